# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What Triton's tuner may choose from; that results are right is tested on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.integration import mcore, rotary_kernels

pytestmark = pytest.mark.releases


@pytest.fixture(autouse=True)
def tuners_of_megatron() -> Iterator[None]:
    """As megatron-core makes them, before and after."""
    kernels = rotary_kernels.tuned_kernels()
    configs = [config for kernel in kernels for config in kernel.configs]
    before = [config.num_warps for config in configs]
    prunes = [kernel.early_config_prune for kernel in kernels]
    for config in configs:
        config.num_warps = 4
    for kernel in kernels:
        kernel.early_config_prune = None
    yield
    for config, num_warps in zip(configs, before, strict=True):
        config.num_warps = num_warps
    for kernel, prune in zip(kernels, prunes, strict=True):
        kernel.early_config_prune = prune


def num_warps_of(names: Sequence[str]) -> set[int]:
    kernels = rotary_kernels.tuned_kernels(names)
    return {config.num_warps for kernel in kernels for config in kernel.configs}


def test_all_kernels_are_found() -> None:
    found = [kernel.fn.__name__ for kernel in rotary_kernels.tuned_kernels()]
    assert found == list(rotary_kernels.NAMES)


def test_in_place_blocks_have_one_warp_and_all_are_tuned_anew() -> None:
    kernels = rotary_kernels.tuned_kernels()
    blocks = [[dict(config.kwargs) for config in kernel.configs] for kernel in kernels]
    for kernel in kernels:
        kernel.cache["some shape"] = kernel.configs[2]
    rotary_kernels.choose_safely()
    assert num_warps_of(rotary_kernels.IN_PLACE) == {1}
    assert num_warps_of(rotary_kernels.NAMES[2:]) == {4}
    assert not any(kernel.cache for kernel in kernels)
    assert blocks == [[config.kwargs for config in kernel.configs] for kernel in kernels]


@pytest.mark.parametrize(
    "num_heads, sizes",
    [
        (1, [1, 2, 4, 8, 16, 32, 64, 128]),
        (12, [1, 2, 4, 16, 32, 64, 128]),
        (40, [1, 2, 4, 8, 64, 128]),
    ],
)
def test_no_block_reaches_into_the_next_token(
    num_heads: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    rotary_kernels.choose_safely()
    for kernel in rotary_kernels.tuned_kernels():
        kernel.nargs = {"head_num": num_heads}
        left = kernel.prune_configs({})
        assert [config.kwargs["BLOCK_H"] for config in left] == sizes


@pytest.mark.parametrize("num_heads, size", [(1, 16), (12, 16), (40, 8), (128, 16), (7, 16)])
def test_heads_are_summed_in_one_order_where_runs_are_to_be_the_same(
    num_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    rotary_kernels.choose_safely()
    (kernel,) = rotary_kernels.tuned_kernels([rotary_kernels.SUMMING])
    kernel.nargs = {"head_num": num_heads}
    assert [config.kwargs["BLOCK_H"] for config in kernel.prune_configs({})] == [size]


def test_what_was_tuned_safely_is_kept() -> None:
    rotary_kernels.choose_safely()
    kernel = rotary_kernels.tuned_kernels()[0]
    kernel.cache["some shape"] = kernel.configs[0]
    rotary_kernels.choose_safely()
    assert kernel.cache.pop("some shape") is kernel.configs[0]


def test_installing_is_enough() -> None:
    mcore.install(OffloadConfig(offload_backend="cpu"))
    mcore.uninstall()
    assert num_warps_of(rotary_kernels.IN_PLACE) == {1}


@pytest.mark.parametrize("stand_in", [None, lambda *_: None])
def test_without_triton_there_is_nothing_to_do(
    monkeypatch: pytest.MonkeyPatch, stand_in: object
) -> None:
    for name in rotary_kernels.NAMES:
        monkeypatch.setattr(fused, name, stand_in)
    assert rotary_kernels.tuned_kernels() == []
    rotary_kernels.choose_safely()
