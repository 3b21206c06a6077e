# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Medians, their errors, and the figures drawn from profiles and plans."""

from __future__ import annotations

import math
import random
import statistics
from dataclasses import replace

import pytest
from make_trace import Model, one_pass

from benchmarks.copies import call_costs_us, profile_of
from benchmarks.figures import loss_difference, overhead_percent, spread_of
from benchmarks.marks import HostTimes
from benchmarks.variant import VariantRun, _Figures, bound_fields, describe
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
    profile = profile_of(
        [
            copy("Memcpy DtoH (Device -> Pinned)", 50_000_000, 1000),
            copy("Memcpy DtoH (Device -> Pinned)", 10_000_000, 200),
            copy("Memcpy DtoH (Device -> Pageable)", 64, 2),
            copy("Memcpy HtoD (Pinned -> Device)", 30_000_000, 1000),
            copy("Memcpy DtoD (Device -> Device)", 90_000_000, 50),
            kernel(0, 10),
        ]
    )
    assert profile.d2h.bulk_bytes == 60_000_000
    assert profile.d2h.gb_per_s == pytest.approx(50)
    assert (profile.d2h.num_small, profile.d2h.small_bytes) == (1, 64)
    assert profile.h2d.gb_per_s == pytest.approx(30)
    assert profile.fields()["d2h_bulk_bytes"] == 60_000_000


def test_a_profile_without_copies_gives_no_figures_of_them() -> None:
    profile = profile_of([kernel(0, 10)])
    assert not any(name.startswith(("d2h", "h2d")) for name in profile.fields())


def test_kernels_that_overlap_are_counted_once() -> None:
    spans = [(100, 50), (0, 10), (120, 10), (140, 40), (300, 5)]
    assert profile_of(kernel(*span) for span in spans).fields()["kernel_ms"] == 0.095


def kernel(begin_us: float, us: float) -> dict[str, object]:
    return {"cat": "kernel", "name": "gemm", "ts": begin_us, "dur": us, "args": {}}


def call(name: str, us: float = 1.0) -> dict[str, object]:
    return {"cat": "cuda_runtime", "name": name, "dur": us, "args": {}}


def copy(name: str, nbytes: int = 64, us: float = 1.0) -> dict[str, object]:
    return {"cat": "gpu_memcpy", "name": name, "dur": us, "args": {"bytes": nbytes}}


TO_HOST, TO_DEVICE = "Memcpy DtoH (Device -> Pinned)", "Memcpy HtoD (Pinned -> Device)"
RECORD, WAIT = "cudaEventRecord", "cudaStreamWaitEvent"


def test_calls_of_the_driver_are_counted_by_kind() -> None:
    events = [call(RECORD, 1.5), call("cudaEventRecordWithFlags", 2.5), call(WAIT)]
    events += [call("cudaLaunchKernel", 30.0), copy(TO_HOST), copy(TO_DEVICE, 5_000_000)]
    profile = profile_of(events)
    assert profile.engine_calls == {"copy": 2, RECORD: 2, WAIT: 1}
    fields = profile.fields()
    assert fields["num_driver_calls"][RECORD] == 1
    assert fields["driver_us_per_call"] == {
        RECORD: 1.5, "cudaEventRecordWithFlags": 2.5, WAIT: 1.0, "cudaLaunchKernel": 30.0,
    }  # fmt: skip


def test_the_floor_of_a_group_is_made_of_the_calls_that_an_engine_adds(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    costs_us = {"copy": 4.0, RECORD: 2.0, WAIT: 1.0}
    monkeypatch.setattr("benchmarks.variant.call_costs_us", lambda: costs_us)
    host = HostTimes()
    host.calls["on_group_commit_forward"] = 2
    measured = VariantRun.__new__(VariantRun)
    measured._first = "off"
    events = [copy(TO_HOST)] * 3 + [copy(TO_DEVICE)] * 2 + [call(RECORD)] * 5 + [call(WAIT)] * 4
    measured._figures = {
        "off": _Figures(profile=profile_of([copy(TO_HOST), call(RECORD)])),
        "slipstream": _Figures(host=host, profile=profile_of(events)),
    }
    assert measured._floor_us_per_group("slipstream") == (4 * 4.0 + 4 * 2.0 + 4 * 1.0) / 2
    assert measured._floor_us_per_group("off") is None


def test_each_kind_of_call_has_a_cost() -> None:
    costs_us = call_costs_us()
    assert costs_us.keys() == profile_of([]).engine_calls.keys()
    assert all(cost_us > 0 for cost_us in costs_us.values())


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
