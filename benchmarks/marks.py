# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host time in an engine, by the method that layers, schedules and autograd call."""

from __future__ import annotations

import contextlib
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import Any, Optional
from unittest.mock import patch

import torch
from megatron_models import use_gpu
from torch.autograd.graph import saved_tensors_hooks

from benchmarks.engines import Engine
from megatron.slipstream.fine_grained_activation_offload.markers import CommitMark
from megatron.slipstream.fine_grained_activation_offload.native import native_module

MANAGER_METHODS = (
    *("init_model_chunk_offload_handler", "pop_forward_chunk", "cur_forward_chunk"),
    *("start_on", "end_on", "__enter__", "__exit__", "flush_delayed_groups", "reset"),
)
ENGINE_METHODS = (
    *("start", "enter", "leave", "end", "use_group", "end_group"),
    *("mark_output", "mark_gradient"),
)
"""Methods of our engine that hooks on modules and autograd call."""
MARK_METHODS = (
    "on_group_start_forward",
    "on_group_commit_forward",
    "on_group_commit_backward",
    "on_group_start_backward",
)
NUM_ITERATIONS = 5


class HostTimes:
    """Host time that one iteration spends in an engine, by method called."""

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self.calls: Counter[str] = Counter()
        self.driver_seconds: Optional[float] = None
        """Part spent in the driver and the allocator; None if Python calls them."""
        self._is_inside = False

    @property
    def driver_us_per_group(self) -> Optional[float]:
        """:attr:`driver_seconds` per group of the iteration."""
        if self.driver_seconds is None or not self.num_groups:
            return None
        return 1e6 * self.driver_seconds / self.num_groups

    @property
    def us_per_group(self) -> Optional[float]:
        """Total per group of the iteration; None if there were none."""
        return 1e6 * sum(self.seconds.values()) / self.num_groups if self.num_groups else None

    @property
    def num_groups(self) -> int:
        """Number of groups in the iteration."""
        ended = self.calls["end_on"] + self.calls["end"]
        return ended or self.calls["on_group_commit_forward"]

    @property
    def us_per_call(self) -> dict[str, float]:
        """Time per call, by name."""
        return {name: 1e6 * self.seconds[name] / self.calls[name] for name in sorted(self.calls)}

    @contextlib.contextmanager
    def watching(self, manager: Any, mark_class: type) -> Iterator[None]:
        """Time the engine's methods that layers, schedules and autograd call."""
        with contextlib.ExitStack() as stack:
            engine_class = type(getattr(manager, "engine", None))
            for owner, names in (
                (type(manager), MANAGER_METHODS),
                (engine_class, ENGINE_METHODS),
                (mark_class, MARK_METHODS),
            ):
                for name in names:
                    if hasattr(owner, name):
                        method = self._timed(name, getattr(owner, name))
                        stack.enter_context(patch.object(owner, name, method))
            enter = self._enter_with_timed_hooks(saved_tensors_hooks.__enter__)
            stack.enter_context(patch.object(saved_tensors_hooks, "__enter__", enter))
            native = native_module() if getattr(manager, "store", None) is not None else None
            if native is not None:
                native.HostTime.take()
                native.HostTime.is_taken = True
            yield
        if native is not None:
            native.HostTime.is_taken = False
            in_autograd, in_driver = native.HostTime.take()
            self.seconds["autograd in C++"] = 1e-9 * in_autograd
            self.calls["autograd in C++"] = self.num_groups
            self.driver_seconds = 1e-9 * in_driver

    def _timed(self, name: str, function: Any) -> Any:
        # An engine's calls of its own methods count as part of the outer call. Backward may run in
        # its own thread, but then the thread that started it waits, so one flag suffices.
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
        """Wrap saved-tensor hooks on entry to their region, where they are read."""

        def entered(hooks: Any) -> Any:
            pack, unpack = hooks.pack_hook, hooks.unpack_hook
            if type(pack).__module__ == "slipstream_native":  # these time themselves
                return enter(hooks)
            hooks.pack_hook = self._timed("pack", pack)
            hooks.unpack_hook = self._timed("unpack", unpack)
            try:
                return enter(hooks)
            finally:
                hooks.pack_hook, hooks.unpack_hook = pack, unpack

        return entered


def measure_host_times(engine: Engine) -> HostTimes:
    """Return the iteration with the median total of a few, so that one slow call has no effect."""
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
    """Return the class of the objects whose methods autograd calls at the marks."""
    if engine.is_ours:
        return CommitMark
    from megatron.core.pipeline_parallel import fine_grained_activation_offload

    return fine_grained_activation_offload.ChunkOffloadHandler
