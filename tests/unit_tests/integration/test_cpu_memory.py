# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The meter that replaces ``torch.cuda.max_memory_allocated`` without a GPU."""

from __future__ import annotations

import gc

import pytest
import torch
from device_memory import host_clone
from torch.autograd.graph import saved_tensors_hooks

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import (
    CpuBackend,
    LazyCpuBackend,
)
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter

KIB = 1024
FLOATS_PER_KIB = KIB // 4


def test_counts_what_lives_and_keeps_the_peak() -> None:
    with DeviceMemoryMeter() as meter:
        first = torch.zeros(FLOATS_PER_KIB)
        second = first + 1
        assert meter.allocated_bytes == 2 * KIB
        del first
        assert meter.allocated_bytes == KIB
        assert meter.peak_bytes == 2 * KIB
        meter.reset_peak()
        assert meter.peak_bytes == KIB
        del second
    assert meter.allocated_bytes == 0


def test_counts_a_storage_once_and_until_its_last_view_is_gone() -> None:
    with DeviceMemoryMeter() as meter:
        whole = torch.zeros(4, FLOATS_PER_KIB)
        views = [whole[1], whole.t(), whole.view(-1), *whole.split(1)]
        whole.add_(1)
        assert meter.allocated_bytes == 4 * KIB
        del whole
        gc.collect()
        assert meter.allocated_bytes == 4 * KIB
        del views
        assert meter.allocated_bytes == 0


def test_memory_from_before_is_not_counted() -> None:
    before = torch.zeros(FLOATS_PER_KIB)
    with DeviceMemoryMeter() as meter:
        view = before[1:]
        before.mul_(2)
        alias = torch.empty(0).set_(before.untyped_storage(), 0, (4,), (1,))
        assert meter.allocated_bytes == 0
        del view, alias


def test_a_copy_counts_though_it_might_have_been_a_view() -> None:
    square = torch.zeros(FLOATS_PER_KIB // 8, 8)
    with torch.inference_mode(), DeviceMemoryMeter() as meter:  # There, torch keeps them whole.
        copies = [square.t().contiguous(), square.t().reshape(-1), square.to(torch.float64)]
        assert meter.allocated_bytes == 4 * KIB
        views = [square.contiguous(), square.reshape(-1), square.to(torch.float32)]
        assert meter.allocated_bytes == 4 * KIB
        del copies, views
        assert meter.allocated_bytes == 0


def test_a_new_storage_at_an_old_address_counts_again() -> None:
    with DeviceMemoryMeter() as meter:
        for _ in range(50):
            tensor = torch.zeros(FLOATS_PER_KIB)
            assert meter.allocated_bytes == KIB
            del tensor
            assert meter.allocated_bytes == 0


@pytest.mark.parametrize("backend_type", [CpuBackend, LazyCpuBackend], ids=lambda kind: kind.name)
def test_host_memory_of_a_backend_does_not_count(backend_type: type[CpuBackend]) -> None:
    with DeviceMemoryMeter() as meter:
        host = backend_type().allocate_host(KIB).view(torch.float32)
        device = torch.ones(FLOATS_PER_KIB)
        host.copy_(device)
        host[:8].zero_()
        assert meter.peak_bytes == KIB
        del device
        assert meter.allocated_bytes == 0


def test_moving_saved_tensors_to_the_host_lowers_the_peak() -> None:
    """The meter shows that an offloaded activation is freed between forward and backward."""
    num_layers, floats = 16, 8 * FLOATS_PER_KIB
    peaks = {}
    for offload in (False, True):
        weight = torch.full((floats,), 0.5, requires_grad=True)
        with DeviceMemoryMeter() as meter:

            def keep(tensor: torch.Tensor) -> torch.Tensor:
                return tensor

            value = torch.ones(floats)
            with saved_tensors_hooks(host_clone if offload else keep, torch.clone):
                for _ in range(num_layers):
                    value = torch.sin(value * weight)
            value.sum().backward()
        peaks[offload] = meter.peak_bytes
    assert peaks[False] > num_layers * 8 * KIB
    assert peaks[True] < peaks[False] / 2
