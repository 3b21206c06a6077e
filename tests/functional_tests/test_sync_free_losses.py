# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models with sync-free experts learn on a GPU as those with megatron-core's experts do.

Without a GPU whole trainings are bitwise equal: ``test_sync_free_experts.py``.
"""

from __future__ import annotations

import dataclasses

import pytest
from gpu_models import MIN_NUMEL, MOE
from loss_curves import STABLE_RATE, distance, losses
from ranks import TIMEOUT_S, run_ranks
from tiny_gpt import MOE_MODULES, compare


@pytest.mark.gpu
@pytest.mark.timeout(TIMEOUT_S + 60)
def test_two_hundred_steps_are_within_the_spread_of_two_seeds() -> None:
    stock = dataclasses.replace(MOE, num_layers=4, seq_length=512)
    ours = dataclasses.replace(stock, sync_free_experts=True)
    ((expected,), (actual,), (other,)) = (
        run_ranks(1, losses, case, seed, 200, STABLE_RATE)
        for case, seed in ((stock, 7), (ours, 7), (stock, 8))
    )
    spread = distance(expected, other)
    print(f"{distance(expected, actual):.4f} from megatron-core's, two seeds {spread:.4f}")
    assert expected[-1] < expected[0] - 1
    assert distance(expected, actual) < spread


@pytest.mark.gpu
def test_offloading_changes_no_bit() -> None:
    case = dataclasses.replace(MOE, sync_free_experts=True)
    result = compare(0, 1, 0, case, MOE_MODULES, "cuda", (2, 2, 2), dict(MIN_NUMEL))
    assert result.difference is None
    assert result.moved_bytes > 0
