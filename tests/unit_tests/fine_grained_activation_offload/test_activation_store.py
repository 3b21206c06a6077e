# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Saved tensors come back bit by bit, move once, and live as long as without offloading."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from typing import Optional

import pytest
import torch
from hand_driven import LAZY_NATIVE, HandDriven
from hypothesis import given, settings, strategies as st
from torch.autograd import forward_ad

from megatron.slipstream.fine_grained_activation_offload import activation_store
from megatron.slipstream.fine_grained_activation_offload.group import (
    OffloadTensorGroup,
    SavedTensor,
)
from megatron.slipstream.fine_grained_activation_offload.storage import Residence


@pytest.fixture(params=["cpu-lazy", LAZY_NATIVE])
def bench(request: pytest.FixtureRequest) -> HandDriven:
    return HandDriven(request.param)


def test_device_memory_is_gone_while_the_bytes_are_on_the_host(bench: HandDriven) -> None:
    tensor = torch.randn(64, 64)
    expected, gone = tensor.clone(), weakref.ref(tensor.untyped_storage())
    group = bench.group()
    saved = bench.save(group, tensor)
    del tensor
    bench.send(group)
    assert gone() is None
    assert torch.equal(bench.unpack(saved), expected)


def test_views_of_one_storage_move_once_and_share_memory_again(bench: HandDriven) -> None:
    base = torch.randn(8, 6, 16)
    expected = base.clone()
    group = bench.group()
    saved = bench.save(group, base[:, :2], base[:, 2:4].transpose(0, 1), base[:, 4:])
    del base
    bench.send(group)
    views = [bench.unpack(item) for item in saved]
    assert bench.copies == 1
    assert torch.equal(views[0], expected[:, :2])
    assert torch.equal(views[1], expected[:, 2:4].transpose(0, 1))
    assert views[1].stride() == expected[:, 2:4].transpose(0, 1).stride()
    assert len({view.untyped_storage().data_ptr() for view in views}) == 1


def test_storage_of_two_groups_moves_once_and_is_freed_by_the_last(bench: HandDriven) -> None:
    tensor = torch.randn(256)
    expected, gone = tensor.clone(), weakref.ref(tensor.untyped_storage())
    first, second = bench.group("first"), bench.group("second")
    in_first, in_second = bench.save(first, tensor), bench.save(second, tensor.view(16, 16))
    del tensor
    bench.send(first)
    assert gone() is not None, "the second group has not released it"
    bench.send(second)
    assert gone() is None
    assert bench.copies == 1
    assert torch.equal(bench.unpack(in_second), expected.view(16, 16))
    assert torch.equal(bench.unpack(in_first), expected)


def test_a_group_that_saves_what_has_left_copies_nothing(bench: HandDriven) -> None:
    tensor = torch.randn(256)
    expected = tensor.clone()
    first, second = bench.group("first"), bench.group("second")
    bench_first = bench.save(first, tensor)
    bench.send(first)
    saved = bench.save(second, tensor)
    del tensor
    bench.send(second)
    assert bench.copies == 1
    assert torch.equal(bench.unpack(saved), expected)
    assert torch.equal(bench.unpack(bench_first), expected)


def test_a_small_part_of_a_large_storage_moves_alone(bench: HandDriven) -> None:
    base = torch.randn(64, 1024)
    expected = base[40].clone()
    group = bench.group()
    saved = bench.save(group, base[40])
    del base
    bench.send(group)
    assert bench.store.modules["group"].d2h_bytes <= 4096 + 512
    tensor = bench.unpack(saved)
    assert torch.equal(tensor, expected)
    assert tensor.storage_offset() * 4 % 512 == (40 * 4096) % 512, "alignment decides kernels"


def test_a_view_outside_of_what_has_left_is_a_storage_of_its_own(bench: HandDriven) -> None:
    base = torch.randn(64, 1024)
    expected = base.clone()
    first, second = bench.group(), bench.group()
    in_first = bench.save(first, base[3])
    bench.send(first)
    in_second = bench.save(second, base[50])
    del base
    bench.send(second)
    assert torch.equal(bench.unpack(in_second), expected[50])
    assert torch.equal(bench.unpack(in_first), expected[3])


