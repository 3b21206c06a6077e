# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Builds a trace for the planner from a model's shape, without running an iteration.

Its marks are those of megatron-core's layers and its storages are the tensors that they save, in
the order of a pipeline rank's schedule; its times are estimates. Device memory counts the state,
the saved tensors of passes in flight, what the running part takes beside them (layer_passes), but
not the fragmentation of the allocator.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Union

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.layer_costs import layer_costs
from megatron.slipstream.estimate.layer_passes import Stretch, backward_pass, forward_pass
from megatron.slipstream.estimate.model_shapes import Chunk, ModelShape
from megatron.slipstream.estimate.saved_tensors import (
    CHECKPOINT_INPUTS,
    SavedTensor,
    marked_modules,
    saved_tensors,
)
from megatron.slipstream.estimate.schedules import Pass, Schedule, idle_ms, rank_schedule
from megatron.slipstream.plan.staying import Staying
from megatron.slipstream.plan.trace import (
    BACKWARD,
    OUTPUT_LAYER,
    GroupKey,
    GroupTrace,
    MemoryReading,
    Step,
    StepKind,
    StorageTrace,
    Trace,
)

DEFAULT_MIN_NUMEL = 1 << 20
"""megatron-core's ``min_offloaded_tensor_size``, in elements."""

KEPT_BY_SCHEDULE = "the pipeline schedule holds the stage's input"


@dataclass(frozen=True)
class Workplan:
    """A model to plan: its shape, the GPU's speed, and the modules that may be offloaded.

    Args:
        shape: The model.
        speed: Speed of the GPU.
        modules: megatron-core's ``offload_modules``.
        num_micro_batches: Number of micro-batches per iteration.
        min_numel: Tensors with fewer elements are not offloaded.

    Raises:
        ValueError: The schedule does not support this number of micro-batches.
    """

    shape: ModelShape
    speed: Speed
    modules: tuple[str, ...]
    num_micro_batches: int
    min_numel: int = DEFAULT_MIN_NUMEL

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        """The schedule of every pipeline rank."""
        par = self.shape.parallelism
        return tuple(
            rank_schedule(par.pp, rank, self.num_micro_batches, par.vpp, par.group_size)
            for rank in range(par.pp)
        )

    @cached_property
    def chunks(self) -> dict[tuple[int, int], ChunkWork]:
        """The work of one pass through each chunk, by pipeline rank and virtual stage."""
        return {
            (chunk.pp_rank, chunk.vp_stage): ChunkWork(self, chunk) for chunk in self.shape.chunks
        }

    @cached_property
    def idle_ms(self) -> list[list[float]]:
        """How long each rank waits for other ranks before each pass."""

        def duration_ms(rank: int, item: Pass) -> float:
            chunk = self.chunks[rank, item.vp_stage]
            return chunk.forward_ms if item.direction == "F" else chunk.backward_ms

        return idle_ms(self.schedules, duration_ms)


def synthetic_trace(work: Workplan, pp_rank: int, state_bytes: int = 0) -> Trace:
    """Build the trace of one iteration on one pipeline rank.

    Args:
        work: The model to plan.
        pp_rank: The rank.
        state_bytes: Device memory that is always in use.

    Returns:
        A trace with times, bandwidth and memory. It has no steps if no layer of the rank has any of
        the modules.
    """
    recorder = _Recorder(state_bytes)
    in_flight: dict[tuple[int, int], int] = {}
    for item, wait_ms in zip(work.schedules[pp_rank], work.idle_ms[pp_rank], strict=True):
        chunk = work.chunks[pp_rank, item.vp_stage]
        recorder.spend(wait_ms)
        if item.direction == "F":
            in_flight[item.micro_batch, item.vp_stage] = recorder.run_forward(chunk)
        else:
            recorder.run_backward(chunk, in_flight[item.micro_batch, item.vp_stage])
    return recorder.finish(work, pp_rank)


class Mark(NamedTuple):
    """Start or end of a group, by its index in the pass, or of the output layer."""

    kind: StepKind
    group: int
    name: str


class Work(NamedTuple):
    """Compute time and memory of a part of a layer, in forward or in backward."""

    ms: float
    live_bytes: int
    """What it adds to the memory in use; negative if it frees."""
    peak_bytes: int
    """The most that it uses above what was in use before it."""


class Managed(NamedTuple):
    """A storage saved by groups of one pass."""

    tensor: SavedTensor
    groups: tuple[int, ...]
    held_outside: bool
    lingers: bool
    """Whether something else holds it until the pass's forward returns."""


