# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The engine for models that do not announce micro-batches and iterations.

[Note: Where an iteration ends]
A pass is one forward of the model with gradients. Passes that wait for backward at the same time
form an iteration, so a plan covers any training loop: one backward after each forward (each pair
an iteration, with or without accumulation), several forwards before one backward, or both
interleaved as in a pipeline. A pass waits while any of its :class:`BackwardHook` objects is alive;
they are freed with its graph. An iteration ends

- at the end of a backward that leaves no pass waiting, before the optimizer runs; or
- at the next forward, if the newest pass is not waiting for its first backward. This covers
  graphs that stay alive (``retain_graph``, an output that the loss does not use).

An iteration in which backward reaches no pass (a forward for a metric, an exception) is dropped,
and the plan is kept.

[Note: Groups that grow]
The recorded iteration may have a short sequence, or tensors that stay on the device, such as nested
ones. Its plan would never offload what was not recorded. So groups that saved nothing are still
tracked, and a group that saves twice the bytes in its plan ends the plan: the iteration continues
without a plan and records a new one.
"""

from __future__ import annotations

import logging
import sys
import threading
import weakref
from collections.abc import Iterable
from functools import partial
from typing import Any, Optional

import torch
from torch.autograd.graph import Node, saved_tensors_hooks

from megatron.slipstream.fine_grained_activation_offload.counted_modules import CountedModules
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.engine_setup import host_limit
from megatron.slipstream.fine_grained_activation_offload.group import GroupState, OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.pass_policy import PassPolicy
from megatron.slipstream.fine_grained_activation_offload.storage import memory_of
from megatron.slipstream.launcher import rank
from megatron.slipstream.plan.staying import Staying

logger = logging.getLogger(__name__)

MAX_LOST_PASSES = 16
"""Maximum number of passes in an iteration whose graphs are freed without a backward. More indicate
a loop of forwards (an evaluation without ``no_grad``), not training."""

NO_GRAPH_TASK = -1

MIN_GROWTH = 2
"""A group that saves this many times the bytes in its plan ends the plan."""


def is_transformed() -> bool:
    """Whether a ``torch.func`` transform (``jvp``, ``vmap``, ``grad``, ...) or a tracer is active.

    ``torch.func.linearize`` traces operations on tensors without an enclosing transform.
    """
    return (
        torch._C._functorch.peek_interpreter_stack() is not None
        or torch.fx.experimental.proxy_tensor.get_proxy_mode() is not None
    )


def is_backward_compiled() -> bool:
    """Whether compiled autograd is on, or runs this code.

    It traces saved-tensor hooks and breaks the graph at each of ours, so that compiling a backward
    takes minutes.
    """
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    return bool(
        torch._dynamo.config.compiled_autograd
        or getattr(compiled, "compiled_autograd_enabled", False)
        or getattr(compiled, "in_compiled_autograd_region", False)
    )


class VersionCheckedTensor:
    """A saved tensor that stays on the device.

    Autograd raises if a saved tensor was changed in place, but not if an unpack hook returns it, so
    this class does the check.
    """

    __slots__ = ("tensor", "version", "__weakref__")

    def __init__(self, tensor: torch.Tensor) -> None:
        # An output saved by its own operation would keep itself alive through its graph.
        self.tensor = tensor.detach() if tensor.grad_fn is not None else tensor
        self.version = tensor._version

    @property
    def is_intact(self) -> bool:
        return self.tensor._version == self.version

    def read(self) -> torch.Tensor:
        """Return the tensor; ``RuntimeError`` if it was changed in place after it was saved."""
        if not self.is_intact:
            raise RuntimeError(
                f"a tensor of shape {list(self.tensor.shape)} that was saved for backward was "
                "changed by an in-place operation; change a copy of it instead"
            )
        return self.tensor


class BackwardHook:
    """Notifies the engine when backward reaches a group. Owned by autograd's graph."""

    __slots__ = ("_engine", "_group", "__weakref__")

    def __init__(self, engine: AttachedEngine, group: OffloadTensorGroup) -> None:
        self._engine = engine
        self._group = group

    @torch.compiler.disable
    def __call__(self, *_: object) -> None:
        self._engine.use_group(self._group)


class _Pass:
    def __init__(self) -> None:
        self._groups: list[tuple[OffloadTensorGroup, weakref.ref[BackwardHook]]] = []
        self.is_hooked = False
        """Whether a backward of the outputs would reach a group."""

    def add(self, group: OffloadTensorGroup, hook: BackwardHook) -> None:
        self._groups.append((group, weakref.ref(hook)))

    @property
    def is_used(self) -> bool:
        used = (GroupState.IN_USE, GroupState.DONE)
        return any(group.state in used for group, _ in self._groups)

    @property
    def waits(self) -> bool:
        """Whether backward can still reach a group that it has not reached."""
        return bool(self.awaited_names)

    @property
    def awaited_names(self) -> set[str]:
        """Names of groups that backward can still reach."""
        return {
            group.name
            for group, hook in self._groups
            if group.state is GroupState.COMMITTED and hook() is not None
        }