def test_what_something_else_holds_is_not_copied_back_and_is_learnt(bench: HandDriven) -> None:
    tensor = torch.randn(128)
    group = bench.group()
    saved = bench.save(group, tensor)
    bench.send(group)
    bench.store.copy_in(group.storages())
    assert bench.unpack(saved).data_ptr() == tensor.data_ptr()
    assert bench.store.modules["group"].h2d_copies == 0
    assert bench.recorder.finish(0, bench.groups).storages[0].held_outside


def test_memory_refilled_by_recomputation_is_read_as_refilled(
    bench: HandDriven,
) -> None:
    tensor = torch.randn(128)
    expected = tensor.clone()
    group = bench.group()
    saved = bench.save(group, tensor)
    bench.store.commit(group)
    bench.store.copy_out(group, lambda *_: True)
    tensor.untyped_storage().resize_(0)  # while the copy out may still be reading
    bench.store.release(group)
    bench.store.copy_in(group.storages())
    # As megatron-core does, past the version counter.
    tensor.untyped_storage().resize_(512)
    tensor.untyped_storage().copy_(expected.untyped_storage())
    del tensor
    assert torch.equal(bench.unpack(saved), expected)


def test_memory_that_is_empty_when_it_is_saved_stays(bench: HandDriven) -> None:
    tensor = torch.randn(128)
    expected = tensor.clone()
    tensor.untyped_storage().resize_(0)
    group = bench.group()
    saved = bench.save(group, tensor)
    bench.send(group)
    assert bench.copies == 0
    tensor.untyped_storage().resize_(512)
    tensor.untyped_storage().copy_(expected.untyped_storage())
    del tensor
    bench.store.copy_in(group.storages())
    assert torch.equal(bench.unpack(saved), expected)


def test_a_part_saved_by_a_group_that_is_still_open_leaves_with_the_rest(
    bench: HandDriven,
) -> None:
    base = torch.arange(4096, dtype=torch.uint8).repeat(4)
    first, second = bench.group(), bench.group()
    whole = base[1024:1088].view(torch.float32)
    saved_whole = bench.save(first, whole)
    bench.store.commit(first)
    odd = base[1021:1061]
    saved_odd = bench.save(second, odd)
    bench.store.copy_out(first)
    expected = whole.clone(), odd.clone()
    del base, whole, odd
    bench.store.release(first)
    bench.store.commit(second)
    bench.store.release(second)
    bench.store.copy_in(first.storages())
    returned = bench.unpack(saved_whole)
    assert torch.equal(returned.view(torch.int32), expected[0].view(torch.int32))
    assert returned.data_ptr() % 64 == 0
    assert torch.equal(bench.unpack(saved_odd), expected[1])


def test_memory_emptied_for_good_comes_back_from_the_host(bench: HandDriven) -> None:
    tensor = torch.randn(128)
    expected = tensor.clone()
    group = bench.group()
    saved = bench.save(group, tensor)
    bench.send(group)
    tensor.untyped_storage().resize_(0)
    bench.store.copy_in(group.storages())
    assert torch.equal(bench.unpack(saved), expected)


def test_memory_emptied_before_its_commit_is_not_copied(bench: HandDriven) -> None:
    tensor = torch.randn(128)
    group = bench.group()
    saved = bench.save(group, tensor)
    tensor.untyped_storage().resize_(0)
    bench.send(group)
    assert bench.copies == 0
    assert saved.storage.residence is Residence.DEVICE


def test_memory_that_has_another_size_by_now_is_another_storage(bench: HandDriven) -> None:
    """Discarded, and filled with something longer, before it has left."""
    tensor = torch.randn(64)
    group = bench.group()
    saved = bench.save(group, tensor)
    tensor.untyped_storage().resize_(0)
    tensor.untyped_storage().resize_(4 * 512)
    longer = torch.empty(0).set_(tensor.untyped_storage(), 0, (512,)).copy_(torch.randn(512))
    expected = longer.clone()
    saved_longer = bench.save(group, longer)
    assert saved_longer.storage is not saved.storage
    del tensor, longer
    bench.send(group)
    assert bench.copies == 1
    assert torch.equal(bench.unpack(saved_longer), expected)


def test_bytes_changed_past_the_counter_are_not_read_from_the_copy_before(
    bench: HandDriven,
) -> None:
    """The saved tensor's counter shows nothing: the change was made with another's."""
    tensor = torch.randn(128)
    first, second = bench.group("first"), bench.group("second")
    saved = bench.save(first, tensor)
    data = tensor.data
    bench.send(first)
    data.add_(1)
    expected = data.clone()
    saved_data = bench.save(second, data)
    del tensor, data
    bench.send(second)
    assert torch.equal(bench.unpack(saved_data), expected)
    del saved


