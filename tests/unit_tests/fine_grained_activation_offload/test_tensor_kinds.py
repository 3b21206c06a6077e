# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Whatever takes tensors takes them of every kind, and moves only those with their own memory."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hand_driven import LAZY_NATIVE, HandDriven
from tensor_kinds import KINDS, STAYING, dense, tensor_of_kind
from torch.autograd import forward_ad

from megatron.slipstream.fine_grained_activation_offload.storage import memory_of
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter
from megatron.slipstream.plan.staying import Staying, texts_of

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
    assert group.kinds_staying == STAYING[kind].bit


def weight() -> torch.nn.Parameter:
    return torch.nn.Parameter(dense())


def marked(name: str) -> torch.Tensor:
    tensor = dense()
    setattr(tensor, name, True)
    return tensor


def discarded() -> torch.Tensor:
    tensor = dense()
    tensor.untyped_storage().resize_(0)
    return tensor


def dual() -> torch.Tensor:
    return forward_ad.make_dual(dense(), dense())


DENSE: dict[str, tuple[Staying, Callable[[], torch.Tensor]]] = {
    "small": (Staying.SMALL, lambda: torch.ones(8)),
    "parameter": (Staying.PARAMETER, weight),
    "view of a parameter": (Staying.PARAMETER, lambda: weight().t()),
    "marked": (Staying.MARKED, lambda: marked("_do_not_offload")),
    "marked by Transformer Engine": (Staying.MARKED, lambda: marked("_TE_do_not_offload")),
    "discarded": (Staying.DISCARDED, discarded),
    "dual": (Staying.DUAL, dual),
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("kind", DENSE)
def test_a_group_says_which_dense_tensors_stay(kind: str, backend: str) -> None:
    staying, make = DENSE[kind]
    bench = HandDriven(backend)
    group = bench.group()
    with forward_ad.dual_level():
        bench.save(group, make(), min_numel=16)
    assert not group.held
    assert group.kinds_staying == staying.bit
    assert texts_of(group.kinds_staying) == (staying.text,)


@pytest.mark.parametrize("backend", BACKENDS)
def test_a_group_names_all_kinds_that_stay_and_none_that_moves(backend: str) -> None:
    bench = HandDriven(backend)
    group = bench.group()
    saved = bench.save(group, dense())
    assert group.kinds_staying == 0
    bench.save(group, weight(), tensor_of_kind("coo"), tensor_of_kind("jagged"))
    kinds = (Staying.PARAMETER, Staying.NESTED, Staying.NOT_DENSE)
    assert texts_of(group.kinds_staying) == tuple(kind.text for kind in kinds)
    del saved


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
