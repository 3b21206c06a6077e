# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Choices of Triton's autotuner; results are tested on a GPU."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from unittest.mock import MagicMock

import pytest
from megatron.core.fusions import fused_mla_yarn_rope_apply as fused

from megatron.slipstream.integration import install
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

pytestmark = pytest.mark.releases


@pytest.fixture(autouse=True)
def patches() -> Iterator[None]:
    table.apply(Feature.FUSED_ROTATION)
    yield
    table.undo(Feature.FUSED_ROTATION)


NAMES = [patch.target.rpartition(".")[2] for patch in table.ROTATION if patch.is_needed()]
"""The kernels of the installed release."""


def tuners(names: Sequence[str] = NAMES) -> list[Any]:
    return [getattr(fused, name) for name in names]


def num_warps_of(names: Sequence[str]) -> set[int]:
    return {config.num_warps for kernel in tuners(names) for config in kernel.configs}


def test_in_place_blocks_have_one_warp_and_nothing_is_tuned_yet() -> None:
    blocks = [[config.kwargs for config in kernel.configs] for kernel in tuners()]
    assert num_warps_of(NAMES[:2]) == {1}
    assert num_warps_of(NAMES[2:]) == {4}
    assert not any(kernel.cache for kernel in tuners())
    patched = tuners()
    table.undo(Feature.FUSED_ROTATION)
    assert num_warps_of(NAMES) == {4}
    assert blocks == [[config.kwargs for config in kernel.configs] for kernel in tuners()]
    assert not any(a is b or a.cache is b.cache for a, b in zip(patched, tuners(), strict=True))


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
    for kernel in tuners():
        kernel.nargs = {"head_num": num_heads}
        left = kernel.prune_configs({})
        assert [config.kwargs["BLOCK_H"] for config in left] == sizes


@pytest.mark.parametrize("num_heads, size", [(1, 16), (12, 16), (40, 8), (128, 16), (7, 16)])
def test_heads_are_summed_in_one_order_where_runs_are_to_be_the_same(
    num_heads: int, size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    (kernel,) = tuners(NAMES[3:])
    kernel.nargs = {"head_num": num_heads}
    assert [config.kwargs["BLOCK_H"] for config in kernel.prune_configs({})] == [size]


def test_installing_is_enough_and_what_was_tuned_is_kept() -> None:
    table.undo(Feature.FUSED_ROTATION)
    install.install(OffloadConfig(offload_backend="cpu"))
    assert num_warps_of(NAMES[:2]) == {1}
    kernel = tuners()[0]
    install.install(OffloadConfig(offload_backend="cpu", offload_release_lag=3))
    table.apply(Feature.FUSED_ROTATION)
    assert tuners()[0] is kernel
    install.uninstall()
    assert tuners()[0] is kernel, "the other feature still needs it"


def _plain_kernel(*_: Any) -> None:
    """What megatron-core's decorators leave without Triton, or Triton's compiler without tuning."""


def test_without_triton_there_is_nothing_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    table.undo(Feature.FUSED_ROTATION)
    monkeypatch.setattr(fused, "triton", MagicMock())
    for name in NAMES:
        monkeypatch.setattr(fused, name, _plain_kernel)
    table.apply(Feature.FUSED_ROTATION)
    assert tuners() == [_plain_kernel] * len(NAMES)


@pytest.mark.parametrize("other", [None, _plain_kernel])
@pytest.mark.parametrize("name", NAMES)
def test_a_kernel_that_is_tuned_in_another_way_is_an_error(
    name: str, other: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    table.undo(Feature.FUSED_ROTATION)
    monkeypatch.setattr(fused, name, other)
    with pytest.raises(RuntimeError, match=f"{name} is a .* without cache, configs, .*; install"):
        table.apply(Feature.FUSED_ROTATION)
