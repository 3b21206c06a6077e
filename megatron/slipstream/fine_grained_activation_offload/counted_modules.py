# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The counters of an iteration, from Python and C++."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.trace import GroupKey


class CountedModules:
    """The counters of an iteration by module, and late H2D copies by the group that saved first.

    Counts from C++ are added on demand.
    """

    def __init__(
        self,
        modules: Optional[defaultdict[str, ModuleCounters]] = None,
        late_groups: Optional[dict[GroupKey, int]] = None,
    ) -> None:
        self._modules = defaultdict(ModuleCounters) if modules is None else modules
        self.in_cpp: Optional[Any] = None
        self.late_groups = late_groups or {}

    def by_name(self) -> dict[str, ModuleCounters]:
        if self.in_cpp is not None:
            add_counters(self.in_cpp, self._modules)
            self.in_cpp = None
        return dict(self._modules)


@dataclass
class ReplayedGraph:
    """What one replay of a graph moves, and how often it has been replayed."""

    modules: Mapping[str, ModuleCounters]
    num_replays: int = 0

    def take_replays(self) -> Replays:
        """End an iteration; return its replays."""
        replays = Replays(self.modules, self.num_replays)
        self.num_replays = 0
        return replays


class Replays(NamedTuple):
    """Replays of a graph in an iteration."""

    modules: Mapping[str, ModuleCounters]
    number: int


@dataclass
class ReplayedPass(ReplayedGraph):
    """A pass replayed by whole-chunk graphs: its marks do not reach an engine."""

    plan: Plan = field(kw_only=True)
    host_bytes: int = field(kw_only=True)


def sum_of(replays: Iterable[Replays]) -> dict[str, ModuleCounters]:
    """Sum the counters of replays by module name."""
    total: defaultdict[str, ModuleCounters] = defaultdict(ModuleCounters)
    for modules, number in replays:
        for name, counters in modules.items():
            total[name].add({key: number * amount for key, amount in vars(counters).items()})
    return dict(total)


def add_counters(in_cpp: Any, modules: defaultdict[str, ModuleCounters]) -> None:
    """Add counts from C++, by module name and then by counter, to ``modules``."""
    for name, amounts in in_cpp.items():
        modules[name].add(amounts)
