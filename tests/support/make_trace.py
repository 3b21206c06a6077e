# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Traces for tests of the planner: written by hand, or as a pipeline schedule would record them."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from megatron.slipstream.estimate.schedules import (
    Pass as Pass,  # Tests have them from here.
    Schedule,
    rank_schedule,
)
from megatron.slipstream.plan.trace import (
    BACKWARD,
    OUTPUT_LAYER,
    Bandwidth,
    GroupKey,
    GroupTrace,
    MemoryReading,
    Step,
    StepKind,
    StorageTrace,
    Trace,
)

one_f_one_b = interleaved = rank_schedule
"""The schedules without and with a number of chunks, ``(pp_size, pp_rank, count, chunks)``."""

DEFAULT_NBYTES = 1000
"""Default size of a storage; not a power of two, so that sums are distinguishable."""


def passes_that_turn_around(schedule: Schedule) -> list[int]:
    """The forward passes, by index, whose own backward comes next in the schedule."""
    forward = [place for place, item in enumerate(schedule) if item.direction == "F"]
    return [
        index
        for index, place in enumerate(forward)
        if schedule[place + 1 : place + 2] == [schedule[place]._replace(direction="B")]
    ]


@dataclass(frozen=True)
class Model:
    """Marks and storages of every pass through a chunk."""

    num_layers: int = 2
    modules: Sequence[str] = ("core_attn",)
    """The groups of a layer, in the order in which they start."""
    encloses: bool = False
    """The first module's group ends after the others of its layer, as megatron-core's 'attn_norm'
    does, instead of before they start."""
    saves: Mapping[int, Sequence[str]] = field(default_factory=dict)
    """Labels of the storages that a group saves, by its index in the pass. A group without an entry
    saves one storage of its own. Groups that save the same label share the storage."""
    nbytes: Mapping[str, int] = field(default_factory=dict)
    """Sizes by label; :data:`DEFAULT_NBYTES` for other labels."""
    one_for_all_passes: Collection[str] = ()
    """Labels of storages that all passes share, as a table of rotary embeddings is."""
    held_outside: Collection[str] = ()
    """Labels of storages that something else keeps on the device."""
    without_use: Collection[int] = ()
    """Groups that backward never reaches."""
    has_output: bool = False
    """Whether an output layer follows the last group."""

    @property
    def num_groups(self) -> int:
        """Number of groups of one pass."""
        return self.num_layers * len(self.modules)

    def name(self, group: int) -> str:
        """The module name of a group, or of the output layer."""
        if group < 0:
            return OUTPUT_LAYER if group < -1 else BACKWARD
        return self.modules[group % len(self.modules)]

    def last_groups(self) -> set[int]:
        """The groups of the last layer."""
        return set(range(self.num_groups - len(self.modules), self.num_groups))

    def forward_marks(self) -> list[tuple[StepKind, int]]:
        """The marks of one forward pass."""
        marks = []
        for layer in range(self.num_layers):
            first, *others = range(layer * len(self.modules), (layer + 1) * len(self.modules))
            inner = [(kind, group) for group in others for kind in _FORWARD]
            start, commit = ((kind, first) for kind in _FORWARD)
            marks += [start, *inner, commit] if self.encloses else [start, commit, *inner]
        if self.has_output:
            marks += [(StepKind.OUTPUT_START, -2), (StepKind.OUTPUT_END, -2)]
        return marks

    def backward_marks(self) -> list[tuple[StepKind, int]]:
        """The marks of one backward pass: it reaches the groups from their ends, in reverse."""
        commits = [group for kind, group in self.forward_marks() if kind is StepKind.FORWARD_COMMIT]
        used = [group for group in reversed(commits) if group not in self.without_use]
        marks = [(StepKind.BACKWARD_USE, group) for group in used]
        if self.has_output:
            of_output = StepKind.OUTPUT_BACKWARD_START, StepKind.OUTPUT_BACKWARD_END
            marks[:0] = [(StepKind.BACKWARD_START, -1), *((kind, -2) for kind in of_output)]
        return marks


_FORWARD = (StepKind.FORWARD_START, StepKind.FORWARD_COMMIT)


def trace_of(schedule: Schedule, model: Model, pp_rank: int = 0) -> Trace:
    """The trace of ``schedule`` on a rank whose chunks all equal ``model``."""
    steps: list[Step] = []
    groups: list[GroupTrace] = []
    holders: dict[tuple[int, str], list[GroupKey]] = {}
    place_of: dict[tuple[int, str], int] = {}
    index_of: dict[tuple[int, int], int] = {}
    forward, backward = model.forward_marks(), model.backward_marks()
    for item in schedule:
        if item.direction == "F":
            index_of[item.micro_batch, item.vp_stage] = len(index_of)
        chunk_pass = index_of[item.micro_batch, item.vp_stage]
        is_forward = item.direction == "F"
        for kind, group in forward if is_forward else backward:
            key = GroupKey(chunk_pass, group)
            steps.append(Step(kind, key, model.name(group)))
            if kind is not StepKind.FORWARD_START:
                continue
            saved = []
            for label in dict.fromkeys(model.saves.get(group, [f"own {group}"])):
                storage = (-1 if label in model.one_for_all_passes else chunk_pass, label)
                holders.setdefault(storage, []).append(key)
                saved.append(place_of.setdefault(storage, len(place_of)))
            groups.append(GroupTrace(key, model.name(group), item.vp_stage, tuple(saved)))
    storages = tuple(
        StorageTrace(
            model.nbytes.get(label, DEFAULT_NBYTES), tuple(keys), label in model.held_outside
        )
        for (_, label), keys in holders.items()
    )
    return Trace(tuple(steps), tuple(groups), storages, pp_rank)


def one_pass(model: Model, pp_rank: int = 0) -> Trace:
    """The trace of one micro-batch's forward and backward."""
    return trace_of(one_f_one_b(1, 0, 1), model, pp_rank)


def keys(chunk_pass: int, groups: Iterable[int]) -> set[GroupKey]:
    """The keys of some groups of one pass."""
    return {GroupKey(chunk_pass, group) for group in groups}


def timed(
    trace: Trace, step_ms: float | Sequence[float], gb_per_s: float, both_gb_per_s: float = 0.0
) -> Trace:
    """The trace with times (one for all steps, or one each) and the same bandwidth both ways."""
    each = step_ms if isinstance(step_ms, Sequence) else [step_ms] * len(trace.steps)
    both = both_gb_per_s or gb_per_s
    return replace(trace, step_ms=tuple(each), bandwidth=Bandwidth(gb_per_s, gb_per_s, both, both))


def with_saved_bytes_as_memory(trace: Trace, other_bytes: int = 0) -> Trace:
    """The trace with memory readings: saved storages, plus ``other_bytes`` at every step."""
    levels = [nbytes + other_bytes for nbytes in trace.saved_bytes]
    return replace(trace, memory=tuple(MemoryReading(level, level, 0) for level in levels))
