# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Pipeline schedules: the order of each rank's passes, and the rank's idle times."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import Literal, NamedTuple, Optional


class Pass(NamedTuple):
    """One micro-batch's forward or backward through one model chunk."""

    direction: Literal["F", "B"]
    micro_batch: int
    vp_stage: int = 0


Schedule = Sequence[Pass]


def rank_schedule(
    pp_size: int,
    pp_rank: int,
    num_micro_batches: int,
    vp_size: Optional[int] = None,
    group_size: Optional[int] = None,
) -> Schedule:
    """Return the schedule that megatron-core runs: warm-up, steady state, cool-down.

    Without interleaving it is PipeDream-Flush's, with it Megatron-LM's (arXiv:2104.04473, section
    2.2), in which each of ``vp_size`` model chunks runs ``group_size`` micro-batches (by default
    ``pp_size``) before the next chunk runs. Raises ``ValueError`` if the schedule does not support
    this number of micro-batches.
    """
    group, num_stages, num_warmup = num_micro_batches, 1, pp_size - pp_rank - 1
    if vp_size is not None:
        group, num_stages = group_size or pp_size, vp_size
        num_warmup = 2 * num_warmup + (vp_size - 1) * group
        if group < pp_size or num_micro_batches < group or 0 < num_micro_batches % group < pp_size:
            raise ValueError(
                f"num_microbatches={num_micro_batches} is not supported with "
                f"microbatch_group_size_per_vp_stage={group} and "
                f"pipeline_model_parallel_size={pp_size} because it would have dependency bubbles; "
                f"set a multiple of {max(group, pp_size)}"
            )
    forward, backward = [], []
    for first in range(0, num_micro_batches, group):
        members = range(first, min(first + group, num_micro_batches))
        for stage in range(num_stages):
            forward += [Pass("F", index, stage) for index in members]
            backward += [Pass("B", index, num_stages - 1 - stage) for index in members]
    num_warmup = min(num_warmup, len(forward))
    steady = itertools.chain(*zip(forward[num_warmup:], backward, strict=False))
    return [*forward[:num_warmup], *steady, *backward[len(forward) - num_warmup :]]


def idle_ms(
    schedules: Sequence[Schedule], duration_ms: Callable[[int, Pass], float]
) -> list[list[float]]:
    """Return how long each rank waits for others before each of its passes, ignoring copies.

    ``duration_ms`` gives the duration of a pass on a rank; the result is ``[rank][pass]`` in
    milliseconds. Raises ``ValueError`` if the ranks deadlock.
    """
    num_stages = 1 + max(item.vp_stage for item in schedules[0])
    ends: dict[Optional[tuple[int, Pass]], float] = {None: 0.0}
    now = [0.0] * len(schedules)
    waits: list[list[float]] = [[] for _ in schedules]
    while len(ends) <= sum(map(len, schedules)):
        num_ended = len(ends)
        for rank, schedule in enumerate(schedules):
            for item in schedule[len(waits[rank]) :]:
                source = _source(rank, item, len(schedules), num_stages)
                if source not in ends:
                    break
                start = max(now[rank], ends[source])
                waits[rank].append(start - now[rank])
                now[rank] = ends[rank, item] = start + duration_ms(rank, item)
        if len(ends) == num_ended:
            raise ValueError("the pipeline's ranks deadlock: each waits for another")
    return waits


def _source(rank: int, item: Pass, pp_size: int, num_stages: int) -> Optional[tuple[int, Pass]]:
    """Return the rank and pass that produce a pass's input; None if it waits for none."""
    place = item.vp_stage * pp_size + rank + (-1 if item.direction == "F" else 1)
    if place not in range(pp_size * num_stages):
        return None  # A backward's input is then its own forward, earlier in the schedule.
    stage, rank = divmod(place, pp_size)
    return rank, item._replace(vp_stage=stage)


def most_in_flight(schedule: Schedule, size: Callable[[Pass], int] = lambda item: 1) -> int:
    """Return the largest total size of the passes between their forward and backward at once."""
    signs = {"F": 1, "B": -1}
    return max(itertools.accumulate(signs[item.direction] * size(item) for item in schedule))
