# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ways to save memory that ``benchmarks.fit`` compares. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

RECOMPUTE_SOME = ("selective", "megatron", "slipstream")
RECOMPUTE_ALL = ("full", "inputs", "full_tiles")
OURS = ("slipstream", "inputs", "moved", "tiles", "full_tiles", "budget")
WAYS = ("off", "selective", "full", "megatron", *OURS)
"""Ways with our engine."""

FULL = ("layer",)


def recompute_options(parts: Sequence[str]) -> dict[str, Any]:
    """Return the options of ``TransformerConfig`` with which backward recomputes these parts.

    Args:
        parts: Names of ``recompute_modules``; :data:`FULL` for whole layers.
    """
    if tuple(parts) == FULL:
        whole = {"recompute_method": "uniform", "recompute_num_layers": 1}
        return {"recompute_granularity": "full", **whole}
    if not parts:
        return {}
    return {"recompute_granularity": "selective", "recompute_modules": list(parts)}


@dataclass(frozen=True)
class Setup:
    """A way to train a case, for one process."""

    case: str
    way: str
    recompute: tuple[str, ...]
    """``recompute_modules`` of the ways that recompute some."""
    modules: tuple[str, ...]
    """``offload_modules`` of the ways that move some."""
    micro_batches: int = 1
    device_gib: Optional[float] = None
    """Limit of torch's allocator; None for the whole device."""
    budget: Any = "auto"
    loss_tiles: Any = 1
    mlp_tiles: Any = 1
    """Tiles of the sequence, of ways without their own."""
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``OffloadConfig``."""

    def identity(self) -> dict[str, Any]:
        """Return the fields that tell its rows from those of others."""
        return asdict(self)

    @property
    def overrides(self) -> dict[str, Any]:
        """Options of ``TransformerConfig`` for recomputation."""
        if self.way in RECOMPUTE_ALL:
            return recompute_options(FULL)
        return recompute_options(self.recompute if self.way in RECOMPUTE_SOME else ())

    @property
    def tiles(self) -> Mapping[str, Any]:
        """Fields of ``ModelCase`` for tiles of the sequence."""
        are_auto = self.way in ("tiles", "full_tiles")
        given = {"loss_sequence_tiles": self.loss_tiles, "mlp_sequence_tiles": self.mlp_tiles}
        return dict.fromkeys(given, "auto") if are_auto else given

    @property
    def moves_all(self) -> bool:
        """Whether all modules that the model has may move."""
        return self.way in ("moved", "budget")

    @property
    def offload_modules(self) -> tuple[str, ...]:
        """Modules to mark; none for the ways without an engine, or if all are."""
        if self.way in RECOMPUTE_ALL and self.way in OURS:
            return ("core_attn",)  # moves nothing in recomputed layers, but one is required
        if self.moves_all:
            return ()
        return self.modules if self.way in ("megatron", *OURS) else ()

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of ``OffloadConfig``."""
        options = dict(self.options)
        if self.way in ("inputs", "tiles", "full_tiles"):
            options["offload_checkpoint_inputs"] = True
        if self.way == "budget":
            options["activation_memory_budget"] = self.budget
        return options
