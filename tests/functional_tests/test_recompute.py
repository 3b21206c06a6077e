# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Recomputation with offloading: the same bits, and modules move or the report says why not.

By default each recomputed module is combined with all moving modules, and each moving module with
all recomputed ones. ``SLIPSTREAM_WHOLE_MATRIX=1`` runs all pairs, in pipelines too.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Optional

import pytest
from gpu_models import DENSE, MIN_NUMEL, MLA, MOE, PLAN_TOLERANCE
from model_case import GDN_MODULES, SHARED_EXPERTS
from ranks import run_ranks
from state_space_layers import LARGE, OF_GPT
from tiny_gpt import DENSE_MODULES, MOE_MODULES, Comparison, ModelCase, compare

IS_WHOLE = os.environ.get("SLIPSTREAM_WHOLE_MATRIX") == "1"

RECOMPUTED = {
    "dense": ("core_attn", "layernorm", "mlp"),
    "moe": ("core_attn", "layernorm", "moe", "moe_act", "shared_experts"),
    "mla": ("core_attn", "layernorm", "mla_up_proj", "mlp"),
}
"""All modules that megatron-core 0.19.2 recomputes in such a model, except gdn_norm_out, which
belongs to another attention: see test_gated_delta_net."""
INSIDE_EXPERTS = ("expert_fc1", "moe_act")

EXPLAINED = {
    # Checkpointed outside of its group by megatron-core.
    ("core_attn", "core_attn"): "no group",
    # The group saves the norm's output.
    ("qkv_linear", "layernorm"): "it is discarded in forward and recomputed in backward",
    # Modules of other attention.
    ("qkv_linear", "gdn_norm_out"): "no group",
    ("core_attn", "gdn_norm_out"): "no group",
    ("attn_proj", "gdn_norm_out"): "no group",
    ("gdn_out_proj", "gdn_norm_out"): "it is discarded in forward and recomputed in backward",
    ("gdn_in_proj", "layernorm"): "it is discarded in forward and recomputed in backward",
}
"""The reason why a module does not move together with a recomputed one."""


@dataclass(frozen=True)
class Pair:
    """Modules that are recomputed, and modules that move."""

    recomputed: tuple[str, ...]
    moved: tuple[str, ...]

    def case(self, base: ModelCase) -> ModelCase:
        more = {"recompute_granularity": "selective", "recompute_modules": list(self.recomputed)}
        return replace(base, overrides=base.overrides | more)


def pairs(kind: str, is_whole: bool) -> Iterator[Pair]:
    recomputed = RECOMPUTED[kind]
    # megatron-core refuses to move a part of a module that is recomputed as a whole.
    together = tuple(name for name in recomputed if name != "moe")
    names = MOE_MODULES if kind == "moe" else DENSE_MODULES
    alone = [("core_attn", "attn_proj") if name == "attn_proj" else (name,) for name in names]
    if is_whole:
        chosen = itertools.product([*((name,) for name in recomputed), together], [*alone, names])
    else:
        each = (((name,), names) for name in recomputed)
        chosen = itertools.chain(each, ((together, moved) for moved in alone))
    for left, right in chosen:
        moved = tuple(n for n in right if not ("moe" in left and n in INSIDE_EXPERTS))
        if moved:
            yield Pair(left, moved)


GATED_DELTA_NET_PAIRS = tuple(
    Pair(recomputed, moved)
    for recomputed in (("gdn_norm_out",), ("gdn_norm_out", "layernorm"))
    for moved in (("attn_norm",), ("mlp_norm",), (*DENSE_MODULES, *GDN_MODULES))
)


def compare_all(
    rank: int,
    world_size: int,
    port: int,
    base: ModelCase,
    chosen: Sequence[Pair],
    backend: str,
    counts: Sequence[int],
    offload: Optional[dict[str, Any]],
    reads_memory: bool,
) -> list[Comparison]:
    """:func:`compare` for each of several pairs, in one process."""
    return [
        compare(
            rank, world_size, port, pair.case(base), pair.moved, backend, counts, offload,
            reads_memory,
        )
        for pair in chosen
    ]  # fmt: skip


