# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Measures the bandwidth of copies between a GPU and pinned host memory as the planner does."""

from __future__ import annotations

import os
from typing import Union

import torch

from megatron.slipstream.fine_grained_activation_offload import copy_rates
from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Bytes
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.plan.trace import Bandwidth

NBYTES = 256 << 20
"""Bytes on the device and on the host; half of them are copied each way."""

NUM_ROUNDS = 20
"""Other load on the link varies, so the best rates of so many rounds count."""


def measure(number: int, cpus: frozenset[int]) -> Union[Bandwidth, str]:
    """Measure a GPU's bandwidth; return it, or the error in one line.

    Host memory is allocated on the node where the process runs, so that moves to ``cpus``, beside
    the GPU, unless it may use none of them.
    """
    before = os.sched_getaffinity(0)
    try:
        os.sched_setaffinity(0, cpus & before or before)
        with torch.cuda.device(number):
            return measure_bandwidth(CudaBackend())
    except (RuntimeError, MemoryError) as error:
        return str(error).partition("\n")[0] or type(error).__name__
    finally:
        os.sched_setaffinity(0, before)


def measure_bandwidth(backend: Backend) -> Bandwidth:
    """Return the best of each of the four rates, over several rounds on the current device.

    Raises ``RuntimeError`` if copies cannot be timed, or (or ``MemoryError``) if memory runs out.
    """
    device = backend.allocate_scratch(NBYTES)
    if device is None:
        raise RuntimeError(f"the GPU does not have {NBYTES >> 20} MiB of free memory")
    host = backend.allocate_host(NBYTES)
    streams = CopyStreams(backend)
    memory, buffer = Bytes(device, 0, NBYTES), Bytes.of(host)
    try:
        rounds = [
            copy_rates.measure_bandwidth(backend, streams, memory, buffer)
            for _ in range(NUM_ROUNDS)
        ]
    finally:
        streams.finish()
        backend.free_host(host)
    rates = list(zip(*(found for found in rounds if found is not None), strict=True))
    if not rates:
        raise RuntimeError("copies are too fast to be timed")
    return Bandwidth(*map(max, rates))
