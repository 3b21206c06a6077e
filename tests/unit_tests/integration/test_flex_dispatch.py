# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""megatron-core's flex dispatcher with our map: the same bits, and no wait for its sizes.

DeepEP is imitated: its exchange is done by collectives of all tokens.
"""

from __future__ import annotations

import inspect
from typing import Any, NamedTuple

import pytest
import torch
from host_reads import HostReads
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe import token_dispatcher
from ranks import run_ranks
from tiny_gpt import ModelCase, initialize, make_config
from torch.distributed.nn.functional import all_gather, all_reduce

from megatron.slipstream.integration import install
from megatron.slipstream.integration.entry import training
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import multihot_map, table
from megatron.slipstream.patches.table import Feature

TOKENS, BATCH = 12, 2
FLEX = {
    "moe_token_dispatcher_type": "flex",
    "moe_flex_dispatcher_backend": "deepep",
    "moe_router_dtype": "fp32",
}


class Handle(NamedTuple):
    """What a combine must know of its dispatch."""

    rows: torch.Tensor
    """The places of the received tokens among those of all ranks."""
    num_tokens: int
    """Of a rank."""


def dispatch(
    hidden: torch.Tensor,
    indices: torch.Tensor,
    probs: torch.Tensor,
    num_experts: int,
    group: Any,
    **_: Any,
) -> tuple[torch.Tensor, ...]:
    """As DeepEP: the tokens of all ranks that have an expert here; other experts become -1."""
    every = [torch.cat(all_gather(tensor, group)) for tensor in (hidden, probs)]
    experts = torch.cat(all_gather(indices, group))
    num_local = num_experts // group.size()
    local = experts - group.rank() * num_local
    local = torch.where((local >= 0) & (local < num_local), local, -1)
    rows = (local >= 0).any(1).nonzero().flatten()
    counts = torch.bincount(local[local >= 0], minlength=num_local)
    handle: Any = Handle(rows, len(hidden))
    return every[0][rows], local[rows], every[1][rows], counts, handle


def combine(hidden: torch.Tensor, group: Any, handle: Handle, **_: Any) -> tuple[Any, None]:
    """As DeepEP: each token is the sum of what the ranks have made of it."""
    shape = (handle.num_tokens * group.size(), hidden.shape[1])
    sums = hidden.new_zeros(shape).index_copy(0, handle.rows, hidden)
    sums = all_reduce(sums, group=group)
    begin = handle.num_tokens * group.rank()
    return sums[begin : begin + handle.num_tokens], None


def by_install() -> None:
    install.install(OffloadConfig(offload_backend="cpu"))


def run_layer(
    rank: int, num_ranks: int, port: int, is_installed: bool
) -> tuple[list[torch.Tensor], Any]:
    """The layer's output and gradients, and where the map is made with a read of the host."""
    case = ModelCase("moe", ep=num_ranks, overrides=FLEX)
    initialize(case, rank, num_ranks, port)
    lines, first = inspect.getsourcelines(token_dispatcher._DeepepManager._indices_to_multihot)
    stock = {f"{token_dispatcher.__file__}:{first + place}" for place in range(len(lines))}
    token_dispatcher.fused_dispatch = dispatch
    token_dispatcher.fused_combine = combine
    token_dispatcher.set_deepep_num_sms = lambda _: None
    if is_installed:
        by_install()
    config = make_config(case)
    spec = get_gpt_layer_local_spec(num_experts=4).submodules.mlp
    torch.manual_seed(3)
    layer = spec(config=config)
    layer.set_layer_number(1)
    hidden = torch.randn(TOKENS, BATCH, config.hidden_size, requires_grad=True)
    with HostReads() as reads:
        output, _ = layer(hidden)
        output.square().sum().backward()
    gradients = [value.grad for value in (hidden, *layer.parameters()) if value.grad is not None]
    places = [found.partition(" at ")[2] for found in reads.found]
    found = [place for place in places if place in stock or place.startswith(multihot_map.__file__)]
    return [output.detach(), *gradients], found


def test_the_layer_computes_the_same_without_a_read() -> None:
    expected, actual = (run_ranks(2, run_layer, is_installed) for is_installed in (False, True))
    for (left, read), (right, not_read) in zip(expected, actual, strict=True):
        assert len(left) > 4
        assert all(map(torch.equal, left, right))
        assert read
        assert not_read == []


class _StopError(Exception):
    """Ends a training where it would begin."""


def test_a_training_patches_it_with_any_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    applied: list[Feature] = []

    def apply(*features: Feature) -> None:
        applied.extend(features)
        raise _StopError

    monkeypatch.setattr(table, "apply", apply)
    with pytest.raises(_StopError):
        training.run(None, OffloadConfig(offload_engine="megatron"), None)  # type: ignore[arg-type]
    assert Feature.SYNC_FREE_DISPATCH in applied


def test_uninstall_gives_the_dispatcher_its_own_map_back() -> None:
    own = token_dispatcher._DeepepManager._indices_to_multihot
    by_install()
    try:
        assert token_dispatcher._DeepepManager._indices_to_multihot is not own
    finally:
        install.uninstall()
    assert token_dispatcher._DeepepManager._indices_to_multihot is own
