# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Keeps a model's activations within ``activation_memory_budget``.

Before each iteration the layers get the assignment that
:class:`~megatron.slipstream.plan.relaxation.Relaxation` has chosen, and plans the limit on the
device peak; after it, what was measured is added.

[Note: After a budget has settled]
Settings are chosen again if they may not fit any more: device memory has run out in a forward, so
that less is there than was assumed; with 'auto', an optimizer's state has appeared late; or an
iteration has needed more than the budget, as where a router sends a rank more tokens. All is
measured again if more micro-batches are in flight than before, or if none has fitted for some
iterations, since all are larger.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.engine_setup import host_limit
from megatron.slipstream.fine_grained_activation_offload.report import LayerReport, RankReport
from megatron.slipstream.integration.budget import rescue
from megatron.slipstream.integration.budget.batch_sizes import MicroBatches, shape_of, size_of
from megatron.slipstream.integration.budget.device_limits import (
    Budget,
    DeviceLimits,
    optimizer_host_bytes,
)
from megatron.slipstream.integration.budget.messages import Messages, bytes_tried
from megatron.slipstream.integration.budget.stage_ranks import Lack, StageRanks, check_model
from megatron.slipstream.integration.layers import layer_settings
from megatron.slipstream.integration.layers.layer_boundaries import LayerBoundaries
from megatron.slipstream.integration.seam.model_router import stage_of
from megatron.slipstream.plan.layer_visits import Place, RankLayer
from megatron.slipstream.plan.relaxation import Limits, NothingFitsError, Relaxation, Stage
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.settings import describe_setting

PEAK = "iteration"
"""Name of the peak since the iteration began."""
NUM_UNFIT = 4
"""Iterations in a row without a micro-batch that fits, after which settings are chosen again."""


