# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""At an exchange of pipeline stages, the host waits at most for shapes, and never for copies."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest.mock import patch

import pytest
import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator
from ranks import run_ranks
from tiny_gpt import ModelCase, initialize, make_config, use_gpu

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.integration import install
from megatron.slipstream.integration.seam import model_router
from megatron.slipstream.integration.seam.p2p_sync import disable_p2p_host_sync
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import table
from megatron.slipstream.patches.patching import applied

pytestmark = pytest.mark.releases

CASE = ModelCase("dense", pp=2)
WIDTH = 8
COPY_NBYTES = 1 << 30
"""Bytes of copies each way: 20 ms, during an exchange that takes one."""
COMPUTE_CYCLES = 40_000_000
"""Cycles of computation before each exchange: about 20 ms."""
NUM_TRIES = 3
"""Retries, since a busy host may take longer than that."""


class Seen(NamedTuple):
    """Tensors that a stage received, and its waits."""

    received: list[torch.Tensor]
    num_device_waits: int
    ends_with_copies: bool
    """Whether copies that started before an exchange had always ended after it."""
    ends_with_compute: bool
    """Whether earlier work of the current stream had ended after it."""


class _Load:
    """Large copies both ways, on separate streams; optionally with computation."""

    def __init__(self, has_compute: bool) -> None:
        self._has_compute = has_compute and use_gpu()
        self._pairs = []
        for _ in range(2 if use_gpu() else 0):
            device = torch.empty(COPY_NBYTES, dtype=torch.uint8, device="cuda")
            host = torch.empty(COPY_NBYTES, dtype=torch.uint8, pin_memory=True)
            self._pairs.append((device, host, torch.cuda.Stream()))
        self.copies_have_ended = self.compute_has_ended = True

    def beside(self, exchange: Callable[[], Any]) -> Any:
        """Run an exchange during the copies."""
        torch.cuda.synchronize()
        torch.distributed.barrier()
        for to_device, (device, host, stream) in enumerate(self._pairs):
            with torch.cuda.stream(stream):
                target, source = (device, host) if to_device else (host, device)
                target.copy_(source, non_blocking=True)
        if self._has_compute:
            torch.cuda._sleep(COMPUTE_CYCLES)
        result = exchange()
        self.copies_have_ended &= all(stream.query() for _, _, stream in self._pairs)
        if use_gpu():
            self.compute_has_ended &= torch.cuda.current_stream().query()
        return result


def _exchange(
    rank: int, num_ranks: int, port: int, is_variable: bool, is_installed: bool
) -> list[Seen]:
    from megatron.core import parallel_state

    initialize(CASE, rank, num_ranks, port)
    config: Any = make_config(CASE)
    config.variable_seq_lengths = is_variable
    group = parallel_state.get_pipeline_model_parallel_group()
    communicator = P2PCommunicator(group, config)
    with applied(table.COPIES if is_installed else ()):
        if is_installed:
            disable_p2p_host_sync(_chunk(config))
        return [_pass_two(communicator, rank, is_variable) for _ in range(NUM_TRIES)]


def _pass_two(communicator: Any, rank: int, is_variable: bool) -> Seen:
    """Two micro-batches pass both stages, as in 1F1B."""
    # With varying lengths the host waits for shapes, and so for earlier computation.
    load, waits = _Load(has_compute=not is_variable), 0
    first, second = _sent(is_variable)
    shapes = [tuple(first.shape), tuple(second.shape)]
    plain = torch.cuda.synchronize

    def counted(*arguments: Any) -> None:
        nonlocal waits
        waits += 1
        plain(*arguments)

    def step(method: str, *arguments: Any) -> Any:
        def exchange() -> Any:
            with patch.object(torch.cuda, "synchronize", counted):
                return getattr(communicator, method)(*arguments)

        return load.beside(exchange)

    if rank == 0:
        step("send_forward", first, False)
        received = [step("send_forward_recv_backward", second, shapes[0], False)]
        received.append(step("recv_backward", shapes[1], False))
    else:
        received = [step("recv_forward", shapes[0], False)]
        gradient = 2 * received[0].detach()
        received.append(step("send_backward_recv_forward", gradient, shapes[1], False))
        step("send_backward", 2 * received[1].detach(), False)
    on_host = [tensor.detach().cpu() for tensor in received]
    return Seen(on_host, waits, load.copies_have_ended, load.compute_has_ended)


