# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A record of one training iteration on one rank: the planner's only input.

A trace is a list of :class:`Step` in host issue order, which is also the order of the compute
stream, and the storages that the groups saved for backward. It holds only plain numbers, so that it
can be saved to a file and planned again on a laptop.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, Optional

from megatron.slipstream.plan.settings import Assignment


class StepKind(enum.Enum):
    """The kinds of steps: those of a group, in order, and those of its pass.

    [Note: Recomputation reads first]
    Recomputation runs as soon as backward has the gradient of whatever consumed its output. That
    can be before backward reaches the end of the group that saved the recomputation's input: the
    up-projections of MLA are recomputed after attention, and the group that saved their input ends
    before it. So a group's use is the first read of one of its saved tensors, if that precedes its
    end. A plan reloads for that step, and the proof covers it.

    [Note: Marks of no group]
    Actions are due at marks, and the peak is usually between the model's last commit and the first
    use in backward. Logits and loss run there, forward and backward, for up to half the forward
    time. Without a mark in between, memory that must be free for the loss would have to be free
    when the last group commits, and no reload could start before the first use. So the start and
    end of the output layer are marks too, in forward and in backward, and so is the start of each
    pass's backward. They belong to no group and move nothing themselves.
    """

    FORWARD_START = "FS"
    """The group's forward begins."""
    FORWARD_COMMIT = "FC"
    """The group has saved all its tensors: they may be offloaded from here on."""
    BACKWARD_USE = "BU"
    """Backward reaches the group's end, or reads one of its saved tensors before that: the tensors
    are needed on the device from here on. See [Note: Recomputation reads first]."""
    BACKWARD_END = "BE"
    """Backward of the group is done: the tensors that it read may be freed, and the next groups may
    be reloaded. Recorded only if the engine knows the group's input."""
    OUTPUT_START = "OS"
    """The pass reaches its output layer: all of its groups have committed."""
    OUTPUT_END = "OE"
    """The output layer has computed the logits: the loss follows."""
    BACKWARD_START = "BS"
    """The pass's backward begins, after the loss or a later pipeline stage."""
    OUTPUT_BACKWARD_START = "OB"
    """The gradient of the logits is ready: the loss's backward is done."""
    OUTPUT_BACKWARD_END = "OD"
    """Backward of the output layer is done: that of the layers follows."""

    __hash__ = object.__hash__  # Enum's is a Python function, and lookups of steps are hot.


KINDS_OF_BACKWARD = (
    StepKind.BACKWARD_USE,
    StepKind.BACKWARD_END,
    StepKind.BACKWARD_START,
    StepKind.OUTPUT_BACKWARD_START,
    StepKind.OUTPUT_BACKWARD_END,
)
"""The kinds of marks recorded in backward."""
KINDS_BETWEEN_GROUPS = (
    StepKind.FORWARD_COMMIT,
    StepKind.OUTPUT_END,
    StepKind.BACKWARD_START,
    StepKind.BACKWARD_END,
    StepKind.OUTPUT_BACKWARD_END,
)
"""Marks after which neither a group nor the output layer runs: a group that has committed saves
nothing more."""

OUTPUT_LAYER = "output_layer"
"""Name of the output layer's marks."""
BACKWARD = "backward"
"""Name of the mark at which a pass's backward begins."""


class GroupKey(NamedTuple):
    """Identifies a group within an iteration."""

    chunk_pass: int
    """Index, in forward order, of the model chunk's forward pass (one micro-batch through one
    virtual pipeline stage) within the iteration."""
    group: int
    """Index of the group within the pass, in start order. Negative for marks of no group: -1 where
    backward begins, -2 for the first call of the output layer in the pass, -3 for the second."""

    def __str__(self) -> str:
        return f"{self.chunk_pass}.{self.group}" if self.group >= 0 else f"{self.chunk_pass}"


class Step(NamedTuple):
    """One mark. ``str(step)`` is the text used in plans, logs, NVTX ranges and errors."""

    kind: StepKind
    key: GroupKey
    name: str
    """The module name, as in ``offload_modules``, or the name of another marked point."""

    @property
    def is_of_group(self) -> bool:
        """Whether the mark belongs to a group: [Note: Marks of no group]."""
        return self.key.group >= 0

    def __str__(self) -> str:
        return f"{self.key}.{self.name}:{self.kind.value}"


