# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Measuring device memory where other processes may use the same GPU."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from megatron.slipstream.plan.render import format_bytes


@contextmanager
def memory_to_itself(needed_bytes: int) -> Iterator[None]:
    """Around a measurement of device memory: it fails where other processes take what it needs.

    While a graph is captured, the allocator cannot empty its cache when the device refuses memory,
    and raises. Elsewhere it empties it and asks again, which it counts; memory then lies otherwise
    than in a process that has the GPU to itself.

    Args:
        needed_bytes: The most that the process is going to take.

    Raises:
        AssertionError: The device had too little memory at the start, or refused some later. Says
            how much of it others have.
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
        f"nothing was measured: {what}; of the GPU's {format_bytes(total_bytes)}, others than this "
        f"process's tensors take {format_bytes(total_bytes - free_bytes - own_bytes)}. If other "
        "processes share the GPU, run this test without them"
    )
