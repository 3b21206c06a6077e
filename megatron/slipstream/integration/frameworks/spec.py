# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""For ``--spec``, megatron's only flag that imports code.

    --spec megatron.slipstream.integration.frameworks.spec layer_spec          GPT models
    --spec megatron.slipstream.integration.frameworks.spec hybrid_stack_spec   hybrid models

The model is the same as without the flag, except that layers support offloading inside Transformer
Engine's CUDA graphs if it is enabled. Importing this module prepares the engine.
"""

from __future__ import annotations

from typing import Any, Optional

from megatron.core.transformer.transformer_block import TransformerBlockSubmodules

from megatron.slipstream.integration.frameworks import loading
from megatron.slipstream.integration.graphs.layers import with_graph_offloading
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.options.model import moves_in_layer_graphs

loading.load()

# Hybrid models use a spec directly, without calling it.
from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec  # noqa: E402, F401


class DefaultLayerSpec(TransformerBlockSubmodules):
    """A GPT model's default spec, as a value of ``--spec``.

    Builders of megatron-core 0.19 call it with a model configuration, slime with arguments and a
    ``TransformerConfig``. Megatron-LM's ``gpt_builders.py`` (up to 0.18) does not call it, so it
    also acts as the submodules of a block, which are built when they are read.
    """

    def __init__(self) -> None:
        """Skip the base class's fields: their values are not known yet."""

    def __call__(
        self, first: Any, config: Any = None, vp_stage: Optional[int] = None, **_: Any
    ) -> Any:
        """Return the spec for a model configuration, or for megatron's arguments and ``config``."""
        if config is not None:
            spec, transformer = compat.gpt_block_spec(first, config, vp_stage), config
        else:
            from megatron.training.models.gpt import default_layer_spec

            spec, transformer = default_layer_spec(first, vp_stage), first.transformer
        return with_graph_offloading(spec) if moves_in_layer_graphs(transformer) else spec

    @property
    def layer_specs(self) -> Any:
        """The layers of a block, for builders that do not call the spec."""
        return self._uncalled.layer_specs

    @property
    def layer_norm(self) -> Any:
        """The norm after the last layer, for builders that do not call the spec."""
        return self._uncalled.layer_norm

    @property
    def _uncalled(self) -> Any:
        from megatron.training import get_args
        from megatron.training.arguments import core_transformer_config_from_args

        args = get_args()
        if args.virtual_pipeline_model_parallel_size is not None:
            raise ValueError(
                "--spec megatron.slipstream.integration.frameworks.spec layer_spec is not "
                "supported with virtual pipeline stages in Megatron-LM's gpt_builders.py because "
                "that does not say for which stage a spec is; remove --spec and call "
                "megatron.slipstream.install() in the script"
            )
        return self(args, core_transformer_config_from_args(args))


layer_spec = DefaultLayerSpec()
"""The value of ``--spec`` for a GPT model."""
