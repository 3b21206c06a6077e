# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Medians, their errors, and the figures drawn from profiles and plans."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from make_trace import Model, one_pass

from benchmarks.copies import copies_of
from benchmarks.figures import Pace, loss_difference, overhead_percent, spread_of
from benchmarks.variant import bound_fields, describe
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import Bandwidth


def test_spread_of_known_samples() -> None:
    spread = spread_of([1, 2, 3, 4, 100])
    assert spread.median == 3
    assert spread.interquartile == 2
    assert spread.standard_error == pytest.approx(1.2533 * 1.4826 * 1 / math.sqrt(5))


def test_standard_error_is_how_far_medians_scatter() -> None:
    generator = random.Random(5)
    draws = [[generator.gauss(100, 2) for _ in range(40)] for _ in range(400)]
    scatter = statistics.stdev(statistics.median(draw) for draw in draws)
    claimed = statistics.mean(spread_of(draw).standard_error for draw in draws)
    assert claimed == pytest.approx(scatter, rel=0.15)


def test_the_largest_relative_difference_of_losses_counts() -> None:
    assert loss_difference([2.0, 4.0], [2.0, 5.0]) == pytest.approx(0.2)
    assert loss_difference([2.0, math.nan], [2.0, 5.0]) == math.inf
    assert loss_difference([], []) is None


def test_one_sample_tells_nothing_of_its_error() -> None:
    assert spread_of([5.0]).relative_error == math.inf
    with pytest.raises(ValueError, match="no samples"):
        spread_of([])


def test_overhead_compares_neighbours_so_that_drift_cancels() -> None:
    base = [100 + 3 * index for index in range(20)]
    overhead = overhead_percent([1.05 * ms for ms in base], base)
    assert overhead.median == pytest.approx(5)
    assert overhead.standard_error == pytest.approx(0, abs=1e-9)


def test_rows_and_tables_tell_the_same_pace() -> None:
    pace = Pace.of([11.0, 22.0, 33.0], [10.0, 20.0, 30.0])
    assert pace.fields() == {
        "median_ms": 22.0,
        "interquartile_ms": 11.0,
        "slower_percent": pytest.approx(10),
        "slower_percent_standard_error": pytest.approx(0, abs=1e-9),
    }
    assert pace.cells() == ("22.00 (11.00)", "+10.0% (±0.0)")


def test_copies_are_read_from_a_profile() -> None:
    def copy(name: str, nbytes: int, us: float) -> dict[str, object]:
        return {"cat": "gpu_memcpy", "name": name, "dur": us, "args": {"bytes": nbytes}}

    copies = copies_of(
        [
            copy("Memcpy DtoH (Device -> Pinned)", 50_000_000, 1000),
            copy("Memcpy DtoH (Device -> Pinned)", 10_000_000, 200),
            copy("Memcpy DtoH (Device -> Pageable)", 64, 2),
            copy("Memcpy HtoD (Pinned -> Device)", 30_000_000, 1000),
            copy("Memcpy DtoD (Device -> Device)", 90_000_000, 50),
            {"cat": "kernel", "name": "gemm", "dur": 10, "args": {}},
        ]
    )
    assert copies is not None
    assert copies.d2h.bulk_bytes == 60_000_000
    assert copies.d2h.gb_per_s == pytest.approx(50)
    assert (copies.d2h.num_small, copies.d2h.small_bytes) == (1, 64)
    assert copies.h2d.gb_per_s == pytest.approx(30)


def test_a_profile_without_copies_gives_no_figures() -> None:
    assert copies_of([{"cat": "kernel", "name": "gemm", "dur": 10}]) is None


def test_bound_needs_times_of_the_plans_own_marks() -> None:
    trace = one_pass(Model(num_layers=4))
    plan = build_plan(trace, PolicyOptions())
    marks = [(step.kind, step.name) for step in trace.steps]
    bandwidth = Bandwidth(1e-3, 1e-3, 1e-3, 1e-3)
    found = bound_fields(plan, (marks, (0.5,) * len(marks)), bandwidth, off_ms=10.0)
    assert found["compute_ms"] == pytest.approx(0.5 * len(marks))
    # Backward has four steps of half a millisecond, and copies of a millisecond each.
    assert found["bound_overhead_percent"] == pytest.approx(
        100 * (found["bound_ms"] - found["compute_ms"]) / 10
    )
    assert bound_fields(plan, (marks[1:], (0.5,) * 7), bandwidth, off_ms=10.0) == {}
    assert replace(plan) == plan


def test_errors_are_told_with_their_place() -> None:
    try:
        assert not "what an assertion says"
    except AssertionError as error:
        text = describe(error)
    assert text.startswith("AssertionError:")
    assert "benchmarks/test_figures.py:" in text
    assert describe(ValueError("option=1 is not supported")) == (
        "ValueError: option=1 is not supported"
    )
