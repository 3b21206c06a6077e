# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Composes the trace of an iteration from templates of its layers, one per kind and setting.

A template is what one layer does in forward and in backward: its marks, and between them the time
and the memory. Layers of a kind differ only by position, so a few templates give the trace of every
assignment of settings to layers. Templates come from shapes (``estimate.synthetic``) or from traces
of a run.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal, NamedTuple, Union

from megatron.slipstream.plan.settings import Assignment, LayerSetting
from megatron.slipstream.plan.trace import (
    BACKWARD,
    Bandwidth,
    GroupKey,
    GroupTrace,
    MemoryReading,
    Step,
    StepKind,
    StorageTrace,
    Trace,
)


class Mark(NamedTuple):
    """A mark of a group, by its index in the template, or of the output layer (below 0)."""

    kind: StepKind
    group: int
    name: str


class Work(NamedTuple):
    """Computation between two marks. Bytes are relative to what is allocated at its start."""

    ms: float
    net_bytes: int = 0
    """Bytes by which allocated memory grows (or shrinks, if negative) until its end."""
    peak_bytes: int = 0
    """Bytes by which the peak exceeds the memory allocated at its start; 0 or more."""

    def then(self, other: Work) -> Work:
        """Return this work followed by another."""
        return Work(
            self.ms + other.ms,
            self.net_bytes + other.net_bytes,
            max(self.peak_bytes, self.net_bytes + other.peak_bytes),
        )


Event = Union[Mark, Work]
NO_WORK = Work(0.0)


class TemplateGroup(NamedTuple):
    """A group of a layer."""

    name: str
    stays: tuple[str, ...] = ()
    """See :attr:`GroupTrace.stays`."""
    is_read_first: bool = False
    """See :attr:`GroupTrace.is_read_first`."""


class TemplateStorage(NamedTuple):
    """A storage that groups of a layer save."""

    nbytes: int
    groups: tuple[int, ...]
    """The groups that save it, by index in the template, in order of their first save."""
    held_outside: bool = False
    """Whether something besides these groups holds it: see :attr:`StorageTrace.held_outside`."""
    is_input: bool = False
    """Whether it is the layer's input. In a chunk's first layer, the model's forward holds it until
    it returns, or the schedule until the pass's backward."""
    is_recomputed: bool = False
    """See :attr:`StorageTrace.is_recomputed`."""


class _Lane(NamedTuple):
    """Events of one direction, with the work between two marks added up."""

    lead: Work
    """The work before the first mark."""
    marks: tuple[tuple[Mark, Work], ...]
    """Each mark, with the work until the next one."""


@dataclass(frozen=True, eq=False)
class Template:
    """One layer of a kind under one setting, or what runs before or after a chunk's layers."""

    forward: tuple[Event, ...]
    """Marks and work in forward order."""
    backward: tuple[Event, ...]
    """Marks and work in backward order, recomputation included."""
    groups: tuple[TemplateGroup, ...] = ()
    storages: tuple[TemplateStorage, ...] = ()
    recompute_ms: float = 0.0
    """The part of the backward time that recomputes."""
    recomputed_bytes: int = 0
    """Bytes of saved tensors that backward computes again, which forward did not keep."""
    left_bytes: int = 0
    """Bytes that are always in use beside :attr:`RankTemplates.state_bytes`, such as what modules
    keep until they run again."""

    @cached_property
    def lanes(self) -> tuple[_Lane, _Lane]:
        """The events of forward and backward by mark."""
        return _lane(self.forward), _lane(self.backward)

    @cached_property
    def in_forward(self) -> Work:
        """All work of forward: its net bytes are what the layer saves."""
        return _total(self.forward)

    @cached_property
    def in_backward(self) -> Work:
        """All work of backward."""
        return _total(self.backward)

    @property
    def compute_ms(self) -> float:
        """Compute time of forward and backward."""
        return self.in_forward.ms + self.in_backward.ms

    @cached_property
    def movable_bytes(self) -> int:
        """Saved bytes that may move."""
        return sum(item.nbytes for item in self.storages if not item.held_outside)

    def as_one_group(self, count: int = 1) -> Template:
        """Return a coarser template of ``count`` such layers: all that may move is one group.

        It commits when the last layer ends and is used when the backward of that begins, so that a
        plan for it takes no less memory and no less time than one for the layers.
        """
        movable = [item for item in self.storages if not item.held_outside]
        inputs = sum(item.nbytes for item in movable if item.is_input)
        others = self.movable_bytes * count - inputs
        sizes = ((inputs, True), (others, False))
        return replace(
            self,
            forward=(*[self.in_forward] * count, Mark(StepKind.FORWARD_COMMIT, 0, ONE_GROUP)),
            backward=(Mark(StepKind.BACKWARD_USE, 0, ONE_GROUP), *[self.in_backward] * count),
            groups=(TemplateGroup(ONE_GROUP),),
            storages=tuple(TemplateStorage(n, (0,), is_input=is_in) for n, is_in in sizes if n),
            recompute_ms=self.recompute_ms * count,
            recomputed_bytes=self.recomputed_bytes * count,
            left_bytes=self.left_bytes * count,
        )


