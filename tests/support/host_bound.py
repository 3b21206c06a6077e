# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A launch-bound engine: its iterations take the host's time for passes and copies of groups."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

from timed_backend import TimedBackend
from toy_model import SCHEDULES, all_equal, make_chunks, run_schedule

from megatron.slipstream.fine_grained_activation_offload.backend import Copy, Event, Stream
from megatron.slipstream.fine_grained_activation_offload.cost_trial import MAX_TRIALS, MIN_PAIRS
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.step_clock import (
    MAX_ROUNDS,
    NUM_TIMED,
    NUM_WARMUPS,
)
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.candidates import PolicyOptions

MAX_ITERATIONS = (MAX_ROUNDS + MAX_TRIALS + 1) * (NUM_WARMUPS + NUM_TIMED + 2 * (MIN_PAIRS + 2))
"""Number of iterations that all rounds and trials need if times do not vary."""
PASS_MS = 10.0
NUM_PASSES = 3


class HostBound(TimedBackend):
    """A backend whose clock advances only with host work: for each pass and each group's copies.

    Args:
        copy_ms: Time of a group's copies one way.
        obtainable: Device memory that can be allocated.
        ms_per_kib: Additional time per KiB that they copy.
    """

    def __init__(
        self, copy_ms: float, obtainable: Optional[int] = None, ms_per_kib: float = 0.0
    ) -> None:
        super().__init__()
        self.now_ms = 0.0
        self.num_copies = 0
        self._copy_ms = copy_ms
        self._ms_per_kib = ms_per_kib
        self._obtainable = obtainable

    def timed_event(self, stream: Stream) -> Event:
        return self.now_ms

    def elapsed_ms(self, start: Event, stop: Event) -> Optional[float]:
        return float(stop - start) if self.has_come else None

    def run_copies(self, copies: Sequence[Copy], stream: Stream) -> None:
        super().run_copies(copies, stream)
        self.now_ms += self._copy_ms
        self.now_ms += self._ms_per_kib * sum(source.nbytes for _, source in copies) / 1024
        self.num_copies += len(copies)

    def obtainable_bytes(self) -> Optional[int]:
        return self._obtainable


class Engine(PipelineOffloadManager):
    """The engine of a model whose passes take time on the host."""

    def __init__(self, backend: HostBound, max_percent: float) -> None:
        super().__init__(OffloadEngine(backend, PolicyOptions(max_overhead_percent=max_percent)))
        self.clock = backend

    def init_model_chunk_offload_handler(self, *arguments: Any, **options: Any) -> None:
        super().init_model_chunk_offload_handler(*arguments, **options)
        self.clock.now_ms += PASS_MS

    @property
    def num_moving(self) -> int:
        return sum(group.moves for group in self.plan.groups)


def train(engine: Engine, num_iterations: Optional[int] = None) -> list[float]:
    """Train, compare every gradient, and return the durations of the iterations.

    Args:
        engine: An engine, new or already trained.
        num_iterations: Number of iterations; None to train until the plan is settled.
    """
    chunks = make_chunks(1)
    expected = run_schedule(chunks, SCHEDULES["accumulation"], None)
    took_ms: list[float] = []
    most = MAX_ITERATIONS if num_iterations is None else num_iterations
    while len(took_ms) < most and (num_iterations is not None or not engine.is_settled):
        begin_ms = engine.clock.now_ms
        assert all_equal(expected, run_schedule(chunks, SCHEDULES["accumulation"], engine))
        took_ms.append(engine.clock.now_ms - begin_ms)
    assert num_iterations is not None or engine.is_settled
    return took_ms
