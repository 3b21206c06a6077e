# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What moves where a plan says so."""

from __future__ import annotations

from collections.abc import Mapping

from megatron.slipstream.fine_grained_activation_offload.group import (
    GroupState,
    OffloadTensorGroup,
)
from megatron.slipstream.fine_grained_activation_offload.host_waits import HostWaits
from megatron.slipstream.fine_grained_activation_offload.transfer import ActivationStore
from megatron.slipstream.plan.build import Action, ActionKind, Plan
from megatron.slipstream.plan.trace import GroupKey

Groups = Mapping[GroupKey, OffloadTensorGroup]


class PlanFollower:
    """Carries out a plan's actions. What has been done already, or can't be, is skipped.

    Args:
        store: What moves the groups.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store

    def come_to(self, index: int, plan: Plan, groups: Groups, host_waits: HostWaits) -> None:
        """Do what is due at a step.

        Args:
            index: Of the step.
            plan: What is followed.
            groups: Of this iteration, as far as it has come.
            host_waits: Where the host waits.
        """
        for action in plan.actions[index]:
            self._perform(plan, action, groups)
        if index in host_waits:
            for key in host_waits[index]:
                group = groups.get(key)
                if group is not None and group.state is not GroupState.OPEN:
                    self._store.outlast_copies(group)

    def catch_up(self, index: int, plan: Plan, groups: Groups) -> None:
        """Do what has been due before a step, the iteration having followed another plan so far."""
        for due in plan.actions[:index]:
            for action in due:
                self._perform(plan, action, groups)

    def _perform(self, plan: Plan, action: Action, groups: Groups) -> None:
        group = groups.get(action.key)
        if group is None or group.state is GroupState.OPEN:
            return
        backend = self._store.backend
        if backend.names_ranges:
            with backend.profiler_range(str(action)):
                self._carry_out(plan, action, group)
        else:
            self._carry_out(plan, action, group)

    def _carry_out(self, plan: Plan, action: Action, group: OffloadTensorGroup) -> None:
        if action.kind is ActionKind.H2D:
            self._store.copy_in(group.storages())
        elif group.state is not GroupState.COMMITTED:
            return
        elif action.kind is ActionKind.FREE:
            self._store.release(group)
        else:
            kept = plan.group_by_key[action.key].kept_storages
            may_move = (lambda position, _: position not in kept) if kept else None
            self._store.copy_out(group, may_move)
