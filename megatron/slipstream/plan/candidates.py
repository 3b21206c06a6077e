# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Policies for which groups move: one pure function per reason to keep a group on the device.

Each policy takes a trace and the groups that still move, and returns those that it keeps, with the
reason. Reasons appear in the report, so they are written for its readers.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Optional

from megatron.slipstream.plan.trace import (
    OUTPUT_LAYER,
    GroupKey,
    GroupTrace,
    StepKind,
    Trace,
)


@dataclass(frozen=True)
class PolicyOptions:
    """The options that decide which groups move and when."""

    activation_offload_fraction: float = 1.0
    """Fraction of each pass's groups that move, in forward order; the last ones stay."""
    delta_offload_bytes_across_pp_ranks: int = 0
    """Bytes that each pipeline rank keeps on the device in addition to the previous rank's."""
    release_lag: int = 1
    """Number of group commits after its own at which a group's device memory is released."""
    prefetch_depth: int = 1
    """Number of group uses before its own at which a group's H2D copy starts."""
    max_inflight_offloads: Optional[int] = None
    """Maximum number of a module's D2H copies in flight (compute has not waited for them yet) when
    its next group has committed: a group's memory is freed at most that many commits of the same
    module after its own. None for no limit."""
    host_memory_limit_bytes: Optional[int] = None
    """Maximum host memory in use at once; None for no limit."""
    target_memory_bytes: Optional[int] = None
    """Upper limit on the device peak; the plan meets it in the least time. None to move every group
    that may move."""
    target_option: str = "offload_target_memory_gib"
    """The user's option that sets it, for messages."""
    max_overhead_percent: Optional[float] = None
    """Upper limit on the time that compute stalls on copies, in percent of compute time; the plan
    lowers the device peak as far as that allows. None to move every group that may move. Mutually
    exclusive with ``target_memory_bytes``."""

    def __post_init__(self) -> None:
        if self.target_memory_bytes is not None and self.max_overhead_percent is not None:
            raise ValueError(
                f"target_memory_bytes={self.target_memory_bytes} is not supported with "
                f"max_overhead_percent={self.max_overhead_percent} because each alone decides how "
                "much moves; set one of them"
            )


Kept = dict[GroupKey, str]

BACKWARD_FOLLOWS = "its backward follows before another layer hides the copies"
NEVER_USED = "backward never asks for it"
FRACTION = "activation_offload_fraction keeps it"
DELTA = "delta_offload_bytes_across_pp_ranks keeps it"
NOTHING_SAVED = "it saves nothing"
HELD_OUTSIDE = "an operation outside the chosen modules holds it too"
RECOMPUTED = "it is discarded in forward and recomputed in backward"
LINGERS = "an operation outside the chosen modules holds it too, past the peak of device memory"
HELD_BY_KEPT = "a group that stays holds it too"
HOST_MEMORY = "offload_host_memory_limit_bytes keeps it"
NO_TIME = "backward needs it before it could have left"
NOT_WORTH_THE_WAIT = (
    "its copies cannot hide behind computation, and moving it would hardly lower the peak"
)
CANNOT_HIDE = "offload_max_overhead_percent keeps it: its copies cannot hide behind computation"
NOT_NEEDED_FOR_PEAK = "offload_max_overhead_percent keeps it: moving it would not lower the peak"
NOT_NEEDED_FOR_TARGET = "the limit on the device peak keeps it: the peak fits without moving it"


def keep_where_backward_follows(trace: Trace, moving: Sequence[GroupKey]) -> Kept:
    """Keep a group if no layer runs between its commit and its own use in backward.

    Then no layer's computation can hide the two copies. In any pipeline schedule, this is the last
    layer before backward: :class:`_Starts` says how a trace, which names no layers, shows it.
    """
    kept: Kept = {}
    wanted = set(moving)
    starts: dict[int, _Starts] = {}
    num_starts = 0
    last_commit: dict[str, tuple[GroupKey, int, int]] = {}
    for step in trace.steps:
        of_pass = starts.setdefault(step.key.chunk_pass, _Starts())
        if step.kind is StepKind.FORWARD_START:
            num_starts += of_pass.add(step.name)
        elif step.kind is StepKind.FORWARD_COMMIT:
            last_commit[step.name] = step.key, len(of_pass.names), num_starts
        elif step.kind is StepKind.BACKWARD_USE:
            key, since, since_all = last_commit.pop(step.name, (None, 0, 0))
            if key != step.key or key not in wanted:
                continue
            of_others = num_starts - since_all > len(of_pass.names) - since
            if not of_others and not of_pass.show_a_layer(step.name, since):
                kept[step.key] = BACKWARD_FOLLOWS
    return kept


