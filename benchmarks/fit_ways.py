# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ways to save memory that ``benchmarks.fit`` compares. Does not import torch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any, Optional

WAYS = ("off", "selective", "full", "megatron", "slipstream", "inputs", "budget")
OURS = ("slipstream", "inputs", "budget")
"""Ways with our engine."""

FULL = ("layer",)


def recompute_options(parts: Sequence[str]) -> dict[str, Any]:
    """Return the options of ``TransformerConfig`` with which backward recomputes these parts.

    Args:
        parts: Names of ``recompute_modules``; :data:`FULL` for whole layers.
    """
    if tuple(parts) == FULL:
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
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
    optimizer: str = "none"
    device_gib: Optional[float] = None
    """Limit of torch's allocator; None for the whole device."""
    budget: Any = "auto"
    options: Mapping[str, Any] = field(default_factory=dict)
    """Options of ``OffloadConfig``."""

    def identity(self) -> dict[str, Any]:
        """Return the fields that tell its rows from those of others."""
        return asdict(self)

    @property
    def overrides(self) -> dict[str, Any]:
        """Options of ``TransformerConfig`` for recomputation."""
        if self.way in ("full", "inputs"):
            return recompute_options(FULL)
        recomputes = self.way in ("selective", "megatron", "slipstream")
        return recompute_options(self.recompute if recomputes else ())

    @property
    def offload_modules(self) -> tuple[str, ...]:
        """Modules to mark; none for the ways without an engine."""
        if self.way == "inputs":
            return ("core_attn",)  # moves nothing in recomputed layers, but one is required
        return self.modules if self.way in ("megatron", *OURS) else ()

    @property
    def engine_options(self) -> dict[str, Any]:
        """Options of ``OffloadConfig``."""
        options = dict(self.options)
        if self.way == "inputs":
            options["offload_checkpoint_inputs"] = True
        if self.way == "budget":
            options["activation_memory_budget"] = self.budget
        return options
