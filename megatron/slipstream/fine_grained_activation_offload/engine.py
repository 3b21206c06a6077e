# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs training iterations: records the first, then follows plans made from the recording.

Correctness does not depend on the plan. A plan says when copies start and memory is released;
``activation_store`` ensures at each read that the tensor is on the device. An iteration that
departs from its plan is therefore slower, never wrong.

The engine is framework-agnostic. megatron-core's layers call ``integration.seam.manager``, and
hooks on any other model call ``attached.engine``.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.chunk import (
    ChunkOffloadHandler,
    mark_of_no_group,
)
from megatron.slipstream.fine_grained_activation_offload.counted_modules import (
    CountedModules,
    ReplayedPass,
)
from megatron.slipstream.fine_grained_activation_offload.graph_capture import GraphCaptures
from megatron.slipstream.fine_grained_activation_offload.group import GroupState, OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.iteration import Iteration
from megatron.slipstream.fine_grained_activation_offload.lifecycle import Lifecycle
from megatron.slipstream.fine_grained_activation_offload.markers import (
    GroupOwner,
    at_first_gradient,
)
from megatron.slipstream.fine_grained_activation_offload.native_store import make_store
from megatron.slipstream.fine_grained_activation_offload.pass_policy import PassPolicy
from megatron.slipstream.fine_grained_activation_offload.recorder import Recorder
from megatron.slipstream.fine_grained_activation_offload.regions import Regions
from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.fine_grained_activation_offload.report_builder import ReportBuilder
from megatron.slipstream.fine_grained_activation_offload.verify import Verifier
from megatron.slipstream.plan.actions import Action, Plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.settings import Assignment
from megatron.slipstream.plan.trace import Step, StepKind

logger = logging.getLogger(__name__)

HELD_BY_NODES = ("attn_norm", "mlp_norm")
"""Modules whose inputs a schedule holds: [Note: Layers that run in nodes]."""


class Switch:
    """Says whether offloading is on."""

    is_on = True


