# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Where the host waits together with the device, so that copies are not slowed down.

[Note: Waiting streams slow copies down]
While compute waits for a copy, all operations that the host has issued after that point wait too.
On one stream this costs nothing. But Transformer Engine issues the matrix products of experts into
four streams, which wait for the compute stream, and copies are slower while such products wait: on
an H200 49.7 instead of 55.4 GB/s (docs/design/overhead.md). So if copies are slower than between
iterations, the host stops at a long wait of compute until it is over. The device is then idle until
the next launch, which is far less than the time gained by copies of that length; for short waits it
is not. In a launch-bound model the host has mostly issued nothing in advance, so copies are not
slowed; if they are, waiting costs time. All streams in one device queue
(CUDA_DEVICE_MAX_CONNECTIONS=1) is better: then nothing slows copies down. It cannot be changed once
CUDA has started, so the user is told.
"""

from __future__ import annotations

from collections.abc import Mapping

from megatron.slipstream.plan.actions import ActionKind, Plan
from megatron.slipstream.plan.trace import Bandwidth, GroupKey
from megatron.slipstream.plan.walk import Simulation

MIN_STALL_MS = 2.0
"""Minimum stall of compute at which the host waits too: a launch takes some hundredths of it."""

SLOW_SHARE = 0.97
"""Below this fraction of the measured bandwidth copies count as slowed; kernels cost less."""

HostSyncPoints = Mapping[int, tuple[GroupKey, ...]]
"""For steps of the plan, the groups for whose copies the host waits after the step's actions."""


def are_copies_slowed(measured: Bandwidth, beside_compute: Bandwidth) -> bool:
    """Whether either direction is slower during iterations than between them.

    Args:
        measured: Bandwidth between iterations.
        beside_compute: Bandwidth during iterations.
    """
    return (
        beside_compute.d2h_gb_per_s < SLOW_SHARE * measured.d2h_gb_per_s
        or beside_compute.h2d_gb_per_s < SLOW_SHARE * measured.h2d_gb_per_s
    )


def host_sync_points(plan: Plan, simulation: Simulation) -> HostSyncPoints:
    """The steps at which compute is predicted to stall for long.

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