def check(pair: Pair, result: Comparison, kind: str) -> None:
    row = {"kind": kind, "recomputed": pair.recomputed, "moved": pair.moved}
    print(json.dumps(row | asdict(result)))
    assert result.difference is None, pair
    assert result.num_late == 0, pair
    assert result.freed_bytes == result.moved_bytes, pair
    for name, reasons in result.why_not.items():
        explained = {
            EXPLAINED[name, other] for other in pair.recomputed if (name, other) in EXPLAINED
        }
        assert explained, f"{pair}: {name} stays: {reasons}"
        assert explained & set(reasons), pair
    # Bytes count for the group that saved them first, which may be another moving group.
    assert {*result.moved_modules} <= {*pair.moved} - result.why_not.keys(), pair
    assert result.moved_modules or not {*pair.moved} - result.why_not.keys(), pair


CPU_CASES = {
    "dense": ModelCase("dense"),
    "moe": ModelCase("moe", overrides=SHARED_EXPERTS),
    "mla": ModelCase("mla"),
}


@pytest.mark.parametrize("kind", CPU_CASES)
def test_one_rank(kind: str) -> None:
    chosen = list(pairs(kind, IS_WHOLE))
    case = replace(CPU_CASES[kind], num_layers=2)  # the last one stays
    arguments = (case, chosen, "cpu", (1, 1), None, True)
    (results,) = run_ranks(1, compare_all, *arguments)
    for pair, result in zip(chosen, results, strict=True):
        check(pair, result, kind)
        assert result.peak_drop_bytes == result.planned_drop_bytes, pair


@pytest.mark.parametrize("kind, vpp", [("moe", 2), ("mla", None)])
def test_pipelines(kind: str, vpp: Optional[int]) -> None:
    case = replace(CPU_CASES[kind], num_layers=8, pp=2, vpp=vpp)
    chosen = list(pairs(kind, IS_WHOLE))
    if not IS_WHOLE:
        together = max(chosen, key=lambda pair: len(pair.recomputed)).recomputed
        chosen = [Pair(together, MOE_MODULES if kind == "moe" else DENSE_MODULES)]
    results = run_ranks(2, compare_all, case, chosen, "cpu-lazy", (2, 2, 2), None, False)
    for of_rank in results:
        for pair, result in zip(chosen, of_rank, strict=True):
            check(pair, result, kind)


def test_gated_delta_net() -> None:
    case = ModelCase("dense", num_layers=3, overrides=OF_GPT)
    chosen = GATED_DELTA_NET_PAIRS if IS_WHOLE else GATED_DELTA_NET_PAIRS[2:]
    arguments = (case, chosen, "cpu", (1, 1), None, True)
    (results,) = run_ranks(1, compare_all, *arguments)
    for pair, result in zip(chosen, results, strict=True):
        check(pair, result, "gated delta net")
        assert result.peak_drop_bytes == result.planned_drop_bytes > 0, pair


GPU_CASES = {
    "dense": replace(DENSE, num_layers=4),
    "moe": replace(
        MOE,
        num_layers=4,
        overrides={**MOE.overrides, "moe_shared_expert_intermediate_size": 1024},
    ),
    "mla": MLA,
}


@pytest.mark.gpu
@pytest.mark.parametrize("kind", GPU_CASES)
def test_one_gpu(kind: str) -> None:
    for pair in pairs(kind, IS_WHOLE):
        # Transformer Engine fuses a norm with the linear layer after it, so the norm saves nothing.
        fused = {"dense": {"attn_norm", "mlp_norm"}, "moe": {"attn_norm"}, "mla": {"mlp_norm"}}
        moved = tuple(name for name in pair.moved if name not in fused[kind])
        if not moved:
            continue
        chosen = Pair(pair.recomputed, moved)
        case = chosen.case(GPU_CASES[kind])
        result = compare(0, 1, 0, case, moved, "cuda", (2, 2, 2), dict(MIN_NUMEL))
        check(chosen, result, kind)
        assert result.peak_drop_bytes == pytest.approx(
            result.planned_drop_bytes, rel=PLAN_TOLERANCE, abs=4096
        )


@pytest.mark.gpu
def test_gated_delta_net_on_a_gpu() -> None:
    case = replace(GPU_CASES["dense"], overrides={**OF_GPT, **LARGE})
    for pair in GATED_DELTA_NET_PAIRS:
        moved = tuple(name for name in pair.moved if name != "mlp_norm")  # fused by its linear
        if not moved:
            continue
        chosen = Pair(pair.recomputed, moved)
        result = compare(0, 1, 0, chosen.case(case), moved, "cuda", (2, 2, 2), dict(MIN_NUMEL))
        check(chosen, result, "gated delta net")
        assert result.peak_drop_bytes == pytest.approx(
            result.planned_drop_bytes, rel=PLAN_TOLERANCE, abs=4096
        )