class OffloadEngine:
    """Offloads and reloads the tensors that groups save, and plans from recorded iterations."""

    def __init__(
        self,
        backend: Backend,
        options: Optional[PolicyOptions] = None,
        rank: int = 0,
        num_verified_iterations: int = 0,
        is_native: bool = False,
    ) -> None:
        self.now = Iteration()
        """The running iteration, or the next one."""
        self.switch: Any = Switch()
        """Its ``is_on`` is False while offloading is suspended. Engines may share one."""
        self.moves_checkpoint_inputs = False
        """Whether the tensors that a checkpoint saves are a group."""
        self.delayed: list[Callable[[], None]] = []
        """Commits that a schedule has delayed; dropped with their iteration."""
        self.wanted_modules: tuple[str, ...] = ()
        """``offload_modules`` of the model, for the report."""
        self._report = RankReport(rank=rank)
        self.recorder = Recorder(backend)
        """What records iterations that follow no plan."""
        self.store = make_store(backend, self.recorder, is_native)
        """The saved activations."""
        self._marks = self.store.marks
        self.regions = Regions(self.store)
        """The regions of groups that are entered."""
        self._report.is_native = self.store.is_native
        parts = (self.store, self.recorder, self._report)
        self.lifecycle = Lifecycle(*parts, options or PolicyOptions())
        """Decides which plan an iteration follows."""
        self.executor = self.lifecycle.executor
        self.store.host_pool.limit_bytes = self.options.host_memory_limit_bytes
        self._policy: Optional[PassPolicy] = None
        """The policy of the latest pass."""
        self._num_verified_iterations = num_verified_iterations
        if num_verified_iterations > 0:
            self.store.verifier = Verifier(backend)
        self.graphs = GraphCaptures(self.store)
        """The CUDA graph captures."""
        self.replayed: dict[str, ReplayedPass] = {}
        """Passes replayed by whole-chunk graphs, by chunk name."""
        self._report_builder = ReportBuilder(
            self._report, self.store, self.lifecycle, self.graphs, self.replayed
        )

    @property
    def report(self) -> RankReport:
        return self._report_builder.build()

    @property
    def do_offload(self) -> bool:
        """False while offloading is suspended: marks then do nothing."""
        return self.switch.is_on

    @do_offload.setter
    def do_offload(self, is_on: bool) -> None:
        self.switch.is_on = is_on
        self.follow_in_python()

    def follow_in_python(self) -> None:
        """Run the rest of this iteration's steps in Python.

        C++ does not check whether offloading is suspended.
        """
        self.executor.follow_in_python(self.now)

    @property
    def options(self) -> PolicyOptions:
        return self.lifecycle.planner.options

    @property
    def plan(self) -> Optional[Plan]:
        """The plan being followed, or else that of the last iteration; None if there is none."""
        return self.now.plan or self.lifecycle.last_plan

    def change_assignment(self, assignment: Assignment) -> None:
        """Follow only plans of this assignment, which the layers have from the next pass on.

        Raises ``RuntimeError`` if an iteration has begun and not ended.
        """
        if assignment == self.lifecycle.plans.assignment:
            return
        self._restart_if_abandoned()
        now = self.now
        if now.num_steps or any(chunk.awaits_backward for chunk in now.passes):
            raise RuntimeError(
                "other settings of layers are not supported within an iteration because its "
                "backward reads what its forward has saved; change them after the schedule has "
                "returned"
            )
        self.lifecycle.change_assignment(assignment)

    # The life of a pass and of its groups.

    def begin_pass(self, vp_stage: int, policy: PassPolicy, pp_rank: int = 0) -> None:
        """Begin the pass of a micro-batch through a model chunk.

        Passes without gradients, and recomputations in backward, are ignored.
        """
        self.now.leave_pass()
        self.now.started = None
        if not self._is_training_forward():
            return
        self._prepare_pass(policy)
        self._restart_if_abandoned()
        self._report.pp_rank = pp_rank
        if policy != self._policy:
            self._policy = policy
            if self.lifecycle.change_options(policy.applied_to(self.options)):
                self.executor.leave_plan(self.now, self.now.num_steps)
        now = self.now
        if not now.has_begun:
            now.has_begun = True
            self.lifecycle.enter_iteration(now, self.are_marks_in_graphs)
        now.num_entered += 1
        if now.trial is not None and now.trial.is_left_out:
            return
        if now.num_steps == 0:
            now.passes.clear()  # They had no marks, or the iteration failed before its first one.
        micro_batch = sum(chunk.vp_stage == vp_stage for chunk in now.passes)
        now.begin_pass(
            self.store.make_pass(len(now.passes), vp_stage, policy.min_numel, micro_batch)
        )

    def _prepare_pass(self, policy: PassPolicy) -> None:
        """Called before a pass with gradients begins."""
        self.regions.leave_open()
        self.graphs.close()
        self.graphs.min_numel = policy.min_numel

    def start(self, tensor: torch.Tensor, name: str) -> None:
        """Start a group called ``name``, whose input is ``tensor``."""
        if not self._marks.start(self, tensor, name):
            self.start_group(name)
            group = self.now.started
            # Backward has the gradient of the input once it has left the group. Not a node of our
            # own: [Note: One mark per group].
            if group is not None and tensor.grad_fn is not None and not self.graphs.is_capturing:
                self.store.call_before(tensor, partial(self.end_group, group))

    def start_group(self, name: str) -> None:
        if self.graphs.is_open and not self.do_offload:
            self.graphs.note_warmup(name)
        now = self.now
        if self.graphs.is_capturing and self._is_training_forward():
            now.started = self.graphs.start_group(name)
        if now.chunk is None or not self._is_training_forward():
            return
        group = now.chunk.open_group(name)
        now.started = group
        self.store.modules[name].num_groups += 1
        self.advance(StepKind.FORWARD_START, group)

    def take_started(self) -> Optional[OffloadTensorGroup]:
        """Return the group whose region is being entered, if its saved tensors are tracked.

        Also None if the plan keeps the group: its saved tensors are then not needed.
        """
        group, self.now.started = self.now.started, None
        return None if group is None or self._stays(group) else group

    def enter(self) -> None:
        is_in_python = self.now.started is not None
        if is_in_python or not self._marks.enter(self, self.regions.flag):
            self.regions.enter(self.take_started(), self)

    def leave(self) -> None:
        if not self._marks.leave(self.regions.flag):
            self.regions.leave()

    def run_in_nodes(self) -> None:
        """Note that the pass runs node by node: [Note: Layers that run in nodes]."""
        if self.now.chunk is not None:
            self.now.chunk.given_up_by = HELD_BY_NODES
            self.store.crosses_streams = True

    # Iterations.

    @property
    def is_needed(self) -> bool:
        """Whether backward may still read offloaded tensors."""
        return any(chunk.awaits_backward for chunk in self.now.passes)

    def end_iteration(self) -> None:
        now, life, builder = self.now, self.lifecycle, self._report_builder
        now.is_over = True
        now.leave_pass()
        if now.num_steps > 0:
            life.finish(now, self._report.pp_rank)
            builder.note_iteration(self.clear_iteration())
            # The allocator is read at every mark only while its readings are needed.
            self.recorder.reads_memory = False
        elif now.trial is not None or (now.has_begun and self.are_marks_in_graphs):
            builder.note_iteration(None if life.finish_without_marks(now) else CountedModules())
            self.now = Iteration()
        else:
            # No marks: there were no gradients, or a chunk was replayed as one graph.
            self.now = Iteration()
            return
        if self._report.num_iterations >= self._num_verified_iterations:
            self.store.stop_verifying()
        life.trim_host_memory()

    @property
    def are_marks_in_graphs(self) -> bool:
        """Whether graphs replay passes, with fewer marks or none."""
        return bool(self.graphs.of_layers or self.replayed)

    def _stays(self, group: OffloadTensorGroup) -> bool:
        """Return whether the plan keeps the group, so its saved tensors need not be tracked."""
        plan = self.now.plan
        if plan is None or plan.tracks(group.key):
            return False
        group.untracked_in = plan.trace
        return True

    # A pass or an iteration that has failed, or is over.

    @property
    def has_earlier_passes(self) -> bool:
        """Whether backward of other passes than the latest is still to come."""
        now = self.now
        return any(chunk.awaits_backward for chunk in now.passes if chunk is not now.chunk)

    def discard_pass(self) -> None:
        """Discard the forward pass that has failed; the iteration goes on.

        Neither the failed pass nor those before it are in what is recorded of the iteration, so
        that no plan is made from it. Call once all references to what the pass has saved are gone.

        Raises:
            RuntimeError: Backward of an earlier pass is still to come.
        """
        if self.has_earlier_passes:
            raise RuntimeError("a pass cannot be discarded while others wait for their backward")
        before = self.now
        self.clear_iteration()
        self.store.recover()
        self.now.has_begun, self.now.is_incomplete = before.has_begun, True
        self.lifecycle.next = None

    def finish_report(self) -> None:
        self._report_builder.finish(self.wanted_modules)

    def close(self) -> None:
        """Free the host memory. Saved tensors cannot be read afterwards."""
        self.clear_iteration()
        self.store.stop_verifying()
        self.store.close()

    def read(self, saved: Any) -> torch.Tensor:
        """Return a saved tensor to backward; raises ``RuntimeError`` if it was changed in place."""
        if (
            type(saved) is self.store.saved_type
            and saved.group.state is GroupState.COMMITTED
            # Not if a graph is only inspected.
            and torch._C._current_graph_task_id() != -1
        ):
            # [Note: Recomputation reads first]
            saved.group.is_read_first = True
            self.use_group(saved.group)
        return self.store.read(saved)

    # The life of a group, called by its mark.

    def owner_of_marks(self) -> Optional[GroupOwner]:
        """Return what handles a group's end here; None outside a training pass."""
        if not self._is_training_forward():
            return None
        if self.graphs.is_capturing:
            return self.graphs
        return None if self.now.chunk is None else self

    def end(
        self, tensor: torch.Tensor, name: str, given_up: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """End a group on an output; return it with a node where backward needs the group.

        Forward no longer reads ``given_up`` tensors, though other references may exist.
        """
        marked = self._marks.end(self, tensor, name)
        if marked is not None:
            return marked
        owner = self.owner_of_marks()
        group = None if owner is None else owner.commit_group(name, given_up)
        if owner is None or group is None:
            return tensor
        return self.store.mark(tensor, partial(owner.use_group, group))

    def commit_group(
        self, name: str, given_up: Sequence[torch.Tensor] = ()
    ) -> Optional[OffloadTensorGroup]:
        """Commit the open group called ``name``, which has saved everything; None if none is open.

        Forward no longer reads ``given_up`` tensors, though other references may exist.
        """
        now = self.now
        group = now.chunk.commit_group(name) if now.chunk is not None else None
        if group is not None:
            if group.untracked_in is None:
                self.store.commit(group)
                if now.chunk is not None and name in now.chunk.given_up_by:
                    self.store.give_up(group, given_up)
            self.advance(StepKind.FORWARD_COMMIT, group)
        return group

    def end_without_node(self, tensor: torch.Tensor, name: str) -> None:
        """End a group on one of its outputs, which may be changed in place afterwards."""
        group = self.commit_group(name)
        if group is not None:
            at_first_gradient([tensor], partial(self.use_group, group))

    def use_group(self, group: OffloadTensorGroup) -> None:
        """Note that backward, which may outlive its iteration, needs the group from here on."""
        if group.state is GroupState.COMMITTED and self.now.find(group.key) is group:
            group.move_to(GroupState.IN_USE)
            self.advance(StepKind.BACKWARD_USE, group)

    def end_group(self, group: OffloadTensorGroup, *_: object) -> None:
        """Note that backward has left the group. An autograd hook; ignores the gradients."""
        if group.state is GroupState.IN_USE and self.now.find(group.key) is group:
            group.move_to(GroupState.DONE)
            self.advance(StepKind.BACKWARD_END, group)

    def mark_output(self, kind: StepKind) -> None:
        """Mark the start or the end of the output layer in forward (OUTPUT_START, OUTPUT_END)."""
        if self._marks.mark_output(self, kind):
            return
        chunk = self._marked_pass()
        if chunk is not None:
            self.advance(kind, mark_of_no_group(chunk, kind))

    def mark_gradient(self, kind: StepKind, tensors: list[torch.Tensor]) -> None:
        """Mark, once, where backward first has the gradient of any of these tensors.

        The mark is BACKWARD_START, OUTPUT_BACKWARD_START or OUTPUT_BACKWARD_END.
        """
        if self._marks.mark_gradient(self, kind, tensors):
            return
        chunk = self._marked_pass()
        if chunk is not None:
            mark = mark_of_no_group(chunk, kind)
            at_first_gradient(tensors, partial(self.come_to_gradient, mark, chunk))

    def come_to_gradient(self, mark: Step, chunk: ChunkOffloadHandler) -> None:
        """Process the mark of a gradient in the backward of a pass, which may be over."""
        passes = self.now.passes
        if chunk.index < len(passes) and passes[chunk.index] is chunk:
            self.advance(mark.kind, mark)

    def _marked_pass(self) -> Optional[ChunkOffloadHandler]:
        """Return the running forward pass if it has groups; otherwise nothing can move."""
        chunk = self.now.chunk
        if chunk is None or chunk.find(0) is None or self.graphs.is_capturing:
            return None
        return chunk if self._is_training_forward() else None

    def _is_training_forward(self) -> bool:
        # Inside a graph task a forward is a recomputation: its saved tensors are read immediately.
        return (
            self.do_offload and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        )

    def advance(self, kind: StepKind, at: OffloadTensorGroup | Step) -> None:
        """Process a mark: see :meth:`PlanExecutor.come_to`."""
        if self.now.num_steps == 0:
            self.lifecycle.begin(self.now)
        self.executor.come_to(self.now, kind, at)

    # What C++ leaves to Python, besides single calls of the methods above: ``EngineOfMarks``.

    def depart(self, kind: StepKind, at: OffloadTensorGroup | Step) -> None:
        """Process a mark that is not the next one of the plan that C++ follows."""
        if kind is StepKind.FORWARD_START:
            self.now.started = at  # type: ignore[assignment]
        self.advance(kind, at)

    def perform(self, actions: Sequence[Action]) -> None:
        """Perform actions of the current plan that C++ does not."""
        for action in actions:
            self.executor.perform(self.now, action)

    def clear_iteration(self) -> CountedModules:
        """Discard the iteration so far. Return its counters."""
        self.delayed.clear()
        self.store.copy_streams.forget_waits()
        self.executor.clear(self.now)
        counted = self.store.end_iteration()
        self.recorder.clear()
        self.now = Iteration()
        return counted

    def _restart_if_abandoned(self) -> None:
        """Discard the iteration so far if it ended in an exception.

        Detected when autograd has freed the saved tensors of a pass before its backward, while no
        other pass awaits backward; or when the exception came while the iteration was ended.
        """
        passes = self.now.passes
        is_abandoned = any(chunk.lacks_backward for chunk in passes)
        if self.now.is_over or (
            is_abandoned and not any(chunk.awaits_backward for chunk in passes)
        ):
            logger.warning("an iteration ended before its backward pass; recording starts again")
            self.clear_iteration()
