# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Step times and device memory."""

from __future__ import annotations

import contextlib
import gc
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple, Optional

import torch
from garbage import give_back_unused_memory
from megatron_models import use_gpu

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine_setup import make_backend
from megatron.slipstream.graphs.capture import graph_pool_bytes
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter

Run = Callable[[int], list[torch.Tensor]]
"""Runs the iteration with the given number and returns its losses."""

NUM_MEMORY_WARMUPS = 2
NUM_MEMORY_ITERATIONS = 3


def maximum_of_ranks(value: float) -> float:
    """Return the maximum of ``value`` over ranks. A collective."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    held = torch.tensor([value], dtype=torch.float64, device="cuda" if use_gpu() else "cpu")
    torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
    return float(held)


def wait_for_all() -> None:
    """Wait until every rank has called this and its device is idle."""
    if torch.distributed.is_initialized() and torch.distributed.get_world_size() > 1:
        torch.distributed.barrier()
    if use_gpu():
        torch.cuda.synchronize()


@dataclass(frozen=True)
class Step:
    """One measured iteration."""

    ms: float
    """From the first operation to the last on the compute stream of the slowest rank."""
    num_device_allocs: int
    """cudaMalloc calls on this rank."""
    losses: tuple[float, ...]
    host_ms: float = 0.0
    """Time until this rank's host had launched everything."""


def timed_step(run: Run, iteration: int) -> Step:
    """Time one iteration, starting with idle devices. A collective."""
    wait_for_all()
    allocs = _num_device_allocs()
    with _gpu_time() as gpu_ms:
        begin_s = time.perf_counter()
        losses = run(iteration)
        host_ms = 1e3 * (time.perf_counter() - begin_s)
    return Step(
        maximum_of_ranks(gpu_ms() or host_ms),
        _num_device_allocs() - allocs,
        tuple(float(loss) for loss in losses),
        host_ms,
    )


@contextlib.contextmanager
def _gpu_time() -> Iterator[Callable[[], float]]:
    """Yield a function for the milliseconds on the compute stream, called after the context.

    It returns 0 without a GPU.
    """
    if not use_gpu():
        yield lambda: 0.0
        return
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    yield lambda: start.elapsed_time(stop)
    stop.record()
    torch.cuda.synchronize()


def _num_device_allocs() -> int:
    return int(torch.cuda.memory_stats().get("num_device_alloc", 0)) if use_gpu() else 0


def release_host_memory() -> None:
    """Release pinned memory cached for the last engines, before the next ones start."""
    give_back_unused_memory()
    if use_gpu() and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


class HeldMemory(NamedTuple):
    """Device memory that is held between iterations, in bytes; 0 without a GPU."""

    graph_pool_bytes: int
    tensor_bytes: int
    """Tensors outside the pools."""
    outside_bytes: int
    """Not from torch's allocator: graphs themselves, NCCL connections."""

    @classmethod
    def now(cls) -> HeldMemory:
        """Measure the memory held now."""
        give_back_unused_memory()
        if not use_gpu():
            return cls(0, 0, 0)
        segments = torch.cuda.memory_snapshot()
        outside = [s for s in segments if tuple(s["segment_pool_id"]) == (0, 0)]
        free, total = torch.cuda.mem_get_info()
        return cls(
            graph_pool_bytes(),
            sum(segment["allocated_size"] for segment in outside),
            total - free - torch.cuda.memory_reserved(),
        )

    def fields_since(self, before: HeldMemory) -> dict[str, int]:
        """Return the fields of a summary row: the increase since ``before``."""
        pools, tensors, outside = (a - b for a, b in zip(self, before, strict=True))
        return {"held_bytes": pools + tensors, "graph_pool_bytes": pools, "outside_bytes": outside}


@dataclass(frozen=True)
class MemoryFigures:
    """Device memory of one engine's iterations, in bytes."""

    resident_bytes: int
    """Allocated between iterations: weights, gradients, data."""
    peak_bytes: int
    reserved_bytes: Optional[int] = None
    """Peak memory reserved by the caching allocator, including unused cache."""
    num_device_allocs: Optional[int] = None
    """cudaMalloc calls in the steady-state iterations (three by default)."""
    num_alloc_retries: Optional[int] = None
    """Number of times the cache was emptied to serve a request, in the same iterations."""

    @property
    def act_bytes(self) -> int:
        """Memory that an iteration needs on top of the resident memory."""
        return self.peak_bytes - self.resident_bytes


@contextlib.contextmanager
def metered_backend(manager: Any) -> Iterator[Backend]:
    """Context in which the yielded backend reads device memory, which a CPU imitates.

    Args:
        manager: Our engine, which resets the peak statistics in some iterations; None for others.
    """
    backend: Backend = make_backend("auto") if manager is None else manager.store.backend
    if not isinstance(backend, CpuBackend):
        yield backend
        return
    try:
        with DeviceMemoryMeter() as backend.meter:
            yield backend
    finally:
        backend.meter = None


def measure_memory(
    run: Run, manager: Any = None, num_iterations: int = NUM_MEMORY_ITERATIONS
) -> MemoryFigures:
    """Run a few iterations of one engine alone, starting with an empty cache. A collective.

    Args:
        run: Runs an iteration of the engine.
        manager: Our engine; None for others.
        num_iterations: Iterations to measure on a GPU, after as many (at most two) warm-up ones.
    """
    with metered_backend(manager) as backend:
        if use_gpu():
            return _measure_cuda_memory(run, backend, num_iterations)
        run(0)
        resident_bytes = backend.begin_peak()
        run(1)
        return MemoryFigures(resident_bytes, backend.peak_bytes())


def _measure_cuda_memory(run: Run, backend: Backend, num_iterations: int) -> MemoryFigures:
    gc.collect()
    wait_for_all()
    torch.cuda.empty_cache()
    for iteration in range(min(NUM_MEMORY_WARMUPS, num_iterations)):
        run(iteration)
        wait_for_all()
    torch.cuda.reset_peak_memory_stats()  # also of what the engine's own resets discarded
    resident_bytes = backend.begin_peak()
    before = torch.cuda.memory_stats()
    for iteration in range(num_iterations):
        run(iteration)
        wait_for_all()
    after = torch.cuda.memory_stats()

    def grown(name: str) -> Optional[int]:
        return int(after[name] - before[name]) if name in after else None

    return MemoryFigures(
        resident_bytes=resident_bytes,
        peak_bytes=backend.peak_bytes(),
        reserved_bytes=int(after["reserved_bytes.all.peak"]),
        num_device_allocs=grown("num_device_alloc"),
        num_alloc_retries=grown("num_alloc_retries"),
    )