ONE_GROUP = "layer"
"""Name of the group of :meth:`Template.as_one_group`."""


def _total(events: Iterable[Event]) -> Work:
    return functools.reduce(Work.then, (e for e in events if isinstance(e, Work)), NO_WORK)


def _lane(events: Iterable[Event]) -> _Lane:
    marks: list[tuple[Mark | None, Work]] = [(None, NO_WORK)]
    for event in events:
        if isinstance(event, Work):
            mark, work = marks[-1]
            marks[-1] = mark, work.then(event)
        else:
            marks.append((event, NO_WORK))
    return _Lane(marks[0][1], tuple((m, work) for m, work in marks if m is not None))


class ChunkPass(NamedTuple):
    """What one pass through a model chunk does."""

    templates: tuple[Template, ...]
    """The templates of its layers, in forward order, and those of what runs before and after."""
    is_first: bool = False
    """Whether it is the model's first chunk. The schedule holds the input of every other one."""
    vp_stage: int = 0
    num_before: int = 0
    """Number of templates before those of its layers."""

    @property
    def num_groups(self) -> int:
        """Number of groups of the pass."""
        return sum(len(item.groups) for item in self.templates)

    @property
    def forward_ms(self) -> float:
        """Compute time of its forward."""
        return sum(item.in_forward.ms for item in self.templates)

    @property
    def backward_ms(self) -> float:
        """Compute time of its backward."""
        return sum(item.in_backward.ms for item in self.templates)

    @property
    def saved_bytes(self) -> int:
        """All bytes that a pass saves for backward."""
        return sum(item.in_forward.net_bytes for item in self.templates)


class ScheduledPass(NamedTuple):
    """One micro-batch's forward or backward through one model chunk, as a rank runs it."""

    direction: Literal["F", "B"]
    micro_batch: int
    vp_stage: int = 0
    wait_ms: float = 0.0
    """Time for which the rank waits for other ranks before it."""
    extra_bytes: int = 0
    """Bytes that it needs beside those of templates, such as what is held outside the model."""


class ChunkLayers(NamedTuple):
    """The layers of a model chunk: the kind of each, and what runs before and after them."""

    kinds: tuple[str, ...]
    is_first: bool = True
    before: tuple[Template, ...] = ()
    after: tuple[Template, ...] = ()


