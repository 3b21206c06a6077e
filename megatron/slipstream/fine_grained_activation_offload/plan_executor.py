# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Moves groups at their marks: as planned, or by counting marks if there is no plan.

[Note: Silent groups]
A group that stays on the device costs most of its time in backward: two autograd callbacks, for
marks at which nothing is due. So where C++ performs the steps, such marks are left out, and their
steps are skipped when a later step is reached. It is then unknown which marks an iteration would
have had, so an iteration that departs from its plan cannot be used for a new one: it ends without a
plan, and the next one is recorded. Therefore marks are left out only while all iterations so far
have been alike. Once one has departed, no marks are left out any more, so that it gets a plan when
it comes again, however rarely.
"""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.chunk import ChunkOffloadHandler
from megatron.slipstream.fine_grained_activation_offload.group import GroupState, OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.iteration import Iteration
from megatron.slipstream.fine_grained_activation_offload.planner import Planner
from megatron.slipstream.fine_grained_activation_offload.recorder import Recorder
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.plan.actions import Action, ActionKind, Plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import Step, StepKind

logger = logging.getLogger(__name__)


class PlanExecutor:
    """Carries out the actions of a plan, step by step.

    An action that is already done, or is impossible, is skipped. An iteration that departs from its
    plan continues with another plan that begins with the same steps, or with :class:`Fallback`.
    """

    def __init__(self, store: ActivationStore, recorder: Recorder, planner: Planner) -> None:
        self.store = store
        """Moves the groups."""
        self._recorder = recorder
        self._planner = planner
        self._fallback = Fallback(store, recorder)
        self.is_bound = False
        """Whether departing from the plan is an error: a captured pass must match its plan."""

    def come_to(self, now: Iteration, kind: StepKind, at: OffloadTensorGroup | Step) -> None:
        """Perform the actions due at a mark of a group, or at one of no group.

        (Step objects of groups are created only while recording, since there are many.) Raises
        ``RuntimeError`` if the mark is not the planned one, and :attr:`is_bound` is set.
        """
        if now.native is not None:
            left = now.native.come_to(kind, at)
            if left is not None:
                for action in left:
                    self.perform(now, action)
                return
            if now.native.leaves_out_marks:
                logger.info(
                    "step %d, %s, is not in the plan: deciding group by group until the iteration "
                    "ends, then recording the next one",
                    now.num_steps,
                    Step(kind, at.key, at.name),
                )
            self.follow_in_python(now)  # The iteration departs from its plan.
        index = now.count_step()
        if now.plan is not None and not _is_step(now.plan, index, kind, at):
            self._depart(now, index, Step(kind, at.key, at.name))
        plan, probe = now.plan, now.probe
        if plan is None:
            self._go_on_without_plan(now, index, kind, at)
            return
        if probe is not None:
            probe.begin_step()
        for action in plan.actions[index]:
            self.perform(now, action)
        if probe is not None:
            probe.end_step()

    def follow_in_python(self, now: Iteration) -> None:
        if now.native is not None and now.native.leaves_out_marks:
            self.leave_plan(now, now.num_steps)
            self._planner.plans.note_departure()
        now.go_on_in_python()

    def leave_plan(self, now: Iteration, num_steps: int) -> None:
        """Stop following a plan after ``num_steps`` that were as planned."""
        self.stop_measuring(now)
        if now.native is not None:
            now.is_incomplete = now.native.leaves_out_marks
            now.go_on_in_python()
        if now.plan is None:
            return
        planned, now.entry, now.has_layout = now.plan.trace.steps[:num_steps], None, False
        self._recorder.steps.extend(planned)
        commits = (step.key for step in planned if step.kind is StepKind.FORWARD_COMMIT)
        self._fallback.adopt(filter(None, map(now.find, commits)))

    def stop_measuring(self, now: Iteration) -> None:
        if now.probe is not None:
            now.probe = self.store.copy_streams.timings = None

    def clear(self, now: Iteration) -> None:
        """Reset the state of an iteration that has ended or was dropped."""
        if now.has_layout and now.entry and not self.store.host_pool.follows_layout:
            now.entry.num_layouts_left += 1
        self.stop_measuring(now)
        now.go_on_in_python()
        self._fallback.clear()

    def _depart(self, now: Iteration, index: int, step: Step) -> None:
        departed = now.plan
        assert departed is not None
        if self.is_bound:
            planned = departed.trace.steps[index]
            raise RuntimeError(
                f"step {index} of a captured pass is {step} and was {planned} when it was planned; "
                "the model has to do the same in every micro-batch"
            )
        self.stop_measuring(now)
        now.has_layout = False
        entry = self._planner.plans.find_beginning((*departed.trace.steps[:index], step))
        if entry is not None:
            now.entry = entry
            # Perform the earlier actions of a plan that the iteration switches to midway.
            for action in itertools.chain(*entry.plan.actions[:index]):
                self.perform(now, action)
            return
        logger.info(
            "step %d, %s, is not in the plan: deciding group by group until the iteration ends, "
            "then making a new plan",
            index,
            step,
        )
        self.leave_plan(now, index)
        self._recorder.steps.append(step)

    def _go_on_without_plan(
        self, now: Iteration, index: int, kind: StepKind, at: OffloadTensorGroup | Step
    ) -> None:
        if len(self._recorder.steps) == index:
            self._recorder.add_step(Step(kind, at.key, at.name))
        chunk, options = now.passes[at.key.chunk_pass], self._planner.options
        if not isinstance(at, Step):
            self._fallback.come_to_group(kind, at, chunk, options)
        elif kind in (StepKind.OUTPUT_START, StepKind.BACKWARD_START):
            self._fallback.come_to_end(kind, chunk, options)
        self._recorder.end_step()

    def perform(self, now: Iteration, action: Action) -> None:
        plan = now.plan
        assert plan is not None
        group = now.find(action.key)
        if group is None or group.state is GroupState.OPEN:
            return
        backend = self.store.backend
        if backend.names_ranges:
            with backend.profiler_range(str(action)):
                self._carry_out(now, plan, action, group)
        else:
            self._carry_out(now, plan, action, group)

    def _carry_out(
        self, now: Iteration, plan: Plan, action: Action, group: OffloadTensorGroup
    ) -> None:
        if action.kind is ActionKind.H2D:
            self.store.copy_in_group(group)
        elif group.state is not GroupState.COMMITTED:
            return
        elif action.kind is ActionKind.FREE:
            self.store.release(group)
        else:
            kept = plan.group_by_key[action.key].kept_storages
            numbers = plan.trace.group_by_key[action.key].storages if now.has_layout else None
            self.store.copy_out(group, kept=kept, numbers=numbers)


class Fallback:
    """Offloads every group, without a plan.

    Used while an iteration is recorded, and for the rest of one that departs from its plan. A group
    is released ``release_lag`` commits after its own, and reloaded ``prefetch_depth`` groups ahead
    of backward. The recorder knows which storages have other references, so that moving them frees
    nothing.
    """

    def __init__(self, store: ActivationStore, recorder: Recorder) -> None:
        self._store = store
        self._recorder = recorder
        self._waiting: deque[OffloadTensorGroup] = deque()
        """Committed groups not yet released."""

    def adopt(self, committed: Iterable[OffloadTensorGroup]) -> None:
        """Take over groups that were committed under a plan that is no longer followed."""
        self._waiting.extend(g for g in committed if g.state is GroupState.COMMITTED)

    def clear(self) -> None:
        self._waiting.clear()

    def come_to_group(
        self,
        kind: StepKind,
        group: OffloadTensorGroup,
        chunk: ChunkOffloadHandler,
        options: PolicyOptions,
    ) -> None:
        if kind is StepKind.FORWARD_COMMIT:
            self._store.copy_out(group, self._may_move)
            self._waiting.append(group)
            while len(self._waiting) > options.release_lag:
                self._release(self._waiting.popleft())
            if options.max_inflight_offloads is not None:
                of_name = [waiting for waiting in self._waiting if waiting.name == group.name]
                for early in of_name[: len(of_name) - options.max_inflight_offloads]:
                    self._waiting.remove(early)
                    self._release(early)
        elif kind is StepKind.BACKWARD_USE:
            self._store.copy_in(group.storages(), late=True)
            self._reload_before(group, chunk, options)

    def come_to_end(
        self, kind: StepKind, chunk: ChunkOffloadHandler, options: PolicyOptions
    ) -> None:
        """Release the last groups of a pass, which no commit follows; reload as backward begins.

        The mark is OUTPUT_START or BACKWARD_START. A plan may release them before the loss, so
        other references to their memory must be detected. That is possible until backward reaches
        their holders, which may be right before the group.
        """
        for group in list(self._waiting):
            if group.key.chunk_pass == chunk.index:
                self._waiting.remove(group)
                self._release(group)
        if kind is StepKind.BACKWARD_START:
            self._reload_before(None, chunk, options)

    def _release(self, group: OffloadTensorGroup) -> None:
        if group.state is GroupState.COMMITTED:
            self._store.release(group)

    def _reload_before(
        self,
        group: Optional[OffloadTensorGroup],
        chunk: ChunkOffloadHandler,
        options: PolicyOptions,
    ) -> None:
        for ahead in chunk.used_before(group, options.prefetch_depth):
            self._store.copy_in(ahead.storages())

    def _may_move(self, _: int, storage: SavedStorage) -> bool:
        return not self._recorder.is_held_outside(storage)


def _is_step(plan: Plan, index: int, kind: StepKind, at: OffloadTensorGroup | Step) -> bool:
    """Return whether the plan's step at ``index`` is this one, given that earlier ones matched."""
    steps = plan.trace.steps
    if index >= len(steps):
        return False
    step = steps[index]
    return step.kind is kind and step.key == at.key and step.name == at.name
