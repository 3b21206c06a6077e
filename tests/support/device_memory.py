# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Device memory: what else uses a GPU, and copies that a meter of the CPU does not count."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import page_aligned
from megatron.slipstream.plan.render import format_bytes


def host_clone(tensor: torch.Tensor) -> torch.Tensor:
    """Copy a CPU tensor into memory that a ``DeviceMemoryMeter`` takes for host memory."""
    memory = page_aligned(tensor.nbytes)
    return memory.view(tensor.dtype).view(tensor.shape).copy_(tensor.detach())


@contextmanager
def memory_to_itself(needed_bytes: int) -> Iterator[None]:
    """Context of a measurement of device memory that fails if other processes use the memory.

    During a capture, the allocator cannot empty its cache when the device is out of memory, and
    raises. Otherwise it empties the cache and retries, which it counts; the memory layout then
    differs from that of a process with exclusive use of the GPU.

    Args:
        needed_bytes: The peak of the process.

    Raises:
        AssertionError: The device had too little memory at the start or later. The message says how
            much of it other processes use.
    """
    free_bytes, _ = torch.cuda.mem_get_info()
    if free_bytes < needed_bytes:
        raise _crowded(f"{format_bytes(needed_bytes)} are needed, {format_bytes(free_bytes)} free")
    num_before = _num_retries()
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise _crowded("the device has refused memory") from error
    num_retries = _num_retries() - num_before
    if num_retries:
        raise _crowded(f"the allocator has had to empty its cache {num_retries} times")


def _num_retries() -> int:
    return int(torch.cuda.memory_stats().get("num_alloc_retries", 0))


def _crowded(what: str) -> AssertionError:
    free_bytes, total_bytes = torch.cuda.mem_get_info()
    own_bytes = torch.cuda.memory_reserved()
    return AssertionError(
        f"nothing was measured: {what}; of the GPU's {format_bytes(total_bytes)}, "
        f"{format_bytes(total_bytes - free_bytes - own_bytes)} are in use outside this "
        "process's tensors. If other processes share the GPU, run this test without them"
    )
