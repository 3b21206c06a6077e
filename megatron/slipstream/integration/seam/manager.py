# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The interface that megatron-core's layers, models and schedules call, in front of an engine."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.backend import Event, Stream
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.graph_capture import GraphCaptures
from megatron.slipstream.fine_grained_activation_offload.markers import CommitMark
from megatron.slipstream.fine_grained_activation_offload.pass_policy import PassPolicy
from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.candidates import PolicyOptions

logger = logging.getLogger(__name__)


class PipelineOffloadManager:
    """megatron-core's interface of an engine."""

    def __init__(self, engine: OffloadEngine) -> None:
        self.engine = engine
        """Does the work."""
        self._has_warned_of_no_groups = False
        self._unknown: set[str] = set()
        """Options without effect, of which a warning was logged."""
        self._cuda_graph_stream: Optional[Stream] = None
        self._cuda_graph_event: Optional[Event] = None
        self._in_replay = False

    # What users see of the engine.

    @property
    def report(self) -> RankReport:
        return self.engine.report

    @property
    def plan(self) -> Optional[Plan]:
        return self.engine.plan

    @property
    def options(self) -> PolicyOptions:
        return self.engine.options

    @property
    def store(self) -> ActivationStore:
        return self.engine.store

    @property
    def graphs(self) -> GraphCaptures:
        return self.engine.graphs

    @property
    def is_settled(self) -> bool:
        """Whether all measurements for plans are done, and the last plan is final."""
        return self.engine.lifecycle.is_settled

    def finish_report(self) -> None:
        self.engine.finish_report()

    def close(self) -> None:
        """Free the host memory. Saved tensors cannot be read afterwards."""
        self.engine.close()

    # megatron-core's contract.

    @property
    def do_offload(self) -> bool:
        """False while offloading is suspended: marks then do nothing."""
        return self.engine.do_offload

    @do_offload.setter
    def do_offload(self, is_on: bool) -> None:
        self.engine.do_offload = is_on

    @property
    def d2h_stream(self) -> Stream:
        """The stream of copies to the host; ``RuntimeError`` while an unknown layer is captured."""
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
        return self.store.copy_streams.h2d

    @property
    def cuda_graph_stream(self) -> Stream:
        if self._cuda_graph_stream is None:
            self._cuda_graph_stream = self.store.backend.new_stream()
        return self._cuda_graph_stream

    @property
    def cuda_graph_event(self) -> Event:
        if self._cuda_graph_event is None:
            self._cuda_graph_event = torch.cuda.Event(external=True)
        return self._cuda_graph_event

    @property
    def offload_summary_bytes(self) -> dict[str, int]:
        """The reduction of the device peak by the latest plan in bytes, by module name."""
        return self.engine.lifecycle.peak_drop.by_module

    @property
    def offload_summary_total_bytes(self) -> int:
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
        **others: Any,
    ) -> None:
        """Begin a pass through a model chunk. Called by the model before its first layer.

        Passes without gradients, and recomputations in backward, are ignored. For the values see
        ``PassPolicy``. A warning says once what a later megatron-core passes in ``others``.
        """
        for name, value in others.items():
            if value is None or name in self._unknown:
                continue
            self._unknown.add(name)
            instead = "leave it out"
            if name == "buffer_size_gib":
                instead = "set offload_host_memory_limit_bytes to limit host memory"
            logger.warning(
                "%s=%s has no effect with Slipstream's engine, which does not know it; %s",
                *(name, value, instead),
            )
        policy = PassPolicy(
            min_offloaded_tensor_size,
            activation_offload_fraction,
            delta_offload_bytes_across_pp_ranks,
            max_inflight_offloads,
        )
        self.engine.begin_pass(vp_stage or 0, policy, pp_rank)

    def reset(self, **_: Any) -> None:
        """End an iteration. The schedule calls this after forward-backward, or forward alone."""
        self.flush_delayed_groups()
        self.graphs.close()
        engine = self.engine
        now = engine.now
        is_bypassed = now.trial is not None or engine.are_marks_in_graphs or not self.do_offload
        lacks_groups = now.has_begun and not now.num_steps and not is_bypassed
        if lacks_groups and engine.wanted_modules and not self._has_warned_of_no_groups:
            self._has_warned_of_no_groups = True
            logger.warning(
                "rank %d: nothing moves, because no group of offload_modules=%s ran; name modules "
                "that its layers have",
                self.report.rank,
                ",".join(engine.wanted_modules),
            )
        engine.end_iteration()

    def disable_offload(self) -> None:
        """Ignore marks from the next one on. Offloaded groups are still reloaded."""
        self.do_offload = False

    def enable_offload(self) -> None:
        self.do_offload = True

    # Groups.

    def pop_forward_chunk(self, name: str) -> None:
        """Start a group, without a node that marks the start: [Note: One mark per group]."""
        self.engine.start_group(name)

    def start_on(self, tensor: torch.Tensor, name: str) -> None:
        self.engine.start(tensor, name)

    def cur_forward_chunk(self) -> Optional[CommitMark]:
        """Return the object that marks a group's end; None outside a training pass."""
        owner = self.engine.owner_of_marks()
        return None if owner is None else CommitMark(owner)

    def end_on(
        self,
        tensor: torch.Tensor,
        name: str,
        given_up: Sequence[torch.Tensor] = (),
        is_delayed: bool = False,
    ) -> torch.Tensor:
        """End a group as ``OffloadEngine.end``.

        If it is delayed, the commit waits for :meth:`flush_delayed_groups` during a replay.
        """
        if not (is_delayed and self._in_replay):
            return self.engine.end(tensor, name, given_up)
        mark = self.cur_forward_chunk()
        if mark is None:
            return tensor
        self.push_offload_groups(mark.on_group_commit_forward, name, given_up)
        return self.store.mark(tensor, partial(mark.on_group_commit_backward, name))

    def __enter__(self) -> PipelineOffloadManager:
        self.engine.enter()
        return self

    def __exit__(self, *exception: object) -> None:
        self.engine.leave()

    def mark_not_offload(self, tensor: Optional[torch.Tensor]) -> None:
        if tensor is not None:
            tensor._do_not_offload = True  # type: ignore[attr-defined]

    mark_not_offloadable = mark_not_offload

    def push_offload_groups(
        self,
        group_hook: Callable[..., None],
        name: str,
        forced_released_tensors: Sequence[torch.Tensor],
    ) -> None:
        """Queue a commit for :meth:`flush_delayed_groups`."""
        self.engine.delayed.append(partial(group_hook, name, forced_released_tensors))

    def flush_delayed_groups(self) -> None:
        delayed, self.engine.delayed = self.engine.delayed, []
        for commit in delayed:
            commit()
