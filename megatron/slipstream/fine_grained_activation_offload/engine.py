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
from dataclasses import replace
from functools import partial
from typing import Any, Optional, Protocol

import torch
from torch.autograd.graph import saved_tensors_hooks

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
from megatron.slipstream.fine_grained_activation_offload.group import (
    GroupState,
    OffloadTensorGroup,
)
from megatron.slipstream.fine_grained_activation_offload.host_trim import HostTrimmer
from megatron.slipstream.fine_grained_activation_offload.iteration import Iteration
from megatron.slipstream.fine_grained_activation_offload.markers import (
    GroupOwner,
    at_first_gradient,
)
from megatron.slipstream.fine_grained_activation_offload.native_store import make_store
from megatron.slipstream.fine_grained_activation_offload.pass_policy import PassPolicy
from megatron.slipstream.fine_grained_activation_offload.plan_cache import PlanCache
from megatron.slipstream.fine_grained_activation_offload.plan_executor import PlanExecutor
from megatron.slipstream.fine_grained_activation_offload.recorder import Recorder
from megatron.slipstream.fine_grained_activation_offload.region import RegionFlag
from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.fine_grained_activation_offload.report_builder import ReportBuilder
from megatron.slipstream.fine_grained_activation_offload.step_clock import StepClock, Times
from megatron.slipstream.fine_grained_activation_offload.tuner import Tuner
from megatron.slipstream.fine_grained_activation_offload.verify import Verifier
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import PlanFacts
from megatron.slipstream.plan.settings import Assignment
from megatron.slipstream.plan.staying import Staying
from megatron.slipstream.plan.trace import Bandwidth, Step, StepKind, StepsKey

logger = logging.getLogger(__name__)

CHECKPOINT_INPUTS = "checkpoint_inputs"
"""Name of the groups of tensors that checkpoints save."""
HELD_BY_NODES = ("attn_norm", "mlp_norm")
"""Modules whose inputs a schedule holds: [Note: Layers that run in nodes]."""


class Switch(Protocol):
    """Says whether offloading is on."""

    is_on: bool


class OwnSwitch:
    """A switch of one engine."""

    is_on = True