@dataclass
class ChunkWork:
    """One micro-batch's pass through one model chunk.

    Args:
        plan: The model to plan.
        chunk: The chunk.
    """

    plan: Workplan
    chunk: Chunk
    forward: list[Union[Mark, Work]] = field(default_factory=list)
    backward: list[Union[Mark, Work]] = field(default_factory=list)
    groups: list[str] = field(default_factory=list)
    """The module names of the pass's groups."""
    storages: list[Managed] = field(default_factory=list)
    with_small: set[int] = field(default_factory=set)
    """Groups that save tensors below the minimum size."""

    def __post_init__(self) -> None:
        shape, group_of = self.plan.shape, {}
        for place, layer in enumerate(self.chunk.layers):
            group_of[layer] = self._add_layer(layer, is_first=place == 0)
        self.forward = list(self._with_marks(forward_pass(shape, self.chunk), group_of))
        self.backward = list(self._with_marks_of_use(backward_pass(shape, self.chunk), group_of))

    @property
    def forward_ms(self) -> float:
        """Compute time of its forward."""
        return sum(item.ms for item in self.forward if isinstance(item, Work))

    @property
    def backward_ms(self) -> float:
        """Compute time of its backward."""
        return sum(item.ms for item in self.backward if isinstance(item, Work))

    @property
    def saved_bytes(self) -> int:
        """All bytes that a pass saves for backward."""
        return sum(item.live_bytes for item in self.forward if isinstance(item, Work))

    def _add_layer(self, layer: int, is_first: bool) -> dict[str, int]:
        """Add a layer's groups and their storages; return its groups by name."""
        shape = self.plan.shape
        saved = saved_tensors(shape, layer)
        marked = [name for name in marked_modules(shape, layer) if name in self.plan.modules]
        group_of = {name: len(self.groups) + place for place, name in enumerate(marked)}
        self.groups += marked
        savers: dict[str, list[str]] = {}
        tensors: dict[str, SavedTensor] = {}
        for part, items in saved.items():
            for tensor in items:
                savers.setdefault(tensor.name, []).append(part)
                tensors.setdefault(tensor.name, tensor)
        for name, tensor in tensors.items():
            groups = tuple(group_of[part] for part in savers[name] if part in group_of)
            if groups and tensor.numel < self.plan.min_numel:
                self.with_small.update(groups)
            elif groups:
                is_input = is_first and name == "layer_input"
                held_outside = (
                    len(groups) < len(savers[name])
                    or bool(tensor.kept_by)
                    or (is_input and not self.chunk.is_first)
                )
                lingers = is_input and self.chunk.is_first
                self.storages.append(Managed(tensor, groups, held_outside, lingers))
        return group_of

    def _with_marks(
        self, stretches: Iterable[Stretch], group_of: dict[int, dict[str, int]]
    ) -> Iterator[Union[Mark, Work]]:
        """Yield the work of forward, and the marks of groups and of the output layer."""
        for stretch in stretches:
            groups = group_of.get(stretch.layer, {})
            is_output = stretch.part == OUTPUT_LAYER and bool(self.groups)
            spans = {name: _span(name, self.plan.shape, stretch.layer) for name in groups}
            for name, span in spans.items():
                if stretch.part == span[0]:
                    yield Mark(StepKind.FORWARD_START, groups[name], name)
            if is_output:  # [Note: Marks of no group]
                yield Mark(StepKind.OUTPUT_START, -2, OUTPUT_LAYER)
            yield self._work(stretch)
            if is_output:
                yield Mark(StepKind.OUTPUT_END, -2, OUTPUT_LAYER)
            for name, span in spans.items():
                if stretch.part == span[-1]:
                    yield Mark(StepKind.FORWARD_COMMIT, groups[name], name)

    def _with_marks_of_use(
        self, stretches: Iterable[Stretch], group_of: dict[int, dict[str, int]]
    ) -> Iterator[Union[Mark, Work]]:
        """Yield the work of backward, and a mark where a group is first read.

        A part that runs again reads what it saved: [Note: Recomputation reads first] in ``trace``.
        """
        used: set[int] = set()
        for stretch in stretches:
            groups = group_of.get(stretch.layer, {})
            is_output = stretch.part == OUTPUT_LAYER and bool(self.groups)
            for name in reversed(groups):
                is_read = stretch.part in _span(name, self.plan.shape, stretch.layer)
                if is_read and groups[name] not in used:
                    used.add(groups[name])
                    yield Mark(StepKind.BACKWARD_USE, groups[name], name)
            if is_output:
                yield Mark(StepKind.OUTPUT_BACKWARD_START, -2, OUTPUT_LAYER)
            yield self._work(stretch)
            if is_output:
                yield Mark(StepKind.OUTPUT_BACKWARD_END, -2, OUTPUT_LAYER)

    def _work(self, stretch: Stretch) -> Work:
        ms = _round(stretch.ms(self.plan.speed))
        return Work(ms, stretch.live_bytes, stretch.peak_bytes)


