# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Cases, and the ways to run them that are compared. Needs no torch."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Optional

from model_case import DENSE_MODULES, MOE_MODULES, ModelCase

NOTHING: Mapping[str, Any] = MappingProxyType({})


@dataclass(frozen=True)
class Variant:
    """A set of modules that move."""

    modules: tuple[str, ...]
    tunings: Mapping[str, Mapping[str, Any]] = NOTHING
    """Settings of Slipstream that are measured beside its defaults: a name, and options of
    ``OffloadConfig``. The tuning ``x`` is the engine ``slipstream:x`` in commands and results."""
    has_defaults: bool = True
    """Whether Slipstream is measured with its defaults too: each of its engines pins host memory of
    its own."""

    @property
    def name(self) -> str:
        """As in commands and results."""
        return "+".join(self.modules)

    @property
    def moves(self) -> bool:
        """Whether there are modules: '-' stands for none."""
        return self.modules != ("-",)


def short_name(variant: str) -> str:
    """A variant's name for people: 'all' for all modules that a kind of model can have."""
    names = frozenset(variant.split("+"))
    if names in (frozenset(DENSE_MODULES), frozenset(MOE_MODULES)):
        return "all"
    return variant.replace("+", " ")


COMPARISONS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "engines": ("off", "megatron", "slipstream", "copies"),
        "layer_graphs": (
            *("eager", "eager+offload", "graph", "graph+offload", "graph+offload+delayed"),
            "graph+megatron",  # the engine that is not ours is captured last
        ),
        "chunk_graphs": ("eager", "stock", "layer", "chunk", "chunk+offload"),
        "graph_bank": ("eager", "bank", "fixed", "fixed+graph"),
        "attached": ("plain", "attach", "torchtune", "trl", "save_on_cpu"),
    }
)
"""By module of this folder, which builds them: the ways to run a case that are compared. All
are compared with the first; ``A+B`` with ``A`` where that is measured too."""

FIRST = frozenset(labels[0] for labels in COMPARISONS.values())
"""The ways that others are compared with."""


@dataclass(frozen=True)
class Case:
    """A model and what is measured of it."""

    name: str
    about: str
    model: ModelCase
    variants: tuple[Variant, ...]
    num_micro_batches: int = 2
    offload: Mapping[str, Any] = NOTHING
    """Offloading options of megatron-core beside the modules, the same for both engines."""
    needs_gpu: bool = True
    comparison: str = "engines"
    captured: Optional[tuple[str, ...]] = ()
    """Parts of each layer in its CUDA graph: all if empty; None where none can be captured."""

    @property
    def num_ranks(self) -> int:
        """Processes, and with GPUs the number of them."""
        return self.model.pp * self.model.tp * self.model.cp * self.model.dp


FIGURES = ("memory", "host", "copies")
"""Measured beside step times: device memory, host time in the engine, copies and calls of
the driver as the profiler sees them."""


@dataclass(frozen=True, kw_only=True)
class Limits:
    """How long to go on with each variant, and what to find out."""

    min_iterations: int = 10
    max_iterations: int = 100
    seconds: float = 30.0
    """For the iterations that are timed."""
    num_warmups: int = 4
    """Iterations of each engine before any is measured: the other one fills its pool, and the
    allocator comes to rest."""
    max_planning: int = 250
    """Iterations of ours before those, at most. It goes on until its plan is settled: after the
    first ones it plans again up to three times, and tries out what a plan for an allowed overhead
    costs."""
    planning_seconds: float = 120.0
    """For those, of each engine of ours."""
    num_memory_iterations: int = 3
    """Of each engine alone, after as many others but two at most."""
    figures: tuple[str, ...] = FIGURES


IN_ATTENTION = ("qkv_linear", "core_attn", "attn_proj")
"""Modules inside of captured attention: nothing of them is put off until a graph is launched."""

# Slipstream chooses what moves, among the variant's modules.
AUTO = {"auto": {"offload_max_overhead_percent": "auto"}}
HOST = {"python": {"offload_native": "off"}, "stays": {"offload_target_memory_gib": 1000.0}}
"""Python does the work of each group; no group has to move."""


def way_labels(case: Case, variant: Variant, chosen: Sequence[str]) -> tuple[str, ...]:
    """The ways to measure for a variant: the first, then those that ``chosen`` names; all for none.

    'slipstream' chooses its tunings too; 'slipstream:auto' that one only. 'copies', the bytes of
    'slipstream' without an engine, is measured only where it is named.
    """
    first, *labels = COMPARISONS[case.comparison]
    if case.comparison == "engines":
        tunings = [f"slipstream:{name}" for name in variant.tunings]
        labels = ["megatron", *(["slipstream"] if variant.has_defaults else []), *tunings]
        labels += ["copies"] if "copies" in chosen else []
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
    """The way that a way is compared with; see :data:`COMPARISONS`."""
    measured = list(measured)
    without = label.partition("+")[0]
    return without if without != label and without in measured else measured[0]