class OffloadEngine:
    """Offloads and reloads the tensors that groups save, and plans from recorded iterations.

    Args:
        backend: The device.
        options: How groups are chosen and timed.
        rank: Global rank, for the report.
        num_verified_iterations: See ``OffloadConfig.offload_verify``.
        is_native: Whether to use the C++ saved-tensor hooks, if they can be compiled.
    """

    def __init__(
        self,
        backend: Backend,
        options: Optional[PolicyOptions] = None,
        rank: int = 0,
        num_verified_iterations: int = 0,
        is_native: bool = False,
    ) -> None:
        self._now = Iteration()
        """The running iteration, or the next one."""
        self.switch: Switch = OwnSwitch()
        """Its ``is_on`` is False while offloading is suspended. Engines may share one."""
        self.region_flag: Optional[RegionFlag] = None
        """A flag that is true while a group's operations run."""
        self.regions: list[None | bool | tuple[saved_tensors_hooks, bool]] = []
        """Stack of entered regions: None for one without hooks; else the hooks and the flag's
        previous value, or the latter alone if C++ entered the region."""
        self._has_warned_of_others = False
        self.moves_checkpoint_inputs = False
        """Whether the tensors that a checkpoint saves are a group."""
        self.delayed: list[Callable[[], None]] = []
        """Commits that a schedule has delayed; dropped with their iteration."""
        self.wanted_modules: tuple[str, ...] = ()
        """``offload_modules`` of the model, for the report."""
        self._report = RankReport(rank=rank)
        self._recorder = Recorder(backend)
        self.store = make_store(backend, self._recorder, is_native)
        """The saved activations."""
        self._report.is_native = self.store.is_native
        self._cache = PlanCache()
        self._tuner = Tuner(self.store, self._cache, self._report, options or PolicyOptions())
        self.store.host_pool.limit_bytes = self._tuner.options.host_memory_limit_bytes
        self._host_trimmer = HostTrimmer(self.store, self._cache, self._tuner, self._report)
        self._policy: Optional[PassPolicy] = None
        """The policy of the latest pass."""
        self._num_verified_iterations = num_verified_iterations
        if num_verified_iterations > 0:
            self.store.verifier = Verifier(backend)
        self._last_plan: Optional[Plan] = None
        """The plan of the last iteration: the one it followed, or the one made from it."""
        self._next_plan: Optional[Plan] = None
        """The plan with which the next iteration starts."""
        self._executor = PlanExecutor(self.store, self._recorder, self._cache, self._tuner)
        self.graphs = GraphCaptures(self.store)
        """The CUDA graph captures."""
        self.replayed: dict[str, ReplayedPass] = {}
        """Passes replayed by whole-chunk graphs, by chunk name."""
        parts = (self.store, self._tuner, self.graphs, self.replayed)
        self._report_builder = ReportBuilder(self._report, *parts)

    @property
    def report(self) -> RankReport:
        """Statistics of the last complete iteration."""
        return self._report_builder.build(self._last_plan)

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
        self._executor.follow_in_python(self._now)

    @property
    def options(self) -> PolicyOptions:
        """The planning options."""
        return self._tuner.options

    @property
    def recorder(self) -> Recorder:
        """What records iterations that follow no plan."""
        return self._recorder

    @property
    def has_begun(self) -> bool:
        """Whether forward has entered a model chunk in the running iteration."""
        return self._now.has_begun

    @property
    def pass_index(self) -> int:
        """Index of the latest forward pass in the iteration."""
        return len(self._now.passes) - 1

    @property
    def num_groups(self) -> int:
        """Number of groups that the running forward pass has so far."""
        return 0 if self._now.chunk is None else len(self._now.chunk.groups)

    def measure_bandwidth(self) -> Optional[Bandwidth]:
        """Return the bandwidth of copies, measured at the first call; None if it cannot be.

        Call between iterations.
        """
        return self._tuner.measure_bandwidth()

    @property
    def plan(self) -> Optional[Plan]:
        """The plan being followed, or else that of the last iteration; None if there is none."""
        return self._now.plan or self._last_plan

    def read_times(self) -> None:
        """Update the plan from timed iterations that the device has finished.

        Call between iterations.
        """
        self._tuner.read_clocks()
        if self._last_plan is not None:
            # Updated for the same steps.
            self._last_plan = self._cache.find(self._last_plan.trace.steps_key) or self._last_plan
            self._next_plan = self._cache.plan_after(self._last_plan)

    @property
    def assignment(self) -> Assignment:
        """What backward recomputes of each layer; empty: as the model was built."""
        return self._cache.assignment

    def change_assignment(self, assignment: Assignment) -> None:
        """Follow only plans of this assignment, which the layers have from the next pass on.

        Args:
            assignment: What backward recomputes of each layer.

        Raises:
            RuntimeError: An iteration has begun and not ended.
        """
        if assignment == self._cache.assignment:
            return
        self.require_no_iteration()
        self._tuner.read_clocks()
        self._cache.assignment = assignment
        self._recorder.forget_storages()
        self._last_plan = self._next_plan = self._cache.newest()

    def require_no_iteration(self) -> None:
        """Raise ``RuntimeError`` if an iteration has begun and not ended."""
        self._restart_if_abandoned()
        now = self._now
        if now.num_steps or any(chunk.awaits_backward for chunk in now.passes):
            raise RuntimeError(
                "other settings of layers are not supported within an iteration because its "
                "backward reads what its forward has saved; change them after the schedule has "
                "returned"
            )

    def change_target(self, target_memory_bytes: Optional[int]) -> None:
        """Limit the device peak, drop all plans, and record the next iteration.

        Call between iterations.

        Args:
            target_memory_bytes: The limit; None to move all that may.
        """
        options = replace(self._tuner.options, target_memory_bytes=target_memory_bytes)
        self._tuner.change_options(options)
        self._cache.clear()
        self._last_plan = self._next_plan = None

    def predict_overheads(self) -> None:
        """Only predict the overhead of plans, as for iterations that are captured afterwards."""
        self._tuner.tries_plans = False

    @property
    def is_settled(self) -> bool:
        """Whether all measurements for plans are done, and the last plan is final."""
        return self._tuner.is_settled(self._last_plan)

    @property
    def plan_facts(self) -> Optional[PlanFacts]:
        """The proven facts about the latest plan."""
        return self._tuner.facts

    @property
    def peak_drop_bytes(self) -> dict[str, int]:
        """The reduction of the device peak by the latest plan in bytes, by module name.

        Empty before the first iteration has ended. See [Note: Freed is not saved] in ``plan.peak``.
        """
        plan = self._last_plan
        return self._tuner.peak_drop(plan).by_module if plan is not None else {}

    # The life of a pass and of its groups.

    def begin_pass(self, vp_stage: int, policy: PassPolicy, pp_rank: int = 0) -> None:
        """Begin the pass of a micro-batch through a model chunk.

        Passes without gradients, and recomputations in backward, are ignored.

        Args:
            vp_stage: Index of the model chunk on this rank.
            policy: The model's options.
            pp_rank: Pipeline-parallel rank.
        """
        self._now.chunk = None
        if not self._is_training_forward():
            return
        self._prepare_pass(policy)
        self._restart_if_abandoned()
        self._report.pp_rank = pp_rank
        if policy != self._policy:
            self._policy = policy
            if self._tuner.change_options(policy.applied_to(self._tuner.options)):
                self._executor.leave_plan(self._now, self._now.num_steps)
                self._last_plan = self._next_plan = None
        self._begin_trial()
        now = self._now
        now.num_entered += 1
        if now.trial is not None and now.trial.is_left_out:
            return
        if now.num_steps == 0:
            now.passes.clear()  # They had no marks, or the iteration failed before its first one.
        micro_batch = sum(chunk.vp_stage == vp_stage for chunk in now.passes)
        now.chunk = self.store.make_pass(len(now.passes), vp_stage, policy.min_numel, micro_batch)
        now.passes.append(now.chunk)

    def _prepare_pass(self, policy: PassPolicy) -> None:
        """Called before a pass with gradients begins."""
        self.leave_open_regions()
        self.graphs.close()
        self.graphs.min_numel = policy.min_numel

    def start(self, tensor: torch.Tensor, name: str) -> None:
        """Start a group called ``name``, whose input is ``tensor``."""
        if not self.store.start(self, tensor, name):
            self.start_group(name)
            self.mark_backward_end(tensor)

    def start_group(self, name: str) -> None:
        """Start a group called ``name``; its operations follow in the region entered next."""
        if self.graphs.is_open and not self.do_offload:
            self.graphs.note_warmup(name)
        now = self._now
        if self.graphs.is_capturing and self._is_training_forward():
            now.started = self.graphs.start_group(name)
        if now.chunk is None or not self._is_training_forward():
            return
        group = now.chunk.open_group(name)
        now.started = group
        self.store.modules[name].num_groups += 1
        self._advance(StepKind.FORWARD_START, group)

    def take_started(self) -> Optional[OffloadTensorGroup]:
        """Return the group whose region is being entered, if its saved tensors are tracked.

        Also None if the plan keeps the group: its saved tensors are then not needed.
        """
        group, self._now.started = self._now.started, None
        return None if group is None or self._stays(group) else group

    # Regions. C++ works on the same stack.

    def enter(self) -> None:
        """Enter the region of the last started group: tensors saved inside belong to it."""
        if not self.store.enter(self):
            self._enter_region(self.region_flag)

    def leave(self) -> None:
        """Leave the region."""
        if self.store.leave(self):
            return
        entered = self.regions[-1]
        if isinstance(entered, tuple):
            hooks, before = entered
            hooks.__exit__()
            if self.region_flag is not None:
                self.region_flag.set(before)
        self.regions.pop()

    def _enter_region(self, flag: Optional[RegionFlag]) -> None:
        """Enter the region of the last started group.

        Args:
            flag: Set if the group has saved-tensor hooks: see :attr:`region_flag`.
        """
        group = self.take_started()
        if group is not None and self._others_save():
            group.kinds_staying |= Staying.TAKEN.bit
            group = None
        if group is None:
            self.regions.append(None)
            return
        hooks = saved_tensors_hooks(*self.store.hooks(group, self))
        before = self.region_flag is not None and self.region_flag.is_set
        self.regions.append((hooks, before))
        hooks.__enter__()
        if flag is not None and group.name not in flag.without:
            flag.set(True)

    def leave_open_regions(self) -> None:
        """Leave the regions that an exception has left open. No pass begins inside a region."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None and not self.regions:
            return
        while hooks is not None and self.store.is_own_hook(hooks[0]):
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        before = [entered for entered in self.regions if entered is not None]
        if before and self.region_flag is not None:
            self.region_flag.set(before[0][1] if isinstance(before[0], tuple) else before[0])
        self.regions.clear()

    def _others_save(self) -> bool:
        """Return whether other saved-tensor hooks are active, which must see all saved tensors.

        A non-reentrant checkpoint counts saved tensors in forward and in recomputation: if it
        missed some in one of them, backward would get the wrong tensors.
        """
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None or self.store.is_own_hook(hooks[0]):
            return False
        if not self._has_warned_of_others:
            self._has_warned_of_others = True
            logger.warning(
                "a group runs under other saved-tensor hooks (of a checkpoint, of save_on_cpu), so "
                "nothing of it moves"
            )
        return True

    def run_checkpoint(self, run: Callable[[], Any]) -> Any:
        """Run a checkpoint; the tensors that it saves form a group.

        Args:
            run: Calls an autograd function that runs part of the model without gradients and saves
                its inputs.

        Returns:
            The result of ``run``.
        """
        is_group = self.moves_checkpoint_inputs and self.owner_of_marks() is self
        if not is_group:
            return run()
        self.start_group(CHECKPOINT_INPUTS)
        # Without the flag: the modules inside save nothing, and must run as in the recomputation.
        self._enter_region(None)
        try:
            output = run()
        finally:
            self.leave()
        # Backward's first read comes when it reaches the checkpoint, so no mark is needed: [Note:
        # Recomputation reads first].
        self.commit_group(CHECKPOINT_INPUTS)
        return output

    def run_in_nodes(self) -> None:
        """Note that the pass runs node by node: [Note: Layers that run in nodes]."""
        if self._now.chunk is not None:
            self._now.chunk.given_up_by = HELD_BY_NODES
            self.store.crosses_streams = True

    # Iterations.

    @property
    def lacks_groups(self) -> bool:
        """Whether an iteration has begun in which no group ran that should have."""
        now = self._now
        is_bypassed = now.trial is not None or self.are_marks_in_graphs or not self.do_offload
        return now.has_begun and not now.num_steps and not is_bypassed

    @property
    def num_steps(self) -> int:
        """Number of marks passed since the last iteration ended."""
        return self._now.num_steps

    @property
    def is_needed(self) -> bool:
        """Whether backward may still read offloaded tensors."""
        return any(chunk.awaits_backward for chunk in self._now.passes)

    def end_iteration(self) -> None:
        """End an iteration, once all its passes have been issued, with or without backward."""
        now = self._now
        now.chunk = None
        if now.num_steps > 0:
            self._finish_iteration()
        elif now.trial is not None or (now.has_begun and self.are_marks_in_graphs):
            self._finish_without_marks()
        if self._now is now:
            # No marks: there were no gradients, or a chunk was replayed as one graph.
            self._now = Iteration()

    @property
    def are_marks_in_graphs(self) -> bool:
        """Whether graphs replay passes, with fewer marks or none."""
        return bool(self.graphs.of_layers or self.replayed)

    def _stays(self, group: OffloadTensorGroup) -> bool:
        """Return whether the plan keeps the group, so its saved tensors need not be tracked."""
        plan = self._now.plan
        if plan is None or plan.tracks(group.key):
            return False
        group.untracked_in = plan.trace
        return True

    # A pass that is captured as a whole (graphs/offload.py).

    def follow(self, plan: Plan, clock: Optional[StepClock] = None) -> None:
        """Follow ``plan`` in the coming pass, which must match it.

        Args:
            plan: The plan of another engine.
            clock: Times the pass; None for no timing.
        """
        self._last_plan = self._next_plan = plan
        self._executor.is_bound = True
        self._executor.clock = clock

    def plan_for_replays(self, times: Sequence[Times]) -> None:
        """Replan from replays of graphs in which a pass follows this engine's plan.

        Args:
            times: Times of each replay.
        """
        plan = self._last_plan
        if plan is not None:
            self._last_plan = self._next_plan = self._tuner.improve(plan, times)

    def release_all(self) -> None:
        """Release all groups that are being offloaded."""
        for group in self._now.groups.values():
            if group.state is GroupState.COMMITTED:
                self.store.release(group)

    def forget_pass(self) -> None:
        """Discard a pass that has ended; nothing is recorded from it."""
        self._clear_iteration()

    @property
    def has_earlier_passes(self) -> bool:
        """Whether backward of other passes than the latest is still to come."""
        now = self._now
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
        before = self._now
        self._clear_iteration()
        self.store.recover()
        self._now.has_begun, self._now.is_incomplete = before.has_begun, True
        self._next_plan = None

    def finish_report(self) -> None:
        """Add the times of iterations that the device has finished to the report."""
        self._report_builder.finish(self._last_plan, self.wanted_modules)

    def close(self) -> None:
        """Free the host memory. Saved tensors cannot be read afterwards."""
        self._clear_iteration()
        if self.store.verifier is not None:
            self.store.verifier.stop()
        self.store.close()

    def read(self, saved: Any) -> torch.Tensor:
        """Return a saved tensor to backward: autograd's unpack hook.

        Raises:
            RuntimeError: The tensor was changed in place after it was saved.
        """
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
        return None if self._now.chunk is None else self

    def end(
        self, tensor: torch.Tensor, name: str, given_up: Sequence[torch.Tensor] = ()
    ) -> torch.Tensor:
        """End a group on one of its outputs.

        Args:
            tensor: The output.
            name: Name of the group.
            given_up: Tensors that forward no longer reads, though other references may exist.

        Returns:
            ``tensor`` with a graph node that marks where backward needs the group.
        """
        marked = self.store.end(self, tensor, name)
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

        Args:
            name: Name of the group.
            given_up: Tensors that forward no longer reads, though other references may exist.
        """
        now = self._now
        group = now.chunk.commit_group(name) if now.chunk is not None else None
        if group is not None:
            if group.untracked_in is None:
                self.store.commit(group)
                if now.chunk is not None and name in now.chunk.given_up_by:
                    self.store.give_up(group, given_up)
            self._advance(StepKind.FORWARD_COMMIT, group)
        return group

    def end_without_node(self, tensor: torch.Tensor, name: str) -> None:
        """End a group on one of its outputs, which may be changed in place afterwards."""
        group = self.commit_group(name)
        if group is not None:
            at_first_gradient([tensor], partial(self.use_group, group))

    def use_group(self, group: OffloadTensorGroup) -> None:
        """Note that backward needs the group from here on."""
        if group.state is GroupState.COMMITTED and self._is_current(group):
            group.move_to(GroupState.IN_USE)
            self._advance(StepKind.BACKWARD_USE, group)

    def mark_backward_end(self, tensor: torch.Tensor) -> None:
        """Mark where backward leaves the last started group.

        Args:
            tensor: The group's input. Backward has its gradient once it has left the group.
        """
        group = self._now.started
        if group is None or tensor.grad_fn is None or self.graphs.is_capturing:
            return
        # Not a node of our own: [Note: One mark per group].
        self.store.call_before(tensor, partial(self.end_group, group))

    def end_group(self, group: OffloadTensorGroup, *_: object) -> None:
        """Note that backward has left the group. An autograd hook; ignores the gradients."""
        if group.state is GroupState.IN_USE and self._is_current(group):
            group.move_to(GroupState.DONE)
            self._advance(StepKind.BACKWARD_END, group)

    def mark_output(self, kind: StepKind) -> None:
        """Mark the start or the end of the output layer in forward.

        Args:
            kind: OUTPUT_START or OUTPUT_END.
        """
        if self.store.mark_output(self, kind):
            return
        chunk = self._marked_pass()
        if chunk is not None:
            self._advance(kind, mark_of_no_group(chunk, kind))

    def mark_gradient(self, kind: StepKind, tensors: list[torch.Tensor]) -> None:
        """Mark, once, where backward first has the gradient of any of these tensors.

        Args:
            kind: BACKWARD_START, OUTPUT_BACKWARD_START or OUTPUT_BACKWARD_END.
            tensors: Tensors of the running forward pass; those without gradients are skipped.
        """
        if self.store.mark_gradient(self, kind, tensors):
            return
        chunk = self._marked_pass()
        if chunk is not None:
            mark = mark_of_no_group(chunk, kind)
            at_first_gradient(tensors, partial(self._come_to, mark, chunk))

    def _come_to(self, mark: Step, chunk: ChunkOffloadHandler) -> None:
        # Backward may run after its iteration has ended.
        passes = self._now.passes
        if chunk.index < len(passes) and passes[chunk.index] is chunk:
            self._advance(mark.kind, mark)

    def _marked_pass(self) -> Optional[ChunkOffloadHandler]:
        """Return the running forward pass if it has groups; otherwise nothing can move."""
        chunk = self._now.chunk
        if chunk is None or chunk.find(0) is None or self.graphs.is_capturing:
            return None
        return chunk if self._is_training_forward() else None

    def _is_current(self, group: OffloadTensorGroup) -> bool:
        """Return whether the group belongs to this iteration: backward may outlive its own."""
        return self._now.find(group.key) is group

    def _is_training_forward(self) -> bool:
        # Inside a graph task a forward is a recomputation: its saved tensors are read immediately.
        return (
            self.do_offload and torch.is_grad_enabled() and torch._C._current_graph_task_id() == -1
        )

    # The life of an iteration.

    def _advance(self, kind: StepKind, at: OffloadTensorGroup | Step) -> None:
        """Process a mark: see :meth:`PlanExecutor.come_to`."""
        if self._now.num_steps == 0:
            self._begin_iteration()
        self._executor.come_to(self._now, kind, at)

    def _begin_trial(self) -> None:
        """At an iteration's first model chunk, decide whether the iteration is part of a trial."""
        if self._now.has_begun:
            return
        self._now.has_begun = True
        if not self.are_marks_in_graphs and not self._executor.is_bound:
            self._now.trial = self._tuner.begin_trial(self._next_plan, self._report.num_iterations)

    def _finish_without_marks(self) -> None:
        """End an iteration without marks: the engine was bypassed, or graphs replayed all of it."""
        trial = self._now.trial
        is_trial = False
        if trial is not None:
            self._tuner.end_trial(trial, was_followed=False)
            self._tuner.read_clocks()
            # Without marks, the number of micro-batches identifies the iteration.
            plan = self._last_plan = self._cache.find_like(trial.plan, self._now.num_entered)
            self._next_plan = self._cache.plan_after(plan) if plan is not None else None
            is_trial = plan is not None and self._tuner.is_tried(plan)
        self._report.is_left_out = is_trial
        if not is_trial:  # otherwise the report keeps the previous iteration's figures
            self._report_builder.counted = CountedModules()
        self._report_builder.note_iteration()
        self._host_trimmer.end_iteration(self._last_plan)

    def _begin_iteration(self) -> None:
        gradients = self.store.backend.gradients
        if self._report.num_iterations == 1 and gradients is not None:
            self._tuner.resident_gradient_bytes = gradients.count()
        self.store.recover()
        self._executor.begin(self._now, self._next_plan)

    def _finish_iteration(self) -> None:
        self._drop_plans_beyond_limit()
        now, plan = self._now, self._now.plan
        if now.steps is not None:
            now.num_steps = now.steps.end_of(now.num_steps)
        was_followed = plan is not None and len(plan.trace.steps) == now.num_steps
        if now.trial is not None:
            self._tuner.end_trial(now.trial, was_followed and plan is now.trial.plan)
        if plan is not None and was_followed and plan is self._next_plan:  # from its first step
            self._tuner.note_followed(plan, now.probe)
        if plan is not None and not was_followed:
            self._recorder.steps.extend(plan.trace.steps[: now.num_steps])
            plan = None
        if plan is None and not now.is_incomplete:
            # It departed from its plan, or ended early: another plan may still match it.
            plan = self._cache.find(self._recorded_key()) or self._make_plan()
        self._tuner.read_clocks()
        is_next = plan is self._last_plan and plan is self._next_plan
        if plan is None:
            self._next_plan = None
        elif not (is_next and self._cache.is_repeated(plan, now.num_entered)):
            self._cache.note_order(plan, now.num_entered)
            # The plan for the same steps; it may have been rebuilt.
            self._last_plan = self._cache.find(plan.trace.steps_key)
            self._next_plan = self._cache.plan_after(plan)
        self._report.is_left_out = False
        self._report_builder.note_iteration()
        if self._report.num_iterations >= self._num_verified_iterations:
            self.stop_verifying()
        self._report_builder.counted = self._clear_iteration()
        # The allocator is read at every mark only while its readings are needed.
        self._recorder.reads_memory = False
        self._host_trimmer.end_iteration(self._last_plan)

    def _drop_plans_beyond_limit(self) -> None:
        """Drop plans that exceed the pool's limit after a failed allocation has lowered it."""
        limit_bytes = self.store.host_pool.limit_bytes
        if limit_bytes == self._tuner.options.host_memory_limit_bytes:
            return
        options = replace(self._tuner.options, host_memory_limit_bytes=limit_bytes)
        if self._tuner.change_options(options):
            self._executor.leave_plan(self._now, self._now.num_steps)

    def stop_verifying(self) -> None:
        """Stop verifying what comes back, if it is verified."""
        verifier = self.store.verifier
        if verifier is not None:
            verifier.stop()
            self.store.verifier = None
            logger.info(
                "offload_verify: %d storages came back unchanged in the first %d iterations; "
                "verifying ends",
                verifier.num_verified,
                self._num_verified_iterations,
            )

    def _recorded_key(self) -> StepsKey:
        return StepsKey(tuple(self._recorder.steps), self._cache.assignment)

    def _make_plan(self) -> Plan:
        trace = self._recorder.finish(self._report.pp_rank, self._now.groups)
        return self._tuner.make(replace(trace, assignment=self._cache.assignment)).plan

    def _clear_iteration(self) -> CountedModules:
        self.delayed.clear()
        self.store.copy_streams.forget_waits()
        self._executor.clear(self._now)
        counted = self.store.end_iteration()
        self._recorder.clear()
        self._now = Iteration()
        return counted

    def _restart_if_abandoned(self) -> None:
        """Discard the iteration so far if it ended in an exception.

        Detected when autograd has freed the saved tensors of a pass before its backward, while no
        other pass awaits backward.
        """
        passes = self._now.passes
        if any(chunk.lacks_backward for chunk in passes) and not any(
            chunk.awaits_backward for chunk in passes
        ):
            logger.warning("an iteration ended before its backward pass; recording starts again")
            self._clear_iteration()
