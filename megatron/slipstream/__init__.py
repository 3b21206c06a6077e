# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Slipstream: activations are offloaded on side streams and reloaded before backward needs them.

The public interface. Names load on first use, so that ``import megatron.slipstream`` needs neither
torch nor megatron-core.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from megatron.slipstream.notices import silence_if_asked
from megatron.slipstream.version import __version__ as __version__

# For type checkers and editors, which do not run __getattr__. They take only names with `as` for
# public ones.
if TYPE_CHECKING:
    from megatron.slipstream.attached.handle import attach as attach
    from megatron.slipstream.context_parallel.limits import RankLimits as RankLimits
    from megatron.slipstream.integration.experts.sync_free_experts import (
        with_sync_free_experts as with_sync_free_experts,
    )
    from megatron.slipstream.integration.frameworks.options import (
        apply_overrides as apply_overrides,
        to_cli as to_cli,
        to_transformer_overrides as to_transformer_overrides,
    )
    from megatron.slipstream.integration.graphs.chunks import (
        close_graphs as close_graphs,
        replay_chunks as replay_chunks,
    )
    from megatron.slipstream.integration.graphs.layers import (
        with_graph_offloading as with_graph_offloading,
        with_packed_layer_graphs as with_packed_layer_graphs,
    )
    from megatron.slipstream.integration.install import (
        bind as bind,
        gather_report as gather_report,
        install as install,
        report as report,
        save_trace as save_trace,
        suspended as suspended,
        uninstall as uninstall,
    )
    from megatron.slipstream.integration.layers.tiled_model import (
        tiles_of as tiles_of,
        with_tiles as with_tiles,
    )
    from megatron.slipstream.integration.packed.context_parallel_groups import (
        context_parallel_groups as context_parallel_groups,
    )
    from megatron.slipstream.integration.packed.dynamic_context_parallel import (
        with_dynamic_context_parallelism as with_dynamic_context_parallelism,
    )
    from megatron.slipstream.options.fields import (
        OffloadConfig as OffloadConfig,
        OffloadOptions as OffloadOptions,
        TileOptions as TileOptions,
    )

_HOMES = {
    "OffloadConfig": "options.fields",
    "install": "integration.install",
    "uninstall": "integration.install",
    "bind": "integration.install",
    "suspended": "integration.install",
    "report": "integration.install",
    "gather_report": "integration.install",
    "save_trace": "integration.install",
    "with_graph_offloading": "integration.graphs.layers",
    "with_packed_layer_graphs": "integration.graphs.layers",
    "with_dynamic_context_parallelism": "integration.packed.dynamic_context_parallel",
    "with_sync_free_experts": "integration.experts.sync_free_experts",
    "with_tiles": "integration.layers.tiled_model",
    "tiles_of": "integration.layers.tiled_model",
    "TileOptions": "options.fields",
    "replay_chunks": "integration.graphs.chunks",
    "close_graphs": "integration.graphs.chunks",
    "RankLimits": "context_parallel.limits",
    "context_parallel_groups": "integration.packed.context_parallel_groups",
    "attach": "attached.handle",
    "OffloadOptions": "options.fields",
    "to_transformer_overrides": "integration.frameworks.options",
    "to_cli": "integration.frameworks.options",
    "apply_overrides": "integration.frameworks.options",
}

__all__ = ["__version__", *_HOMES]

silence_if_asked()


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


if not TYPE_CHECKING:  # With it, type checkers would accept every name.

    def __getattr__(name: str) -> Any:
        if name in _HOMES:
            return getattr(import_module(f"{__name__}.{_HOMES[name]}"), name)
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
