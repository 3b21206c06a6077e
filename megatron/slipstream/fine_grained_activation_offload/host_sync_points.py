# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Chooses where the host waits along with the device, so that copies are not slowed down.

[Note: Waiting streams slow copies down]
While compute waits for a copy, all operations that the host has issued after that point wait too.
On one stream this costs nothing. But Transformer Engine issues the experts' GEMMs on four streams,
which wait for the compute stream, and copies are slower while these GEMMs wait: on an H200 49.7
instead of 55.4 GB/s (docs/design/overhead.md). So if copies are slower than between iterations, the
host blocks at each long stall of compute until it is over. The device is then idle until the next
launch, which takes far less time than a copy of that length gains, but not less than a short one
does. In a launch-bound model the host has mostly issued nothing in advance, so copies are not
slowed; if they are, blocking costs time. Putting all streams in one device queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) is better: then nothing slows copies down. It cannot be changed once
CUDA has started, so the engine logs a warning.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.slipstream.plan.actions import ActionKind, Plan
from megatron.slipstream.plan.trace import Bandwidth, GroupKey
from megatron.slipstream.plan.walk import Simulation

MIN_STALL_MS = 2.0
"""Minimum compute stall at which the host waits too: a launch takes a few percent of it."""

SLOW_SHARE = 0.97
"""Fraction of the measured bandwidth below which copies count as slowed; kernels cost less."""

HostSyncPoints = Mapping[int, tuple[GroupKey, ...]]
"""By step of the plan, the groups whose copies the host waits for after the step's actions."""


def are_copies_slowed(measured: Bandwidth, beside_compute: Bandwidth) -> bool:
    """Return whether copies in either direction are slower during iterations than between them.

    Args:
        measured: Bandwidth between iterations.
        beside_compute: Bandwidth during iterations.
    """
    return (
        beside_compute.d2h_gb_per_s < SLOW_SHARE * measured.d2h_gb_per_s
        or beside_compute.h2d_gb_per_s < SLOW_SHARE * measured.h2d_gb_per_s
    )


def host_sync_points(plan: Plan, simulation: Simulation) -> HostSyncPoints:
    """Return the steps at which compute is predicted to stall for long.

    Args:
        plan: The plan.
        simulation: Its simulation.
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
