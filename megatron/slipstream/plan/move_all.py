# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Moves all groups that may move, as where no target is set, except what costs more than it frees.

The schedule by counting marks is the reference: its peak is the limit of the schedule by time.
"""

from __future__ import annotations

from dataclasses import replace

from megatron.slipstream.plan.arrange import Steps, arrange, replay
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.search import Choice
from megatron.slipstream.plan.trace import GroupKey

NUM_ROUNDS = 3
"""Number of times to leave out groups that do not fit."""
MAX_SHARE_GIVEN_UP = 0.02
"""Fraction of the peak drop that may be given up if that removes most of the stalls. The last bytes
of a drop cost the most: to free what commits right before the peak, compute waits for whole copies
in every micro-batch. In an interleaved pipeline on two H200s, the last 1.8% account for 7 of the
8.4 ms predicted."""
MIN_SHARE_OF_STALLS = 0.5
"""Fraction of the stalls that this must remove. If compute stalls everywhere, as with a slow link,
the user has chosen to pay for it."""
MIN_SHARE_OF_COMPUTE = 1e-3
"""Fraction of the compute time that this must save. Smaller savings cannot be measured, so they are
not worth giving up any drop."""
TIME_FOR_MEMORY = MIN_SHARE_OF_COMPUTE / MAX_SHARE_GIVEN_UP
"""Fraction of the compute time that the whole peak drop may cost if the groups could stay: the
price at which its last bytes are given up."""


def choose_as_given(
    model: IterationModel,
    given: frozenset[GroupKey],
    uncounted: frozenset[GroupKey],
    optional: frozenset[GroupKey],
    reference: Steps,
) -> Choice:
    """Move all given groups, except those that cost much time and hardly lower the peak.

    Compared with a schedule by counting marks, compute stalls longer only for groups that counting
    leaves no time for, and only at the price of :data:`TIME_FOR_MEMORY`. The peak is higher by at
    most :data:`MAX_SHARE_GIVEN_UP` of its drop, and only if that removes most stalls.

    Args:
        model: The timed trace.
        given: The groups that move.
        uncounted: Groups that the user also chose, but that counting marks would reload before they
            are offloaded.
        optional: Groups directly followed by their own backward. They and the uncounted ones move
            if that costs no time and lowers the peak; otherwise the copy is useless.
        reference: The schedule of the given groups by counting marks.
    """
    everything = _lowest_as_given(model, given, uncounted | optional, reference)
    everything = _with_uncounted(model, everything, uncounted)
    return _without_costliest_bytes(model, everything)


def _with_uncounted(model: IterationModel, best: Choice, uncounted: frozenset[GroupKey]) -> Choice:
    """Also move the uncounted groups if the lower peak is worth the stalls."""
    if uncounted <= best.moving:
        return best
    highest_bytes = float(model.present_bytes.max(initial=0.0))
    peak_bytes = best.timing.peak_bytes
    # Not the lowest possible peak: compute would also stall at marks away from the peak.
    limit_bytes = peak_bytes - MAX_SHARE_GIVEN_UP * (highest_bytes - peak_bytes)
    moving = best.moving | uncounted
    lower = Choice(moving, arrange(model, moving, limit_bytes))
    drop_bytes = highest_bytes - lower.timing.peak_bytes
    more_bytes = peak_bytes - lower.timing.peak_bytes
    if more_bytes <= MAX_SHARE_GIVEN_UP * drop_bytes:
        return best
    price_ms = TIME_FOR_MEMORY * model.compute_ms * more_bytes / drop_bytes
    return lower if lower.stall_ms - best.stall_ms <= price_ms else best


def _lowest_as_given(
    model: IterationModel,
    given: frozenset[GroupKey],
    optional: frozenset[GroupKey],
    reference: Steps,
) -> Choice:
    """Move all given groups, with no higher peak and no more time than by counting marks."""
    counted = replay(model, given, reference)
    by_count = Choice(given, replace(counted, steps={key: reference[key] for key in given}))
    limit_bytes = by_count.timing.peak_bytes
    by_time = Choice(given, arrange(model, given, limit_bytes))
    best = min(by_time, by_count, key=lambda item: (item.stall_ms, item.timing.peak_bytes))
    wanted = given | optional
    for _ in range(NUM_ROUNDS if optional else 0):
        timing = arrange(model, wanted, best.timing.peak_bytes)
        choice = Choice(wanted, timing)
        late = optional & timing.stalled.keys() & wanted
        if choice.stall_ms <= best.stall_ms and timing.peak_bytes < best.timing.peak_bytes:
            return choice
        wanted -= late
        if not late or wanted == given:
            break
    return best


def _without_costliest_bytes(model: IterationModel, best: Choice) -> Choice:
    """Give up a small share of the peak drop if that removes most of the stalls.

    Usually a slightly higher limit for the same groups is enough: some are then freed a mark later.
    Groups that stall compute even without a limit cannot hide their copies; they stay on the device
    if that in turn is worth it.
    """
    min_gain_ms = MIN_SHARE_OF_COMPUTE * model.compute_ms
    if best.stall_ms <= min_gain_ms:
        return best
    peak_bytes = best.timing.peak_bytes
    drop_bytes = float(model.present_bytes.max(initial=0.0)) - peak_bytes
    limit_bytes = peak_bytes + MAX_SHARE_GIVEN_UP * drop_bytes
    cannot_hide = arrange(model, best.moving).stalled.keys()
    for moving in (best.moving, best.moving - cannot_hide):
        least_gain_ms = max(min_gain_ms, MIN_SHARE_OF_STALLS * best.stall_ms)
        most_ms = best.stall_ms - least_gain_ms
        choice = Choice(moving, arrange(model, moving, limit_bytes, most_ms))
        is_worth_it = best.stall_ms - choice.stall_ms >= least_gain_ms
        if is_worth_it and choice.timing.peak_bytes <= limit_bytes:
            best = choice
    return best