@pytest.mark.parametrize("when", ["before commit", "while leaving", "after it stayed"])
def test_in_place_change_of_a_saved_tensor_is_refused(bench: HandDriven, when: str) -> None:
    tensor = torch.randn(128)
    group = bench.group("moe_act")
    saved = bench.save(group, tensor)
    if when == "before commit":
        tensor.add_(1)
    bench.store.commit(group)
    bench.store.copy_out(group, lambda *_: when != "after it stayed")
    if when != "before commit":
        tensor.add_(1)
    bench.store.release(group)
    with pytest.raises(RuntimeError, match=r"\[128\] that moe_act of layer 0 .* in-place"):
        bench.unpack(saved)


WHEN = ["before its copy", "while leaving", "after its release"]


def _send_and_change(
    bench: HandDriven, group: OffloadTensorGroup, when: str, change: Callable[[], None]
) -> None:
    """Copy a group out and release it; call ``change`` at some time."""
    bench.store.commit(group)
    for step, move in zip(WHEN, (bench.store.copy_out, bench.store.release, None), strict=True):
        if when == step:
            change()
        if move is not None:
            move(group)


@pytest.mark.parametrize("is_held", [True, False], ids=["held", "not held"])
@pytest.mark.parametrize("when", WHEN)
def test_only_what_was_saved_before_a_change_in_place_is_refused(
    bench: HandDriven, when: str, is_held: bool
) -> None:
    tensor = torch.randn(128)
    expected = tensor + 1
    first, second = bench.group("first"), bench.group("second")
    before = bench.save(first, tensor)
    after = None

    def change() -> None:
        nonlocal after
        tensor.add_(1)
        after = bench.save(second, tensor[:])

    _send_and_change(bench, first, when, change)
    bench.send(second)
    if not is_held:
        del tensor, change  # the function refers to the tensor
    for group in (first, second):
        bench.store.copy_in(group.storages())
    assert torch.equal(bench.unpack(after), expected)
    with pytest.raises(RuntimeError, match="that first of layer 0 .* in-place"):
        bench.unpack(before)
    assert torch.equal(bench.unpack(after), expected), "after the error, too"


@pytest.mark.parametrize("is_read_early", [True, False], ids=["copied in before", "read first"])
def test_a_change_in_place_after_the_release_is_refused(
    bench: HandDriven, is_read_early: bool
) -> None:
    """The bytes of the copy are right, but who reads them cannot have meant it: as autograd."""
    tensor = torch.randn(128)
    group = bench.group()
    saved = bench.save(group, tensor, tensor[64:])
    bench.send(group)
    if is_read_early:
        bench.store.copy_in(group.storages())
        bench.unpack(saved[0])
    tensor.add_(1)
    del tensor
    for item in saved:
        with pytest.raises(RuntimeError, match="in-place"):
            bench.unpack(item)


@pytest.mark.parametrize(
    "when, is_held", [*((when, True) for when in WHEN), (WHEN[0], False), (WHEN[1], False)]
)
def test_a_tensor_with_a_counter_of_its_own_is_read_as_it_is_by_now(
    bench: HandDriven, when: str, is_held: bool
) -> None:
    """``.data`` has the same memory and another version counter, so autograd reads it."""
    tensor = torch.randn(128)
    expected = tensor + 1
    held, group = [tensor], bench.group()
    saved, other = bench.save(group, tensor, tensor.data)
    del tensor
    _send_and_change(bench, group, when, lambda: held[0].add_(1))
    if not is_held:
        held.clear()
    assert torch.equal(bench.unpack(other), expected)
    with pytest.raises(RuntimeError, match="in-place"):
        bench.unpack(saved)


def test_bytes_that_are_lost_are_refused_rather_than_out_of_date(bench: HandDriven) -> None:
    tensor = torch.randn(128)
    group = bench.group()
    _, other = bench.save(group, tensor, tensor.data)
    bench.send(group)
    tensor.add_(1)
    del tensor
    with pytest.raises(RuntimeError, match="in-place"):
        bench.unpack(other)


