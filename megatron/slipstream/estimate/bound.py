# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How long an iteration must take at least for its device peak, whichever engine moves the bytes.

Compute and copies overlap, but not anyhow. What is away at the peak has been copied out since its
group committed, and the group that committed last has the least time for that: what committed from
some mark on needs that mark's time and the time of all those copies, one after the other. Likewise
what is used up to some mark cannot be back before the time of all those copies after the peak. So
where memory is short, compute waits, however well the copies are ordered. :class:`Limits` adds
these waits up.

Beside the rate of the link this takes nothing for granted but the two marks of a group: no copy out
starts before its commit, none back ends after its use. When memory goes is left open. A plan, which
lets it go at marks only, may need longer.
"""

from __future__ import annotations

from megatron.slipstream.plan.build import Plan
from megatron.slipstream.plan.limits import Limits
from megatron.slipstream.plan.trace import Trace
from megatron.slipstream.plan.workload import Workload


def physical_bound_ms(plan: Plan | Trace) -> float:
    """The least time from the first mark to the end of the iteration, in milliseconds.

    Args:
        plan: A plan, for the peak that it reaches by moving what it moves; a trace, for the lowest
            peak that it allows. Without memory readings, the peak is that of the saved storages.

    Raises:
        ValueError: The trace has no times or no bandwidth.
    """
    trace = plan.trace if isinstance(plan, Plan) else plan
    if len(trace.step_ms) != len(trace.steps):
        raise ValueError(
            "the trace has no compute times (Trace.step_ms); record it on a device that is timed"
        )
    if trace.bandwidth is None:
        raise ValueError(
            "the trace has no bandwidth (Trace.bandwidth); measure what copies reach and add it"
        )
    workload = Workload(trace)
    if isinstance(plan, Plan):
        limits = Limits(workload, [g.key for g in plan.groups if g.moves], at_marks=False)
        peak_bytes = float((workload.present_bytes - plan.absent_bytes).max(initial=0.0))
    else:
        limits = Limits(workload, [group.key for group in trace.groups], at_marks=False)
        peak_bytes = limits.lowest_peak_bytes()
    return workload.compute_ms + limits.least_stall_ms(peak_bytes)
