# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The interface that megatron-core's layers, models and schedules call, on top of the engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.slipstream.fine_grained_activation_offload.backend import Event, Stream
from megatron.slipstream.fine_grained_activation_offload.counted_modules import CountedModules
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.markers import (
    CommitMark,
    at_first_gradient,
)
from megatron.slipstream.fine_grained_activation_offload.pass_policy import PassPolicy
from megatron.slipstream.plan.staying import Staying

logger = logging.getLogger(__name__)

CHECKPOINT_INPUTS = "checkpoint_inputs"
"""Name of the groups of tensors that checkpoints save."""
HELD_BY_NODES = ("attn_norm", "mlp_norm")
"""Modules whose inputs a schedule holds: [Note: Layers that run in nodes]."""

DelayedCommit = tuple[Callable[..., None], str, Sequence[torch.Tensor]]
"""A function and its arguments."""


class RegionFlag(NamedTuple):
    """A flag that is set while code runs in a group's region."""

    owner: Any
    name: str
    """Name of a bool attribute of ``owner``."""
    without: frozenset[str]
    """Names of groups in whose regions it is not set."""

    @property
    def is_set(self) -> bool:
        """Whether the flag is set."""
        return bool(getattr(self.owner, self.name))

    def set(self, is_set: bool) -> None:
        """Set or clear the flag."""
        setattr(self.owner, self.name, is_set)