def test_what_is_saved_after_a_change_does_not_share_the_copy_before_it(bench: HandDriven) -> None:
    """Its own counter says as little of the change as the counter's number."""
    tensor = torch.randn(128)
    expected = tensor + 1
    first, second = bench.group("first"), bench.group("second")
    saved = bench.save(first, tensor)
    bench.send(first)
    tensor.add_(1)
    other = bench.save(second, tensor.data)
    del tensor
    bench.send(second)
    assert torch.equal(bench.unpack(other), expected)
    with pytest.raises(RuntimeError, match="in-place"):
        bench.unpack(saved)


def test_a_tensor_that_was_changed_before_it_was_saved_leaves(bench: HandDriven) -> None:
    """So that a state which is updated in place does not stay on the device."""
    tensor = torch.randn(128)
    group = bench.group()
    saved = [bench.save(group, tensor)]
    tensor.add_(1)
    saved.append(bench.save(group, tensor))
    gone = weakref.ref(tensor.untyped_storage())
    del tensor
    bench.send(group)
    assert bench.copies == 1
    assert gone() is None


def test_a_dual_tensor_of_forward_mode_differentiation_stays(bench: HandDriven) -> None:
    with forward_ad.dual_level():
        tangent = torch.ones(64)
        saved = bench.save(bench.group(), forward_ad.make_dual(torch.randn(64), tangent))
        assert torch.equal(forward_ad.unpack_dual(bench.unpack(saved)).tangent, tangent)
        assert type(bench.save(bench.group(), torch.randn(64))) is bench.store.saved_type


def test_needed_before_it_was_released_it_stays(bench: HandDriven) -> None:
    tensor = torch.randn(128)
    address = tensor.data_ptr()
    group = bench.group()
    saved = bench.save(group, tensor)
    bench.store.commit(group)
    bench.store.copy_out(group, lambda *_: True)
    assert bench.unpack(saved).data_ptr() == address
    bench.store.release(group)
    assert saved.storage.residence is Residence.STAYS
    assert bench.store.host_pool.in_use_bytes == 0


