# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Keeps a model's activations within ``activation_memory_budget``.

Before each iteration the layers get the assignment that
:class:`~megatron.slipstream.plan.relaxation.Relaxation` has chosen, and plans the limit on the
device peak; after it, what was measured is added. Ranks that compute a pipeline stage together
choose from the same numbers: recomputation repeats their collectives.
"""

from __future__ import annotations

import logging
import math
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, Literal, Optional, Union

import torch
from megatron.core import parallel_state

from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.engine_setup import host_limit
from megatron.slipstream.fine_grained_activation_offload.report import LayerReport, RankReport
from megatron.slipstream.integration.budget import rescue
from megatron.slipstream.integration.budget.batch_sizes import (
    shape_of,
    size_of,
    smaller_sizes,
)
from megatron.slipstream.integration.budget.optimizer_memory import optimizer_host_bytes
from megatron.slipstream.integration.layers import layer_settings
from megatron.slipstream.integration.layers.layer_boundaries import LayerBoundaries
from megatron.slipstream.plan.layer_visits import Place, RankLayer
from megatron.slipstream.plan.relaxation import Limits, NothingFitsError, Relaxation, Stage
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.settings import describe_setting
from megatron.slipstream.plan.trace import Bandwidth

logger = logging.getLogger(__name__)

MARGIN = 0.05
"""Share of the obtainable device memory that 'auto' leaves: the allocator reserves more than it
allocates."""
PEAK = "iteration"
"""Name of the peak since the iteration began."""
Budget = Union[float, Literal["auto"]]


class MemoryBudget:
    """The budget of one model.

    Args:
        engine: The engine of the model.
        budget: GiB of activations, or 'auto'.

    Raises:
        ValueError: The budget is 'auto', and the backend's device has no end.
    """

    def __init__(self, engine: OffloadEngine, budget: Budget) -> None:
        if budget == "auto" and engine.store.backend.obtainable_bytes() is None:
            raise ValueError(
                "activation_memory_budget='auto' is not supported with offload_backend="
                f"{engine.store.backend.name!r} because host memory stands in for the device's, "
                "and has no end of its own; set the GiB that activations may use"
            )
        self.relaxation: Optional[Relaxation] = None
        """What chooses the assignment; None before the first iteration."""
        self._engine = engine
        self._budget = budget
        self._chunk_refs: list[weakref.ref[torch.nn.Module]] = []
        self._boundaries = LayerBoundaries(engine)
        self._limits = Limits(0, 0, 0)
        self._allowed_bytes = 0
        """Bytes of activations that all ranks of the stage may use."""
        self._known_size: dict[int, float] = {}
        """For each virtual stage, the largest micro-batch for which the assignment was chosen."""
        self._size = 0.0
        """The largest share of a known size in this iteration."""
        self._varies = False
        """Whether micro-batches have had several sizes."""
        self._is_spoiled = False
        """Whether layers had other settings in part of this iteration, so that it says nothing."""
        self._frugal_stages: set[int] = set()
        """Virtual stages whose layers are at their most frugal settings for one micro-batch."""
        self._has_run_out = False
        """Whether device memory ran out in this iteration, so that layers stay frugal in it."""
        self._left_bytes = 0
        """What the first iteration left allocated beside gradients."""
        self._movable_bytes: list[int] = []
        self._peak_bytes = 0
        """The device peak of the last iteration."""
        self._is_blind = False
        """Whether the backend does not count memory."""
        self._has_rescued = self._has_repeated = False

    @property
    def is_settled(self) -> bool:
        """Whether settings of layers do not change any more."""
        is_final = self.relaxation is not None and self.relaxation.is_settled
        return self._is_blind or is_final

    @property
    def resident_bytes(self) -> int:
        """Device bytes of weights, gradients and optimizer state, as of the latest choice."""
        return self._limits.resident_bytes

    @property
    def activation_bytes(self) -> int:
        """The device peak of the last iteration without :attr:`resident_bytes`."""
        return self._peak_bytes - self._limits.resident_bytes

    @property
    def _chunks(self) -> list[torch.nn.Module]:
        """The chunks of the model, by virtual stage."""
        chunks = (reference() for reference in self._chunk_refs)
        return sorted((chunk for chunk in chunks if chunk is not None), key=_stage)

    def close(self) -> None:
        """Give the layers back the settings that they were built with."""
        self._boundaries.stop()
        if self._chunks:
            layer_settings.restore(self._chunks)
        self._chunk_refs.clear()

    # The life of an iteration.

    def call(self, chunk: torch.nn.Module, inputs: Any, attempt: Callable[[], Any]) -> Any:
        """Run a forward pass, and once more if device memory runs out: :mod:`rescue`."""
        return rescue.call(self._engine, self, chunk, inputs, attempt)

    def enter(
        self, chunk: torch.nn.Module, tensors: Sequence[torch.Tensor], is_first: bool
    ) -> None:
        """Note that forward enters a chunk of the model in training.

        Args:
            chunk: The chunk.
            tensors: Its arguments.
            is_first: Whether an iteration begins with it.

        Raises:
            ValueError: Activations exceed the budget with the most frugal assignment, too.
        """
        if all(chunk is not known for known in self._chunks):
            self._add(chunk, is_first)
        if is_first:
            self._begin()
        if not self._is_blind:
            self._fit(chunk, tensors)
        self._boundaries.come_to(Place.CALL, _stage(chunk))

    def leave(self, chunk: torch.nn.Module) -> None:
        """Note that forward returns from a chunk."""
        self._boundaries.come_to(Place.RETURN, _stage(chunk))

    def before_end(self) -> None:
        """Note that all passes of the iteration have been issued, and its plan is not made yet."""
        self._boundaries.end()
        if not self._peak_bytes:
            self._left_bytes = self._boundaries.growth_bytes
        if not self._is_blind:
            self._peak_bytes = self._engine.store.backend.peak_bytes(PEAK)

    def after_end(self) -> None:
        """Note that the iteration's plan is made."""
        plan = self._engine.plan
        self._movable_bytes = []
        if self._boundaries.has_memory and plan is not None:
            self._movable_bytes = self._boundaries.movable_bytes(plan.trace)

    def _add(self, chunk: torch.nn.Module, is_first: bool) -> None:
        """Add a chunk, with each layer at its most frugal setting."""
        self._chunk_refs.append(weakref.ref(chunk))
        if not is_first:
            layer_settings.make_frugal(chunk)
        options = layer_settings.layers_of(self._chunks)
        stages = [_stage(one) for one in self._chunks for _ in layer_settings.layers_of([one])]
        layers = [
            RankLayer(one.kind, stage, one.settings)
            for one, stage in zip(options, stages, strict=True)
        ]
        self.relaxation = Relaxation(layers, self._engine.options)
        self._boundaries.watch([one.layer for one in options], layers)

    def _begin(self) -> None:
        """Give the layers the assignment of the coming iteration."""
        relaxation, engine = self.relaxation, self._engine
        assert relaxation is not None
        if engine.store.backend.memory() is None:
            self._stay_frugal(relaxation)
            return
        if not self._peak_bytes:  # The first iteration.
            host_limit.reserve(optimizer_host_bytes(self._chunks))
            self._follow(relaxation, self._find_limits())
        elif not relaxation.is_settled:
            self._advance(relaxation)
        if self._varies and engine.options.target_memory_bytes is not None:
            engine.change_target(None)
        if self._frugal_stages:
            self._frugal_stages.clear()
            for chunk in self._chunks:
                layer_settings.give(relaxation.assignment, self._chunks, chunk)
        self._size, self._is_spoiled, self._has_run_out = 0.0, False, False
        engine.store.backend.begin_peak(PEAK)

    def _stay_frugal(self, relaxation: Relaxation) -> None:
        if not self._is_blind and self._engine.report.rank == 0:
            logger.warning(
                "activation_memory_budget=%s is not followed, because backend %s does not count "
                "device memory: every layer is recomputed, and all that may moves; leave "
                "activation_memory_budget out, or train on a GPU",
                self._budget,
                self._engine.store.backend.name,
            )
        self._is_blind = True
        layer_settings.apply(relaxation.frugal, self._chunks)

    def _advance(self, relaxation: Relaxation) -> None:
        """Add the last iteration, and choose the assignment of the coming one."""
        is_timed = relaxation.stage is Stage.TIMED
        boundaries = self._boundaries.boundaries()
        is_busy = is_timed and boundaries is None
        facts = (is_busy, self._is_spoiled, self._size, self.activation_bytes)
        busy, spoiled, larger, activation_bytes = _largest(facts)
        if spoiled:
            if larger > 1:
                relaxation.note_larger(larger, int(activation_bytes))
                self._known_size = {s: size * larger for s, size in self._known_size.items()}
            self._follow(relaxation, self._find_limits())
            return
        if busy:
            return  # The device has not finished it.
        if not is_timed or boundaries is None:
            boundaries = self._boundaries.without_times()
        limits = self._find_limits()
        before = relaxation.assignment, relaxation.stage is Stage.FRUGAL
        scale = 1 / larger if larger else 1.0
        relaxation.note(boundaries, self._movable_bytes, self.activation_bytes, scale)
        relaxation.take(_largest(relaxation.numbers()))
        agreed = _tightest(limits)
        self._allowed_bytes = agreed.device_bytes - agreed.resident_bytes
        try:
            relaxation.advance(agreed)
        except NothingFitsError as error:
            raise self._nothing_fits(error) from error
        # The first iteration may have seen no gradients that stay, so its plan does not. The last
        # one's plan may not know what the iteration has needed beyond it.
        is_over = relaxation.activation_bytes > self._allowed_bytes
        if before != (relaxation.assignment, False) or (relaxation.is_settled and is_over):
            self._follow(relaxation, limits)
        elif relaxation.is_settled:
            self._end(relaxation)
        else:
            self._boundaries.begin(has_memory=False)

    def _follow(self, relaxation: Relaxation, limits: Limits) -> None:
        """Give the layers their assignment, and record the coming iteration."""
        self._limits = limits
        self._engine.change_target(None if self._varies else relaxation.target_bytes(limits))
        layer_settings.apply(relaxation.assignment, self._chunks)
        if relaxation.is_settled:
            self._end(relaxation)
        else:
            self._boundaries.begin(has_memory=True)

    # Micro-batches of several sizes.

    def _fit(self, chunk: torch.nn.Module, tensors: Sequence[torch.Tensor]) -> None:
        """Give the layers of a chunk settings with which the coming micro-batch fits.

        [Note: Larger micro-batches]
        What a micro-batch needs is known from its size before it is launched. If it is larger than
        all that were measured, and what was measured, scaled to it, exceeds the budget, its layers
        get their most frugal settings for this one pass. Once sizes vary, all that may moves, since
        a plan for less would be one for the size that was recorded.
        """
        size, stage = size_of(chunk, tensors), _stage(chunk)
        if size is None:
            return
        if getattr(chunk.config, "expert_model_parallel_size", 1) > 1:
            if not getattr(chunk.config, "variable_seq_lengths", False):
                return  # Its ranks could not agree without an exchange in each pass.
            (size,) = _largest([size])
        known = self._known_size.setdefault(stage, size)
        self._varies |= size != known
        if not self._peak_bytes:  # In the first iteration layers are frugal anyway.
            known = self._known_size[stage] = max(known, size)
        share = size / known
        self._size = max(self._size, share)
        relaxation = self.relaxation
        assert relaxation is not None
        # A plan for a target may need all that is allowed.
        has_target = self._engine.options.target_memory_bytes is not None
        needed = self._allowed_bytes if has_target else relaxation.activation_bytes
        if self._has_run_out:
            return
        if share > 1 and needed * share > self._allowed_bytes:
            self._make_frugal(chunk, share)
        elif stage in self._frugal_stages:
            self._frugal_stages.discard(stage)
            layer_settings.give(relaxation.assignment, self._chunks, chunk)

    def _make_frugal(self, chunk: torch.nn.Module, share: float) -> None:
        relaxation, stage = self.relaxation, _stage(chunk)
        assert relaxation is not None
        if not self._has_rescued:
            logger.warning(
                "rank %d: a micro-batch is %.2f times as large as any before, so that with the "
                "settings chosen for activation_memory_budget=%s it would not fit: every layer is "
                "recomputed for it, and for others like it",
                self._engine.report.rank,
                share,
                self._budget,
            )
        self._has_rescued = self._is_spoiled = True
        self._frugal_stages.add(stage)
        layer_settings.make_frugal(chunk)

    # Device memory that runs out in spite of all.

    def rescue(
        self, chunk: torch.nn.Module, tensors: Sequence[torch.Tensor], tried_bytes: int
    ) -> None:
        """Make the layers of a chunk frugal until the iteration ends: device memory ran out.

        Args:
            chunk: The chunk.
            tensors: Its arguments.
            tried_bytes: Bytes of the allocation that failed.
        """
        length, batch = shape_of(chunk, tensors) or (0, 0)
        if not self._has_repeated:
            logger.warning(
                "rank %d: device memory ran out in the forward of a micro-batch of %d x %d tokens "
                "within activation_memory_budget=%s: what it had saved is freed, every layer is "
                "recomputed until the iteration ends, and the forward is repeated (%s were asked "
                "for)",
                self._engine.report.rank,
                batch,
                length,
                self._budget,
                format_bytes(tried_bytes),
            )
        self._has_repeated = self._has_run_out = self._is_spoiled = True
        self._frugal_stages.add(_stage(chunk))
        layer_settings.make_frugal(chunk)

    def out_of_memory(
        self,
        chunk: torch.nn.Module,
        tensors: Sequence[torch.Tensor],
        tried_bytes: int,
        because: str,
    ) -> torch.OutOfMemoryError:
        """Return the error for a forward that ran out of memory and is not repeated.

        Args:
            chunk: The chunk.
            tensors: Its arguments.
            tried_bytes: Bytes of the allocation that failed.
            because: Why it is not repeated.
        """
        peak_bytes = 0 if self._is_blind else self._engine.store.backend.peak_bytes(PEAK)
        used_bytes = max(0, peak_bytes - self._limits.resident_bytes)
        needed_bytes = used_bytes + tried_bytes
        share = used_bytes / max(1, needed_bytes)
        cures = smaller_sizes(share, shape_of(chunk, tensors) or (0, 0))
        less_gib = math.floor((used_bytes - tried_bytes) / 2**30 * 100) / 100
        if less_gib > 0 and not self._has_run_out:
            cures.insert(0, f"activation_memory_budget to at most {less_gib:.2f}")
        return torch.OutOfMemoryError(
            f"activation_memory_budget={self._budget} is not supported with this micro-batch "
            f"because rank {self._engine.report.rank} ran out of device memory with "
            f"{format_bytes(used_bytes)} of activations, and {because}; "
            + ("set " + ", or ".join(cures) if cures else "spread the model over more devices")
        )

    # Limits, and what ranks agree on.

    def _find_limits(self) -> Limits:
        """Return what the coming iteration may use, and what is in use before it."""
        backend = self._engine.store.backend
        reading = backend.memory()
        assert reading is not None
        base_bytes = reading[0] + _absent_gradient_bytes(self._chunks)
        resident_bytes = base_bytes - self._left_bytes
        obtainable = backend.obtainable_bytes()
        if self._budget != "auto":
            device_bytes = resident_bytes + int(self._budget * 2**30)
        else:
            assert obtainable is not None
            device_bytes = int(obtainable * (1 - MARGIN))
        bandwidth = self._engine.measure_bandwidth() if self._peak_bytes else None
        host_bytes = self._engine.store.host_pool.limit_bytes
        return Limits(device_bytes, resident_bytes, base_bytes, bandwidth, host_bytes)

    # What users are told.

    def fill(self, report: RankReport) -> None:
        """Add what layers keep, move and recompute, and the budget, to the report of the rank."""
        relaxation, plan = self.relaxation, self._engine.plan
        if relaxation is None:
            return
        report.budget_bytes = self._limits.device_bytes - self._limits.resident_bytes
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

    def _nothing_fits(self, error: NothingFitsError) -> ValueError:
        share = error.allowed_bytes / error.needed_bytes
        needed_gib = math.ceil(error.needed_bytes / 2**30 * 100) / 100
        cures = [f"set activation_memory_budget to {needed_gib:.2f} or more"]
        if self._budget == "auto":
            cures = ["spread the model over more devices"]
        cures += smaller_sizes(share, self._boundaries.shape)
        return ValueError(
            f"activation_memory_budget={self._budget} is not supported with this model because "
            f"rank {self._engine.report.rank} needs {format_bytes(error.needed_bytes)} for "
            "activations even if every layer is recomputed and its input offloaded, and "
            f"{format_bytes(max(0, error.allowed_bytes))} are allowed; " + ", or ".join(cures)
        )

    def _end(self, relaxation: Relaxation) -> None:
        """Measure no more, and say what was chosen."""
        self._boundaries.stop()  # Hooks of layers would cost each later pass.
        counts = Counter(map(describe_setting, relaxation.assignment))
        predicted = relaxation.predicted
        log = logger.info if self._engine.report.rank == 0 else logger.debug
        log(
            "activation_memory_budget=%s has settled: layers %s; the device peak may be %s, of "
            "which activations %s; at most %s is predicted",
            self._budget,
            ", ".join(f"{number} {name}" for name, number in sorted(counts.items())),
            format_bytes(self._limits.device_bytes),
            format_bytes(self._limits.device_bytes - self._limits.resident_bytes),
            format_bytes(predicted.peak_bytes if predicted is not None else 0),
        )


