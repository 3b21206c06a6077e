# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Autotuning of the fused rotation chooses from correct configurations only."""

from types import SimpleNamespace

import pytest
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

from megatron.slipstream.patches import rotary_kernels


def kernel(name: str, *sizes: int) -> SimpleNamespace:
    configs = [SimpleNamespace(kwargs={"BLOCK_H": size}, num_warps=4) for size in sizes]
    fn = SimpleNamespace(__name__=name)
    return SimpleNamespace(fn=fn, cache={1: 2}, configs=configs, early_config_prune=None)


@pytest.mark.parametrize("name", rotary_kernels.IN_PLACE)
def test_kernels_in_place_run_in_one_warp(name: str) -> None:
    made = rotary_kernels.restrict_autotune_configs(kernel(name, 1, 2, 4))
    assert [config.num_warps for config in made.configs] == [1, 1, 1]
    assert made.cache == {}


@pytest.mark.parametrize(
    ("heads", "left"), [(8, [1, 2, 4, 8, 16]), (6, [1, 2, 8, 16]), (3, [1, 4, 8, 16])]
)
def test_no_block_is_partly_filled(heads: int, left: list[int]) -> None:
    made = rotary_kernels.restrict_autotune_configs(kernel("rotary_fwd_kv_kernel", 1, 2, 4, 8, 16))
    chosen = made.early_config_prune(made.configs, {}, head_num=heads)
    assert [config.kwargs["BLOCK_H"] for config in chosen] == left


def test_sums_over_heads_have_one_block_size_if_results_must_repeat(monkeypatch) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    made = rotary_kernels.restrict_autotune_configs(kernel("rotary_bwd_kv_kernel", 1, 8, 16, 32))
    chosen = made.early_config_prune(made.configs, {}, head_num=32)
    assert [config.kwargs["BLOCK_H"] for config in chosen] == [16]


def test_each_kernel_of_the_module_is_restricted() -> None:
    known = {*rotary_kernels.IN_PLACE, "rotary_fwd_kv_kernel", "rotary_bwd_kv_kernel"}
    known |= {"_mla_rope_fwd_kv_split_kernel", "_mla_rope_bwd_kv_split_kernel"}
    there = [getattr(fused, name) for name in known if hasattr(fused, name)]
    assert len(there) == 4
    for one in there:
        if hasattr(one, "fn"):
            assert one.early_config_prune is not None