def _sent(is_variable: bool) -> list[torch.Tensor]:
    device = "cuda" if use_gpu() else "cpu"
    lengths = (5, 7) if is_variable else (6, 6)
    return [
        torch.arange(length * WIDTH, dtype=torch.float32, device=device).view(length, 1, WIDTH)
        for length in lengths
    ]


def _check(is_variable: bool, is_installed: bool) -> list[Seen]:
    of_first, of_last = run_ranks(2, _exchange, is_variable, is_installed)
    sent = [tensor.cpu() for tensor in _sent(is_variable)]
    for gradients, outputs in zip(of_first, of_last, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(outputs.received, sent, strict=True))
        assert all(torch.equal(a, 2 * b) for a, b in zip(gradients.received, sent, strict=True))
    return [*of_first, *of_last]


@pytest.mark.parametrize("is_variable", [False, True], ids=["one length", "any length"])
def test_stages_get_what_was_sent_and_wait_for_no_device(is_variable: bool) -> None:
    assert all(seen.num_device_waits == 0 for seen in _check(is_variable, is_installed=True))
    # Three exchanges, plus those of shapes if they vary.
    num_waits = 6 if is_variable else 3
    seen = _check(is_variable, is_installed=False)
    assert all(one.num_device_waits == num_waits for one in seen)


@pytest.mark.gpus2
@pytest.mark.parametrize("is_variable", [False, True], ids=["one length", "any length"])
def test_copies_go_on_while_stages_exchange(is_variable: bool) -> None:
    of_first, of_last = run_ranks(2, _exchange, is_variable, True)
    # The first attempt opens NCCL's connections, which takes longer than the copies.
    assert not all(seen.ends_with_copies for seen in of_first[1:])
    assert not all(seen.ends_with_copies for seen in of_last[1:])
    for seen in run_ranks(2, _exchange, is_variable, False):
        assert all(one.ends_with_copies for one in seen), "the premise holds no longer"


@pytest.mark.gpus2
def test_the_host_runs_ahead_of_what_stages_exchange() -> None:
    of_first, of_last = run_ranks(2, _exchange, False, True)
    assert not any(seen.ends_with_compute for seen in [*of_first[1:], *of_last[1:]])
    for seen in run_ranks(2, _exchange, False, False):
        assert all(one.ends_with_compute for one in seen), "the premise holds no longer"


def _chunk(config: SimpleNamespace) -> Any:
    chunk: Any = torch.nn.Identity()
    chunk.config = config
    return chunk


@pytest.mark.parametrize("syncs", [True, False])
@pytest.mark.parametrize("is_ring", [True, False])
def test_the_configuration_is_as_it_was_afterwards(syncs: bool, is_ring: bool) -> None:
    config = SimpleNamespace(batch_p2p_sync=syncs, use_ring_exchange_p2p=is_ring)
    chunk = _chunk(config)
    restore = disable_p2p_host_sync(chunk)
    assert config.batch_p2p_sync is (syncs and is_ring)
    disable_p2p_host_sync(_chunk(config))()  # another one with the same configuration
    assert config.batch_p2p_sync is (syncs and is_ring)
    restore()
    assert config.batch_p2p_sync is syncs


@pytest.mark.parametrize("is_on_gpu", [False, True])
def test_stages_of_a_trained_model_do_not_wait(
    is_on_gpu: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend says whether copies overlap with computation."""
    monkeypatch.setattr(model_router, "CudaBackend", CpuBackend if is_on_gpu else type(None))
    manager = install.install(OffloadConfig(offload_backend="cpu"))
    config = SimpleNamespace(batch_p2p_sync=True, use_ring_exchange_p2p=False)
    chunk = _chunk(config)
    manager.router.bind([chunk])
    assert config.batch_p2p_sync is not is_on_gpu
    install.uninstall()
    assert config.batch_p2p_sync is True


def test_a_chunk_that_its_own_configuration_refers_to_is_not_kept() -> None:
    config = SimpleNamespace(batch_p2p_sync=True, use_ring_exchange_p2p=False)
    chunk = _chunk(config)
    config.no_sync_func = chunk.forward  # as megatron's training loop sets
    restore, gone = disable_p2p_host_sync(chunk), weakref.ref(chunk)
    del chunk, config
    gc.collect()
    assert gone() is None
    restore()
