# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The two imitations of a device: one copies at once, the other shows every missing wait."""

from __future__ import annotations

import pytest
import torch

from megatron.slipstream.fine_grained_activation_offload import peak_statistics
from megatron.slipstream.fine_grained_activation_offload.backend import (
    POISON_BYTE,
    Bytes,
    Event,
    Stream,
)
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import (
    CpuBackend,
    LazyCpuBackend,
)
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.fine_grained_activation_offload.engine_setup import make_backend

CPU = torch.device("cpu")
NBYTES = 64


def filled(value: int, nbytes: int = NBYTES) -> torch.Tensor:
    return torch.full((nbytes,), value, dtype=torch.uint8)


def poison(nbytes: int = NBYTES) -> torch.Tensor:
    return filled(POISON_BYTE, nbytes)


def ordered_copy(
    backend: LazyCpuBackend, stream: Stream, destination: torch.Tensor, source: torch.Tensor
) -> Event:
    """Put a copy into a stream as the engine should: after the newest computation.

    Returns the event after it.
    """
    backend.wait(stream, backend.record(backend.current_stream()))
    backend.run_copies([(Bytes.of(destination), Bytes.of(source))], stream)
    return backend.record(stream)


@pytest.fixture
def lazy() -> LazyCpuBackend:
    return LazyCpuBackend()


# Memory.


@pytest.mark.parametrize(
    "dtype",
    [
        *(torch.float32, torch.bfloat16, torch.float16, torch.float64),
        *(torch.float8_e4m3fn, torch.float8_e5m2),
    ],
    ids=str,
)
def test_poison_is_nan_in_every_float_format(dtype: torch.dtype) -> None:
    assert poison().view(dtype).float().isnan().all()


def test_a_byte_view_shares_the_bytes_it_names() -> None:
    floats = torch.arange(4, dtype=torch.float32)
    view = Bytes(floats.untyped_storage(), 4, 8).view()
    assert (view.dtype, view.shape) == (torch.uint8, (8,))
    view.zero_()
    assert floats.tolist() == [0.0, 0.0, 0.0, 3.0]


# cpu: everything at once.


def test_cpu_copies_in_the_order_given() -> None:
    backend = CpuBackend()
    first, second = filled(0), filled(0)
    backend.run_copies(
        [(Bytes.of(first), Bytes.of(filled(7))), (Bytes.of(second), Bytes.of(first))],
        backend.new_stream(),
    )
    assert second.equal(filled(7))


@pytest.mark.parametrize("is_destination", [False, True])
def test_a_copy_beyond_its_memory_is_refused(is_destination: bool) -> None:
    backend = CpuBackend()
    short = Bytes(filled(0).untyped_storage(), 8, NBYTES)
    copy = (short, Bytes.of(filled(7))) if is_destination else (Bytes.of(filled(7)), short)
    with pytest.raises(RuntimeError, match=f"bytes 8 to {NBYTES + 8} of a storage of {NBYTES}"):
        backend.run_copies([copy], backend.new_stream())


@pytest.mark.parametrize("backend", [CpuBackend(), LazyCpuBackend()], ids=lambda b: b.name)
def test_streams_are_told_apart(backend: CpuBackend) -> None:
    first, second = backend.new_stream(), backend.new_stream()
    ids = {backend.stream_id(s) for s in (first, second, first, backend.current_stream())}
    assert len(ids) == 3
    assert backend.stream_id(backend.current_stream()) == backend.stream_id(
        backend.current_stream()
    )


@pytest.mark.parametrize("backend", [CpuBackend(), LazyCpuBackend()], ids=lambda b: b.name)
def test_memory_has_the_size_asked_for(backend: CpuBackend) -> None:
    assert backend.allocate_device(NBYTES, CPU).nbytes() == NBYTES
    host = backend.allocate_host(NBYTES)
    assert (host.dtype, host.shape) == (torch.uint8, (NBYTES,))
    assert backend.manages(host)
    assert not backend.manages(torch.empty(1, device="meta"))


class FakeMeter:
    """Counts as a memory meter does, with fixed figures."""

    allocated_bytes = 10
    peak_bytes = 20

    def reset_peak(self) -> None:
        self.peak_bytes = self.allocated_bytes


