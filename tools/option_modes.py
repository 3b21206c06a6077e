# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What each option does in each way to train.

docs/user-guide/options.md has this table, and tests/unit_tests/options/test_option_modes.py checks
every cell against the rules of the package. A new option needs a row.
"""

from __future__ import annotations

import enum
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, NamedTuple


class Mode(enum.Enum):
    """A way to train."""

    EAGER = "eager"
    LAYER_GRAPHS = "layer graphs"
    PACKED_LAYER_GRAPHS = "packed layer graphs"
    CHUNK_GRAPHS = "chunk graphs"
    SYNC_FREE = "sync-free experts"
    MEGATRON = "`--offload-engine megatron`"
    CPU = "no GPU"
    ATTACH = "`attach()`"


class Effect(enum.Enum):
    """What an option does in a mode."""

    WORKS = "yes"
    REFUSED = "refused"
    """An error at the start names what to set instead."""
    WARNED = "warned"
    """It has no effect, or not everywhere, and a warning says so."""
    ABSENT = "-"
    """The mode has no such option: passing it is a ``TypeError``."""


WORKS, REFUSED, WARNED, ABSENT = Effect


class Row(NamedTuple):
    """One option."""

    value: Any
    """A value other than the default."""
    other: Mapping[Mode, Effect] = {}
    """The modes in which it does not work, with what happens instead."""
    beside: Mapping[str, Any] = {}
    """Options that it needs."""
    late: frozenset[Mode] = frozenset()
    """The modes whose warning comes when a plan is made, or with the first backend."""


_LAYERS = (Mode.LAYER_GRAPHS, Mode.PACKED_LAYER_GRAPHS)
_GRAPHS = (*_LAYERS, Mode.CHUNK_GRAPHS)
_NONE = {Mode.ATTACH: ABSENT}
_OWN = {Mode.MEGATRON: WARNED}
"""Megatron-core's engine has none of our engine's options."""
_NO_GPU = frozenset({Mode.CPU})
_PACKED = {"sequence_packing": "greedy"}
_DYNAMIC = {
    "sequence_packing": "balanced",
    "calculate_per_token_loss": True,
    "dynamic_context_parallel": True,
}
_EXPERTS = {"num_experts": 4, "add_bias_linear": False}
_SYNC_FREE = {
    **_EXPERTS,
    "moe_sync_free_experts": True,
    "expert_model_parallel_size": 2,
    "moe_token_dispatcher_type": "alltoall",
}
_RECOMPUTED = {"recompute_granularity": "selective", "recompute_modules": ["mlp", "moe"]}


def _in(modes: Iterable[Mode], effect: Effect) -> dict[Mode, Effect]:
    return dict.fromkeys(modes, effect)


_WITHOUT_LAYER_GRAPHS = (Mode.EAGER, Mode.CHUNK_GRAPHS, Mode.SYNC_FREE, Mode.CPU)
_WITHOUT_MEGATRON = (Mode.PACKED_LAYER_GRAPHS, Mode.CHUNK_GRAPHS, Mode.CPU, Mode.ATTACH)
_AT_THE_END = {**_OWN, Mode.ATTACH: REFUSED}
_NEIGHBOURS = {**_OWN, **_in(_LAYERS, WARNED)}
_NOT_IN_GRAPHS = {**_OWN, **_in(_GRAPHS, WARNED)}

OF_MEGATRON: dict[str, Row] = {
    "fine_grained_activation_offloading": Row(True, _NONE),
    "offload_modules": Row(["core_attn"], _NONE),
    "min_offloaded_tensor_size": Row(7),
    "activation_offload_fraction": Row(0.5),
    "delta_offload_bytes_across_pp_ranks": Row(7, _NONE),
    "fine_grained_offloading_max_inflight_offloads": Row(3, {**_NONE, **_in(_LAYERS, WARNED)}),
    "delay_offload_until_cuda_graph": Row(True, {**_NONE, **_in(_WITHOUT_LAYER_GRAPHS, REFUSED)}),
}
"""Megatron-core's offloading options."""

OF_ENGINE: dict[str, Row] = {
    "offload_engine": Row("megatron", _in(_WITHOUT_MEGATRON, REFUSED)),
    "offload_backend": Row("cpu-lazy", _OWN),
    "offload_release_lag": Row(3, _NEIGHBOURS),
    "offload_prefetch_depth": Row(3, _NEIGHBOURS),
    "offload_target_memory_gib": Row(1.0, {**_OWN, Mode.CPU: WARNED}, late=_NO_GPU),
    "offload_max_overhead_percent": Row(1.0, {**_OWN, Mode.CPU: WARNED}, late=_NO_GPU),
    "activation_memory_budget": Row(
        1.0,
        {**_OWN, **_in(_GRAPHS, REFUSED), Mode.ATTACH: REFUSED, Mode.CPU: WARNED},
        late=_NO_GPU,
    ),
    "offload_host_memory_limit_bytes": Row(1 << 30, _OWN),
    "offload_native": Row("off", _OWN),
    "offload_checkpoint_inputs": Row(True, _AT_THE_END, _RECOMPUTED),
    "offload_verify": Row(2, _NOT_IN_GRAPHS),
    "offload_trace_path": Row("trace.json", _AT_THE_END),
    "offload_report_path": Row("report.json", _AT_THE_END),
    "offload_nvtx_ranges": Row(True, {**_NOT_IN_GRAPHS, Mode.CPU: WARNED}, late=_NO_GPU),
}
"""Fields of ``OffloadConfig``."""

OF_TRAINING: dict[str, Row] = {
    "sequence_packing": Row("greedy", _NONE),
    "thd_max_packed_sequences": Row(4, _NONE, _PACKED),
    "thd_max_tokens": Row(32, _NONE, _PACKED),
    "dynamic_context_parallel": Row(True, _NONE, _DYNAMIC),
    "min_dynamic_context_parallel_size": Row(2, _NONE, _DYNAMIC),
    "max_dynamic_context_parallel_size": Row(2, _NONE, _DYNAMIC),
    "dynamic_context_parallel_verify": Row(True, _NONE, _DYNAMIC),
    "moe_sync_free_experts": Row(True, {**_NONE, **_in(_LAYERS, REFUSED)}, _EXPERTS),
    "moe_sync_free_capacity_factor": Row(2.0, {**_NONE, **_in(_LAYERS, REFUSED)}, _SYNC_FREE),
    "loss_sequence_tiles": Row(4, _NONE),
    "mlp_sequence_tiles": Row("auto", _NONE),
    "cuda_graph_granularity": Row("chunk", {**_NONE, **_in((*_LAYERS, Mode.MEGATRON), REFUSED)}),
    "tokenizer_json": Row("tokenizer.json", _NONE),
    "megatron_output_path": Row("-", _NONE),
    "eval_before_training": Row(True, _NONE),
    "run_record_path": Row("record.json", _NONE),
    "output_interval": Row(3, _NONE, {"run_record_path": "record.json"}),
}
"""Other flags of the training script."""

TABLE: dict[str, Row] = {**OF_MEGATRON, **OF_ENGINE, **OF_TRAINING}


def effect(option: str, mode: Mode) -> Effect:
    """Return what an option does in a mode."""
    return TABLE[option].other.get(mode, WORKS)


def rows() -> Iterator[tuple[str, ...]]:
    """Yield the table's lines: the option, and what it does in each mode."""
    for name in TABLE:
        flag = "--" + name.replace("_", "-")
        yield f"`{flag}`", *(effect(name, mode).value for mode in Mode)