@dataclass(frozen=True)
class StorageTrace:
    """A storage that groups saved. It moves as a whole, once, however many views share it."""

    nbytes: int
    """Bytes that a copy of it transfers."""
    holders: tuple[GroupKey, ...]
    """The groups that saved a view of it, in order of their first save."""
    held_outside: bool = False
    """Whether something other than these groups keeps the device memory alive until backward needs
    it, so that offloading frees nothing."""
    lingers_until: int = 0
    """The step from which only the groups keep the device memory alive, if that is after they
    release it: releasing it earlier frees nothing. (The model's input, for example, is a local
    variable until its forward returns.)"""
    is_recomputed: bool = False
    """Whether it is ``held_outside`` because forward discards it after use and backward recomputes
    it into the same storage."""


@dataclass(frozen=True)
class GroupTrace:
    """One group of the iteration."""

    key: GroupKey
    name: str
    vp_stage: int
    """Virtual pipeline stage (index of the model chunk) that the pass belongs to."""
    storages: tuple[int, ...]
    """Indices into :attr:`Trace.storages`, in order of their first save by this group."""
    is_read_first: bool = False
    """Whether backward uses the group before reaching its end: [Note: Recomputation reads first].
    Its saved tensors are tracked even if it stays on the device, to detect its use."""
    stays: tuple[str, ...] = ()
    """Kinds of tensors that it saved and that cannot move: texts of ``Staying``."""


@dataclass(frozen=True)
class MemoryReading:
    """Device memory between one step and the next, as counted by the allocator."""

    allocated_bytes: int
    """Allocated right after the step."""
    peak_bytes: int
    """Peak allocated bytes before the next step."""
    absent_bytes: int
    """Bytes of managed storages that were on the host in that interval."""
    peak_beside_gradients_bytes: int = 0
    """Peak allocated bytes without the gradients that parameters had by then; 0 if unknown. See
    [Note: Gradients that stay] in ``peak``."""


class Bandwidth(NamedTuple):
    """Bandwidth of copies between pinned host memory and the device, in 1e9 bytes per second."""

    d2h_gb_per_s: float
    """To the host, while no copy to the device runs."""
    h2d_gb_per_s: float
    """To the device, while no copy to the host runs."""
    d2h_both_gb_per_s: float
    """To the host, while copies to the device run too."""
    h2d_both_gb_per_s: float
    """To the device, while copies to the host run too."""


class StepsKey:
    """The steps of an iteration and its assignment, as a dictionary key.

    Two assignments may have the same steps and save other storages. Both are hashed once: a large
    iteration has tens of thousands of steps, and a tuple rehashes all of them at each lookup.
    """

    __slots__ = ("steps", "assignment", "_hash")

    def __init__(self, steps: tuple[Step, ...], assignment: Assignment = ()) -> None:
        self.steps = steps
        self.assignment = assignment
        self._hash = hash((steps, assignment))

    def __hash__(self) -> int:
        return self._hash

    def __eq__(self, other: object) -> bool:
        return (
            isinstance(other, StepsKey)
            and self.assignment == other.assignment
            and self.steps == other.steps
        )


def bytes_by_step(num_steps: int, intervals: Iterable[tuple[int, int, int]]) -> list[int]:
    """Return, for each step, the sum of the bytes of the intervals that it is in.

    Args:
        num_steps: Number of steps.
        intervals: The first step of each, the step at which it ends, and its bytes.
    """
    change = [0] * (num_steps + 1)
    for first, stop, nbytes in intervals:
        change[first] += nbytes
        change[stop] -= nbytes
    return list(itertools.accumulate(change[:-1]))


