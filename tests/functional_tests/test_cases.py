# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs ``test_cases``: whole trainings through ``pretrain_gpt.py``, on a CPU and on GPUs.

Each is compared with its golden values, and bitwise with a run without offloading, which has a
higher peak. On a CPU they take minutes: unless ``--all-cases`` is given, which
``./run functional-tests`` does, one of them runs, and with offloading only, since
``test_pretrain.py`` compares such a training with one without. ``--record`` writes the measured
values as golden values.
"""

from __future__ import annotations

import math
from pathlib import Path

import pytest
from functional_cases import (
    EXACT_METRICS,
    Job,
    Result,
    compare,
    first_difference,
    load_jobs,
    read_golden,
    train,
    write_golden,
)

ALWAYS = ("gpt3_offload", "cpu")
MOST_LINES = 15
"""Beside iterations, what is said while packages are imported included."""
MARKERS = {1: pytest.mark.gpu, 2: pytest.mark.gpus2}


def parameters() -> list[object]:
    """A parameter for each case and platform, marked by the GPUs that it needs."""
    return [
        pytest.param(
            job,
            id=f"{job.case}-{job.platform}",
            marks=() if job.platform == "cpu" else MARKERS[job.num_ranks],
        )
        for job in load_jobs()
    ]


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("job", parameters())
def test_a_case_meets_its_golden_values_and_is_the_same_without_offloading(
    job: Job, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    is_short = job.platform == "cpu" and not request.config.getoption("--all-cases")
    if is_short and (job.case, job.platform) != ALWAYS:
        pytest.skip("takes minutes: ./run functional-tests")
    offloading = train(job, True, tmp_path / "offloading")
    if job.platform == "cpu" and job.num_ranks == 1:
        lines = offloading.shown.partition("Activation offload, per iteration")[0].splitlines()
        assert offloading.num_iterations < len(lines) < offloading.num_iterations + MOST_LINES
        assert not any("Warning: " in line for line in lines), "of other packages"
    if not is_short:
        without = train(job, False, tmp_path / "without")
        assert first_difference(without, offloading) is None
        check_that_it_offloads(without, offloading)
    if job.config.TEST_TYPE == "ckpt-resume":
        again = train(job, True, tmp_path / "offloading", run_number=2)
        assert first_difference(offloading, again) is None
    now = {name: offloading.metrics()[name] for name in job.metrics}
    if request.config.getoption("--record"):
        assert all(math.isfinite(value) for values in now.values() for value in values.values())
        write_golden(job.golden_path, now)
    check_golden(job, now)


def check_that_it_offloads(without: Result, offloading: Result) -> None:
    moved_bytes = sum(offloading.by_iteration("bytes_offloaded")[offloading.num_iterations])
    assert moved_bytes > 0
    assert offloading.peak_bytes() < without.peak_bytes()


def check_golden(job: Job, now: dict[str, dict[int, float]]) -> None:
    golden = read_golden(job.golden_path)
    for name, values in now.items():
        steps = compare(golden[name], values, exact=name in EXACT_METRICS)
        assert not steps, f"{name} in iterations {steps}: {golden[name]}, now {values}"
