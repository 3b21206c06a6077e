# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The counters of an iteration, counted in Python and in C++."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, NamedTuple, Optional

from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.trace import GroupKey


class CountedModules:
    """The counters of an iteration. Those of C++ are added on demand.

    Args:
        modules: Counters by module name.
        late_groups: Late copies in by the group that saved the storage first.
        in_cpp: What C++ has counted beside them.
    """

    def __init__(
        self,
        modules: Optional[defaultdict[str, ModuleCounters]] = None,
        late_groups: Optional[dict[GroupKey, int]] = None,
        in_cpp: Optional[Any] = None,
    ) -> None:
        self._modules = defaultdict(ModuleCounters) if modules is None else modules
        self.in_cpp = in_cpp
        self.late_groups = late_groups or {}

    def by_name(self) -> dict[str, ModuleCounters]:
        """The counters by module name."""
        if self.in_cpp is not None:
            add_counters(self.in_cpp, self._modules)
            self.in_cpp = None
        return dict(self._modules)


class ReplayedPass(NamedTuple):
    """A pass that graphs of a whole chunk replay: its marks do not reach an engine."""

    plan: Plan
    """The plan that its graphs follow."""
    modules: Mapping[str, ModuleCounters]
    """Counters of one replay of each of its graphs, by module name."""
    host_bytes: int
    """Host memory that only these graphs use."""


def sum_of(*counted: Mapping[str, ModuleCounters]) -> dict[str, ModuleCounters]:
    """The sums of counters, by module name."""
    total: defaultdict[str, ModuleCounters] = defaultdict(ModuleCounters)
    for modules in counted:
        for name, counters in modules.items():
            total[name].add(asdict(counters))
    return dict(total)


def add_counters(in_cpp: Any, modules: defaultdict[str, ModuleCounters]) -> None:
    """Add to ``modules`` what C++ has counted: amounts by counter, by module name."""
    for name, amounts in in_cpp.items():
        modules[name].add(amounts)
