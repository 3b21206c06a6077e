# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The limit on host memory is one of the process, whatever its engines are attached to."""

from __future__ import annotations

import gc
import logging
from typing import Any

import pytest
import torch
from attached_models import Decoder

from megatron.slipstream.attached.handle import Attached, attach
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine_setup import (
    SharedHostLimit,
    host_limit,
)
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.integration import install
from megatron.slipstream.options.fields import OffloadConfig

LIMIT_BYTES = 400 * 1024


def config(native: str = "auto", **options: Any) -> OffloadConfig:
    options = {"offload_host_memory_limit_bytes": LIMIT_BYTES, **options}
    return OffloadConfig(offload_backend="cpu", offload_native=native, **options)


def attached(options: OffloadConfig) -> tuple[Decoder, Attached]:
    model = Decoder(4)
    return model, attach(model, "layers.*", options, min_offloaded_tensor_size=1)


def step(*models: Decoder) -> None:
    """Run one forward of each model, and one backward of all of them."""
    ids = torch.randint(0, 50, (8, 16))
    sum(model(ids).square().mean() for model in models).backward()  # type: ignore[union-attr]


def held_bytes(*handles: Attached) -> list[int]:
    return [handle.engine.store.host_pool.allocated_bytes for handle in handles]


@pytest.mark.parametrize("native", ["auto", "off"])
def test_models_of_several_attach_calls_stay_within_one_limit(native: str) -> None:
    pairs = [attached(config(native)) for _ in range(3)]
    models, handles = [model for model, _ in pairs], [handle for _, handle in pairs]
    for _ in range(4):
        step(*models)
        assert sum(held_bytes(*handles)) <= LIMIT_BYTES
    assert all(held_bytes(*handles)), "each has a share"


def test_a_model_attached_later_gets_what_the_first_left() -> None:
    first, one = attached(config())
    for _ in range(3):
        step(first)
    (before,) = held_bytes(one)
    assert before > LIMIT_BYTES // 2
    second, two = attached(config())
    for _ in range(3):
        step(first, second)
        assert sum(held_bytes(one, two)) <= LIMIT_BYTES
    assert held_bytes(one) == [before], "pinned memory stays pinned"


@pytest.mark.parametrize("native", ["auto", "off"])
def test_a_plan_that_fits_in_a_smaller_share_stays(native: str) -> None:
    first, one = attached(config(native, offload_host_memory_limit_bytes=8 * LIMIT_BYTES))
    for _ in range(3):
        step(first)
    pool, lifecycle = one.engine.store.host_pool, one.engine.lifecycle
    entry, before = lifecycle.last, pool.limit_bytes
    second, _two = attached(config(native, offload_host_memory_limit_bytes=8 * LIMIT_BYTES))
    step(first, second)
    assert pool.limit_bytes < before
    assert lifecycle.last is lifecycle.next is entry
    assert lifecycle.planner.options.host_memory_limit_bytes == pool.limit_bytes


def test_a_plan_for_which_host_memory_was_short_is_made_again_with_more() -> None:
    second, two = attached(config())
    first, one = attached(config())
    for _ in range(3):
        step(first, second)
    entry = one.engine.lifecycle.last
    assert entry.plan.num_kept_for_host_memory
    two.detach()
    for _ in range(2):
        step(first)
    assert one.engine.lifecycle.last is not entry
    assert one.engine.lifecycle.last.plan.moved_nbytes > entry.plan.moved_nbytes


@pytest.mark.parametrize("end", ["detach", "delete"])
def test_the_share_of_a_model_that_is_gone_goes_to_the_others(end: str) -> None:
    first, one = attached(config())
    second, two = attached(config())
    pool = one.engine.store.host_pool
    assert pool.limit_bytes == LIMIT_BYTES // 2
    if end == "detach":
        two.detach()
    else:
        del second, two
        gc.collect()
    assert pool.limit_bytes == LIMIT_BYTES
    step(first)


def test_an_installed_engine_shares_with_attached_ones() -> None:
    installed = install.install(config()).store.host_pool
    assert installed.limit_bytes == LIMIT_BYTES
    model, handle = attached(config())
    pool = handle.engine.store.host_pool
    assert installed.limit_bytes == pool.limit_bytes == LIMIT_BYTES // 2
    installed.allocate(LIMIT_BYTES // 4)
    for _ in range(3):
        step(model)
        assert installed.allocated_bytes + pool.allocated_bytes <= LIMIT_BYTES
    assert pool.allocated_bytes
    install.uninstall()
    assert pool.limit_bytes == LIMIT_BYTES


def test_of_several_limits_the_lowest_holds() -> None:
    models = [attached(config(offload_host_memory_limit_bytes=limit)) for limit in (300, 100, None)]
    pools = [handle.engine.store.host_pool for _, handle in models]
    assert sum(pool.limit_bytes or 0 for pool in pools) <= 100


def test_the_default_is_one_of_the_process_too() -> None:
    """The first engine reads what memory is available; later ones would count what it pinned."""
    available = iter([1000, 10])
    limit = SharedHostLimit(lambda: next(available))
    pools = [HostPool(CpuBackend()) for _ in range(2)]
    for pool in pools:
        limit.join(pool)
    assert [pool.limit_bytes for pool in pools] == [500, 500]
    for pool in pools:
        limit.leave(pool)
    limit.join(pools[0])
    assert pools[0].limit_bytes == 10, "read again once no engine is left"


def test_without_a_limit_none_is_set() -> None:
    limit = SharedHostLimit(lambda: None)
    pool = HostPool(CpuBackend())
    limit.join(pool)
    assert pool.limit_bytes is None
    assert pool.process_limit is None


def test_memory_of_captured_graphs_counts() -> None:
    """It is taken from the share of the pool that would have served the same groups."""
    limit = SharedHostLimit(lambda: 1000)
    first, second, part = (HostPool(CpuBackend()) for _ in range(3))
    limit.join(first)
    part.become_part_of(first)
    part.reserve(700)
    assert first.limit_bytes == 300, "it cannot grow into it"
    limit.join(second)
    assert (first.limit_bytes, second.limit_bytes) == (0, 300)
    part.reserve(100)
    assert part.allocated_bytes == 700, "there is no more"
    part.close()
    limit.leave(second)
    assert first.limit_bytes == 1000


# What a warning says of it.


def warning_of(caplog: pytest.LogCaptureFixture, *models: Decoder) -> str:
    with caplog.at_level(logging.WARNING):
        for _ in range(2):
            step(*models)
    (said, *_) = [text for text in caplog.messages if "of host memory that rank" in text]
    return str(said)


def test_a_warning_tells_the_users_limit_from_a_share(caplog: pytest.LogCaptureFixture) -> None:
    pairs = [attached(config()) for _ in range(2)]
    said = warning_of(caplog, *(model for model, _ in pairs))
    assert f"offload_host_memory_limit_bytes={LIMIT_BYTES} (400.0 KiB)" in said
    assert "200.0 KiB of it for this use" in said


def test_a_warning_names_the_users_limit_alone(caplog: pytest.LogCaptureFixture) -> None:
    model, _handle = attached(config())
    said = warning_of(caplog, model)
    assert f"offload_host_memory_limit_bytes={LIMIT_BYTES} (400.0 KiB) is less than" in said


def test_a_warning_quotes_no_limit_that_the_user_did_not_set(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(host_limit, "_find_default", lambda: LIMIT_BYTES)
    model, _handle = attached(config(offload_host_memory_limit_bytes=None))
    said = warning_of(caplog, model)
    assert "the default of offload_host_memory_limit_bytes, 400.0 KiB" in said
    assert "limit_bytes=" not in said
