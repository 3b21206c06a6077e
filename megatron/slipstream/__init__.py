# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Slipstream: activations are offloaded on side streams and reloaded before backward needs them.

The public interface. Names load on first use, so that ``import megatron.slipstream`` needs neither
torch nor megatron-core.
"""

from __future__ import annotations

from importlib import import_module
from typing import Any

from megatron.slipstream.notices import silence_if_asked

__version__ = "0.1.0"

_HOMES = {
    "OffloadConfig": "megatron.slipstream.config",
    "install": "megatron.slipstream.integration.install",
    "uninstall": "megatron.slipstream.integration.install",
    "bind": "megatron.slipstream.integration.install",
    "suspended": "megatron.slipstream.integration.install",
    "report": "megatron.slipstream.integration.install",
    "gather_report": "megatron.slipstream.integration.install",
    "save_trace": "megatron.slipstream.integration.install",
    "with_graph_offloading": "megatron.slipstream.integration.graph_layers",
    "with_packed_layer_graphs": "megatron.slipstream.integration.packed_layer_graphs",
    "with_dynamic_context_parallelism": "megatron.slipstream.integration.dynamic_context_parallel",
    "with_sync_free_dispatch": "megatron.slipstream.integration.moe",
    "with_sync_free_experts": "megatron.slipstream.integration.sync_free_experts",
    "replay_chunks": "megatron.slipstream.integration.chunk_graphs",
    "close_graphs": "megatron.slipstream.integration.chunk_graphs",
    "RankLimits": "megatron.slipstream.context_parallel.limits",
    "context_parallel_groups": "megatron.slipstream.integration.context_parallel_groups",
    "attach": "megatron.slipstream.integration.attach.handle",
    "OffloadOptions": "megatron.slipstream.integration.frameworks.options",
    "ModelFacts": "megatron.slipstream.integration.frameworks.options",
    "to_transformer_overrides": "megatron.slipstream.integration.frameworks.options",
    "to_cli": "megatron.slipstream.integration.frameworks.options",
    "apply_overrides": "megatron.slipstream.integration.frameworks.options",
}

__all__ = ["__version__", *_HOMES]

silence_if_asked()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
