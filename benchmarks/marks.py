# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What happens at the marks of a model's groups: host time per call, and compute time between."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator
from statistics import median
from typing import Any, Optional
from unittest.mock import patch

import torch
from megatron_models import use_gpu
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.engines import Engine
from megatron.slipstream.fine_grained_activation_offload.markers import (
    CommitMark,
    at_first_gradient,
)
from megatron.slipstream.plan.trace import BACKWARD, OUTPUT_LAYER, StepKind

MANAGER_METHODS = (
    "init_model_chunk_offload_handler",
    "pop_forward_chunk",
    "cur_forward_chunk",
    "__enter__",
    "__exit__",
    "flush_delayed_groups",
    "reset",
)
MARK_METHODS = (
    "on_group_start_forward",
    "on_group_commit_forward",
    "on_group_commit_backward",
    "on_group_start_backward",
)
NUM_ITERATIONS = 5


class HostTimes:
    """Host time that one iteration spends in an engine, by what was called."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self._is_inside = False

    @property
    def us_per_group(self) -> Optional[float]:
        """All of it, spread over the groups of the iteration; None if there were none."""
        num_groups = self.calls["on_group_commit_forward"]
        return 1e6 * sum(self.seconds.values()) / num_groups if num_groups else None

    @property
    def us_per_call(self) -> dict[str, float]:
        """By name."""
        return {name: 1e6 * self.seconds[name] / self.calls[name] for name in sorted(self.calls)}

    @contextlib.contextmanager
    def watching(self, manager: Any, mark_class: type) -> Iterator[None]:
        """Time inside what layers, schedules and autograd call of the engine."""
        with contextlib.ExitStack() as stack:
            for owner, names in ((type(manager), MANAGER_METHODS), (mark_class, MARK_METHODS)):
                for name in names:
                    if hasattr(owner, name):
                        method = self._timed(name, getattr(owner, name))
                        stack.enter_context(patch.object(owner, name, method))
            enter = self._enter_with_timed_hooks(saved_tensors_hooks.__enter__)
            stack.enter_context(patch.object(saved_tensors_hooks, "__enter__", enter))
            yield

    def _timed(self, name: str, function: Any) -> Any:
        # What an engine calls of itself is part of what was called from outside. Backward may run
        # in a thread of its own, but then the thread that started it waits, so one flag serves.
        def timed(*args: Any, **kwargs: Any) -> Any:
            if self._is_inside:
                return function(*args, **kwargs)
            self._is_inside = True
            start_s = time.perf_counter()
            try:
                return function(*args, **kwargs)
            finally:
                self.seconds[name] += time.perf_counter() - start_s
                self.calls[name] += 1
                self._is_inside = False

        return timed

    def _enter_with_timed_hooks(self, enter: Any) -> Any:
        """Saved-tensor hooks are taken when a region is entered, so they are wrapped there."""

        def entered(hooks: Any) -> Any:
            pack, unpack = hooks.pack_hook, hooks.unpack_hook
            hooks.pack_hook = self._timed("pack", pack)
            hooks.unpack_hook = self._timed("unpack", unpack)
            try:
                return enter(hooks)
            finally:
                hooks.pack_hook, hooks.unpack_hook = pack, unpack

        return entered


def measure_host_times(engine: Engine) -> HostTimes:
    """The iteration of median total among a few, so that one slow call does not decide."""
    results = []
    for iteration in range(NUM_ITERATIONS):
        times = HostTimes()
        with times.watching(engine.manager, _mark_class(engine)):
            engine.run(iteration)
        if use_gpu():
            torch.cuda.synchronize()
        results.append(times)
    return sorted(results, key=lambda times: sum(times.seconds.values()))[NUM_ITERATIONS // 2]


def _mark_class(engine: Engine) -> type:
    """Of the objects whose methods autograd calls at the marks."""
    if engine.is_ours:
        return CommitMark
    from megatron.core.pipeline_parallel import fine_grained_activation_offload

    return fine_grained_activation_offload.ChunkOffloadHandler


MarkName = tuple[StepKind, str]


class MarkClock:
    """Stands behind megatron-core's seam, moves nothing, and notes when compute passes each mark.

    Meets the part of the manager's contract that is used without CUDA graphs.
    """

    def __init__(self) -> None:
        self.marks: list[MarkName] = []
        self._instants: list[Any] = []
        self._started = ""

    def note(self, kind: StepKind, name: str) -> None:
        """Compute has come to the mark of this kind of a group of this name."""
        self.marks.append((kind, name))
        self._instants.append(_now())

    def step_ms(self) -> list[float]:
        """From each mark to the next, and from the last to now, once the device is done."""
        instants = [*self._instants, _now()]
        if use_gpu():
            torch.cuda.synchronize()
        return [_elapsed_ms(a, b) for a, b in zip(instants, instants[1:], strict=False)]

    def init_model_chunk_offload_handler(self, *_: Any, **__: Any) -> None: ...

    def mark_not_offload(self, _: Any) -> None: ...

    def flush_delayed_groups(self) -> None: ...

    def reset(self, **_: Any) -> None: ...

    def pop_forward_chunk(self, name: str) -> None:
        self.note(StepKind.FORWARD_START, name)
        self._started = name

    def mark_backward_end(self, tensor: torch.Tensor) -> None:
        name = self._started
        if tensor.grad_fn is not None:
            tensor.grad_fn.register_prehook(lambda _: self.note(StepKind.BACKWARD_END, name))

    def cur_forward_chunk(self) -> _ClockMark:
        return _ClockMark(self)

    def mark_output(self, kind: StepKind) -> None:
        self.note(kind, OUTPUT_LAYER)

    def mark_gradient(self, kind: StepKind, tensors: Iterable[torch.Tensor]) -> None:
        name = BACKWARD if kind is StepKind.BACKWARD_START else OUTPUT_LAYER
        at_first_gradient(tensors, lambda: self.note(kind, name))

    def __enter__(self) -> MarkClock:
        return self

    def __exit__(self, *_: object) -> None: ...


class _ClockMark:
    def __init__(self, clock: MarkClock) -> None:
        self._clock = clock

    def on_group_commit_forward(self, name: str, _: Any = ()) -> None:
        self._clock.note(StepKind.FORWARD_COMMIT, name)

    def on_group_commit_backward(self, name: str) -> None:
        self._clock.note(StepKind.BACKWARD_USE, name)


def _now() -> Any:
    if not use_gpu():
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def _elapsed_ms(start: Any, stop: Any) -> float:
    return float(start.elapsed_time(stop)) if use_gpu() else 1e3 * (stop - start)


def measure_step_ms(engine: Engine) -> tuple[list[MarkName], tuple[float, ...]]:
    """The marks of the engine's model, and milliseconds of compute after each, moving nothing.

    Returns:
        The marks in order, and for each the median over a few iterations.
    """
    runs = []
    for iteration in range(NUM_ITERATIONS):
        clock = MarkClock()
        if use_gpu():
            torch.cuda.synchronize()
        engine.run_with(clock, iteration)
        runs.append((clock.marks, clock.step_ms()))
    marks = runs[0][0]
    assert all(run[0] == marks for run in runs), "iterations of one model differ in their marks"
    return marks, tuple(median(times) for times in zip(*(run[1] for run in runs), strict=True))
