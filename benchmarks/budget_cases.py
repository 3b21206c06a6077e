# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Budgets for activations, beside ``recompute_modules`` and ``offload_modules`` set by hand."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial

from model_case import DENSE_MODULES, MLP_MODULES, MOE_MODULES, OWN_MODULES

from benchmarks.case import Case, Variant
from benchmarks.engine_cases import DENSE, MLA_MOE, SMOKE
from benchmarks.fit_ways import FULL

SHARES = (0.9, 0.75, 0.6, 0.45, 0.3)


def _variants(
    all_modules: Sequence[str], recomputed: Sequence[str], moved: Sequence[str]
) -> tuple[Variant, ...]:
    """Return the budgets, then each set of parts that are recomputed with each that moves."""
    budgets = [Variant(tuple(all_modules), budget_share=share) for share in SHARES]
    by_hand = [
        Variant(tuple(modules.split()) or ("-",), recompute=tuple(parts.split()))
        for parts in recomputed
        for modules in ("", *moved)
        if (parts or modules) and not _conflict(parts.split(), modules.split())
    ]
    # core_attn moves nothing of a recomputed layer; the layer's input moves.
    whole = [Variant(modules, recompute=FULL) for modules in (("-",), ("core_attn",))]
    return (*budgets, *by_hand, *whole)


def _conflict(recomputed: Sequence[str], moved: Sequence[str]) -> bool:
    """Whether a part is recomputed of which something moves, which is refused."""
    inside = {"mlp": {*MLP_MODULES}, "moe": {"expert_fc1", "moe_act"}}
    return any(inside.get(part, set()) & set(moved) for part in recomputed)


_ALL_DENSE = (*DENSE_MODULES, *OWN_MODULES["dense"])
_DENSE = _variants(
    _ALL_DENSE,
    ("", "core_attn", "mlp", "core_attn mlp"),
    (
        *("qkv_linear", "core_attn", "core_attn attn_proj", "qkv_linear core_attn attn_proj"),
        *(" ".join(MLP_MODULES), " ".join((*DENSE_MODULES, *MLP_MODULES))),
    ),
)
_MLA = _variants(
    (*MOE_MODULES, *OWN_MODULES["mla"], "expert_fc2", "shared_experts"),
    (
        *("", "layernorm", "mla_up_proj", "moe_act", "mla_up_proj layernorm moe_act"),
        *("moe mlp", "moe mlp mla_up_proj"),
    ),
    ("core_attn", "core_attn attn_proj", "expert_fc1", "expert_fc1 moe_act", " ".join(MOE_MODULES)),
)

_budgets = partial(Case, num_micro_batches=1, comparison="budgets")
BUDGET_CASES: tuple[Case, ...] = (
    _budgets(
        "budgets_dense",
        "the dense case with budgets for activations, and with settings by hand",
        DENSE,
        _DENSE,
    ),
    _budgets(
        "budgets_long", "the same with sequence 32768", replace(DENSE, seq_length=32768), _DENSE
    ),
    _budgets("budgets_mla_moe", "the mla_moe case, likewise", MLA_MOE, _MLA),
    _budgets(
        "budgets_smoke",
        "three tiny layers, likewise, for trying it without a GPU",
        SMOKE,
        _variants(_ALL_DENSE, ("mlp",), ("core_attn attn_proj",)),
        offload={"min_offloaded_tensor_size": 1},
        needs_gpu=False,
    ),
)
