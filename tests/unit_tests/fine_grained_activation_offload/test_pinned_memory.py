# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Pinned memory of the GPU's backend: where it lies, and what is left behind when it is refused."""

from __future__ import annotations

import mmap
from pathlib import Path
from typing import Any

import pytest
import torch
from toy_model import SCHEDULES, all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload import cuda_backend
from megatron.slipstream.fine_grained_activation_offload.backend import page_aligned
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostMemoryFull, HostPool


def _huge_pages() -> str:
    """Return when the kernel uses huge pages: ``always``, ``madvise`` or ``never``."""
    setting = Path("/sys/kernel/mm/transparent_hugepage/enabled")
    return setting.read_text().partition("[")[2].partition("]")[0] if setting.exists() else "never"


class FakeRuntime:
    """Notes what is registered; refuses if told to."""

    def __init__(self) -> None:
        self.events: list[tuple[str, int, int]] = []
        self.status = 0

    def cudaHostRegister(self, address: int, nbytes: int, flags: int) -> int:
        self.events.append(("register", address, nbytes))
        return self.status

    def cudaHostUnregister(self, address: int) -> int:
        self.events.append(("unregister", address, 0))
        return 0


@pytest.fixture
def runtime(monkeypatch: pytest.MonkeyPatch) -> FakeRuntime:
    fake = FakeRuntime()

    def check_error(status: int) -> None:
        if status:
            raise RuntimeError(f"CUDA error {status}")

    monkeypatch.setattr(torch.cuda, "cudart", lambda: fake)
    monkeypatch.setattr(torch.cuda, "check_error", check_error)
    return fake


def test_memory_begins_on_a_page(runtime: FakeRuntime) -> None:
    backend = CudaBackend()
    buffer = backend.allocate_host(10_000)
    address = buffer.data_ptr()
    assert address % mmap.PAGESIZE == 0
    assert buffer.numel() == 10_000
    assert runtime.events == [("register", address, 10_000)]
    backend.free_host(buffer)
    assert runtime.events[-1] == ("unregister", address, 0)


@pytest.mark.skipif(_huge_pages() == "never", reason="the kernel has no huge pages")
def test_memory_is_on_huge_pages() -> None:
    buffer = page_aligned(16 << 20).fill_(1)
    assert _huge_bytes(buffer.data_ptr()) >= 12 << 20, "all but what is not aligned to 2 MiB"


def _huge_bytes(address: int) -> int:
    """Return how much of the mapping that holds ``address`` is on huge pages."""
    is_it = False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split()
        if not first.endswith(":"):
            start, end = (int(part, 16) for part in first.split("-"))
            is_it = start <= address < end
        elif is_it and first == "AnonHugePages:":
            return int(rest[0]) << 10
    raise AssertionError("no mapping holds the address")


def test_a_refusal_is_raised_once_and_forgotten(
    runtime: FakeRuntime, monkeypatch: pytest.MonkeyPatch
) -> None:
    forgotten: list[Any] = []
    monkeypatch.setattr(cuda_backend, "_forget_last_error", lambda: forgotten.append(None))
    runtime.status = 2
    with pytest.raises(RuntimeError, match="CUDA error 2"):
        CudaBackend().allocate_host(4096)
    assert len(forgotten) == 1
    assert [kind for kind, *_ in runtime.events] == ["register"], "nothing is there to return"


@pytest.mark.gpu
def test_a_refused_registration_does_not_fail_the_next_kernel(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    backend = CudaBackend()
    buffer = backend.allocate_host(1 << 20)
    with monkeypatch.context() as patch:
        patch.setattr(cuda_backend, "page_aligned", lambda _: buffer)
        pool = HostPool(backend)
        with pytest.raises(HostMemoryFull):
            pool.allocate(1 << 20)  # registered already
    assert pool.was_refused
    assert int(torch.ones(4, device="cuda").add_(1).sum()) == 8
    backend.free_host(buffer)


@pytest.mark.gpu
def test_copies_to_every_buffer_of_a_slab_do_not_hold_up_the_host() -> None:
    """The purpose of pinning. (``Tensor.is_pinned`` looks at the storage's first byte, which lies
    before the page that the slab begins on.)"""
    pool = HostPool(CudaBackend())
    allocations = [pool.allocate(nbytes) for nbytes in (5000, 1 << 20, 64 << 20)]
    assert pool.num_slabs == 1
    stream = torch.cuda.Stream()
    for allocation in allocations:
        source = torch.ones(allocation.buffer.nbytes, dtype=torch.uint8, device="cuda")
        torch.cuda.synchronize()
        with torch.cuda.stream(stream):
            torch.cuda._sleep(400_000_000)  # about 0.2 s on an H200
            allocation.buffer.view().copy_(source, non_blocking=True)
        assert not stream.query(), "the host has waited for the copy"
        stream.synchronize()
        assert bool((allocation.buffer.view() == 1).all())
    pool.close()


@pytest.mark.gpu
@pytest.mark.parametrize("limit_bytes", [60_000, 150_000, None])
def test_gradients_on_a_gpu_are_right_with_little_host_memory(limit_bytes: int | None) -> None:
    chunks = [chunk.to("cuda") for chunk in make_chunks(2)]
    schedule = SCHEDULES["1F1B first of four"]
    expected = run_schedule(chunks, schedule, None)
    manager = make_manager("cuda", host_memory_limit_bytes=limit_bytes)  # type: ignore[arg-type]
    for _ in range(4):
        assert all_equal(expected, run_schedule(chunks, schedule, manager))
    assert (manager.report.num_kept_for_host_memory > 0) == (limit_bytes is not None)
    manager.close()
