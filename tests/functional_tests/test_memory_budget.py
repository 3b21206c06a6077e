# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A budget for activations on a GPU: kept in every iteration, predicted, and without a bit changed.

pytest tests/functional_tests/test_memory_budget.py -m gpu -s     one line per budget
"""

from __future__ import annotations

from dataclasses import replace

import pytest
from budgeted_training import Budgeted, Run, train_within
from gpu_models import DENSE, MIN_NUMEL, MLA, MOE
from ranks import run_ranks
from tiny_gpt import DENSE_MODULES, MOE_MODULES, ModelCase

pytestmark = pytest.mark.releases

BUDGETS = (0.9, 0.75, 0.6, 0.45, 0.3)
"""Shares of the activations without recomputation and offloading."""
COUNTS = (2,) * 26
"""Enough iterations to settle, and to plan twice from times."""
MAX_UNTIL_SETTLED = 12
OWN = {
    "dense": ("mlp_fc1", "mlp_act", "mlp_fc2"),
    "moe": ("expert_fc2",),
    "mla": ("mla_down_proj", "mla_up_proj"),
}


def _run(case: ModelCase, budget: float, counts: tuple[int, ...] = COUNTS) -> Run:
    modules = (MOE_MODULES if case.kind == "moe" else DENSE_MODULES) + OWN[case.kind]
    return Run(case, budget, counts, "cuda", modules, dict(MIN_NUMEL))


def _train(case: ModelCase, budget: float) -> Budgeted:
    (result,) = train_within(0, 1, 0, _run(case, budget))
    return result


@pytest.mark.gpu
@pytest.mark.exclusive
@pytest.mark.parametrize("budget", BUDGETS)
@pytest.mark.parametrize("case", [DENSE, MOE, MLA], ids=lambda case: case.kind)
def test_a_budget_is_kept_and_predicted(case: ModelCase, budget: float) -> None:
    result = _train(case, budget)
    print(f"{case.kind} {budget}: {result}")
    assert result.difference is None
    if result.error:
        assert "even if every layer is recomputed" in result.error
        pytest.skip(f"less than the model needs: {result.error}")
    assert max(result.activation_bytes) <= result.budget_bytes
    assert result.num_until_settled <= MAX_UNTIL_SETTLED
    assert result.planned_bytes == pytest.approx(result.activation_bytes[-1], rel=0.01)
    assert result.moved_bytes == result.planned_moved_bytes


@pytest.mark.gpu
@pytest.mark.exclusive
def test_with_room_to_spare_nothing_is_recomputed_and_nothing_moves() -> None:
    result = _train(replace(DENSE, num_layers=4), 1.5)
    assert result.difference is None
    assert result.assignments[-1] == result.least
    assert result.moved_bytes == 0


@pytest.mark.gpus2
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "ep": 2}, {"pp": 2}], ids=str)
def test_ranks_stay_within_it_together(sizes: dict[str, int]) -> None:
    case = replace(MOE if "ep" in sizes else DENSE, num_layers=4, **sizes)
    # Of what the last stage's two layers hold, logits are so much that 0.79 is its least.
    run = _run(case, 0.85 if "pp" in sizes else 0.7, (4,) * 16)
    results = [result for (result,) in run_ranks(2, train_within, run)]
    for result in results:
        assert result.error == ""
        assert result.difference is None
        # Routing may give a rank more tokens than were measured, for which it then chooses again.
        over = [nbytes > result.budget_bytes for nbytes in result.activation_bytes]
        assert sum(over) <= ("ep" in sizes), result.activation_bytes
    if "pp" not in sizes:
        assert results[0].assignments == results[1].assignments