class PipelineOffloadManager(OffloadEngine):
    """The engine with megatron-core's interface.

    Args:
        arguments: The engine's arguments. The model's configuration sets fraction and delta.
    """

    def __init__(self, *arguments: Any, **options: Any) -> None:
        self.moves_checkpoint_inputs = False
        """Whether the tensors that a checkpoint saves are a group: see :meth:`run_checkpoint`."""
        self.region_flag: Optional[RegionFlag] = None
        """A flag that is true while a group's operations run."""
        self._regions: list[None | bool | tuple[saved_tensors_hooks, bool]] = []
        """Stack of entered regions: None for one without hooks; else the hooks and the flag's
        previous value, or the latter alone if C++ entered the region."""
        self._delayed: list[DelayedCommit] = []
        """Commits that :meth:`flush_delayed_groups` will run."""
        self._has_warned_of_others = False
        self._has_warned_of_no_groups = False
        self._cuda_graph_stream: Optional[Stream] = None
        self._cuda_graph_event: Optional[Event] = None
        self._in_replay = False
        super().__init__(*arguments, **options)

    @property
    def d2h_stream(self) -> Stream:
        """The stream of copies to the host.

        Raises:
            RuntimeError: A layer unknown to the engine is capturing a CUDA graph, which cannot
                include the copies.
        """
        if not self.graphs.is_capturing and self.store.backend.is_capturing():
            raise RuntimeError(
                "offload_modules inside CUDA graphs are not supported with layers of which the "
                "engine has seen no iteration before the capture because their copies would not "
                "be part of the graph; set cuda_graph_warmup_steps to at least 1, build the model "
                "from megatron.slipstream.with_graph_offloading(spec), or leave the modules that "
                "are captured out of offload_modules"
            )
        return self.store.copy_streams.d2h

    @property
    def h2d_stream(self) -> Stream:
        """The stream of copies to the device."""
        return self.store.copy_streams.h2d

    @property
    def cuda_graph_stream(self) -> Stream:
        """The stream on which captured layers are replayed."""
        if self._cuda_graph_stream is None:
            self._cuda_graph_stream = self.store.backend.new_stream()
        return self._cuda_graph_stream

    @property
    def cuda_graph_event(self) -> Event:
        """The external event recorded inside captured layers."""
        if self._cuda_graph_event is None:
            self._cuda_graph_event = torch.cuda.Event(external=True)
        return self._cuda_graph_event

    @property
    def offload_summary_bytes(self) -> dict[str, int]:
        """The reduction of the device peak by the latest plan in bytes, by module name."""
        return self.peak_drop_bytes

    @property
    def offload_summary_total_bytes(self) -> int:
        """The reduction of the device peak by the latest plan in bytes."""
        return sum(self.offload_summary_bytes.values())

    # Passes and iterations.

    def init_model_chunk_offload_handler(
        self,
        pp_rank: int,
        vp_size: Optional[int],
        vp_stage: Optional[int],
        min_offloaded_tensor_size: int = 1024 * 1024,
        delta_offload_bytes_across_pp_ranks: int = 0,
        activation_offload_fraction: float = 1.0,
        max_inflight_offloads: Optional[int] = None,
    ) -> None:
        """Begin a pass through a model chunk. Called by the model before its first layer.

        Passes without gradients, and recomputations in backward, are ignored.

        Args:
            pp_rank: Pipeline-parallel rank.
            vp_size: Number of model chunks on this rank; None means 1.
            vp_stage: Index of this model chunk; None means 0.
            min_offloaded_tensor_size: Minimum size of a moving tensor's memory, in elements.
            delta_offload_bytes_across_pp_ranks: Additional bytes that each later rank keeps.
            activation_offload_fraction: Fraction of a pass's groups that move.
            max_inflight_offloads: See ``PolicyOptions``.
        """
        policy = PassPolicy(
            min_offloaded_tensor_size,
            activation_offload_fraction,
            delta_offload_bytes_across_pp_ranks,
            max_inflight_offloads,
        )
        self.begin_pass(vp_stage or 0, policy, pp_rank)

    def _prepare_pass(self, policy: PassPolicy) -> None:
        self.leave_open_regions()
        self.graphs.close()
        self.graphs.min_numel = policy.min_numel

    def reset(self, **_: Any) -> None:
        """End an iteration. The schedule calls this after forward-backward, or forward alone."""
        if self._delayed:
            self.flush_delayed_groups()
        self.graphs.close()
        if not self._now.num_steps:
            self._warn_of_no_groups()
        self.end_iteration()

    def disable_offload(self) -> None:
        """Ignore marks from the next one on. Offloaded groups are still reloaded."""
        self.do_offload = False

    def enable_offload(self) -> None:
        """Undo :meth:`disable_offload`."""
        self.do_offload = True

    # Groups.

    def pop_forward_chunk(self, name: str) -> None:
        """Start a group called ``name``; its operations follow in the region entered next.

        Returns:
            None, so that no graph node marks the start: [Note: One mark per group].
        """
        if self.graphs.is_open and not self.do_offload:
            self.graphs.note_warmup(name)
        if self.graphs.is_capturing and self._is_training_forward():
            self._now.started = self.graphs.pop_forward_chunk(name)
        self.start_group(name)

    def start_on(self, tensor: torch.Tensor, name: str) -> None:
        """Start a group called ``name``, whose input is ``tensor``."""
        if not self.store.start(self, tensor, name):
            self.pop_forward_chunk(name)
            self.mark_backward_end(tensor)

    def cur_forward_chunk(self) -> Optional[CommitMark]:
        """Return the object that marks a group's end; None outside a training pass."""
        if self.graphs.is_capturing and self._is_training_forward():
            return CommitMark(self.graphs)
        is_marked = self._now.chunk is not None and self._is_training_forward()
        return CommitMark(self) if is_marked else None

    def end_on(
        self,
        tensor: torch.Tensor,
        name: str,
        given_up: Sequence[torch.Tensor] = (),
        is_delayed: bool = False,
    ) -> torch.Tensor:
        """End a group on one of its outputs.

        Args:
            tensor: The output.
            name: Name of the group.
            given_up: Tensors that forward no longer reads, though other references may exist.
            is_delayed: Whether the commit waits for :meth:`flush_delayed_groups` during a replay.

        Returns:
            ``tensor`` with a graph node that marks where backward needs the group.
        """
        is_delayed = is_delayed and self._in_replay
        if not is_delayed:
            marked = self.store.end(self, tensor, name)
            if marked is not None:
                return marked
        mark = self.cur_forward_chunk()
        if mark is None:
            return tensor
        if is_delayed:
            self.push_offload_groups(mark.on_group_commit_forward, name, given_up)
        else:
            mark.on_group_commit_forward(name, given_up)
        return self.store.mark(tensor, partial(mark.on_group_commit_backward, name))

    def end_without_node(self, tensor: torch.Tensor, name: str) -> None:
        """End a group on one of its outputs, which may be changed in place afterwards."""
        group = self.commit_group(name)
        if group is not None:
            at_first_gradient([tensor], partial(self.use_group, group))

    def __enter__(self) -> PipelineOffloadManager:
        """Enter the region of the last started group: tensors saved inside belong to it."""
        if not self.store.enter(self):
            self._enter_region(self.region_flag)
        return self

    def __exit__(self, *exception: object) -> None:
        """Leave the region."""
        if self.store.leave(self):
            return
        entered = self._regions[-1]
        if isinstance(entered, tuple):
            hooks, before = entered
            hooks.__exit__()
            if self.region_flag is not None:
                self.region_flag.set(before)
        self._regions.pop()

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
            self._regions.append(None)
            return
        hooks = saved_tensors_hooks(*self.store.hooks(group, self))
        before = self.region_flag is not None and self.region_flag.is_set
        self._regions.append((hooks, before))
        hooks.__enter__()
        if flag is not None and group.name not in flag.without:
            flag.set(True)

    def leave_open_regions(self) -> None:
        """Leave the regions that an exception has left open. No pass begins inside a region."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None and not self._regions:
            return
        while hooks is not None and self.store.is_own_hook(hooks[0]):
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        before = [entered for entered in self._regions if entered is not None]
        if before and self.region_flag is not None:
            self.region_flag.set(before[0][1] if isinstance(before[0], tuple) else before[0])
        self._regions.clear()

    def _warn_of_no_groups(self) -> None:
        now = self._now
        is_empty = now.has_begun and not self.are_marks_in_graphs
        if is_empty and now.trial is None and self.wanted_modules and self.do_offload:
            if not self._has_warned_of_no_groups:
                logger.warning(
                    "rank %d: nothing moves, because no group of offload_modules=%s ran; name "
                    "modules that its layers have",
                    self.report.rank,
                    ",".join(self.wanted_modules),
                )
            self._has_warned_of_no_groups = True

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
        is_group = (
            self.moves_checkpoint_inputs
            and self._now.chunk is not None
            and self._is_training_forward()
            and not self.graphs.is_capturing
        )
        if not is_group:
            return run()
        self.pop_forward_chunk(CHECKPOINT_INPUTS)
        # Without the flag: the modules inside save nothing, and must run as in the recomputation.
        self._enter_region(None)
        try:
            output = run()
        finally:
            self.__exit__()
        # Backward's first read comes when it reaches the checkpoint, so no mark is needed: [Note:
        # Recomputation reads first].
        self.commit_group(CHECKPOINT_INPUTS)
        return output

    def run_in_nodes(self) -> None:
        """Note that the pass runs node by node: [Note: Layers that run in nodes]."""
        if self._now.chunk is not None:
            self._now.chunk.given_up_by = HELD_BY_NODES
            self.store.crosses_streams = True

    def mark_not_offload(self, tensor: Optional[torch.Tensor]) -> None:
        """Keep ``tensor`` on the device, whichever group saves it."""
        if tensor is not None:
            tensor._do_not_offload = True  # type: ignore[attr-defined]

    mark_not_offloadable = mark_not_offload

    def before_discard(self, tensor: torch.Tensor) -> None:
        """Note that ``tensor``'s storage is discarded now, and recomputed before it is read."""
        self.store.before_discard(tensor)

    def push_offload_groups(
        self,
        group_hook: Callable[..., None],
        name: str,
        forced_released_tensors: Sequence[torch.Tensor],
    ) -> None:
        """Queue a commit for :meth:`flush_delayed_groups`."""
        self._delayed.append((group_hook, name, forced_released_tensors))

    def flush_delayed_groups(self) -> None:
        """Run the delayed commits, in order."""
        delayed, self._delayed = self._delayed, []
        for group_hook, name, forced_released_tensors in delayed:
            group_hook(name, forced_released_tensors)

    def _clear_iteration(self) -> CountedModules:
        self._delayed.clear()
        return super()._clear_iteration()
