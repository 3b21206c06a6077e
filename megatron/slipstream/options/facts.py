# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The options of a training or of a model, under one set of names."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Any

DEFAULTS: Mapping[str, Any] = {
    "activation_offload_fraction": 1.0,
    "apply_rope_fusion": True,
    "attention_backend": "auto",
    "context_parallel_size": 1,
    "cuda_graph_granularity": "layer",
    "cuda_graph_impl": "none",
    "cuda_graph_modules": (),
    "cuda_graph_warmup_steps": 3,
    "delta_offload_bytes_across_pp_ranks": 0,
    "expert_model_parallel_size": 1,
    "fp8_recipe": "delayed",
    "gtp_weight_remat_size": 1,
    "has_gpu": True,
    "loss_sequence_tiles": 1,
    "micro_batch_size": 1,
    "min_dynamic_context_parallel_size": 1,
    "min_offloaded_tensor_size": 1024 * 1024,
    "mlp_chunks_for_training": 1,
    "mlp_sequence_tiles": 1,
    "moe_flex_dispatcher_backend": "deepep",
    "moe_router_load_balancing_type": "aux_loss",
    "moe_token_dispatcher_type": "allgather",
    "offload_engine": "slipstream",
    "tensor_model_parallel_size": 1,
}
"""Values of options that a release or a source of facts lacks; of all others None."""

_OTHER_NAMES = {
    "fp8_param": "fp8_param_gather",
    "num_experts": "num_moe_experts",
    "num_moe_experts": "num_experts",
    "te_precision_config_file": "quant_recipe",
    "kitchen_config_file": "quant_recipe",
    "kitchen_recipe_number": "quant_recipe",
}
"""Names that rules read, by the names of flags or of megatron-core's configuration."""


class Facts:
    """Options as attributes, built once from parsed arguments, a configuration, or both.

    An option has the name of its flag or of its field in ``TransformerConfig``, whichever the
    source has; members of enums are their names. An option that the source lacks has its value in
    :data:`DEFAULTS`, else None.

    Args:
        sources: Objects with options as attributes, or mappings; later ones win.
        more: Options beside them.
    """

    def __init__(self, *sources: object, **more: Any) -> None:
        given: dict[str, Any] = {}
        for source in (*sources, more):
            given |= source if isinstance(source, Mapping) else vars(source)
        for name, other in _OTHER_NAMES.items():
            # 0 is the number of a recipe.
            if given.get(name) is not None and given[name] is not False:
                given[other] = given[name]
        if given.get("cuda_graph_impl", "none") is None:
            given["cuda_graph_impl"] = "none"
        if "cpu_offloading" not in given and "cpu_offloading_num_layers" in given:
            given["cpu_offloading"] = (given["cpu_offloading_num_layers"] or 0) > 0
        vars(self).update((name, _plain(value)) for name, value in given.items())

    @classmethod
    def of(cls, options: object, **more: Any) -> Facts:
        """Return ``options`` as facts; facts stay as they are, unless there is more."""
        if isinstance(options, Facts) and not more:
            return options
        return cls(options, **more)

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        return DEFAULTS.get(name)

    def __getitem__(self, name: str) -> Any:
        return getattr(self, name)

    def lacks(self, option: str) -> bool:
        """Whether the source has the option, and it is off."""
        return option in vars(self) and not vars(self)[option]

    def fill(self, text: str) -> str:
        """Return a format string over options with their values."""
        return text.format_map(self)


def _plain(value: Any) -> Any:
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value.name if isinstance(value, enum.Enum) else value
