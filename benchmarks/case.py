# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Cases, and the ways to run them that are compared. Does not import torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Optional

from model_case import DENSE_MODULES, MOE_MODULES, ModelCase

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Variant:
    """A set of modules to offload."""

    modules: tuple[str, ...]
    tunings: Mapping[str, Mapping[str, Any]] = NOTHING
    """Settings of Slipstream to measure in addition to its defaults: a name, and options of
    ``OffloadConfig``. Tuning ``x`` is called engine ``slipstream:x`` in commands and results."""
    has_defaults: bool = True
    """Whether Slipstream is also measured with its defaults: each engine pins its own host
    memory."""

    @property
    def name(self) -> str:
        """Name in commands and results, such as ``core_attn+attn_proj``."""
        return "+".join(self.modules)

    @property
    def moves(self) -> bool:
        """Whether there are modules: '-' means none."""
        return self.modules != ("-",)


def short_name(variant: str) -> str:
    """Return a variant's display name: 'all' for all modules that a kind of model can have."""
    names = frozenset(variant.split("+"))
    if names in (frozenset(DENSE_MODULES), frozenset(MOE_MODULES)):
        return "all"
    return variant.replace("+", " ")


COMPARISONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "engines": ("off", "megatron", "slipstream"),
        "layer_graphs": (
            *("eager", "eager+offload", "graph", "graph+offload", "graph+offload+delayed"),
            "graph+megatron",  # the engine that is not ours is captured last
        ),
        "chunk_graphs": ("eager", "stock", "layer", "chunk", "chunk+offload"),
    }
)
"""Ways to run a case that are compared, by the module of this folder that builds them. All are
compared with the first, except ``A+B`` with ``A`` if ``A`` is measured too."""

FIRST = frozenset(labels[0] for labels in COMPARISONS.values())
"""The baselines of the comparisons."""


@dataclass(frozen=True)
class Case:
    """A model and its measurements."""

    name: str
    about: str
    model: ModelCase
    variants: tuple[Variant, ...]
    num_micro_batches: int = 2
    offload: Mapping[str, Any] = NOTHING
    """Offloading options of megatron-core besides the modules, the same for both engines."""
    needs_gpu: bool = True
    comparison: str = "engines"
    captured: Optional[tuple[str, ...]] = ()
    """Parts of each layer in its CUDA graph: all if empty; None if none can be captured."""

    @property
    def num_ranks(self) -> int:
        """Number of processes, and of GPUs if any."""
        return self.model.pp * self.model.tp * self.model.cp * self.model.dp


FIGURES = ("memory", "host", "copies")
"""Measured in addition to step times: device memory, host time in the engine, and copies and
driver calls as the profiler sees them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to measure each variant, and which figures."""

    min_iterations: int = 10
    max_iterations: int = 100
    seconds: float = 30.0
    """Time limit for the timed iterations."""
    num_warmups: int = 4
    """Iterations of each engine before any is measured: megatron-core's engine fills its pool, and
    the allocator reaches a steady state."""
    max_planning: int = 250
    """Maximum iterations of our engine before those, until its plan is settled: after the first
    ones it replans up to three times, and tries out the cost of a plan with an overhead limit. An
    engine that needs more is not timed."""
    planning_seconds: float = 120.0
    """Time limit for those, for each engine of ours."""
    num_memory_iterations: int = 3
    """Iterations of each engine alone, after as many (at most two) warm-up iterations."""
    figures: tuple[str, ...] = FIGURES


IN_ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
"""Modules inside captured attention: none of their copies is delayed until a graph launch."""

# Slipstream chooses what moves, among the variant's modules.
AUTO = {"auto": {"offload_max_overhead_percent": "auto"}}
HOST = {"python": {"offload_native": "off"}, "stays": {"offload_target_memory_gib": 1000.0}}
"""Per-group work is done in Python; no group needs to move."""


def way_labels(case: Case, variant: Variant, chosen: Sequence[str]) -> tuple[str, ...]:
    """Return the ways to measure for a variant: the first, then those ``chosen``; all if none are.

    'slipstream' includes its tunings; 'slipstream:auto' is that tuning only.
    """
    first, *labels = COMPARISONS[case.comparison]
    if case.comparison == "engines":
        tunings = [f"slipstream:{name}" for name in variant.tunings]
        labels = ["megatron", *(["slipstream"] if variant.has_defaults else []), *tunings]
    if case.captured is None:
        labels.remove("layer")
    if not variant.moves:
        labels = [label for label in labels if "+offload" not in label]
    if "stock" in labels and not case.model.sync_free_experts:
        labels.remove("stock")
    if set(variant.modules) <= set(IN_ATTENTION):
        labels = [label for label in labels if label != "graph+offload+delayed"]
    picked = [x for x in labels if not chosen or {x, x.partition(":")[0]} & set(chosen)]
    return (first, *picked)


def base_label(label: str, measured: Iterable[str]) -> str:
    """Return the way that a way is compared with; see :data:`COMPARISONS`."""
    measured = list(measured)
    without = label.partition("+")[0]
    return without if without != label and without in measured else measured[0]