@dataclass(frozen=True)
class RankTemplates:
    """The templates of a rank's layers, and the order in which it runs them.

    Args:
        templates: For each kind of layers, its template in each setting that it can take.
        chunks: The rank's model chunks, by virtual stage.
        schedule: The passes of an iteration, in the order in which the rank runs them.
        bandwidth: Bandwidth of copies; None if it is not known, so that nothing can be timed.
        state_bytes: Device memory that is always in use.
        pp_rank: Pipeline rank.
        ms_per_moved_group: See :attr:`Trace.ms_per_moved_group`.
        ms_per_moved_gb: See :attr:`Trace.ms_per_moved_gb`.
    """

    templates: Mapping[str, Mapping[LayerSetting, Template]]
    chunks: tuple[ChunkLayers, ...]
    schedule: tuple[ScheduledPass, ...]
    bandwidth: Bandwidth | None
    state_bytes: int = 0
    pp_rank: int = 0
    ms_per_moved_group: float = 0.0
    ms_per_moved_gb: float = 0.0

    @property
    def kinds(self) -> tuple[str, ...]:
        """The kind of each layer of the rank, in the order of an :data:`Assignment`."""
        return tuple(itertools.chain.from_iterable(chunk.kinds for chunk in self.chunks))

    def layer_templates(self, assignment: Assignment) -> tuple[Template, ...]:
        """Return the template of each layer of the rank.

        Raises:
            ValueError: There is not one setting for each layer.
            KeyError: A kind of layers has no template in the setting of such a layer.
        """
        chosen = zip(self.kinds, assignment, strict=True)
        return tuple(self.templates[kind][setting] for kind, setting in chosen)

    def passes(self, assignment: Assignment) -> tuple[ChunkPass, ...]:
        """Return what a pass through each chunk does, by virtual stage."""
        layers = iter(self.layer_templates(assignment))
        return tuple(
            ChunkPass(
                (*chunk.before, *itertools.islice(layers, len(chunk.kinds)), *chunk.after),
                chunk.is_first,
                vp_stage,
                len(chunk.before),
            )
            for vp_stage, chunk in enumerate(self.chunks)
        )

    def compute_ms(self, assignment: Assignment) -> float:
        """Return the time of an iteration without waits for copies."""
        chunks = self.passes(assignment)
        ms = {"F": [c.forward_ms for c in chunks], "B": [c.backward_ms for c in chunks]}
        return sum(ms[item.direction][item.vp_stage] + item.wait_ms for item in self.schedule)

    def compose(self, assignment: Assignment, marks_all: bool = False) -> Trace:
        """Return the trace of an iteration in which each layer has its setting.

        Args:
            assignment: The setting of each layer of the rank.
            marks_all: Whether passes without groups have marks too: [Note: Marks of no group] in
                ``trace``. No engine makes these, but without any mark a trace says nothing.
        """
        chunks = self.passes(assignment)
        left_bytes = sum(item.left_bytes for chunk in chunks for item in chunk.templates)
        recorder = _Recorder(self.state_bytes + left_bytes, marks_all)
        in_flight: dict[tuple[int, int], int] = {}
        for direction, micro_batch, vp_stage, wait_ms, extra_bytes in self.schedule:
            recorder.spend(wait_ms)
            recorder.extra_bytes = extra_bytes
            if direction == "F":
                in_flight[micro_batch, vp_stage] = recorder.run_forward(chunks[vp_stage])
            else:
                recorder.run_backward(chunks[vp_stage], in_flight[micro_batch, vp_stage])
        return recorder.finish(self, assignment)


