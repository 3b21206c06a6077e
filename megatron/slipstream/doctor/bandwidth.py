# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What copies between a GPU and pinned host memory reach, measured as the planner measures it."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch

from megatron.slipstream.doctor.facts import Gpu
from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Bytes
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.integration import numa
from megatron.slipstream.plan.trace import Bandwidth

NBYTES = 256 << 20
"""Of each side; half of it goes each way."""

NUM_ROUNDS = 20
"""Each of some twelve copies. Other users of the link come and go; the best rates count."""


def measure(gpu: Gpu, progress: Callable[[str], None]) -> Gpu:
    """A GPU with its bandwidth, or with the error that kept it from being measured.

    Host memory is where training would have it. The process stays where it is, unlike training's:
    the next GPU may be on another node, and copies do not need the CPU.
    """
    progress(f"copies of GPU {gpu.number}")
    backend = CudaBackend()
    if gpu.bound_to is not None:
        backend.place_host_memory = numa.NodeMemory(gpu.bound_to)
    try:
        with torch.cuda.device(gpu.number):
            return gpu._replace(bandwidth=measure_bandwidth(backend))
    except (RuntimeError, MemoryError) as error:
        text = str(error).partition("\n")[0] or type(error).__name__
        return gpu._replace(bandwidth_error=text)


def measure_bandwidth(backend: Backend) -> Bandwidth:
    """The best rates of some rounds on the current device.

    Raises:
        RuntimeError: There is no memory for it (or ``MemoryError``), or the backend takes no times.
    """
    device = backend.allocate_scratch(NBYTES)
    if device is None:
        raise RuntimeError(f"the GPU has no {NBYTES >> 20} MiB to spare")
    host = backend.allocate_host(NBYTES)
    streams = CopyStreams(backend)
    try:
        memory, buffer = Bytes(device, 0, NBYTES), Bytes.of(host)
        rounds = [streams.measure_bandwidth(memory, buffer) for _ in range(NUM_ROUNDS)]
        return best(found for found in rounds if found is not None)
    finally:
        streams.finish()
        backend.free_host(host)


def best(rounds: Iterable[Bandwidth]) -> Bandwidth:
    """The highest rate of each kind.

    Raises:
        RuntimeError: There are no rounds.
    """
    columns = list(zip(*rounds, strict=True))
    if not columns:
        raise RuntimeError("copies take no time that could be measured")
    return Bandwidth(*map(max, columns))
