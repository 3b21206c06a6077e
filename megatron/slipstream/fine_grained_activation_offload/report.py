# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Per-rank, per-module figures of an iteration, for logs and for ``slipstream report``."""

from __future__ import annotations

import itertools
import json
from collections.abc import Container, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Optional

from pydantic import ConfigDict

from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.files import parse
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.settings import NOTHING, describe_setting
from megatron.slipstream.plan.whole_files import write_whole


@dataclass
class ModuleCounters:
    """Counters for the groups of one module name, on one rank, in one iteration."""

    num_groups: int = 0
    num_groups_moved: int = 0
    d2h_bytes: int = 0
    d2h_copies: int = 0
    h2d_bytes: int = 0
    h2d_copies: int = 0
    freed_bytes: int = 0
    """Bytes copied out whose device memory was actually freed during the iteration."""
    peak_drop_bytes: int = 0
    """This module's share of the drop in the device peak, which is less than the bytes freed: see
    [Note: Freed is not saved] in ``plan.peak``. Predicted from measurements; counts saved storages
    only if device memory could not be read."""
    num_late: int = 0
    """Copies in that started only when backward needed them; each one stalls the device."""
    num_kept_for_host_memory: int = 0
    """Number of groups kept on the device because host memory was too small."""
    stall_ms: float = 0.0
    """Time the compute stream waited for copies (measured in one iteration; 0 without a GPU)."""

    def add(self, amounts: Mapping[str, Any]) -> None:
        """Add amounts, keyed by counter name."""
        for name, amount in amounts.items():
            setattr(self, name, getattr(self, name) + amount)


MAX_TRIED_SHOWN = 20
"""Maximum number of tried plans in a report."""


@dataclass
class TriedPlan:
    """A plan whose overhead was measured, by alternating it with iterations without the engine."""

    num_groups_moved: int
    num_groups: int
    moved_bytes: int
    percent: float
    standard_error: float
    """Standard error of the overhead, in percent."""


@dataclass
class LayerReport:
    """One transformer layer in a micro-batch. All layers of a rank are listed in forward order."""

    setting: str = describe_setting(NOTHING)
    """What backward recomputes, as ``describe_setting`` writes it."""
    kind: str = ""
    """What layers of the same shape have in common, such as 'dense' or 'experts'."""
    saved_bytes: int = 0
    """What it saves for backward if it recomputes nothing."""
    moved_bytes: int = 0
    """Part of that which is in host memory until backward."""
    recomputed_bytes: int = 0
    """Part of that which backward computes again."""
    recomputed_ms: Optional[float] = None
    """Time of that computation; None if unknown."""
    reason: str = ""