@dataclass(frozen=True)
class Trace:
    """One iteration of one rank."""

    steps: tuple[Step, ...]
    groups: tuple[GroupTrace, ...]
    storages: tuple[StorageTrace, ...]
    pp_rank: int = 0
    """Pipeline-parallel rank, for ``delta_offload_bytes_across_pp_ranks``."""
    memory: tuple[MemoryReading, ...] = field(default=())
    """One reading per step, or empty if none were taken."""
    step_ms: tuple[float, ...] = ()
    """For each step, the compute stream's time in ms until the next step (for the last one, until
    the iteration ends), excluding stalls on copies; empty if untimed."""
    bandwidth: Optional[Bandwidth] = None
    """Measured bandwidth; None if not measured."""
    ms_per_moved_group: float = 0.0
    """By how much moving one more group lengthens an iteration, excluding stalls on copies: in a
    launch-bound model, the host work per group costs time."""
    ms_per_moved_gb: float = 0.0
    """The same per 1e9 bytes offloaded and reloaded: on a busy device, copies take power and memory
    bandwidth from compute. The larger of the two costs applies."""
    assignment: Assignment = ()
    """What backward recomputed of each layer; empty: as the model was built."""
    seq_length: int = 0
    """Tokens per sequence; 0 if not known."""

    @cached_property
    def steps_key(self) -> StepsKey:
        """:attr:`steps` and :attr:`assignment` as a dictionary key."""
        return StepsKey(self.steps, self.assignment)

    @cached_property
    def group_by_key(self) -> dict[GroupKey, GroupTrace]:
        """The groups by key."""
        return {group.key: group for group in self.groups}

    @cached_property
    def names(self) -> tuple[str, ...]:
        """The names of modules and the output layer, in the order in which forward reaches them."""
        named = (step.name for step in self.steps if step.kind is not StepKind.BACKWARD_START)
        return tuple(dict.fromkeys(named))

    @cached_property
    def step_index(self) -> dict[tuple[StepKind, GroupKey], int]:
        """The index in :attr:`steps` of each mark."""
        return {(step.kind, step.key): index for index, step in enumerate(self.steps)}

    @property
    def is_timed(self) -> bool:
        """Whether it has the times of computation and copies."""
        return bool(self.steps) and len(self.step_ms) == len(self.steps) and bool(self.bandwidth)

    @cached_property
    def saved_bytes(self) -> tuple[int, ...]:
        """For each step, the bytes of saved storages on the device until the next, nothing moved.

        A storage counts from the step before the first commit of its holders, since forward
        computes it by the end of that interval, to the last use of a holder.
        """
        index, last_step = self.step_index, len(self.steps) - 1
        intervals = []
        for storage in self.storages:
            holders = storage.holders
            commits = [index.get((StepKind.FORWARD_COMMIT, key), -1) for key in holders]
            commits = [commit for commit in commits if commit >= 0]
            if commits:
                last = max(index.get((StepKind.BACKWARD_USE, key), -1) for key in holders)
                stop = max(last if last >= 0 else last_step, max(commits) - 1) + 1
                intervals.append((max(0, min(commits) - 1), stop, storage.nbytes))
        return tuple(bytes_by_step(len(self.steps), intervals))

    @cached_property
    def present_bytes(self) -> tuple[int, ...]:
        """For each step, the peak device memory until the next one with nothing moved.

        As counted by the allocator; saved storages only if there are no readings.
        """
        if self.memory:
            return tuple(reading.peak_bytes + reading.absent_bytes for reading in self.memory)
        return self.saved_bytes

    def moving_storages(self, moving: Collection[GroupKey]) -> list[int]:
        """Return the storages that move if exactly these groups do: nothing else holds them."""
        wanted = set(moving)
        return [
            index
            for index, storage in enumerate(self.storages)
            if not storage.held_outside and wanted.issuperset(storage.holders)
        ]

    def moving_cost_ms(self, num_groups: int, nbytes: int) -> float:
        """Return by how much moving lengthens an iteration, excluding stalls on copies.

        Args:
            num_groups: Number of groups that move.
            nbytes: Bytes that they move, each way.
        """
        return max(num_groups * self.ms_per_moved_group, nbytes / 1e9 * self.ms_per_moved_gb)

    def uses(self) -> Sequence[Step]:
        """Return the backward uses, in order."""
        return [step for step in self.steps if step.kind is StepKind.BACKWARD_USE]

    def group_nbytes(self, key: GroupKey) -> int:
        """Return the bytes of storages that this group saves first and nothing outside holds."""
        storages = (self.storages[index] for index in self.group_by_key[key].storages)
        return sum(
            storage.nbytes
            for storage in storages
            if storage.holders[0] == key and not storage.held_outside
        )
