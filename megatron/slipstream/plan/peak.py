# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How much a plan lowers the device peak, in total and per module.

[Note: Freed is not saved]
A plan frees the device memory of everything that it moves at some point. The peak drops by less: at
the peak, the groups that backward needs first are already reloaded, or not yet freed. So the two
figures have different names. *Freed* bytes are all bytes that are offloaded; the *peak drop* is the
difference between the peaks without and with the plan. Only the peak drop is device memory that
becomes available.

[Note: Gradients that stay]
The first backward pass allocates gradients. If they are kept (zeroed rather than deleted), they
exist from the first step of every later iteration, and the peak shifts from where gradients are
allocated to where the most is saved. So readings exclude gradients, and those that stay allocated
are added at every step.
"""

from __future__ import annotations

from dataclasses import dataclass

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.model import Floats, IterationModel


@dataclass(frozen=True)
class PeakDrop:
    """The device peak without and with a plan, in bytes.

    If the trace has no memory readings, only saved storages count.
    """

    without_bytes: int
    planned_bytes: int
    by_module: dict[str, int]
    """Each moving module's share of the drop, in bytes. The shares sum to the drop."""

    @property
    def nbytes(self) -> int:
        """Bytes by which the peak drops."""
        return self.without_bytes - self.planned_bytes


def present_bytes(plan: Plan, resident_gradient_bytes: int = 0) -> Floats:
    """Return, for each step, the peak device memory until the next one with nothing moved.

    Args:
        plan: A plan; only its trace is used.
        resident_gradient_bytes: Gradients that stay allocated: [Note: Gradients that stay].
    """
    model = IterationModel(plan.trace)
    beside = model.present_beside_gradients_bytes
    if not resident_gradient_bytes or beside is None:
        return model.present_bytes
    return beside + resident_gradient_bytes


def peak_drop(plan: Plan, resident_gradient_bytes: int = 0) -> PeakDrop:
    """Compute how much the plan lowers the device peak.

    The drop is the bytes absent at the step of the peak with the plan, plus the amount by which
    that step is below the peak without the plan. The first part is each module's own bytes; the
    second is divided by how many more bytes each module has offloaded at the peak without the plan.

    Args:
        plan: Any plan.
        resident_gradient_bytes: See :func:`present_bytes`.
    """
    present = present_bytes(plan, resident_gradient_bytes)
    if not len(present):
        return PeakDrop(0, 0, {})
    planned = present - plan.absent_bytes
    highest, highest_planned = int(present.argmax()), int(planned.argmax())
    drop = round(present[highest] - planned[highest_planned])
    at_peak = _away_by_module(plan, highest_planned)
    before = _away_by_module(plan, highest)
    more = {name: max(0, before[name] - nbytes) for name, nbytes in at_peak.items()}
    rest = _share_out(drop - sum(at_peak.values()), more)
    by_module = {name: nbytes + rest[name] for name, nbytes in at_peak.items()}
    return PeakDrop(round(present[highest]), round(planned[highest_planned]), by_module)


def _away_by_module(plan: Plan, step: int) -> dict[str, int]:
    """Return the bytes on the host until the next step, by the module that saved them first."""
    trace = plan.trace
    away: dict[str, int] = {}
    for storage in plan.storages:
        name = trace.group_by_key[trace.storages[storage.index].holders[0]].name
        is_away = storage.gone_step(trace) <= step < storage.h2d_step
        away[name] = away.get(name, 0) + is_away * storage.nbytes
    return away


def _share_out(total: int, weights: dict[str, int]) -> dict[str, int]:
    """Split ``total`` into integers in proportion to ``weights``."""
    shares, left, left_weight = {}, total, sum(weights.values())
    for name, weight in weights.items():
        shares[name] = left * weight // left_weight if left_weight else 0
        left, left_weight = left - shares[name], left_weight - weight
    return shares