class _Recorder:
    """Records consecutive passes as a trace."""

    def __init__(self, state_bytes: int, marks_all: bool) -> None:
        self.extra_bytes = 0
        """See :attr:`ScheduledPass.extra_bytes`, of the coming pass."""
        self._live_bytes = state_bytes
        self._marks_all = marks_all
        self._steps: list[Step] = []
        self._step_ms: list[float] = []
        self._peaks: list[int] = []
        self._allocated: list[int] = []
        self._groups: list[GroupTrace] = []
        self._storages: list[StorageTrace] = []
        self._num_passes = 0
        self._early_ms, self._early_peak_bytes = 0.0, state_bytes

    def run_forward(self, chunk: ChunkPass) -> int:
        """Record a pass's forward and return the index of the pass."""
        chunk_pass = self._num_passes
        self._num_passes += 1
        is_marked = self._marks_all or chunk.num_groups > 0
        first = 0
        for template in chunk.templates:
            self._run(template.lanes[0], chunk_pass, first, is_marked)
            first += len(template.groups)
        first = 0
        for place, template in enumerate(chunk.templates):
            is_first_layer = place == chunk.num_before
            self._add_groups(template, chunk, GroupKey(chunk_pass, first), is_first_layer)
            first += len(template.groups)
        return chunk_pass

    def run_backward(self, chunk: ChunkPass, chunk_pass: int) -> None:
        """Record the pass's backward."""
        first = chunk.num_groups
        is_marked = self._marks_all or first > 0
        if is_marked:
            self._mark(StepKind.BACKWARD_START, GroupKey(chunk_pass, -1), BACKWARD, NO_WORK)
        for template in reversed(chunk.templates):
            first -= len(template.groups)
            self._run(template.lanes[1], chunk_pass, first, is_marked)

    def spend(self, ms: float) -> None:
        """Add time to the latest step, or to the time before the first one."""
        if self._steps:
            self._step_ms[-1] += ms
        else:
            self._early_ms += ms

    def finish(self, rank: RankTemplates, assignment: Assignment) -> Trace:
        """Return the recorded trace."""
        readings = map(MemoryReading, self._allocated, self._peaks, [0] * len(self._steps))
        return Trace(
            tuple(self._steps),
            tuple(self._groups),
            tuple(self._storages),
            rank.pp_rank,
            tuple(readings),
            tuple(self._step_ms),
            rank.bandwidth,
            rank.ms_per_moved_group,
            rank.ms_per_moved_gb,
            assignment,
        )

    def _run(self, lane: _Lane, chunk_pass: int, first: int, is_marked: bool) -> None:
        """Record one direction of a template whose first group has the index ``first``."""
        self._work(lane.lead)
        for (kind, group, name), work in lane.marks:
            if group >= 0:
                self._mark(kind, GroupKey(chunk_pass, first + group), name, work)
            elif is_marked:
                self._mark(kind, GroupKey(chunk_pass, group), name, work)
            else:
                self._work(work)

    def _mark(self, kind: StepKind, key: GroupKey, name: str, work: Work) -> None:
        """Record a mark and the work after it."""
        live_bytes = self._live_bytes
        self._steps.append(Step(kind, key, name))
        self._step_ms.append(self._early_ms + work.ms)
        peak_bytes = live_bytes + work.peak_bytes + self.extra_bytes
        self._peaks.append(max(peak_bytes, self._early_peak_bytes))
        self._allocated.append(live_bytes)
        self._live_bytes = live_bytes + work.net_bytes
        self._early_ms = self._early_peak_bytes = 0

    def _work(self, work: Work) -> None:
        """Record work that follows the latest mark's."""
        peak = self._live_bytes + work.peak_bytes + self.extra_bytes
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], peak)
        else:
            self._early_peak_bytes = max(self._early_peak_bytes, peak)
        self._live_bytes += work.net_bytes
        self.spend(work.ms)

    def _add_groups(
        self, template: Template, chunk: ChunkPass, first: GroupKey, is_first_layer: bool
    ) -> None:
        """Add the groups and storages of a template whose first group has the key ``first``."""
        held: list[list[int]] = [[] for _ in template.groups]
        keys = [GroupKey(first.chunk_pass, first.group + i) for i in range(len(held))]
        for storage in template.storages:
            is_held = lingers = False
            if is_first_layer and storage.is_input:
                is_held, lingers = not chunk.is_first, chunk.is_first
            for group in storage.groups:
                held[group].append(len(self._storages))
            self._storages.append(
                StorageTrace(
                    storage.nbytes,
                    tuple([keys[group] for group in storage.groups]),
                    storage.held_outside or is_held,
                    len(self._steps) if lingers else 0,
                    storage.is_recomputed,
                )
            )
        for key, (name, stays, is_read_first), storages in zip(
            keys, template.groups, held, strict=True
        ):
            self._groups.append(
                GroupTrace(key, name, chunk.vp_stage, tuple(storages), is_read_first, stays)
            )