def _round(ms: float) -> float:
    """Round to a multiple of a power of two, so that sums are exact in any order."""
    return round(ms * 4096) / 4096


_LAST_PARTS: dict[str, str] = {
    # megatron-core ends a norm's group after reading the residual, which is the norm's input.
    "attn_norm": "attn_residual",
    "moe_act": "expert_fc2",
    "mlp_norm": "mlp_residual",
}
"""The part of a layer at whose end a module's group ends, if it is not the module's own."""


def _span(module: str, shape: ModelShape, layer: int) -> Sequence[str]:
    """Return the parts of a layer between the marks of a module's group."""
    parts = list(layer_costs(shape, layer))
    if module == CHECKPOINT_INPUTS:
        return parts
    first, last = parts.index(module), parts.index(_LAST_PARTS.get(module, module))
    return parts[first : last + 1]


class _Recorder:
    """Records consecutive passes as a trace."""

    def __init__(self, state_bytes: int) -> None:
        self._live_bytes = state_bytes
        self._steps: list[Step] = []
        self._step_ms: list[float] = []
        self._peaks: list[int] = []
        self._allocated: list[int] = []
        self._groups: list[GroupTrace] = []
        self._storages: list[StorageTrace] = []
        self._num_passes = 0
        self._early_ms, self._early_peak_bytes = 0.0, state_bytes

    def run_forward(self, chunk: ChunkWork) -> int:
        """Record a pass's forward and return the index of the pass."""
        chunk_pass = self._num_passes
        self._num_passes += 1
        self._run(chunk.forward, chunk_pass)
        self._add_storages(chunk, chunk_pass)
        return chunk_pass

    def run_backward(self, chunk: ChunkWork, chunk_pass: int) -> None:
        """Record the pass's backward."""
        if chunk.groups:
            self._mark(chunk_pass, Mark(StepKind.BACKWARD_START, -1, BACKWARD))
        self._run(chunk.backward, chunk_pass)

    def _run(self, events: Iterable[Union[Mark, Work]], chunk_pass: int) -> None:
        for event in events:
            if isinstance(event, Mark):
                self._mark(chunk_pass, event)
            else:
                self._note_peak(event.peak_bytes)
                self._live_bytes += event.live_bytes
                self.spend(event.ms)

    def spend(self, ms: float) -> None:
        """Add time to the latest step, or to the time before the first one."""
        if self._steps:
            self._step_ms[-1] += ms
        else:
            self._early_ms += ms

    def finish(self, work: Workplan, pp_rank: int) -> Trace:
        """Return the recorded trace."""
        readings = map(MemoryReading, self._allocated, self._peaks, [0] * len(self._steps))
        return Trace(
            tuple(self._steps),
            tuple(self._groups),
            tuple(self._storages),
            pp_rank,
            tuple(readings),
            tuple(self._step_ms),
            work.speed.bandwidth,
        )

    def _mark(self, chunk_pass: int, mark: Mark) -> None:
        self._steps.append(Step(mark.kind, GroupKey(chunk_pass, mark.group), mark.name))
        self._step_ms.append(self._early_ms)
        self._peaks.append(max(self._live_bytes, self._early_peak_bytes))
        self._allocated.append(self._live_bytes)
        self._early_ms = self._early_peak_bytes = 0

    def _note_peak(self, more_bytes: int) -> None:
        peak = self._live_bytes + more_bytes
        if self._peaks:
            self._peaks[-1] = max(self._peaks[-1], peak)
        else:
            self._early_peak_bytes = max(self._early_peak_bytes, peak)

    def _add_storages(self, chunk: ChunkWork, chunk_pass: int) -> None:
        first = len(self._storages)
        held: dict[int, list[int]] = {}
        for place, managed in enumerate(chunk.storages):
            holders = tuple(GroupKey(chunk_pass, group) for group in managed.groups)
            lingers_until = len(self._steps) if managed.lingers else 0
            self._storages.append(
                StorageTrace(managed.tensor.nbytes, holders, managed.held_outside, lingers_until)
            )
            for group in managed.groups:
                held.setdefault(group, []).append(first + place)
        self._groups += [
            GroupTrace(
                GroupKey(chunk_pass, group),
                name,
                chunk.chunk.vp_stage,
                tuple(held.get(group, ())),
                stays=(Staying.SMALL.text,) if group in chunk.with_small else (),
            )
            for group, name in enumerate(chunk.groups)
        ]
