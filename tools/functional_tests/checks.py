# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What must hold of a case's trainings, as rows that people read."""

from __future__ import annotations

import statistics
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Optional

from megatron.slipstream.plan.render import format_bytes
from tools.functional_tests.cases import Case
from tools.functional_tests.golden import (
    MEGATRON_METRICS,
    OUR_METRICS,
    TOLERANCE,
    Values,
    compare,
    measured,
)
from tools.functional_tests.launch import Result


class Row(NamedTuple):
    """One thing that was checked."""

    what: str
    golden: str
    """What it should be like."""
    now: str
    verdict: str
    passed: bool


class Results(NamedTuple):
    """The trainings of a case that have been run."""

    offloading: Result
    """Of the case as it is."""
    without: Optional[Result] = None
    again: Optional[Result] = None
    """The second half, from the checkpoint."""


def metrics_of(case: Case, platform: str) -> tuple[str, ...]:
    """What is compared with golden values.

    Raises:
        ValueError: The case asks for something that is not measured.
    """
    unknown = [name for name in case.config.METRICS if name not in MEGATRON_METRICS]
    if unknown:
        raise ValueError(
            f"{case.name}: METRICS: {unknown[0]!r} is not measured by this runner; name some of "
            f"{', '.join(MEGATRON_METRICS)}"
        )
    ours = OUR_METRICS if case.offloads and platform == "cpu" else ()
    return (*case.config.METRICS, *ours)


def is_deterministic(case: Case, platform: str) -> bool:
    """Whether a second training gives the same numbers."""
    return platform == "cpu" or case.config.ENV_VARS.get("NVTE_ALLOW_NONDETERMINISTIC_ALGO") == "0"


def golden_rows(
    case: Case, platform: str, golden: Optional[Mapping[str, Values]], result: Result
) -> Iterator[Row]:
    """A row for each metric; ``golden`` is None where nobody has recorded any."""
    now = measured(result)
    for metric in metrics_of(case, platform):
        last = _shown(metric, list(now[metric].values())[-1])
        if golden is None or metric not in golden:
            yield Row(metric, "none", last, "not recorded: --record", passed=False)
            continue
        expected = _shown(metric, list(golden[metric].values())[-1])
        exact = metric in MEGATRON_METRICS and is_deterministic(case, platform)
        found = compare(metric, golden[metric], now[metric], exact)
        if found:
            first = found[0]
            yield Row(
                metric,
                _shown(metric, first.golden),
                _shown(metric, first.now),
                f"differs in {len(found)} of {len(golden[metric])} steps, first in {first.step}",
                passed=False,
            )
        else:
            yield Row(
                metric, expected, last, "equal" if exact else f"within {TOLERANCE:.0%}", passed=True
            )


def offloading_rows(without: Result, offloading: Result) -> Iterator[Row]:
    """That offloading changes no bit of what is computed, and that it does something."""
    difference = first_difference(without, offloading)
    yield Row(
        "losses, gradients, weights",
        "without offloading",
        "offloading",
        difference or "bit-equal",
        passed=difference is None,
    )
    peaks = [_peak(result) for result in (without, offloading)]
    moved = sum(offloading.by_iteration("bytes_offloaded")[offloading.num_iterations])
    verdict = f"{1 - peaks[1] / peaks[0]:.0%} less, {format_bytes(moved)} moved"
    yield Row(
        "activation peak",
        f"below {format_bytes(peaks[0])}",
        format_bytes(peaks[1]),
        verdict if moved else "no bytes moved",
        passed=moved > 0 and peaks[1] < peaks[0],
    )


def resume_row(whole: Result, again: Result) -> Row:
    """That training from a checkpoint is the training that it was written in."""
    difference = first_difference(whole, again)
    return Row(
        f"iterations {again.first_iteration} to {again.num_iterations} again",
        "as the first time",
        "from the checkpoint",
        difference or "bit-equal",
        passed=difference is None,
    )


def first_difference(expected: Result, actual: Result) -> Optional[str]:
    """Where two trainings are not equal bit by bit, in the iterations of both; None if nowhere."""
    losses = expected.losses()
    for step, loss in actual.losses().items():
        if losses.get(step) != loss:
            return f"loss differs in iteration {step}: {losses.get(step)} and {loss}"
    for rank, (left, right) in enumerate(zip(expected.records, actual.records, strict=True)):
        for name in ("gradients_sha256", "weights_sha256"):
            # Both are of the end, which both trainings have.
            if left.get(name) is None or left.get(name) != right.get(name):
                return f"{name.partition('_')[0]} of rank {rank} differ at the end"
    return None


def _peak(result: Result) -> int:
    """Of the rank that has the highest, in a typical iteration, with what CUDA graphs keep."""
    outside = result.by_iteration("activation_peak_bytes").values()
    inside = result.by_iteration("graph_pool_bytes").values()
    by_iteration = [
        [peak + pool for peak, pool in zip(peaks, pools, strict=True)]
        for peaks, pools in zip(outside, inside, strict=True)
    ]
    return int(max(statistics.median(peaks) for peaks in zip(*by_iteration, strict=True)))


def _shown(metric: str, value: float) -> str:
    if metric in OUR_METRICS and value == value:
        return format_bytes(int(value))
    return f"{value:.5f}".rstrip("0").rstrip(".")