@dataclass
class RankReport:
    """One rank's figures for its last complete iteration."""

    rank: int = 0
    modules: dict[str, ModuleCounters] = field(default_factory=dict)
    pp_rank: int = 0
    """Pipeline stage of the rank. Stages hold different amounts of memory by design."""
    absent_modules: list[str] = field(default_factory=list)
    """Names in ``offload_modules`` that have no group on this rank."""
    reasons: dict[str, str] = field(default_factory=dict)
    """Why modules move nothing or less than they could, for other reasons than the plan's: by
    module name, of the whole model by an empty name."""
    plan: str = ""
    """The plan as a text grid; empty before the first plan."""
    planned_peak_bytes: int = 0
    baseline_peak_bytes: int = 0
    """Device peaks with and without the plan, predicted from the recorded iteration; 0 if device
    memory could not be read."""
    planned_ms: float = 0.0
    """Predicted time of an iteration with the plan, from its first mark to its end; 0 if nothing
    was timed."""
    measured_ms: float = 0.0
    """Time of the last timed iteration that followed the newest plan; 0 if none was timed."""
    tried_percent: Optional[float] = None
    """Measured overhead of iterations with the engine in percent; None without a trial. See
    ``cost_trial``."""
    tried_standard_error: float = 0.0
    """Standard error of the overhead, in percent."""
    tried: list[TriedPlan] = field(default_factory=list)
    """Plans tried for the newest options, oldest first. Most or all of them exceed the limit."""
    is_native: bool = False
    """Whether C++ did the work of each group; see ``offload_native``."""
    layers: list[LayerReport] = field(default_factory=list)
    """What each layer keeps, moves and recomputes; empty if no budget is set."""
    tiles: dict[str, int] = field(default_factory=dict)
    """Number of pieces of the sequence in which a part of the model runs, such as 'output_layer':
    parts that are not tiled are missing."""
    budget_bytes: int = 0
    """The most device memory for activations; 0 for no budget."""
    budget_reason: str = ""
    host_allocated_bytes: int = 0
    host_growth_bytes: int = 0
    """Bytes by which the pool grew in the iteration: 0 in steady state."""
    host_high_water_bytes: int = 0
    """The most bytes in use at once since host memory was last trimmed."""
    host_waste_bytes: int = 0
    """Unusable bytes of the pool at the high-water mark: see [Note: Waste of host memory] in
    ``host_pool``."""
    host_memory_limit_bytes: Optional[int] = None
    """The most that the pool may hold; None for no limit."""
    num_host_allocations: int = 0
    num_kept_for_host_memory: int = 0
    """Number of groups that the plan keeps on the device because host memory is limited."""
    num_iterations: int = 0
    is_left_out: bool = False
    """Whether the last iteration was a trial without the engine; figures are then those of the last
    one with it."""
    num_plans: int = 0
    graphs: dict[str, ModuleCounters] = field(default_factory=dict)
    """Counters of all replays of CUDA graphs, by module name; not included in ``modules``."""
    graph_host_bytes: int = 0
    """Host memory that only graphs use."""
    options: Optional[PolicyOptions] = None
    """Options of the newest plan; ``build_plan`` rebuilds it from these and its trace."""
    notes: list[str] = field(default_factory=list)
    """Notes of the newest plan on options that could not be honored."""
    step_ms: list[float] = field(default_factory=list)
    """Compute time from each step to the next, excluding waits for copies, in the last timed
    iteration of the newest plan. Empty if none was timed."""
    step_stall_ms: list[float] = field(default_factory=list)
    """Time that compute waited for copies in the same steps."""
    step_peak_bytes: list[int] = field(default_factory=list)
    """For each step of the newest plan, the peak device memory until the next step, in an
    iteration that followed the plan. Empty if none was read."""
    later_bytes: int = 0
    """Device memory allocated since the iteration from which the plan was built, such as optimizer
    state if that was the first iteration."""
    late_groups: dict[str, int] = field(default_factory=dict)
    """:attr:`ModuleCounters.num_late` by the group that first saved the storage; a group is named
    as in plans, without its module (``0.3``)."""
    iteration_ms: list[float] = field(default_factory=list)
    """Host time between the ends of recent iterations, oldest first, including the optimizer and
    all other work."""
    warnings: dict[str, int] = field(default_factory=dict)
    """Slipstream's warnings in this process, with their counts."""
    settings: dict[str, Any] = field(default_factory=dict)
    environment: dict[str, str] = field(default_factory=dict)

    @property
    def measured_peak_bytes(self) -> int:
        """Device peak of an iteration that followed the newest plan; 0 if none was read."""
        return max(self.step_peak_bytes, default=0)

    @property
    def host_waste_fraction(self) -> float:
        """Wasted host memory as a fraction of the high-water mark."""
        return self.host_waste_bytes / max(1, self.host_high_water_bytes)

    @property
    def total(self) -> ModuleCounters:
        total = ModuleCounters()
        for counters in self.modules.values():
            total.add(asdict(counters))
        return total

    @property
    def d2h_bytes(self) -> int:
        return self.total.d2h_bytes

    @property
    def freed_bytes(self) -> int:
        return self.total.freed_bytes

    @property
    def peak_drop_bytes(self) -> int:
        return self.total.peak_drop_bytes


SCHEMA = "slipstream-report"
VERSION = 1
"""See [Note: Versions of files] in ``plan.files``."""


@dataclass
class _File:
    """The fields of a report file."""

    __pydantic_config__ = ConfigDict(allow_inf_nan=False)

    schema: str
    version: int
    ranks: list[RankReport]