class _Starts:
    """The groups of a pass in the order of their starts: they show whether a layer has run.

    A trace names no layers. Where a name occurs once in a pass, another one that occurs before it
    and after it shows a layer after it; elsewhere one that occurs after the last of a name more
    often than once, and than between two of them. Groups of a name in a row are one; those of the
    output layer come after all layers.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def add(self, name: str) -> bool:
        """Add a group that starts; return whether it counts."""
        counts = name != OUTPUT_LAYER and self.names[-1:] != [name]
        if counts:
            self.names.append(name)
        return counts

    def show_a_layer(self, name: str, since: int) -> bool:
        """Return whether a layer has run since the last group of a name.

        Args:
            name: The name.
            since: The number of names when that group had committed.
        """
        places = [place for place, other in enumerate(self.names[:since]) if other == name]
        after = Counter(self.names[since:])
        if len(places) == 1 and after.keys() & {*self.names[: places[0]]}:
            return True
        gaps = [Counter(self.names[i:j]) for i, j in itertools.pairwise(places)]
        return any(count > max([1, *(gap[n] for gap in gaps)]) for n, count in after.items())


def keep_unused(trace: Trace, moving: Sequence[GroupKey]) -> Kept:
    """Keep groups that were never used in backward: the time of their reload is unknown."""
    used = {step.key for step in trace.uses()}
    return {key: NEVER_USED for key in moving if key not in used}


def keep_empty(trace: Trace, moving: Sequence[GroupKey]) -> Kept:
    """Keep groups that have no storage of their own to move."""
    groups = (trace.group_by_key[key] for key in moving)
    return {group.key: _why_empty(group) for group in groups if not group.storages}


def _why_empty(group: GroupTrace) -> str:
    return f"it saves only {', '.join(group.stays)}" if group.stays else NOTHING_SAVED


def keep_for_pp_rank(trace: Trace, moving: Sequence[GroupKey], delta_bytes: int) -> Kept:
    """Keep whole groups until ``pp_rank * delta_bytes`` that would otherwise move stay.

    As in megatron-core, passes are taken in backward order, and the groups of a pass in forward
    order.
    """
    kept: Kept = {}
    budget = trace.pp_rank * delta_bytes
    if budget <= 0:
        return kept
    wanted = set(moving)
    seen: set[int] = set()
    pass_order: list[int] = []
    for step in trace.uses():
        if step.key.chunk_pass not in seen:
            seen.add(step.key.chunk_pass)
            pass_order.append(step.key.chunk_pass)
    rank_of = {chunk_pass: rank for rank, chunk_pass in enumerate(pass_order)}
    movable = {index: trace.storages[index].nbytes for index in trace.moving_storages(wanted)}
    for key in sorted(wanted, key=lambda k: (rank_of.get(k.chunk_pass, len(rank_of)), k.group)):
        if budget <= 0:
            break
        budget -= sum(movable.pop(index, 0) for index in trace.group_by_key[key].storages)
        kept[key] = DELTA
    return kept


def keep_by_fraction(trace: Trace, moving: Sequence[GroupKey], fraction: float) -> Kept:
    """Keep the last groups of each pass so that about ``fraction`` of its groups move.

    Like megatron-core's option, the fraction is of groups, not of bytes.
    """
    kept: Kept = {}
    if fraction >= 1.0:
        return kept
    by_pass: dict[int, list[GroupKey]] = {}
    for key in moving:
        if trace.group_nbytes(key) > 0:
            by_pass.setdefault(key.chunk_pass, []).append(key)
    for keys in by_pass.values():
        keys.sort()
        num_kept = int(len(keys) * (1.0 - fraction))
        for key in keys[len(keys) - num_kept :]:
            kept[key] = FRACTION
    return kept


def select_groups(trace: Trace, options: PolicyOptions) -> tuple[frozenset[GroupKey], Kept]:
    """Apply every policy in turn.

    Returns:
        The groups that move, and the reason for each group that stays.
    """
    kept: Kept = {}

    def moving() -> list[GroupKey]:
        return [group.key for group in trace.groups if group.key not in kept]

    def keep(more: Mapping[GroupKey, str]) -> None:
        kept.update(more)

    keep(keep_empty(trace, moving()))
    keep(keep_unused(trace, moving()))
    keep(keep_where_backward_follows(trace, moving()))
    keep(keep_for_pp_rank(trace, moving(), options.delta_offload_bytes_across_pp_ranks))
    keep(keep_by_fraction(trace, moving(), options.activation_offload_fraction))
    return frozenset(moving()), kept
