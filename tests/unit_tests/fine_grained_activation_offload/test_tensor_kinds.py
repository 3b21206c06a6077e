# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Whatever takes tensors takes them of every kind, and moves only those with their own memory."""

from __future__ import annotations

import gc

import pytest
import torch
from hand_driven import LAZY_NATIVE, HandDriven
from tensor_kinds import KINDS, dense, tensor_of_kind

from megatron.slipstream.fine_grained_activation_offload.memory_of import memory_of
from megatron.slipstream.integration.cpu_memory import DeviceMemoryMeter

BACKENDS = ["cpu-lazy", LAZY_NATIVE]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_tensor_of_any_kind_stays_as_it_is(kind: str, backend: str) -> None:
    bench, tensor = HandDriven(backend), tensor_of_kind(kind)
    group = bench.group()
    saved = bench.save(group, tensor)
    bench.send(group)
    back = bench.unpack(saved)
    assert (type(back), back.layout) == (type(tensor), tensor.layout)
    assert not group.held
    assert bench.copies == 0


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", KINDS)
def test_tensors_of_any_kind_can_be_given_up_and_discarded(kind: str, backend: str) -> None:
    bench, tensor = HandDriven(backend), tensor_of_kind(kind)
    group = bench.group()
    saved, expected = bench.save(group, dense()), dense()
    bench.store.commit(group)
    bench.store.give_up(group, [tensor])
    bench.copy_out(group)
    bench.store.before_discard(tensor)
    bench.store.release(group)
    assert torch.equal(bench.unpack(saved), expected)
    assert bench.copies == 1


@pytest.mark.parametrize("kind", KINDS)
def test_the_memory_meter_sees_tensors_of_any_kind(kind: str) -> None:
    with DeviceMemoryMeter() as meter:
        tensor = tensor_of_kind(kind)
        assert (memory_of(tensor) is None) is not torch._C._has_storage(tensor)
        del tensor
        gc.collect()
        assert meter.allocated_bytes == 0
        plain = dense()
        assert meter.allocated_bytes == plain.nbytes
