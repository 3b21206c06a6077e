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

from megatron.slipstream.chunk_graphs.backend import graph_pool_bytes
from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.backends import make_backend
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.integration.cpu_memory import DeviceMemoryMeter

Run = Callable[[int], list[torch.Tensor]]
"""Runs the iteration of a number and returns its losses."""

NUM_MEMORY_WARMUPS = 2
NUM_MEMORY_ITERATIONS = 3


def maximum_of_ranks(value: float) -> float:
    """The largest ``value`` of any rank, on each. A collective."""
    if not torch.distributed.is_initialized() or torch.distributed.get_world_size() == 1:
        return value
    held = torch.tensor([value], dtype=torch.float64, device="cuda" if use_gpu() else "cpu")
    torch.distributed.all_reduce(held, op=torch.distributed.ReduceOp.MAX)
    return float(held)


def wait_for_all() -> None:
    """Until every rank is here and its device has nothing left to do."""
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
    """Calls of cudaMalloc on this rank."""
    losses: tuple[float, ...]
    host_ms: float = 0.0
    """Until this rank's host had launched everything."""


def timed_step(run: Run, iteration: int) -> Step:
    """Run one iteration with nothing before it in any queue, and time it. A collective."""
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
    """Yields what returns, afterwards, the milliseconds on the compute stream; 0 without a GPU."""
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
    """Let the next engines begin without pinned memory that the last ones have left in a cache."""
    give_back_unused_memory()
    if use_gpu() and hasattr(torch._C, "_host_emptyCache"):
        torch._C._host_emptyCache()


class HeldMemory(NamedTuple):
    """Device memory that is held between iterations, in bytes; 0 without a GPU."""

    graph_pool_bytes: int
    tensor_bytes: int
    """Of tensors outside of the pools."""
    outside_bytes: int
    """Not from torch's allocator: graphs themselves, connections of NCCL."""

    @classmethod
    def now(cls) -> HeldMemory:
        """All of it."""
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
        """Of a summary row: what has been added to ``before``."""
        pools, tensors, outside = (a - b for a, b in zip(self, before, strict=True))
        return {
            "held_bytes": pools + tensors,
            "graph_pool_bytes": pools,
            "outside_bytes": outside,
        }


@dataclass(frozen=True)
class MemoryFigures:
    """Device memory of one engine's iterations, in bytes."""

    resident_bytes: int
    """Allocated between iterations: weights, gradients, data."""
    peak_bytes: int
    reserved_bytes: Optional[int] = None
    """The most that the caching allocator held, with what lies unused in its cache."""
    num_device_allocs: Optional[int] = None
    """Calls of cudaMalloc in the iterations of the steady state (three unless told otherwise)."""
    num_alloc_retries: Optional[int] = None
    """How often the cache had to be emptied for a request, in the same iterations."""

    @property
    def act_bytes(self) -> int:
        """Needed by an iteration beside what stays."""
        return self.peak_bytes - self.resident_bytes


def backend_of(manager: Any) -> Backend:
    """The backend that tells the device memory of an engine's iterations.

    Args:
        manager: Ours, which resets the peak statistics in some iterations; None for others.
    """
    backend: Backend = make_backend("auto") if manager is None else manager.store.backend
    return backend


def measure_memory(
    run: Run, manager: Any = None, num_iterations: int = NUM_MEMORY_ITERATIONS
) -> MemoryFigures:
    """Run a few iterations of one engine alone, beginning with an empty cache. A collective.

    Args:
        run: Its iterations.
        manager: Ours, whose host buffers are not device memory where the CPU stands for the device;
            None for others.
        num_iterations: On a GPU, how many, after as many others but two at most.
    """
    backend = backend_of(manager)
    if not use_gpu():
        return _measure_cpu_memory(run, backend)
    return _measure_cuda_memory(run, backend, num_iterations)


def _measure_cuda_memory(run: Run, backend: Backend, num_iterations: int) -> MemoryFigures:
    gc.collect()
    wait_for_all()
    torch.cuda.empty_cache()
    for iteration in range(min(NUM_MEMORY_WARMUPS, num_iterations)):
        run(iteration)
        wait_for_all()
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


def _measure_cpu_memory(run: Run, backend: Backend) -> MemoryFigures:
    assert isinstance(backend, CpuBackend)
    try:
        with DeviceMemoryMeter() as backend.meter:
            run(0)
            resident_bytes = backend.begin_peak()
            run(1)
            return MemoryFigures(resident_bytes, backend.peak_bytes())
    finally:
        backend.meter = None
