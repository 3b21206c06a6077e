# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Versions, machine and options of a run, for its report."""

from __future__ import annotations

import dataclasses
import socket
from functools import cache
from typing import Any

import torch

from megatron.slipstream.options import preflight
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.version import __version__

MODEL_SETTINGS = (
    *("num_layers", "hidden_size", "num_attention_heads", "num_experts", "seq_length"),
    *("micro_batch_size", "global_batch_size", "bf16", "fp16", "fp8"),
    *("tensor_model_parallel_size", "pipeline_model_parallel_size"),
    *("virtual_pipeline_model_parallel_size", "context_parallel_size"),
    *("expert_model_parallel_size", "data_parallel_size"),
    *("recompute_granularity", "recompute_method", "recompute_num_layers", "recompute_modules"),
    *("cuda_graph_impl", "cuda_graph_granularity"),
    *("fine_grained_activation_offloading", "offload_modules", "min_offloaded_tensor_size"),
    *("activation_offload_fraction", "delta_offload_bytes_across_pp_ranks"),
)
"""Megatron's options that determine what can move and where."""


@cache  # A report may be requested after every step, and the lookup takes tens of milliseconds.
def environment() -> dict[str, str]:
    """Return the versions of packages, and the machine, by name. Do not modify it."""
    facts = preflight.collect()
    found = {
        "host": socket.gethostname(),
        "slipstream": __version__,
        "python": facts.python,
        "torch": facts.torch,
        "megatron-core": facts.megatron_core,
        "transformer-engine": facts.transformer_engine,
    }
    if torch.cuda.is_available():
        found["GPU"] = torch.cuda.get_device_name()
        found["CUDA"] = torch.version.cuda
    return {name: text for name, text in found.items() if text is not None}


def settings(*sources: Any) -> dict[str, Any]:
    """Return the set options of a run by name, JSON-serialisable, from objects that have them."""
    names = (*MODEL_SETTINGS, *(field.name for field in dataclasses.fields(OffloadConfig)))
    found = {}
    for source in sources:
        for name in names:
            value = getattr(source, name, None)
            if value is not None:
                found[name] = _plain(value)
    return found


def _plain(value: Any) -> Any:
    if isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return str(value)
