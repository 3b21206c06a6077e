# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""torch's peak memory statistics cover everything since the user's last reset."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from attached_models import Decoder, micro_batch

from megatron.slipstream import OffloadConfig, attach
from megatron.slipstream.fine_grained_activation_offload import peak_statistics
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.graphs.capture import CudaGraphs
from megatron.slipstream.patches import patching, table
from megatron.slipstream.patches.table import Feature

MIB = 1 << 20


class FakeAllocator:
    """Statistics of two devices in the form of torch's, with one counter for each."""

    def __init__(self) -> None:
        self.bytes = [[0, 0], [0, 0]]
        """Current and peak by device."""

    def use(self, device: int, nbytes: int) -> None:
        counted = self.bytes[device]
        counted[0] += nbytes
        counted[1] = max(counted)

    def memory_stats(self, device: int) -> dict[str, Any]:
        current, peak = self.bytes[device]
        counted = {"current": current, "peak": peak, "allocated": 7, "freed": 0}
        kinds = ("allocated_bytes", "reserved_bytes")
        return {name: {"all": dict(counted)} for name in kinds} | {"num_ooms": 3}

    def reset_peak(self, device: int) -> None:
        self.bytes[device][1] = self.bytes[device][0]


@pytest.fixture
def allocator(monkeypatch: pytest.MonkeyPatch) -> FakeAllocator:
    fake = FakeAllocator()
    for name in ("_cuda_memoryStats", "_accelerator_getDeviceStats"):
        monkeypatch.setattr(torch._C, name, lambda device: fake.memory_stats(device))
    for name in ("_cuda_resetPeakMemoryStats", "_accelerator_resetPeakStats"):
        monkeypatch.setattr(torch._C, name, lambda device: fake.reset_peak(device))
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda.memory, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch._C, "_accelerator_isAllocatorInitialized", lambda: True)
    monkeypatch.setattr(peak_statistics, "_discarded", {})
    return fake


@pytest.fixture
def _is_patched(allocator: FakeAllocator) -> Iterator[None]:
    table.apply(Feature.PEAK_MEMORY)
    yield
    table.undo(Feature.PEAK_MEMORY)


READERS: dict[str, Callable[[int], int]] = {
    "max_memory_allocated": torch.cuda.max_memory_allocated,
    "memory_stats": lambda device: torch.cuda.memory_stats(device)["reserved_bytes.all.peak"],
    "nested": lambda device: torch.cuda.memory_stats_as_nested_dict(device)["allocated_bytes"][
        "all"
    ]["peak"],
    "accelerator": lambda device: torch.accelerator.memory_stats(device)[
        "allocated_bytes.all.peak"
    ],
}
RESETS = {
    "cuda": torch.cuda.reset_peak_memory_stats,
    "accelerator": lambda device: torch._C._accelerator_resetPeakStats(device),
}


@pytest.mark.usefixtures("_is_patched")
@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
@pytest.mark.parametrize("reset", RESETS.values(), ids=RESETS)
def test_users_read_the_peak_since_their_own_reset(
    allocator: FakeAllocator, read: Callable[[int], int], reset: Callable[[int], None]
) -> None:
    backend = CudaBackend.__new__(CudaBackend)  # without streams
    allocator.use(0, 100)
    allocator.use(0, -80)
    backend.reset_peak_memory()
    assert backend.memory() == (20, 20)  # the engine reads its own interval
    allocator.use(0, 30)
    backend.reset_peak_memory()
    assert backend.memory() == (50, 50)
    assert (read(0), read(1)) == (100, 0)
    assert torch.cuda.memory_stats(0)["num_ooms"] == 3
    assert torch.cuda.memory_stats(0)["allocated_bytes.all.current"] == 50

    reset(1)
    assert read(0) == 100
    reset(0)
    assert read(0) == 50
    allocator.use(0, 10)
    backend.reset_peak_memory()
    allocator.use(0, -60)
    backend.reset_peak_memory()
    assert read(0) == 60


def test_the_peak_of_a_measured_pass_leaves_it_as_well(
    allocator: FakeAllocator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "empty_cache", lambda: None)
    table.apply(Feature.PEAK_MEMORY)
    try:
        allocator.use(0, 1000)
        allocator.use(0, -990)

        def work() -> None:
            allocator.use(0, 40)
            allocator.use(0, -40)

        assert CudaGraphs(list).measure(work) == 40
        assert torch.cuda.max_memory_allocated(0) == 1000
    finally:
        table.undo(Feature.PEAK_MEMORY)


@pytest.mark.gpu
@pytest.mark.parametrize("native", ["auto", "off"])
def test_recorded_iterations_leave_the_peak(native: str) -> None:
    was_active = patching.active()
    model = Decoder(4).cuda()
    model(micro_batch(0).cuda()).square().mean().backward()  # allocates workspaces of cuBLAS
    torch.cuda.reset_peak_memory_stats()
    config = OffloadConfig(offload_native=native)
    with attach(model, "layers.*", config, min_offloaded_tensor_size=1):
        torch.empty(64 * MIB, dtype=torch.uint8, device="cuda")
        present = torch.cuda.memory_allocated()
        for step in range(4):
            model(micro_batch(step).cuda()).square().mean().backward()
            assert torch.cuda.max_memory_allocated() >= present + 64 * MIB
        torch.cuda.reset_peak_memory_stats()
        assert torch.cuda.max_memory_allocated() < present + 64 * MIB
    assert patching.active() == was_active
