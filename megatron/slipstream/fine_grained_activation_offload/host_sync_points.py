# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Where the host waits together with the device, so that copies are not slowed down.

[Note: Waiting streams slow copies down]
Where compute waits for a copy, everything that the host has issued beyond that point waits too. On
one stream that costs nothing. But Transformer Engine issues the matrix products of experts into
four streams, which wait for the compute stream, and while such products wait copies are slower: on
an H200 49.7 instead of 55.4 GB/s (docs/design/overhead.md). So where copies are seen to be slower
than between iterations, the host goes no further than a long wait of compute until it is over. The
device then stands still for as long as the next launch takes, which is far less than what copies
of that length gain; for short waits it would not be. A host that is what takes the time has mostly
issued nothing in advance, so that copies are not slowed; where they are, waiting costs it time.
All streams in one queue of the device (CUDA_DEVICE_MAX_CONNECTIONS=1) is better: nothing slows
copies down then. It cannot be changed once CUDA has started, so the user is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.slipstream.plan.actions import ActionKind, Plan
from megatron.slipstream.plan.trace import Bandwidth, GroupKey
from megatron.slipstream.plan.walk import Simulation

MIN_STALL_MS = 2.0
"""Of compute, for the host to wait as well: launching again takes some hundredths of that."""

SLOW_SHARE = 0.97
"""Copies that reach less of the measured bandwidth are slowed down. Kernels alone cost less."""

HostSyncPoints = Mapping[int, tuple[GroupKey, ...]]
"""By step of the plan, the groups for whose copies the host waits once the step's actions are
done."""


def are_copies_slowed(measured: Bandwidth, beside_compute: Bandwidth) -> bool:
    """Whether either direction reaches less in iterations than between them.

    Args:
        measured: Between iterations, in 1e9 bytes per second.
        beside_compute: During iterations.
    """
    return (
        beside_compute.d2h_gb_per_s < SLOW_SHARE * measured.d2h_gb_per_s
        or beside_compute.h2d_gb_per_s < SLOW_SHARE * measured.h2d_gb_per_s
    )


def host_sync_points(plan: Plan, simulation: Simulation) -> HostSyncPoints:
    """Where compute is predicted to wait for long.

    Args:
        plan: What is followed.
        simulation: Of it.
    """
    step_of: dict[object, int] = {step: index for index, step in enumerate(plan.trace.steps)}
    for index, actions in enumerate(plan.actions):
        step_of.update((action, index) for action in actions if action.kind is ActionKind.FREE)
    found: dict[int, tuple[GroupKey, ...]] = {}
    for stall in simulation.stalls:
        if stall.ms >= MIN_STALL_MS:
            index = step_of[stall.cause]
            found[index] = (*found.get(index, ()), stall.cause.key)
    return found