@dataclass
class Report:
    """The reports of several ranks."""

    ranks: list[RankReport]

    def render(self) -> str:
        """Render as text: a row per rank and module, by stage, then the first rank's plan."""
        head = "rank module groups moved D2H copies freed peak_drop H2D late stall_ms".split()
        rows = [head]
        stages: dict[int, int] = {}
        """Index of the first row of each stage."""
        for rank in sorted(self.ranks, key=lambda rank: (rank.pp_rank, rank.rank)):
            stages.setdefault(rank.pp_rank, len(rows))
            rows += [_row(rank.rank, name, item) for name, item in sorted(rank.modules.items())]
            rows.append(_row(rank.rank, "total", rank.total))
            rows += [
                _row(rank.rank, f"{name}, in graphs", item)
                for name, item in sorted(rank.graphs.items())
            ]
        lines = _columns(rows)
        for stage, place in reversed(stages.items() if len(stages) > 1 else ()):
            lines.insert(place, f"pipeline stage {stage}")
        lines.insert(0, "Activation offload, per iteration")
        if any(rank.graphs for rank in self.ranks):
            lines.append("in graphs: in all replays of a rank's CUDA graphs, beside the total")
        lines += [_absent(rank) for rank in self.ranks if rank.absent_modules]
        lines += [
            f"rank {rank.rank}: {reason}" for rank in self.ranks for reason in rank.reasons.values()
        ]
        lines += [line for rank in self.ranks for line in _layers(rank)]
        lines += [_host_memory(rank) for rank in self.ranks]
        lines += [_times(rank) for rank in self.ranks if rank.measured_ms]
        lines += [line for rank in self.ranks for line in _tried(rank)]
        for rank in self.ranks[:1]:
            path = "in C++" if rank.is_native else "in Python"
            figures = f"iterations: {rank.num_iterations}, plans made: {rank.num_plans}"
            lines.append(f"{figures}, the work of each group: {path}")
            if rank.plan:
                lines += ["", f"Plan of rank {rank.rank}", rank.plan]
        return "\n".join(lines)

    def to_json(self) -> str:
        """Serialize as JSON for :meth:`from_json`."""
        return json.dumps(asdict(_File(SCHEMA, VERSION, self.ranks)), indent=1)

    @classmethod
    def from_json(cls, data: str | bytes, name: str | Path = "the text") -> Report:
        """Parse the output of :meth:`to_json`. The content is untrusted, so types are checked.

        For what is no report of this version, a ``ValueError`` has the file's ``name``, the
        location and the fix.
        """
        data = data.encode() if isinstance(data, str) else data
        ranks = parse(data, name, _File, SCHEMA, VERSION, "--offload-report-path").ranks
        if not ranks:
            raise ValueError(f"{name} has no rank; give a file that --offload-report-path wrote")
        return cls(ranks)

    def save(self, path: str | Path) -> None:
        write_whole(path, f"{self.to_json()}\n".encode())

    @classmethod
    def merge(cls, reports: Iterable[Report]) -> Report:
        """Merge the reports of several ranks into one, in rank order."""
        ranks = [rank for report in reports for rank in report.ranks]
        return cls(sorted(ranks, key=lambda rank: rank.rank))


def _absent(rank: RankReport) -> str:
    return (
        f"no group of {', '.join(rank.absent_modules)} on rank {rank.rank}: its layers have no "
        "such module, or checkpoint it as a whole (offload_checkpoint_inputs=True moves what that "
        "keeps)"
    )


def _layers(rank: RankReport) -> list[str]:
    lines = []
    if rank.budget_bytes:
        why = f" ({rank.budget_reason})" if rank.budget_reason else ""
        budget = format_bytes(rank.budget_bytes)
        lines.append(f"budget of rank {rank.rank} for activations: {budget}{why}")
    if rank.tiles:
        tiles = ", ".join(f"{name} in {number}" for name, number in rank.tiles.items())
        lines.append(f"rank {rank.rank} runs in pieces of the sequence: {tiles}")
    if rank.layers:
        rows = [list(row) for row in (HEADS, *layer_rows(rank.layers))]
        table = [line.rstrip() for line in _columns(rows, {0, 1, 2, 7})]
        lines += [f"layers of rank {rank.rank}, per micro-batch", *table]
    return lines


