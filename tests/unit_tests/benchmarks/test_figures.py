# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Medians, their errors, and the figures drawn from profiles and plans."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from make_trace import Model, one_pass

from benchmarks.copies import profile_fields
from benchmarks.figures import loss_difference, overhead_percent, spread_of
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


def test_copies_are_read_from_a_profile() -> None:
    profile = profile_fields(
        [
            copy("Memcpy DtoH (Device -> Pinned)", 50_000_000, 1000),
            copy("Memcpy DtoH (Device -> Pinned)", 10_000_000, 200),
            copy("Memcpy DtoH (Device -> Pageable)", 64, 2),
            copy("Memcpy HtoD (Pinned -> Device)", 30_000_000, 1000),
            copy("Memcpy DtoD (Device -> Device)", 90_000_000, 50),
            kernel(0, 10),
        ]
    )
    assert profile == {
        "kernel_ms": 0.01,
        "d2h_bulk_bytes": 60_000_000,
        "d2h_bulk_ms": pytest.approx(1.2),
        "d2h_gb_per_s": pytest.approx(50),
        "d2h_num_small": 1,
        "d2h_small_bytes": 64,
        "h2d_bulk_bytes": 30_000_000,
        "h2d_bulk_ms": 1.0,
        "h2d_gb_per_s": pytest.approx(30),
        "h2d_num_small": 0,
        "h2d_small_bytes": 0,
    }


def test_a_profile_without_copies_gives_no_figures_of_them() -> None:
    events = [kernel(0, 10), copy("Memcpy DtoD (Device -> Device)")]
    assert profile_fields(events) == {"kernel_ms": 0.01}


def test_kernels_that_overlap_are_counted_once() -> None:
    spans = [(100, 50), (0, 10), (120, 10), (140, 40), (300, 5)]
    assert profile_fields(kernel(*span) for span in spans)["kernel_ms"] == 0.095


def kernel(begin_us: float, us: float) -> dict[str, object]:
    return {"cat": "kernel", "name": "gemm", "ts": begin_us, "dur": us, "args": {}}


def copy(name: str, nbytes: int = 64, us: float = 1.0) -> dict[str, object]:
    return {"cat": "gpu_memcpy", "name": name, "dur": us, "args": {"bytes": nbytes}}


def test_the_bound_is_that_of_the_times_that_the_engine_measured_and_of_the_link() -> None:
    trace = one_pass(Model(num_layers=4))
    times_ms = (0.5,) * len(trace.steps)
    plan = build_plan(replace(trace, step_ms=times_ms), PolicyOptions())
    found = bound_fields(plan, Bandwidth(1e-3, 1e-3, 1e-3, 1e-3), off_ms=10.0)
    assert found["compute_ms"] == pytest.approx(0.5 * len(times_ms))
    # Backward has four steps of half a millisecond, and copies of a millisecond each.
    assert found["bound_overhead_percent"] == pytest.approx(
        100 * (found["bound_ms"] - found["compute_ms"]) / 10
    )
    assert found["bound_ms"] > found["compute_ms"]
    fast = bound_fields(plan, Bandwidth(1e3, 1e3, 1e3, 1e3), off_ms=10.0)
    assert fast["bound_ms"] < found["bound_ms"]
    untimed = replace(plan, trace=replace(plan.trace, step_ms=()))
    assert bound_fields(untimed, Bandwidth(1e-3, 1e-3, 1e-3, 1e-3), off_ms=10.0) == {}


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