def _stage(chunk: Any) -> int:
    return getattr(chunk, "vp_stage", None) or 0


def _absent_gradient_bytes(chunks: Sequence[torch.nn.Module]) -> int:
    """Return the bytes of gradients that backward will allocate."""
    parameters = (parameter for chunk in chunks for parameter in chunk.parameters())
    return sum(
        parameter.nbytes
        for parameter in parameters
        if parameter.requires_grad
        and parameter.grad is None
        and getattr(parameter, "main_grad", None) is None
    )


def _tightest(limits: Limits) -> Limits:
    """Return the limits that hold on all ranks that compute the same pipeline stage."""
    host_bytes = math.inf if limits.host_bytes is None else limits.host_bytes
    bandwidth = limits.bandwidth or [-1.0] * len(Bandwidth._fields)
    least = (limits.device_bytes - limits.resident_bytes, host_bytes, *bandwidth)
    most = (limits.resident_bytes, limits.base_bytes - limits.resident_bytes)
    resident, left, *rest = _largest([*most, *(-value for value in least)])
    allowed, host, *rates = (-value for value in rest)
    return Limits(
        int(resident + allowed),
        int(resident),
        int(resident + left),
        Bandwidth(*rates) if min(rates) > 0 else None,
        None if math.isinf(host) else int(host),
    )


def _largest(values: Sequence[float]) -> list[float]:
    """Return the largest of each value over the ranks that compute the same pipeline stage."""
    if not parallel_state.model_parallel_is_initialized():
        return list(values)
    group = parallel_state.get_tensor_and_data_parallel_group(with_context_parallel=True)
    if torch.distributed.get_world_size(group) == 1:
        return list(values)
    device = "cuda" if "nccl" in torch.distributed.get_backend(group) else "cpu"
    tensor = torch.tensor(values, dtype=torch.float64, device=device)
    torch.distributed.all_reduce(tensor, torch.distributed.ReduceOp.MAX, group=group)
    return [float(value) for value in tensor.tolist()]