def test_out_of_device_memory_while_returning_loses_nothing(
    bench: HandDriven, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A user may catch it, free memory and go on; neither bytes nor host buffers may be gone."""
    tensors = [torch.randn(128), torch.randn(128)]
    group = bench.group()
    saved = bench.save(group, *(tensor.clone() for tensor in tensors))
    bench.send(group)
    allocate = bench.backend.allocate_device
    calls: list[int] = []

    def failing(nbytes: int, device: torch.device) -> torch.UntypedStorage:
        calls.append(nbytes)
        if len(calls) == 2:
            raise torch.OutOfMemoryError
        return allocate(nbytes, device)

    monkeypatch.setattr(bench.backend, "allocate_device", failing)
    with pytest.raises(torch.OutOfMemoryError):
        bench.store.copy_in(group.storages())
    for item, expected in zip(saved, tensors, strict=True):
        assert torch.equal(bench.unpack(item), expected)
    assert bench.store.host_pool.in_use_bytes == 0


def test_read_again_it_is_the_same_memory(bench: HandDriven) -> None:
    tensor = torch.randn(128)
    group = bench.group()
    saved = bench.save(group, tensor)
    del tensor
    bench.send(group)
    assert bench.unpack(saved).data_ptr() == bench.unpack(saved).data_ptr()
    assert bench.store.modules["group"].h2d_copies == 1


def test_host_memory_returns_when_the_graph_dies_without_backward(bench: HandDriven) -> None:
    group = bench.group()
    saved = bench.save(group, torch.randn(4096))
    bench.send(group)
    assert bench.store.host_pool.in_use_bytes > 0
    del saved
    gc.collect()
    assert bench.store.host_pool.in_use_bytes == 0


class Subclass(torch.Tensor):
    pass


def _not_offloadable() -> torch.Tensor:
    tensor = torch.ones(64)
    tensor._do_not_offload = True  # type: ignore[attr-defined]
    return tensor


@pytest.mark.parametrize(
    "tensor",
    [
        pytest.param(torch.nn.Parameter(torch.ones(64)), id="parameter"),
        pytest.param(torch.nn.Parameter(torch.ones(8, 8)).t(), id="view of a parameter"),
        pytest.param(torch.ones(64).as_subclass(Subclass), id="subclass"),
        pytest.param(torch.ones(4), id="smaller than the minimum"),
        pytest.param(torch.ones(0), id="empty"),
        pytest.param(torch.ones(64, device="meta"), id="another device"),
        pytest.param(torch.ones(64, dtype=torch.complex64).conj(), id="conjugate view"),
        pytest.param(torch.eye(8).to_sparse(), id="sparse"),
        pytest.param(_not_offloadable(), id="marked"),
    ],
)
def test_stays_as_it_is(bench: HandDriven, tensor: torch.Tensor) -> None:
    group = bench.group()
    kept = bench.save(group, tensor, min_numel=16)
    assert isinstance(kept, torch.Tensor)
    assert not group.held
    assert bench.unpack(kept) is kept


def test_a_result_saved_by_its_own_operation_does_not_keep_its_graph(bench: HandDriven) -> None:
    x = torch.randn(8, requires_grad=True)
    result = torch.exp(x)
    kept = bench.save(bench.group(), result, min_numel=1000)
    assert kept.grad_fn is None
    assert kept.data_ptr() == result.data_ptr()


@settings(max_examples=150, deadline=None)
@given(data=st.data())
def test_any_order_of_moves_returns_what_was_saved(data: st.DataObject) -> None:
    """Groups over shared and separate storages, driven in a random order, adversarial backend."""
    bench = HandDriven("cpu-lazy")
    bases = [torch.randn(4, 32) for _ in range(3)]
    groups, saved = [], []
    view = None
    for _ in range(data.draw(st.integers(1, 5), label="groups")):
        group = bench.group()
        groups.append(group)
        for index in data.draw(st.lists(st.integers(0, 2), max_size=3), label="bases"):
            row = data.draw(st.integers(0, 3), label="row")
            view = bases[index] if data.draw(st.booleans(), label="whole") else bases[index][row:]
            saved.append((bench.save(group, view), view.clone()))
        bench.store.commit(group)
    del bases, view, group
    moves = st.sampled_from(["out", "release", "in"])
    for _ in range(data.draw(st.integers(0, 25), label="moves")):
        group = data.draw(st.sampled_from(groups), label="group")
        match data.draw(moves, label="move"):
            case "out":
                bench.store.copy_out(group, lambda *_: True)
            case "release":
                bench.store.release(group)
            case "in":
                bench.store.copy_in(group.storages())
        if saved and data.draw(st.booleans(), label="read"):
            item, expected = data.draw(st.sampled_from(saved), label="which")
            assert torch.equal(bench.unpack(item), expected)
    for item, expected in saved:
        assert torch.equal(bench.unpack(item), expected)
    bench.store.close()


@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_any_order_of_moves_and_changes_is_read_as_autograd_reads_it(data: st.DataObject) -> None:
    """Changes in place at any time: of memory with another reference until the end through either
    of two version counters, of memory without one through one. ``plain`` is what autograd keeps.
    """
    bench = HandDriven("cpu-lazy")
    is_held = data.draw(st.booleans(), label="held to the end")
    tensor = torch.randn(4, 32)
    plain = [tensor.clone()] * 2
    views: Optional[list[torch.Tensor]] = [tensor] * 2
    if is_held:
        views, plain = [tensor, tensor.data], [plain[0], plain[0].data]
    del tensor
    groups = [bench.group() for _ in range(3)]
    open_groups = list(groups)
    saved: list[tuple[SavedTensor, torch.Tensor, int]] = []
    moves = ["save", "change", "commit", "out", "release", "in", "read", "drop"]
    for step in data.draw(st.lists(st.sampled_from(moves), max_size=30), label="steps"):
        counter = data.draw(st.integers(0, 1), label="counter")
        group = data.draw(st.sampled_from(groups), label="group")
        is_open = group in open_groups
        match step:
            case "save" if views is not None and is_open:
                row = data.draw(st.integers(0, 3), label="row")
                item = bench.save(group, views[counter][row:])
                saved.append((item, plain[counter][row:], plain[counter]._version))
            case "change" if views is not None:
                views[counter].add_(1)
                plain[counter].add_(1)
            case "commit" if is_open:
                bench.store.commit(group)
                open_groups.remove(group)
            case "out" if not is_open:
                bench.store.copy_out(group, lambda *_: True)
            case "release" if not is_open:
                bench.store.release(group)
            case "in":
                bench.store.copy_in(group.storages())
            case "drop" if not is_held:
                views = None
            case "read" if saved:
                _read_as_autograd(bench, *data.draw(st.sampled_from(saved), label="which"))
    for item, expected, version in saved:
        _read_as_autograd(bench, item, expected, version)
    bench.store.close()


def _read_as_autograd(
    bench: HandDriven, item: SavedTensor, expected: torch.Tensor, version: int
) -> None:
    if expected._version == version:
        assert torch.equal(bench.unpack(item), expected)
        return
    with pytest.raises(RuntimeError, match="in-place"):
        bench.unpack(item)


def test_addresses_of_storages_that_are_gone_are_forgotten_now_and_then(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(activation_store, "MIN_KNOWN", 4)
    bench = HandDriven("cpu")
    group = bench.group()
    kept = bench.save(group, torch.randn(8))
    gone = [bench.save(group, torch.randn(8)) for _ in range(20)]
    assert len(bench.store._by_memory) == 21
    del gone
    for _ in range(2):  # the next time none has to be forgotten
        bench.store.end_iteration()
        assert len(bench.store._by_memory) == 1
    assert bench.unpack(kept).numel() == 8


def given_up(bench: HandDriven, tensor: torch.Tensor) -> SavedTensor:
    """A saved tensor whose memory has been taken from under ``tensor``."""
    group = bench.group()
    saved = bench.save(group, tensor)
    bench.store.commit(group)
    bench.store.give_up(group, [tensor])
    bench.store.copy_out(group)
    bench.store.release(group)
    assert tensor.untyped_storage().nbytes() == 0
    return saved


def test_a_new_tensor_is_never_taken_for_one_whose_memory_was_given_up(bench: HandDriven) -> None:
    """Torch puts a new storage object where one that is gone has been, most of the time."""
    for _ in range(50):
        tensor = torch.full((64,), 1.0)
        saved = given_up(bench, tensor)
        del tensor
        new = [torch.full((64,), 2.0) for _ in range(20)]
        group = bench.group()
        for other in new:
            assert bench.save(group, other).storage is not saved.storage
        assert torch.equal(bench.unpack(saved), torch.full((64,), 1.0))


def test_given_up_memory_that_others_fill_again_is_another_storage(bench: HandDriven) -> None:
    tensor = torch.full((64,), 1.0)
    saved = given_up(bench, tensor)
    tensor.untyped_storage().resize_(tensor.numel() * tensor.element_size())
    tensor.data.fill_(2.0)
    group = bench.group()
    again = bench.save(group, tensor)
    assert torch.equal(bench.unpack(again), torch.full((64,), 2.0))
    assert torch.equal(bench.unpack(saved), torch.full((64,), 1.0))


def returned(bench: HandDriven, tensors: list[torch.Tensor]) -> list[SavedTensor]:
    """Saved tensors of one group that have been away. Takes the tensors out of the list."""
    group = bench.group()
    saved = [bench.save(group, tensor) for tensor in tensors]
    tensors.clear()
    bench.send(group)
    bench.store.copy_in(group.storages())
    return saved


def test_each_stream_that_reads_waits_for_the_copy_back_once(
    bench: HandDriven, monkeypatch: pytest.MonkeyPatch
) -> None:
    (saved,) = returned(bench, [torch.randn(64)])
    waiters = []
    wait = bench.backend.wait
    monkeypatch.setattr(
        bench.backend, "wait", lambda stream, event: (waiters.append(stream), wait(stream, event))
    )
    compute, other = bench.backend.current_stream(), bench.backend.new_stream()
    expected = []
    for stream in (other, compute):
        monkeypatch.setattr(bench.backend, "current_stream", lambda stream=stream: stream)
        expected.append(stream)
        for _ in range(3):
            bench.unpack(saved)
        assert waiters == expected
    for stream in (other, compute):
        monkeypatch.setattr(bench.backend, "current_stream", lambda stream=stream: stream)
        bench.unpack(saved)
    assert waiters == expected, "a wait covers what comes later"


def test_a_change_between_two_reads_is_refused(bench: HandDriven) -> None:
    """Of a tensor with a version counter of its own, when the memory is gone."""
    tensors = [torch.randn(64)]
    tensors.append(tensors[0].data)
    expected = tensors[0].clone()
    counter = tensors[1].detach()
    counter.data = torch.empty(0)  # what is left of it is the counter
    first, _ = returned(bench, tensors)
    assert torch.equal(bench.unpack(first), expected)
    counter.add_(1)
    with pytest.raises(RuntimeError, match="in-place"):
        bench.unpack(first)
