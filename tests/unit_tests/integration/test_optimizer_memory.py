# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What an optimizer on the host allocates in its first step is left to it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from megatron.core import parallel_state
from megatron.training import global_vars

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine_setup import SharedHostLimit
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.integration.budget.device_limits import optimizer_host_bytes


@pytest.mark.parametrize(
    "options, expected",
    [
        (None, 0),
        ({"optimizer_cpu_offload": False}, 0),
        ({"optimizer_cpu_offload": True}, 12 * 100),
        ({"optimizer_cpu_offload": True, "optimizer_offload_fraction": 0.5}, 6 * 100),
        ({"optimizer_cpu_offload": True, "use_distributed_optimizer": True}, 12 * 25),
    ],
    ids=str,
)
def test_bytes_of_the_first_step(
    options: dict[str, Any], expected: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    args = options and SimpleNamespace(**{"optimizer_offload_fraction": 1.0, **options})
    monkeypatch.setattr(global_vars, "_GLOBAL_ARGS", args)
    monkeypatch.setattr(parallel_state, "get_data_parallel_world_size", lambda **_: 4)
    frozen = torch.nn.Linear(5, 5)
    frozen.requires_grad_(False)
    assert optimizer_host_bytes([torch.nn.Linear(10, 10, bias=False), frozen]) == expected


def test_the_default_limit_is_lowered_and_a_given_one_is_not() -> None:
    for given, expected in ((None, 700), (900, 900)):
        limit, pool = SharedHostLimit(lambda: 1000), HostPool(CpuBackend())
        limit.join(pool, given)
        limit.reserve(300)
        assert pool.limit_bytes == expected