class AttachedEngine(OffloadEngine):
    """Detects passes and iterations: [Note: Where an iteration ends]."""

    def __init__(
        self,
        *arguments: Any,
        model: torch.nn.Module,
        min_offloaded_tensor_size: int,
        activation_offload_fraction: float,
    ) -> None:
        self._thread = threading.local()
        super().__init__(*arguments)
        self._model = weakref.ref(model)
        self._constants: Optional[frozenset[Optional[int]]] = None
        """Storages of the model's parameters and buffers; None if not yet collected in this pass,
        since wrappers may reallocate parameters."""
        self._largest: dict[int, int] = {}
        """Bytes of groups that have grown, by group index in the pass."""
        self._policy_of_passes = PassPolicy(
            min_numel=min_offloaded_tensor_size,
            activation_offload_fraction=activation_offload_fraction,
            delta_offload_bytes_across_pp_ranks=0,
            max_inflight_offloads=None,
        )
        self._own_passes: list[_Pass] = []
        """Passes of this iteration, oldest first."""
        self._is_model_running = False
        """True from :meth:`begin_forward` to :meth:`end_forward`."""
        self._watched_task = NO_GRAPH_TASK
        """Graph task of the backward that will call :meth:`_end_backward` at its end."""
        self._hooks: Optional[saved_tensors_hooks] = None
        """The saved-tensor hooks of the running region; None if its group stays on the device."""
        self._num_lost = 0
        """Number of consecutive passes whose backward can no longer run."""
        self._has_warned_of_lost_passes = False
        self._is_closing = False
        self._was_backward_compiled = False
        """Whether compiled autograd has run a backward: the next ones may be compiled too."""

    @property
    def is_training_forward(self) -> bool:
        """Whether a group can begin here: gradients enabled, not suspended, not in backward.

        ``torch.func`` transforms are excluded, since their tensors are wrappers without storage,
        and so is compiled autograd.
        """
        is_plain = not is_transformed() and not self.is_backward_compiled
        return is_plain and self._is_training_forward()

    @property
    def is_backward_compiled(self) -> bool:
        return self._was_backward_compiled or is_backward_compiled()

    @property
    def do_offload(self) -> bool:
        """False while offloading is suspended in this thread."""
        return getattr(self._thread, "do_offload", True)

    @do_offload.setter
    def do_offload(self, is_on: bool) -> None:
        self._thread.do_offload = is_on

    @property
    def is_idle(self) -> bool:
        return self._watched_task == NO_GRAPH_TASK and not any(
            own.waits for own in self._own_passes
        )

    # Passes, called by the hooks on the model.

    def begin_forward(self) -> None:
        self._is_model_running = True
        self._open_pass()

    def end_forward(self, failed: bool) -> None:
        """End the forward of the pass; ``failed`` if it raised."""
        self._is_model_running = False
        self.now.leave_pass()
        if failed and self._own_passes:
            # Its backward cannot run, even if a traceback keeps its graph alive.
            self._own_passes.pop()
            if not any(own.waits or own.is_used for own in self._own_passes):
                self.clear_iteration()

    @property
    def awaited_names(self) -> set[str]:
        return self._own_passes[-1].awaited_names if self._own_passes else set()

    # Groups. Regions do not nest.

    def begin_region(self, name: str) -> None:
        """Begin a group; outside of the model's forward, the group is a pass of its own."""
        if self.now.chunk is None and self.is_training_forward:
            self._open_pass()
        self.start_group(name)
        group = self.take_started()
        if group is not None:
            self._hooks = saved_tensors_hooks(partial(self.save, group), self.read)
            self._hooks.__enter__()

    def leave_region(self, is_here: bool = True) -> None:
        """Leave the group's region, in this thread (``is_here``) or one that has ended."""
        if self._hooks is not None and is_here:
            self._hooks.__exit__()
        self._hooks = None

    def commit_region(self, name: str, nodes: Iterable[Node], is_taken: bool = False) -> bool:
        """Commit a group that has saved all its tensors.

        Backward needs the group when it reaches the first of ``nodes``; ``is_taken`` says that
        other saved-tensor hooks take tensors of the module. Returns False if the group saved
        something but has no nodes, so that its backward is not detected.
        """
        group = self.commit_group(name)
        if group is None:
            return True
        if is_taken:
            group.kinds_staying |= Staying.TAKEN.bit
        self._end_plan_if_grown(group)
        hook = BackwardHook(self, group)
        is_hooked = False
        for node in nodes:
            # Not a custom node, which would make in-place changes of the output illegal.
            node.register_prehook(hook)
            is_hooked = True
        self._own_passes[-1].add(group, hook)
        self._own_passes[-1].is_hooked |= is_hooked
        return is_hooked or not group.held

    def begin_inputs(self, name: str) -> Optional[OffloadTensorGroup]:
        """Begin a group whose tensors are added one by one; return None if none can begin."""
        with torch.enable_grad():  # Checkpoints save their inputs with gradients disabled.
            self.start_group(name)
        group, self.now.started = self.now.started, None
        return group

    def commit_inputs(self, name: str, group: OffloadTensorGroup, hook: BackwardHook) -> None:
        """Commit a group of :meth:`begin_inputs` after all its tensors were added."""
        self.commit_group(name)
        self._own_passes[-1].add(group, hook)

    def _prepare_pass(self, policy: PassPolicy) -> None:
        """Do nothing: regions are left by their hooks, and nothing is captured."""

    def _stays(self, group: OffloadTensorGroup) -> bool:
        plan = self.now.plan
        if plan is not None and not plan.trace.group_by_key[group.key].storages:
            return False  # [Note: Groups that grow]
        return super()._stays(group)

    def _end_plan_if_grown(self, group: OffloadTensorGroup) -> None:
        """See [Note: Groups that grow]."""
        entry = self.now.entry
        if entry is None or group.untracked_in is not None:
            return
        nbytes = sum(group.nbytes.values())
        trace = entry.plan.trace
        known = sum(
            trace.storages[index].nbytes for index in trace.group_by_key[group.key].storages
        )
        # Recorded sizes are remembered, even if a plan omits some of them.
        known = max(known, self._largest.get(group.key.group, 0))
        if nbytes >= MIN_GROWTH * known and nbytes > 0:
            self._largest[group.key.group] = nbytes
            self.lifecycle.plans.forget(entry)
            self.executor.leave_plan(self.now, self.now.num_steps)

    def _open_pass(self) -> None:
        self._constants = None
        # torch.distributed may have been initialised since.
        self._report.rank = rank()
        newest = self._own_passes[-1] if self._own_passes else None
        if newest is not None and (newest.is_used or not newest.waits):
            self._finish_or_clear()
        elif len(self._own_passes) > MAX_LOST_PASSES:
            lost = [own for own in self._own_passes if not own.is_used and not own.waits]
            if len(lost) > MAX_LOST_PASSES:
                self.clear_iteration()
        self.begin_pass(0, self._policy_of_passes)
        self._own_passes.append(_Pass())

    # Saved-tensor hooks. Autograd calls them wherever it runs, including compiled code.

    @torch.compiler.disable
    def save(self, group: OffloadTensorGroup, tensor: torch.Tensor) -> Any:
        """Pack hook: save ``tensor`` for ``group``; return its replacement."""
        if self._is_constant(tensor):
            group.kinds_staying |= Staying.PARAMETER.bit
            return VersionCheckedTensor(tensor)
        saved = self.store.pack(group, tensor)
        return VersionCheckedTensor(saved) if isinstance(saved, torch.Tensor) else saved

    def _is_constant(self, tensor: torch.Tensor) -> bool:
        """Whether ``tensor`` is a parameter or buffer of the model, or a detached view of one."""
        if tensor.grad_fn is not None or type(tensor) is not torch.Tensor:
            return False
        if self._constants is None:
            model = self._model()
            own = () if model is None else (*model.parameters(), *model.buffers())
            self._constants = frozenset(
                memory_of(entry)
                for entry in own
                if type(entry) in (torch.Tensor, torch.nn.Parameter)
            )
        memory = memory_of(tensor)
        return memory is not None and memory in self._constants

    @torch.compiler.disable
    def read(self, saved: Any) -> torch.Tensor:
        """Return the tensor that :meth:`save` replaced, or ``RuntimeError`` if it was changed."""
        return saved.read() if type(saved) is VersionCheckedTensor else super().read(saved)

    # Backward.

    def use_group(self, group: OffloadTensorGroup) -> None:
        """Handle backward reaching the group, which it needs from here on."""
        super().use_group(group)
        self._was_backward_compiled |= is_backward_compiled()
        if not self._is_model_running:
            self.now.leave_pass()  # Ends a pass that is outside of the model's forward.
        task = torch._C._current_graph_task_id()
        if task not in (NO_GRAPH_TASK, self._watched_task):
            self._watched_task = task
            torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    @torch.compiler.disable
    def _end_backward(self) -> None:
        self._watched_task = NO_GRAPH_TASK
        # A model may call backward within its forward.
        if self._is_model_running or any(own.waits for own in self._own_passes):
            return
        self._finish_or_clear()
        if self._is_closing:
            self.close()

    def _finish_or_clear(self) -> None:
        if any(own.is_used for own in self._own_passes):
            self.end_iteration()
        else:
            self.clear_iteration()

    def clear_iteration(self) -> CountedModules:
        counted = super().clear_iteration()
        self._num_lost += sum(own.is_hooked and not own.is_used for own in self._own_passes)
        self._own_passes.clear()
        if self._num_lost > MAX_LOST_PASSES and not self._has_warned_of_lost_passes:
            self._has_warned_of_lost_passes = True
            logger.warning(
                "attach(): the model ran %d times in a row with gradients and no backward, so "
                "offloading has no benefit; run it under torch.no_grad() where it is not trained",
                self._num_lost,
            )
        return counted

    def close(self) -> None:
        super().close()
        host_limit.leave(self.store.host_pool)

    def close_when_done(self) -> None:
        """Free the host memory once no pass waits for backward."""
        self._is_closing = True
        if not any(own.waits for own in self._own_passes):
            self.close()

    def end_iteration(self) -> None:
        super().end_iteration()
        self._num_lost = 0
        self._own_passes.clear()
