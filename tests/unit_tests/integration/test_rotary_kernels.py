# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What Triton's tuner may choose from; that results are right is tested on a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.integration import mcore, rotary_kernels

pytestmark = pytest.mark.releases


@pytest.fixture(autouse=True)
def tuners_of_megatron() -> Iterator[None]:
    """As megatron-core makes them, before and after."""
    configs = [config for kernel in rotary_kernels.tuned_kernels() for config in kernel.configs]
    before = [config.num_warps for config in configs]
    for config in configs:
        config.num_warps = 4
    yield
    for config, num_warps in zip(configs, before, strict=True):
        config.num_warps = num_warps


def test_both_in_place_kernels_are_found() -> None:
    found = [kernel.fn.__name__ for kernel in rotary_kernels.tuned_kernels()]
    assert found == list(rotary_kernels.NAMES)


def test_blocks_have_one_warp_and_are_tuned_anew() -> None:
    kernels = rotary_kernels.tuned_kernels()
    blocks = [[dict(config.kwargs) for config in kernel.configs] for kernel in kernels]
    for kernel in kernels:
        kernel.cache["some shape"] = kernel.configs[2]
    rotary_kernels.use_one_warp()
    assert {config.num_warps for kernel in kernels for config in kernel.configs} == {1}
    assert not any(kernel.cache for kernel in kernels)
    assert blocks == [[config.kwargs for config in kernel.configs] for kernel in kernels]


def test_what_was_tuned_with_one_warp_is_kept() -> None:
    rotary_kernels.use_one_warp()
    kernel = rotary_kernels.tuned_kernels()[0]
    kernel.cache["some shape"] = kernel.configs[0]
    rotary_kernels.use_one_warp()
    assert kernel.cache.pop("some shape") is kernel.configs[0]


def test_installing_is_enough() -> None:
    mcore.install(OffloadConfig(offload_backend="cpu"))
    mcore.uninstall()
    kernels = rotary_kernels.tuned_kernels()
    assert {config.num_warps for kernel in kernels for config in kernel.configs} == {1}


@pytest.mark.parametrize("stand_in", [None, lambda *_: None])
def test_without_triton_there_is_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, stand_in: object
) -> None:
    for name in rotary_kernels.NAMES:
        monkeypatch.setattr(fused, name, stand_in)
    assert rotary_kernels.tuned_kernels() == []
    rotary_kernels.use_one_warp()
