# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A measurement of device memory fails with a reason if other processes use the memory."""

from __future__ import annotations

import pytest
import torch
from device_memory import memory_to_itself

GIB = 1 << 30


class _Gpu:
    """A device of 140 GiB, of which other processes use 100 and this one 10."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.num_retries = 3
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda: (30 * GIB, 140 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda: 10 * GIB)
        monkeypatch.setattr(
            torch.cuda, "memory_stats", lambda: {"num_alloc_retries": self.num_retries}
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> _Gpu:
    return _Gpu(monkeypatch)


SHARED = r"100\.0 GiB are in use outside this process's tensors\. If other processes share the GPU"


@pytest.mark.usefixtures("gpu")
def test_with_all_the_memory_it_needs_it_is_a_measurement() -> None:
    with memory_to_itself(20 * GIB):
        pass


@pytest.mark.usefixtures("gpu")
def test_too_little_memory_at_the_start_is_told() -> None:
    with pytest.raises(AssertionError, match=SHARED) as raised, memory_to_itself(31 * GIB):
        pytest.fail("measured all the same")
    assert "31.0 GiB are needed, 30.0 GiB free" in str(raised.value)


def test_memory_that_was_had_only_with_an_empty_cache_is_told(gpu: _Gpu) -> None:
    with pytest.raises(AssertionError, match=SHARED) as raised, memory_to_itself(GIB):
        gpu.num_retries += 2
    assert "empty its cache 2 times" in str(raised.value)


@pytest.mark.usefixtures("gpu")
def test_memory_that_was_refused_is_told() -> None:
    with pytest.raises(AssertionError, match=SHARED) as raised, memory_to_itself(GIB):
        raise torch.OutOfMemoryError("CUDA out of memory")
    assert isinstance(raised.value.__cause__, torch.OutOfMemoryError)