class MemoryBudget:
    """The budget of one model, in GiB of activations, or 'auto'.

    Raises:
        ValueError: The budget is 'auto', and the backend's device has no end.
    """

    def __init__(self, engine: OffloadEngine, budget: Budget) -> None:
        self.relaxation = Relaxation([], engine.options)
        """What chooses the assignment; of no layers before the first iteration."""
        self._engine = engine
        self._budget = budget
        self._chunk_refs: list[weakref.ref[torch.nn.Module]] = []
        self._boundaries = LayerBoundaries(engine)
        self._limits = DeviceLimits(engine, budget)
        self._messages = Messages(budget, engine.report.rank)
        self._ranks = StageRanks()
        self._lack: Optional[Lack] = None
        """What this stage lacks with its most frugal settings."""
        self._batches = MicroBatches()
        self._shape = (0, 0)
        """Sequence length and batch of the latest micro-batch."""
        self._is_spoiled = False
        """Whether layers had other settings in part of this iteration, so that it says nothing."""
        self._frugal_stages: set[int] = set()
        """Virtual stages whose layers are at their most frugal settings for one micro-batch."""
        self._has_run_out = False
        """Whether device memory ran out in this iteration, so that layers stay frugal in it."""
        self._has_fitted = False
        """Whether a micro-batch of this iteration has run with the settings chosen for it."""
        self._num_unfit = 0
        """Iterations in a row without one."""
        self._movable_bytes: list[int] = []
        self._planned_bytes = 0
        """The device peak by the plan that the last iteration was recorded for; 0 without one."""
        self._peak_bytes = 0
        """The device peak of the last iteration."""
        self._most_bytes = 0
        """The most that activations have needed since settings were settled and ranks asked."""
        self._is_blind = False
        """Whether the backend does not count memory."""

    @property
    def is_settled(self) -> bool:
        """Whether settings of layers do not change any more."""
        return self._is_blind or self.relaxation.is_settled

    @property
    def resident_bytes(self) -> int:
        """Device bytes of weights, gradients and optimizer state, as of the latest choice."""
        return self._limits.now.resident_bytes

    @property
    def activation_bytes(self) -> int:
        """The device peak of the last iteration without :attr:`resident_bytes`."""
        return self._peak_bytes - self._limits.now.resident_bytes

    @property
    def _chunks(self) -> list[torch.nn.Module]:
        """The chunks of the model, by virtual stage."""
        chunks = (reference() for reference in self._chunk_refs)
        return sorted((chunk for chunk in chunks if chunk is not None), key=stage_of)

    def close(self) -> None:
        """Give the layers back the settings that they were built with."""
        self._boundaries.stop()
        if self._chunks:
            layer_settings.restore(self._chunks)
        self._chunk_refs.clear()

    # The life of an iteration.

    def call(self, chunk: torch.nn.Module, inputs: Any, attempt: Callable[[], Any]) -> Any:
        """Run a forward pass, and once more if device memory runs out: :mod:`rescue`."""
        try:
            output = rescue.call(self._engine, self, chunk, inputs, attempt)
            self._batches.launched(output)
        except BaseException:
            self._is_spoiled = True  # Part of an iteration was measured.
            raise
        return output

    def enter(
        self, chunk: torch.nn.Module, tensors: Sequence[torch.Tensor], is_first: bool
    ) -> None:
        """Note that a chunk is entered in training; an iteration begins with it if ``is_first``.

        Raises:
            ValueError: Activations exceed the budget with the most frugal assignment, too.
        """
        shape = shape_of(chunk, tensors)
        self._shape = shape or self._shape
        if all(chunk is not known for known in self._chunks):
            self._add(chunk, is_first)
        if is_first:
            self._begin()
        if not self._is_blind:
            self._fit(chunk, shape)
        self._boundaries.come_to(Place.CALL, stage_of(chunk))

    def leave(self, chunk: torch.nn.Module) -> None:
        """Note that forward returns from a chunk."""
        self._boundaries.come_to(Place.RETURN, stage_of(chunk))

    def before_end(self) -> None:
        """Note that all passes of the iteration have been issued, and its plan is not made yet."""
        # The first output of a model may have no part in its loss.
        is_trained = self._batches.has_backward or self._boundaries.has_backward
        growth_bytes = self._boundaries.end()
        self._batches.end(is_trained)
        if not is_trained:  # An evaluation with gradients enabled.
            self._is_spoiled = True
            if self.relaxation.stage is Stage.FRUGAL:
                self._batches = MicroBatches()
            return
        if growth_bytes is not None:
            self._limits.note_growth(growth_bytes)
        if not self._is_blind:
            self._peak_bytes = self._engine.store.backend.peak_bytes(PEAK)
            is_as_chosen = self.relaxation.is_settled and not self._is_spoiled
            if is_as_chosen and self._batches.largest_share <= 1:
                self._most_bytes = max(self._most_bytes, self.activation_bytes)

    def after_end(self) -> None:
        """Note that the iteration's plan is made.

        Raises:
            ValueError: On a rank, activations exceed the budget with the most frugal assignment,
                too. All ranks raise it: they would wait for one that raised it alone.
        """
        plan = self._engine.plan
        self._movable_bytes, self._planned_bytes = [], 0
        if self._boundaries.has_memory and plan is not None:
            self._movable_bytes = self._boundaries.movable_bytes(plan.trace)
            self._planned_bytes = (plan.peak_bytes() or (0, 0))[1]
        worst = None if self._is_blind else self._ranks.worst(self._lack)
        if worst is not None:
            raise self._messages.nothing_fits(worst, self._shape)

    def _add(self, chunk: torch.nn.Module, is_first: bool) -> None:
        """Add a chunk, with each layer at its most frugal setting."""
        check_model(chunk, self._budget)
        self._ranks.add(chunk)
        self._chunk_refs.append(weakref.ref(chunk))
        try:
            host_limit.reserve(optimizer_host_bytes(self._chunks))
            if not is_first:
                layer_settings.make_frugal(chunk)
            self.relaxation = Relaxation(self._watch(), self._engine.options)
        except BaseException:
            self._chunk_refs.pop()  # The next call of the chunk adds it.
            raise

    def _watch(self) -> list[RankLayer]:
        """Set hooks on the layers, and return what is known of each."""
        chunks = self._chunks
        options = layer_settings.layers_of(chunks)
        layers = [RankLayer(one.kind, stage_of(chunks[one.chunk]), one.settings) for one in options]
        self._boundaries.watch([one.layer for one in options], layers)
        return layers

    def _begin(self) -> None:
        """Give the layers the assignment of the coming iteration."""
        relaxation, engine = self.relaxation, self._engine
        if engine.store.backend.memory() is None:
            if engine.report.rank == 0:
                self._messages.warn("blind", backend=engine.store.backend.name)
            self._is_blind = True
            layer_settings.apply(relaxation.frugal, self._chunks)
            return
        self._ranks.begin()
        self._limits.begin(self._chunks, self._boundaries.hidden_bytes)
        self._num_unfit = 0 if self._has_fitted else self._num_unfit + 1
        if not self._peak_bytes:  # The first iteration.
            self._follow(relaxation, self._limits.find(self._chunks, relaxation.frugal_bytes))
        elif self._has_run_out:
            self._note_larger(relaxation, self._batches.largest_share, self.activation_bytes)
            self._choose_again(relaxation)
        elif not relaxation.is_settled:
            self._advance(relaxation)
        elif self._ranks.is_asked:
            self._look_again(relaxation)
        if self._batches.varies and engine.options.target_memory_bytes is not None:
            engine.lifecycle.change_target(None)
        if self._frugal_stages:
            self._frugal_stages.clear()
            for chunk in self._chunks:
                layer_settings.give(self.relaxation.assignment, self._chunks, chunk)
        self._is_spoiled = self._has_run_out = self._has_fitted = False
        self._batches.begin()
        engine.store.backend.begin_peak(PEAK)

    def _look_again(self, relaxation: Relaxation) -> None:
        """Choose again if ranks have to: [Note: After a budget has settled]."""
        is_unfit = self._num_unfit >= NUM_UNFIT
        facts = (self._batches.are_more, is_unfit, self._bytes_over_budget())
        more, unfit, over_bytes = self._ranks.largest(facts)
        needed_bytes = self._limits.allowed_bytes + int(over_bytes)
        if more or unfit:
            self._start_over()
        elif over_bytes and relaxation.note_needed(needed_bytes, self._limits.agreed):
            needed, allowed = map(format_bytes, (needed_bytes, self._limits.allowed_bytes))
            self._messages.warn("over", needed=needed, allowed=allowed)
            self._choose_again(relaxation)
        elif self._limits.is_auto:
            before_bytes = self._limits.allowed_bytes
            limits = self._limits.find(self._chunks, relaxation.frugal_bytes)
            left_bytes = self._limits.shrunk(limits, self._ranks)
            if left_bytes is not None:
                left, before = format_bytes(max(0, left_bytes)), format_bytes(before_bytes)
                self._messages.warn("less", left=left, before=before)
                self._choose_again(relaxation)

    def _bytes_over_budget(self) -> int:
        """Return by how much an iteration has exceeded the budget since ranks were asked.

        What has become resident since is not an activation.
        """
        over_bytes, self._most_bytes = self._most_bytes - self._limits.allowed_bytes, 0
        if over_bytes > 0:
            limits = self._limits.find(self._chunks, self.relaxation.frugal_bytes)
            over_bytes -= max(0, limits.resident_bytes - self._limits.now.resident_bytes)
        return max(0, over_bytes)

    def _start_over(self) -> None:
        """Measure all again, with the micro-batches that come now."""
        self._batches = MicroBatches()
        self.relaxation = Relaxation(self._watch(), self._engine.options)
        self._follow(self.relaxation, self._limits.find(self._chunks, 0))

    def _advance(self, relaxation: Relaxation) -> None:
        """Add the last iteration, and choose the assignment of the coming one."""
        self._lack = None
        is_timed = relaxation.stage is Stage.TIMED
        boundaries = self._boundaries.boundaries()
        is_busy = is_timed and boundaries is None
        share, are_more = self._batches.largest_share, self._batches.are_more
        facts = (are_more, is_busy, self._is_spoiled, share, self.activation_bytes)
        more, busy, spoiled, larger, activation_bytes = self._ranks.largest(facts)
        if more:
            self._start_over()
            return
        if spoiled:
            self._note_larger(relaxation, larger, int(activation_bytes))
            self._follow(relaxation, self._limits.find(self._chunks, relaxation.frugal_bytes))
            return
        if busy:
            return  # The device has not finished it.
        if not is_timed or boundaries is None:
            boundaries = self._boundaries.without_times()
        before = relaxation.assignment, relaxation.stage is Stage.FRUGAL
        scale = 1 / larger if larger else 1.0
        needed_bytes = self.activation_bytes
        if relaxation.predicted is not None:
            # All that may moves while a choice is recorded; afterwards, what its plan says.
            needed_bytes = max(needed_bytes, self._planned_bytes - self.resident_bytes)
        is_choice = is_timed and relaxation.predicted is not None
        waits_ms = self._planned_waits_ms() if is_choice else None
        relaxation.note(boundaries, self._movable_bytes, needed_bytes, scale, waits_ms)
        relaxation.take(self._ranks.largest(relaxation.numbers()))
        limits = self._limits.find(self._chunks, relaxation.frugal_bytes)
        try:
            relaxation.advance(self._limits.agree(limits, self._ranks))
        except NothingFitsError as error:
            self._give_up(relaxation, error)
            self._follow(relaxation, limits)
            return
        # The first iteration may have seen no gradients that stay, so its plan does not. The last
        # one's plan may not know what the iteration has needed beyond it.
        is_over = relaxation.activation_bytes > self._limits.allowed_bytes
        if before != (relaxation.assignment, False) or (relaxation.is_settled and is_over):
            self._follow(relaxation, limits)
        elif relaxation.is_settled:
            self._engine.lifecycle.plans.clear(but_of=[relaxation.assignment])
            if not self._batches.varies:
                self._engine.lifecycle.lower_target(relaxation.target_bytes(limits))
            self._end(relaxation, self._engine.report.planned_ms)
        else:
            self._boundaries.begin(has_memory=False)

    def _planned_waits_ms(self) -> Optional[float]:
        """Return the waits for copies by the plan of the last iteration; None without times."""
        self._engine.lifecycle.read_times()  # The device was behind when the iteration ended.
        plan, planned_ms = self._engine.plan, self._engine.report.planned_ms
        if plan is None or not plan.trace.step_ms or not planned_ms:
            return None
        return max(0.0, planned_ms - sum(plan.trace.step_ms))

    def _note_larger(self, relaxation: Relaxation, share: float, activation_bytes: int) -> None:
        if share > 1:
            relaxation.note_larger(share, activation_bytes)
            self._batches.enlarge(share)

    def _choose_again(self, relaxation: Relaxation) -> None:
        """Choose from what was measured: [Note: After a budget has settled]."""
        self._lack = None
        limits = self._limits.find(self._chunks, relaxation.frugal_bytes)
        try:
            relaxation.choose_again(self._limits.agree(limits, self._ranks))
        except NothingFitsError as error:
            self._give_up(relaxation, error)
        self._watch()
        self._follow(relaxation, limits)

    def _give_up(self, relaxation: Relaxation, error: NothingFitsError) -> None:
        """Raise, or go on frugally until all ranks raise the same."""
        self._lack = Lack(error.needed_bytes, error.allowed_bytes, self._engine.report.rank)
        if self._ranks.is_alone:
            raise self._messages.nothing_fits(self._lack, self._shape) from error
        relaxation.assignment = relaxation.frugal

    def _follow(self, relaxation: Relaxation, limits: Limits) -> None:
        """Give the layers their assignment, and record the coming iteration.

        Of a choice that was followed, the plan is kept, so that it is not recorded again.
        """
        self._limits.now, self._most_bytes = limits, 0
        target_bytes = pass_ms = None
        if not self._batches.varies:
            target_bytes = relaxation.target_bytes(limits)
            pass_ms = relaxation.visits.pass_ms(relaxation.assignment)
        lifecycle = self._engine.lifecycle
        lifecycle.change_target(target_bytes, but_of=relaxation.followed)
        lifecycle.planner.pass_ms = pass_ms
        layer_settings.apply(relaxation.assignment, self._chunks)
        if relaxation.is_settled:
            self._end(relaxation, self._engine.report.planned_ms if lifecycle.last else 0.0)
        else:
            self._boundaries.begin(has_memory=True)

    # Micro-batches of several sizes, and more of them.

    def _fit(self, chunk: torch.nn.Module, shape: Optional[tuple[int, int]]) -> None:
        """Give the layers of a chunk settings with which the coming micro-batch fits.

        [Note: Larger micro-batches]
        What a micro-batch needs is known from its size before it is launched. If it is larger than
        all that were measured, and what was measured, scaled to it, exceeds the budget, its layers
        get their most frugal settings for this one pass; also if more are in flight with it than
        were measured. Once sizes vary, all that may moves, since a plan for less would be one for
        the size that was recorded.
        """
        relaxation, stage = self.relaxation, stage_of(chunk)
        is_first = relaxation.stage is Stage.FRUGAL  # Layers are frugal anyway.
        is_one_more = self._batches.is_one_more(is_first)
        size = self._ranks.agreed_size(size_of(chunk, shape))
        share = 1.0 if size is None else self._batches.share_of(stage, size, is_first)
        # A plan for a target may need all that is allowed.
        has_target = self._engine.options.target_memory_bytes is not None
        needed = self._limits.allowed_bytes if has_target else relaxation.activation_bytes
        if self._has_run_out:
            return
        if is_one_more or (share > 1 and needed * share > self._limits.allowed_bytes):
            if is_one_more:
                self._messages.warn("more", self._batches.most_in_flight)
            else:
                length, batch = self._shape
                self._messages.warn("larger", batch=batch, length=length)
            self._make_frugal(chunk)
            return
        self._has_fitted = True
        if stage in self._frugal_stages:
            self._frugal_stages.discard(stage)
            layer_settings.give(relaxation.assignment, self._chunks, chunk)

    def _make_frugal(self, chunk: torch.nn.Module) -> None:
        self._is_spoiled = True
        self._frugal_stages.add(stage_of(chunk))
        layer_settings.make_frugal(chunk)

    # Device memory that runs out in spite of all.

    def rescue(self, chunk: torch.nn.Module, failure: torch.OutOfMemoryError) -> None:
        """Make the layers of a chunk frugal until the iteration ends: device memory ran out.

        The settings of later iterations are chosen for a device that ends where it did.
        """
        (length, batch), tried = self._shape, format_bytes(bytes_tried(failure))
        self._messages.warn("ran out", length=length, batch=batch, tried=tried)
        relaxation = self.relaxation
        if not self._is_blind and relaxation.stage is not Stage.FRUGAL:
            self._limits.end_at(self._engine.store.backend.peak_bytes(PEAK))
        self._has_run_out = True
        self._make_frugal(chunk)

    def out_of_memory(
        self, failure: torch.OutOfMemoryError, because: str
    ) -> torch.OutOfMemoryError:
        """Return the error for a pass that ran out of memory; ``because``: not repeated."""
        peak_bytes = 0 if self._is_blind else self._engine.store.backend.peak_bytes(PEAK)
        used_bytes = max(0, peak_bytes - self._limits.now.resident_bytes)
        is_frugal = self._has_run_out or bool(self._frugal_stages)
        is_frugal |= self.relaxation.assignment == self.relaxation.frugal
        return self._messages.ran_out(failure, used_bytes, self._shape, because, is_frugal)

    # What users are told.

    def fill(self, report: RankReport) -> None:
        """Add what layers keep, move and recompute, and the budget, to the report of the rank."""
        relaxation, plan = self.relaxation, self._engine.plan
        if not relaxation.assignment:
            return
        report.budget_bytes = self._limits.now.allowed_bytes
        report.budget_reason = f"activation_memory_budget={self._budget}"
        num_layers = len(relaxation.assignment)
        moved = self._boundaries.moved_bytes(plan) if plan is not None else [0] * num_layers
        reason = "the least time that fits" if relaxation.is_settled else "still being measured"
        visits = relaxation.visits
        report.layers = [
            LayerReport(
                describe_setting(setting),
                layer.kind,
                *visits.saved_bytes(layer, setting, nbytes),
                visits.recomputed_ms(layer, setting),
                reason,
            )
            for layer, setting, nbytes in zip(
                visits.layers, relaxation.assignment, moved, strict=True
            )
        ]

    def _end(self, relaxation: Relaxation, planned_ms: float) -> None:
        """Measure no more, and say what was chosen."""
        self._boundaries.stop()  # Hooks of layers would cost each later pass.
        self._messages.settled(relaxation, self._limits.now, planned_ms)
