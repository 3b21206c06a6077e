# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Random models within random budgets: no bit changes, and no iteration exceeds its budget.

``SLIPSTREAM_RANDOM_BUDGETS`` is the number of models, one per seed.
"""

from __future__ import annotations

import os
import random
from typing import Any

import pytest
from budgeted_training import Run, train_within
from model_case import ModelCase
from random_seeds import first_seed
from ranks import run_ranks

FIRST = first_seed()
NUM_MODELS = int(os.environ.get("SLIPSTREAM_RANDOM_BUDGETS", "5"))
NUM_STEPS = 8
"""The frugal iteration, two for each of two trials, two for a choice, and one more."""


def draw_run(seed: int) -> Run:
    draw = random.Random(seed)
    layout = draw.choice(({}, {"pp": 2}, {"pp": 2, "vpp": 2}, {"dp": 2, "ep": 2}))
    kinds = ("moe", "mixed") if "ep" in layout else ("dense", "mla", "moe", "mixed")
    kind = draw.choice(kinds)
    has_experts = kind in ("moe", "mixed") or (kind == "mla" and draw.random() < 0.5)
    overrides: dict[str, Any] = {"normalization": "LayerNorm"}
    if has_experts:
        overrides |= {
            "num_moe_experts": 8,
            "moe_router_topk": draw.choice((2, 4)),
            "moe_ffn_hidden_size": draw.choice((16, 64)),
            "moe_token_dispatcher_type": draw.choice(("alltoall", "allgather")),
        }
        if draw.random() < 0.5:
            overrides["moe_shared_expert_intermediate_size"] = 32
    case = ModelCase(
        kind,
        num_layers=draw.choice((4, 8) if "vpp" in layout else (4, 6)),
        hidden_size=draw.choice((32, 64)),
        seq_length=draw.choice((32, 64)),
        vocab_size=draw.choice((64, 512)),
        overrides=overrides,
        **layout,
    )
    counts = (2 * draw.choice((1, 2)),) * NUM_STEPS
    return Run(case, draw.uniform(0.25, 0.9), counts)


@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM_MODELS))
def test_a_random_model_keeps_its_budget_and_its_bits(seed: int) -> None:
    run = draw_run(seed)
    print(f"SLIPSTREAM_RANDOM_SEED={seed}: {run}")
    case = run.case
    for (result,) in run_ranks(case.pp * case.dp, train_within, run):
        if result.error:
            assert "even if every layer is recomputed" in result.error
            continue
        assert result.difference is None
        if len(set(result.assignments)) == 1:
            continue  # To the engine the first batch is resident, so settings may need more by it.
        assert max(result.activation_bytes) <= result.budget_bytes