@pytest.mark.parametrize("fraction, expected", [(1.0, 80), (0.75, 75), (0.9, 80)])
def test_the_allocators_own_limit_is_the_end_of_the_device(
    fraction: float, expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    readings = {
        "mem_get_info": (60, 100),
        "memory_reserved": 20,
        "get_per_process_memory_fraction": fraction,
    }
    for name, value in readings.items():
        monkeypatch.setattr(torch.cuda, name, lambda value=value: value)
    assert peak_statistics.obtainable_bytes() == expected


def test_a_peak_goes_on_where_the_meters_begins_again() -> None:
    backend = CpuBackend()
    assert (backend.memory(), backend.begin_peak(), backend.peak_bytes()) == (None, 0, 0)
    backend.meter = meter = FakeMeter()
    assert (backend.begin_peak(), backend.peak_bytes()) == (10, 10)
    meter.peak_bytes = 30
    backend.reset_peak_memory()
    assert backend.memory() == (10, 10)
    assert backend.peak_bytes() == 30
    meter.peak_bytes = 40
    assert backend.peak_bytes() == 40
    assert (backend.begin_peak(), backend.peak_bytes()) == (10, 10)


# cpu-lazy: a copy runs when something waits for it.


def test_new_memory_is_poisoned(lazy: LazyCpuBackend) -> None:
    assert lazy.allocate_host(NBYTES).equal(poison())
    assert Bytes(lazy.allocate_device(NBYTES, CPU), 0, NBYTES).view().equal(poison())


def test_a_copy_does_not_run_until_something_waits(lazy: LazyCpuBackend) -> None:
    destination = lazy.allocate_host(NBYTES)
    event = ordered_copy(lazy, lazy.new_stream(), destination, filled(7))
    assert destination.equal(poison())
    lazy.wait(lazy.current_stream(), event)
    assert destination.equal(filled(7))


def test_a_late_copy_reads_what_its_source_has_become(lazy: LazyCpuBackend) -> None:
    # So the memory of a source must not be reused before a wait.
    source, destination = filled(7), filled(0)
    event = ordered_copy(lazy, lazy.new_stream(), destination, source)
    source.fill_(8)
    lazy.wait(lazy.current_stream(), event)
    assert destination.equal(filled(8))


def test_a_wait_runs_what_came_before_the_event_and_nothing_after(lazy: LazyCpuBackend) -> None:
    stream = lazy.new_stream()
    first, second, third = filled(0), filled(0), filled(0)
    ordered_copy(lazy, stream, first, filled(7))
    event = ordered_copy(lazy, stream, second, first)
    ordered_copy(lazy, stream, third, second)
    lazy.wait(lazy.current_stream(), event)
    assert second.equal(filled(7))
    assert third.equal(filled(0))


def test_waiting_again_for_an_old_event_runs_nothing(lazy: LazyCpuBackend) -> None:
    stream, late = lazy.new_stream(), filled(0)
    event = ordered_copy(lazy, stream, filled(0), filled(7))
    lazy.wait(lazy.current_stream(), event)
    ordered_copy(lazy, stream, late, filled(7))
    lazy.wait(lazy.current_stream(), event)
    assert late.equal(filled(0))


def test_a_wait_of_one_copy_stream_for_another_runs_nothing_yet(lazy: LazyCpuBackend) -> None:
    first, second = lazy.new_stream(), lazy.new_stream()
    destination = filled(0)
    event = ordered_copy(lazy, first, destination, filled(7))
    lazy.wait(second, event)
    assert destination.equal(filled(0))


def test_waits_between_copy_streams_hold_transitively_and_in_order(lazy: LazyCpuBackend) -> None:
    # out -> middle -> back, each copy reading what the one before it wrote in another stream.
    streams = [lazy.new_stream() for _ in range(3)]
    buffers = [filled(7), filled(1), filled(2), filled(3)]
    event = ordered_copy(lazy, streams[0], buffers[1], buffers[0])
    for place in (1, 2):
        lazy.wait(streams[place], event)
        event = ordered_copy(lazy, streams[place], buffers[place + 1], buffers[place])
    lazy.wait(lazy.current_stream(), event)
    assert all(buffer.equal(filled(7)) for buffer in buffers)


def test_without_a_wait_between_them_the_second_stream_reads_too_early(
    lazy: LazyCpuBackend,
) -> None:
    host, back = lazy.allocate_host(NBYTES), filled(0)
    ordered_copy(lazy, lazy.new_stream(), host, filled(7))
    event = ordered_copy(lazy, lazy.new_stream(), back, host)
    lazy.wait(lazy.current_stream(), event)
    assert back.equal(poison())


# cpu-lazy: a copy has to wait for the computation.


@pytest.mark.parametrize("num_seen", [0, 1], ids=["none", "an-older-event"])
def test_a_copy_that_missed_the_newest_computation_writes_poison(
    lazy: LazyCpuBackend, num_seen: int
) -> None:
    stream, destination = lazy.new_stream(), filled(0)
    for _ in range(num_seen):
        lazy.wait(stream, lazy.record(lazy.current_stream()))
    lazy.record(lazy.current_stream())
    lazy.run_copies([(Bytes.of(destination), Bytes.of(filled(7)))], stream)
    lazy.wait_on_host(stream)
    assert destination.equal(poison())


def test_the_wait_of_another_copy_stream_does_not_count(lazy: LazyCpuBackend) -> None:
    destination = filled(0)
    waiting, other = lazy.new_stream(), lazy.new_stream()
    lazy.wait(waiting, lazy.record(lazy.current_stream()))
    lazy.run_copies([(Bytes.of(destination), Bytes.of(filled(7)))], other)
    lazy.wait_on_host(other)
    assert destination.equal(poison())


def test_a_wait_after_the_copy_comes_too_late(lazy: LazyCpuBackend) -> None:
    stream, destination = lazy.new_stream(), filled(0)
    event = lazy.record(lazy.current_stream())
    lazy.run_copies([(Bytes.of(destination), Bytes.of(filled(7)))], stream)
    lazy.wait(stream, event)
    lazy.wait_on_host(stream)
    assert destination.equal(poison())


def test_a_source_that_was_emptied_meanwhile_copies_poison(lazy: LazyCpuBackend) -> None:
    source, destination = filled(7), filled(0)
    event = ordered_copy(lazy, lazy.new_stream(), destination, source)
    source.untyped_storage().resize_(0)
    lazy.wait(lazy.current_stream(), event)
    assert destination.equal(poison())


# cpu-lazy: memory that is given up.


def test_dropped_device_memory_is_poisoned_at_once(lazy: LazyCpuBackend) -> None:
    storage = lazy.allocate_device(NBYTES, CPU)
    Bytes(storage, 0, NBYTES).view().fill_(7)
    lazy.drop_device(storage)
    assert Bytes(storage, 0, NBYTES).view().equal(poison())


def test_dropped_device_memory_is_left_alone_while_something_else_holds_it(
    lazy: LazyCpuBackend,
) -> None:
    tensor = filled(7)
    lazy.drop_device(tensor.untyped_storage())
    assert tensor.equal(filled(7))


def test_memory_dropped_before_its_copy_out_has_run_copies_poison(lazy: LazyCpuBackend) -> None:
    # The engine forgot to wait before the release (edge E3).
    storage, host = lazy.allocate_device(NBYTES, CPU), lazy.allocate_host(NBYTES)
    Bytes(storage, 0, NBYTES).view().fill_(7)
    event = ordered_copy(lazy, lazy.new_stream(), host, Bytes(storage, 0, NBYTES).view())
    lazy.drop_device(storage)
    lazy.wait(lazy.current_stream(), event)
    assert host.equal(poison())


def test_dropping_memory_that_a_copy_has_yet_to_write_is_refused(lazy: LazyCpuBackend) -> None:
    storage = lazy.allocate_device(NBYTES, CPU)
    event = ordered_copy(lazy, lazy.new_stream(), Bytes(storage, 0, NBYTES).view(), filled(7))
    with pytest.raises(RuntimeError, match="dropped while a copy has yet to write it"):
        lazy.drop_device(storage)
    lazy.wait(lazy.current_stream(), event)
    lazy.drop_device(storage)


def test_unneeded_host_contents_are_poisoned_in_stream_order(
    lazy: LazyCpuBackend,
) -> None:
    stream, host, device = lazy.new_stream(), filled(7), filled(0)
    ordered_copy(lazy, stream, device, host)
    lazy.drop_host_contents([(Bytes.of(device), Bytes.of(host))], stream)
    assert host.equal(filled(7))
    lazy.wait_on_host(stream)
    assert device.equal(filled(7))
    assert host.equal(poison())


def test_returning_host_memory_under_a_pending_copy_is_refused(lazy: LazyCpuBackend) -> None:
    stream, host = lazy.new_stream(), lazy.allocate_host(NBYTES)
    ordered_copy(lazy, stream, host, filled(7))
    with pytest.raises(RuntimeError, match="before the host waited"):
        lazy.free_host(host)
    lazy.wait_on_host(stream)
    lazy.free_host(host)


def test_a_wait_of_the_compute_stream_does_not_stop_the_host(lazy: LazyCpuBackend) -> None:
    # The copy has run here, but on a device the host would be ahead of both streams.
    stream, host = lazy.new_stream(), lazy.allocate_host(NBYTES)
    lazy.wait(lazy.current_stream(), ordered_copy(lazy, stream, host, filled(7)))
    with pytest.raises(RuntimeError, match="before the host waited"):
        lazy.free_host(host)


def test_the_host_has_to_wait_for_every_stream(lazy: LazyCpuBackend) -> None:
    streams = [lazy.new_stream() for _ in range(2)]
    host = lazy.allocate_host(NBYTES)
    for stream in streams:
        ordered_copy(lazy, stream, host, filled(7))
    lazy.wait_on_host(streams[0])
    with pytest.raises(RuntimeError, match="before the host waited"):
        lazy.free_host(host)


# Choosing one.


@pytest.mark.parametrize(
    "name, has_gpu, kind",
    [
        ("cpu", True, CpuBackend),
        ("cpu-lazy", True, LazyCpuBackend),
        ("auto", False, CpuBackend),
        ("auto", True, CudaBackend),
        ("cuda", True, CudaBackend),
    ],
    ids=lambda value: str(getattr(value, "name", value)),
)
def test_a_backend_is_chosen_by_name(
    monkeypatch: pytest.MonkeyPatch, name: str, has_gpu: bool, kind: type
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: has_gpu)
    assert type(make_backend(name)) is kind


def test_cuda_without_a_gpu_is_refused_with_the_cure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="offload_backend='cuda'.*set offload_backend='auto'"):
        make_backend("cuda")


def test_an_unknown_backend_is_refused_with_the_known_ones() -> None:
    with pytest.raises(ValueError, match="offload_backend='tpu'") as refused:
        make_backend("tpu")
    assert all(name in str(refused.value) for name in ("auto", "cuda", "cpu", "cpu-lazy"))
