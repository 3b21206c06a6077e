# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""An allowed overhead is measured against iterations without the engine, and kept to."""

from __future__ import annotations

import random
from typing import Any

import pytest
from host_bound import NUM_PASSES, PASS_MS, Engine, HostBound, train

from megatron.slipstream.fine_grained_activation_offload.cost_trial import (
    MAX_PAIRS,
    MAX_TRIALS,
    MIN_PAIRS,
    CostTrial,
)


def test_what_costs_next_to_nothing_moves() -> None:
    engine = Engine(HostBound(copy_ms=0.001), 1.0)
    train(engine)
    copied = engine.clock.num_copies
    train(engine, 2)
    assert engine.num_moving > 0
    assert engine.clock.num_copies > copied
    assert engine.report.tried_percent is not None
    assert 0 < engine.report.tried_percent < 1.0
    (trial,) = engine.report.tried
    assert trial.percent == round(engine.report.tried_percent, 2)
    assert trial.num_groups_moved == engine.num_moving
    assert engine.plan is not None
    assert trial.moved_bytes == engine.plan.moved_nbytes


def test_what_costs_too_much_is_declined_and_the_engine_left_out() -> None:
    engine = Engine(HostBound(copy_ms=1.0), 1.0)
    took_ms = train(engine)
    assert max(took_ms) > 1.2 * NUM_PASSES * PASS_MS, "tried at first"
    assert engine.num_moving == 0
    assert "nothing moves" in engine.report.notes[0]
    assert engine.report.tried_percent is None, "of what moves now, nothing was tried"
    assert all(trial.percent > 1.0 for trial in engine.report.tried)
    moved = [trial.num_groups_moved for trial in engine.report.tried]
    assert moved == sorted(moved, reverse=True)
    assert len(moved) <= MAX_TRIALS
    copied, num_iterations = engine.clock.num_copies, engine.report.num_iterations
    engine.engine.advance = None  # type: ignore[assignment, method-assign]  # no mark may come to it
    took_ms = train(engine, 4)
    assert took_ms == pytest.approx([NUM_PASSES * PASS_MS] * 4)
    assert engine.clock.num_copies == copied
    assert engine.report.d2h_bytes == 0
    assert engine.report.num_iterations == num_iterations + 4


def test_as_much_moves_as_fits() -> None:
    engine = Engine(HostBound(copy_ms=1.0), 80.0)
    train(engine)
    took_ms = train(engine, 4)
    without_ms = NUM_PASSES * PASS_MS
    assert without_ms < max(took_ms) <= 1.8 * without_ms
    assert engine.num_moving > 0


def test_where_bytes_cost_time_fewer_bytes_move_and_not_only_fewer_groups() -> None:
    # By groups the largest three would be tried next and exceed the limit, so that nothing moves.
    engine = Engine(HostBound(copy_ms=0.0, ms_per_kib=0.25), 35.0)
    train(engine)
    refused, kept = engine.report.tried
    assert refused.percent > 150.0
    assert 0 < kept.percent <= 35.0
    assert kept.moved_bytes / refused.moved_bytes <= 35.0 / refused.percent
    assert engine.is_settled
    assert engine.num_moving == kept.num_groups_moved > 0


def test_a_limit_that_is_not_reached_lets_the_plan_be() -> None:
    plans = []
    for max_percent in (500.0, 1e9):
        engine = Engine(HostBound(copy_ms=1.0), max_percent)
        train(engine)
        plans.append(engine.num_moving)
    assert plans[0] == plans[1] > 0


def test_nothing_is_tried_that_would_hardly_fit() -> None:
    engine = Engine(HostBound(copy_ms=1.0, obtainable=1), 1.0)
    took_ms = train(engine)
    assert min(took_ms) > 1.1 * NUM_PASSES * PASS_MS, "the engine is never left out"


def test_other_options_are_tried_afresh() -> None:
    engine = Engine(HostBound(copy_ms=1.0), 1.0)
    train(engine)
    assert engine.num_moving == 0
    original = engine.init_model_chunk_offload_handler

    def with_fraction(*arguments: Any, **options: Any) -> None:
        original(*arguments, **options, activation_offload_fraction=0.5)

    engine.init_model_chunk_offload_handler = with_fraction  # type: ignore[method-assign]
    copied = engine.clock.num_copies
    train(engine, 3)
    assert engine.clock.num_copies > copied


def run_trial(percent: float, noise: float, max_percent: float = 1.0) -> tuple[bool, int]:
    """The verdict on iterations of that overhead and noise, both in percent, and its pairs."""
    return _run_trial(random.Random(3), percent, noise, max_percent)


def _run_trial(
    draw: random.Random, percent: float, noise: float, max_percent: float
) -> tuple[bool, int]:
    trial = CostTrial(max_percent)
    number = 0
    while trial.is_affordable is None:
        scale = 1 + noise / 100 * draw.uniform(-1, 1)
        if number % 2:
            trial.note_without(100.0 * scale)
        else:
            trial.note_with(100.0 * (1 + percent / 100) * scale)
        number += 1
    return trial.is_affordable, len(trial.off_ms)


@pytest.mark.parametrize(
    "percent, noise, is_affordable",
    [(0.5, 0.1, True), (1.5, 0.1, False), (0.0, 2.0, True), (20.0, 5.0, False), (-3.0, 1.0, True)],
)
def test_a_trial_tells_costs_from_noise(percent: float, noise: float, is_affordable: bool) -> None:
    draws = (random.Random(seed) for seed in range(100))
    verdicts = [_run_trial(draw, percent, noise, 1.0)[0] for draw in draws]
    assert verdicts.count(is_affordable) >= 95


def test_the_noisier_the_longer_a_trial_goes_on() -> None:
    assert run_trial(0.5, 0.01)[1] == MIN_PAIRS
    assert run_trial(1.1, 8.0)[1] == MAX_PAIRS


def test_what_cannot_be_measured_is_no_cost() -> None:
    assert run_trial(0.1, 0.01, max_percent=0.0)[0]
    assert not run_trial(0.5, 0.01, max_percent=0.0)[0]


def test_drift_is_no_cost() -> None:
    trial = CostTrial(0.5)
    for number in range(2 * MAX_PAIRS):
        ms = 100.0 + 2.0 * number  # 2% longer, each than the one before
        trial.note_without(ms) if number % 2 else trial.note_with(ms)
        if trial.is_affordable is not None:
            break
    assert trial.is_affordable
    assert trial.overhead.percent == pytest.approx(0.0, abs=1e-9)


def test_an_iteration_of_another_kind_is_compared_with_nothing() -> None:
    trial = CostTrial(1.0)
    for _ in range(MAX_PAIRS):
        trial.note_with(100.0)
        trial.note_without(50.0)
        trial.note_with(None)
    assert trial.off_ms == []