def _host_memory(rank: RankReport) -> str:
    grown = format_bytes(rank.host_growth_bytes) if rank.host_growth_bytes else "nothing"
    text = (
        f"host memory of rank {rank.rank}: {format_bytes(rank.host_allocated_bytes)} in "
        f"{rank.num_host_allocations} slabs ({grown} new in the last iteration), at most "
        f"{format_bytes(rank.host_high_water_bytes)} in use, waste "
        f"{format_bytes(rank.host_waste_bytes)} ({rank.host_waste_fraction:.1%})"
    )
    if rank.graph_host_bytes:
        text += f"; {format_bytes(rank.graph_host_bytes)} more for CUDA graphs"
    if rank.host_memory_limit_bytes is not None:
        text += f"; limit {format_bytes(rank.host_memory_limit_bytes)}"
    kept = [
        f"{number} {when}"
        for number, when in (
            (rank.num_kept_for_host_memory, "by plan"),
            (rank.total.num_kept_for_host_memory, "when there was no room"),
        )
        if number
    ]
    if kept:
        text += f", for which groups stay on the device: {' and '.join(kept)}"
    return text


def _times(rank: RankReport) -> str:
    text = (
        f"iteration of rank {rank.rank}: {rank.measured_ms:.1f} ms from its first mark to its end"
    )
    return f"{text}, {rank.planned_ms:.1f} ms planned" if rank.planned_ms else text


def _tried(rank: RankReport) -> list[str]:
    return [
        f"offloading of rank {rank.rank}, tried out: {trial.percent:+.2f}% "
        f"(± {trial.standard_error:.2f}) against iterations without it, with "
        f"{trial.num_groups_moved} of {trial.num_groups} groups moving "
        f"({format_bytes(trial.moved_bytes)} each way)"
        for trial in rank.tried
    ]


def _row(rank: int, name: str, item: ModuleCounters) -> list[str]:
    return [
        str(rank),
        name,
        str(item.num_groups),
        str(item.num_groups_moved),
        format_bytes(item.d2h_bytes),
        str(item.d2h_copies),
        format_bytes(item.freed_bytes),
        format_bytes(item.peak_drop_bytes),
        format_bytes(item.h2d_bytes),
        str(item.num_late),
        f"{item.stall_ms:.2f}",
    ]


def _columns(rows: list[list[str]], on_the_left: Container[int] = (1,)) -> list[str]:
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    return [
        "  ".join(
            cell.ljust(width) if i in on_the_left else cell.rjust(width)
            for i, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        for row in rows
    ]


# Layers.


class LayerRow(NamedTuple):
    """Layers of one kind with one setting and reason."""

    layers: str
    kind: str
    setting: str
    kept: str
    moved: str
    recomputed: str
    ms: str
    reason: str


HEADS = LayerRow(
    "layers", "kind", "recomputes", "kept", "moved", "recomputed", "backward longer by", "why"
)


def layer_rows(layers: Sequence[LayerReport]) -> list[LayerRow]:
    """Return a row for each kind, setting and reason, with the sums of its layers."""
    places: dict[tuple[str, str, str], list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault((layer.kind, layer.setting, layer.reason), []).append(place)
    rows = []
    for (kind, setting, reason), numbers in places.items():
        own = [layers[number] for number in numbers]
        moved = sum(layer.moved_bytes for layer in own)
        recomputed = sum(layer.recomputed_bytes for layer in own)
        kept = sum(layer.saved_bytes for layer in own) - moved - recomputed
        known_ms = [layer.recomputed_ms for layer in own if layer.recomputed_ms is not None]
        ms = f"{sum(known_ms):.1f} ms" if len(known_ms) == len(own) else ""
        rows.append(
            LayerRow(
                layers=format_ranges(numbers),
                kind=kind,
                setting="nothing" if setting == describe_setting(NOTHING) else setting,
                kept=format_bytes(kept),
                moved=format_bytes(moved),
                recomputed=format_bytes(recomputed),
                ms=ms,
                reason=reason,
            )
        )
    return rows


def format_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as text such as ``"0, 2, 5 to 7"``."""
    parts: list[str] = []
    # Within a run of consecutive numbers, number minus index is constant.
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *others = (number for _, number in run)
        parts += [f"{first} to {others[-1]}"] if len(others) > 1 else map(str, [first, *others])
    return ", ".join(parts)
