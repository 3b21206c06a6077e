# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Finds problems of a run, each with a fix, from its report alone, by :data:`CHECKS`."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

from megatron.slipstream.fine_grained_activation_offload.report import RankReport, Report
from megatron.slipstream.options.rules import Finding
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.report_page.summary import peaks_of

MAX_WAIT_SHARE = 0.01
"""Maximum stall time, as a fraction of the step time."""
MAX_PREDICTION_ERROR = 0.05
MAX_PEAK_ERROR = 0.02
MAX_WASTE_SHARE = 0.25
MIN_WASTE_BYTES = 64 << 20
MAX_UNFREED_SHARE = 0.05
WARM_ITERATIONS = 4
"""Number of iterations after which the host pool should not grow."""
MAX_PLANS = 8
"""A few plans are rebuilt from measured times; more indicate that iterations differ."""
MAX_NAMED = 6


Observation = tuple[Finding, str]
"""A finding about one rank, with the rank's figures."""


class RunFinding(NamedTuple):
    """A finding about a run, with the affected ranks and their figures."""

    finding: Finding
    details: tuple[tuple[tuple[int, ...], str], ...]
    """Ranks that have the same figures, and the figures."""


def findings(report: Report) -> list[RunFinding]:
    """Return all findings of a run, warnings first; ranks with the same finding share an entry."""
    details_of: dict[Finding, dict[str, list[int]]] = {}
    for rank in report.ranks:
        for check in CHECKS:
            for finding, detail in check(rank):
                details_of.setdefault(finding, {}).setdefault(detail, []).append(rank.rank)
    merged = [
        RunFinding(finding, tuple((tuple(ranks), detail) for detail, ranks in details.items()))
        for finding, details in details_of.items()
    ]
    return sorted(merged, key=lambda item: item.finding.severity != "warning")


def next_step(report: Report) -> str:
    """Return the next thing to try: the fix for the first problem, or a use of freed memory."""
    for finding, _ in findings(report):
        if finding.severity == "warning":
            return f"{finding.message}. {finding.cure}".removesuffix(". ")
    ranks = report.ranks
    if not any(rank.num_iterations for rank in ranks):
        return "train for 5 iterations or more: the first are recorded and timed."
    is_read = all(rank.baseline_peak_bytes for rank in ranks)
    freed_bytes = min(peaks_of(rank).saved_bytes for rank in ranks)
    if is_read and freed_bytes > 0:
        return (
            f"every rank has at least {format_bytes(freed_bytes)} of freed device memory: raise "
            "--micro-batch-size or --seq-length, or recompute less (--recompute-granularity)."
        )
    if not is_read:
        counted_bytes = min(rank.peak_drop_bytes for rank in ranks)
        counted = f" ({format_bytes(counted_bytes)} or more)" if counted_bytes else ""
        return (
            f"device memory was not measured; peak_drop{counted} is counted from saved tensors. "
            "Train on a GPU, or without one with --run-record-path, to measure it."
        )
    return (
        "the device peak of a rank does not drop: add --offload-modules that save the most at the "
        "peak (see the memory curve of --html with --trace)."
    )


def _problem(message: str, detail: str, cure: str) -> Observation:
    return Finding("warning", message, cure), detail


def _note(message: str, detail: str, cure: str) -> Observation:
    return Finding("note", message, cure), detail


def _warnings(rank: RankReport) -> Iterator[Observation]:
    for text, count in rank.warnings.items():
        # The page already names the rank.
        plain = re.sub(rf"^rank {rank.rank}: ", "", text)
        times = f"{count} times" if count > 1 else ""
        yield _problem(plain, times, "")
    for note in rank.notes:
        if not any(note in text for text in rank.warnings):
            yield _problem(note, "", "")


def _late_starts(rank: RankReport) -> Iterator[Observation]:
    num_late = rank.total.num_late
    if not num_late:
        return
    modules = {name: item.num_late for name, item in rank.modules.items() if item.num_late}
    text = ", ".join(f"{name}: {num}" for name, num in modules.items())
    if rank.late_groups:
        groups = sorted(rank.late_groups.items(), key=lambda item: -item[1])
        text += f"; groups {', '.join(key for key, _ in groups[:MAX_NAMED])}"
        text += f" and {len(groups) - MAX_NAMED} more" if len(groups) > MAX_NAMED else ""
    yield _problem(
        "Copies back started only when backward needed them",
        f"{num_late} in the last iteration ({text})",
        "The last iteration followed no plan: the order or number of its marks was new. Keep the "
        "number of micro-batches constant, or train for one more iteration of the new kind, which "
        "is then planned.",
    )


def _waits(rank: RankReport) -> Iterator[Observation]:
    waited_ms = rank.total.stall_ms
    if not rank.measured_ms or waited_ms <= MAX_WAIT_SHARE * rank.measured_ms:
        return
    by_module = sorted(rank.modules.items(), key=lambda item: -item[1].stall_ms)
    parts = [f"{name} {item.stall_ms:.1f} ms" for name, item in by_module if item.stall_ms > 0]
    yield _problem(
        "Compute waits for copies",
        f"{waited_ms:.1f} of {rank.measured_ms:.1f} ms "
        f"({waited_ms / rank.measured_ms:.1%}): {', '.join(parts)}",
        "Offload less: --offload-max-overhead-percent 1, or fewer --offload-modules. Or give "
        "copies more time, at a higher peak: --offload-release-lag 2 (out), "
        "--offload-prefetch-depth 2 (back). See the stalls in the timeline.",
    )


def _time_as_planned(rank: RankReport) -> Iterator[Observation]:
    planned, measured = rank.planned_ms, rank.measured_ms
    if planned and measured > planned * (1 + MAX_PREDICTION_ERROR):
        yield _problem(
            "The iteration takes longer than planned",
            f"{measured:.1f} ms, {planned:.1f} ms planned",
            "Copies or computation are slower than when they were measured. Check for other "
            "processes on the link or the host's CPUs, and with slipstream doctor that processes "
            "run on the NUMA node of their GPU.",
        )


def _peak_as_planned(rank: RankReport) -> Iterator[Observation]:
    # Memory allocated later, such as the optimizer's state, does not depend on offloading.
    planned = rank.planned_peak_bytes + rank.later_bytes
    measured = rank.measured_peak_bytes
    if rank.planned_peak_bytes and measured > planned * (1 + MAX_PEAK_ERROR):
        yield _problem(
            "The device peak is higher than planned",
            f"{format_bytes(measured)}, {format_bytes(planned)} planned",
            "Something holds memory that was copied out, or sizes have changed. Train for more "
            "iterations; if the difference remains, compare the memory curves.",
        )


def _target(rank: RankReport) -> Iterator[Observation]:
    target = rank.options.target_memory_bytes if rank.options is not None else None
    if target is not None and rank.measured_peak_bytes > target:
        yield _problem(
            "The target for the device peak is missed",
            f"{format_bytes(rank.measured_peak_bytes)}, the target is {format_bytes(target)}",
            "Add --offload-modules, or raise --offload-target-memory-gib.",
        )


def _host_limit(rank: RankReport) -> Iterator[Observation]:
    num_kept = rank.num_kept_for_host_memory + rank.total.num_kept_for_host_memory
    # The engine's own warning about the limit says how much is needed, and who set it.
    if num_kept and not any("host_memory_limit_bytes" in w for w in rank.warnings):
        limit = rank.host_memory_limit_bytes
        yield _problem(
            "Groups stay on the device because host memory is short",
            f"{num_kept} groups"
            + (f", the limit is {format_bytes(limit)}" if limit is not None else ""),
            "Give the job more host memory, raise --offload-host-memory-limit-bytes, or name fewer "
            "--offload-modules.",
        )


def _host_growth(rank: RankReport) -> Iterator[Observation]:
    if rank.host_growth_bytes and rank.num_iterations >= WARM_ITERATIONS:
        yield _problem(
            "Host memory still grows",
            f"{format_bytes(rank.host_growth_bytes)} new in iteration {rank.num_iterations}",
            "Sizes change from iteration to iteration. The growth ends once every size has "
            "occurred, at the latest at --offload-host-memory-limit-bytes.",
        )


def _host_waste(rank: RankReport) -> Iterator[Observation]:
    if rank.host_waste_bytes > MIN_WASTE_BYTES and rank.host_waste_fraction > MAX_WASTE_SHARE:
        yield _note(
            "Host memory is fragmented",
            f"{format_bytes(rank.host_waste_bytes)} was unusable at the peak in use "
            f"({rank.host_waste_fraction:.0%} of it)",
            "Buffers of very different sizes fragment the pool; leave out the module that moves "
            "the smallest tensors, or raise --min-offloaded-tensor-size.",
        )


def _unfreed(rank: RankReport) -> Iterator[Observation]:
    for name, item in rank.modules.items():
        kept = item.d2h_bytes - item.freed_bytes
        if kept > MAX_UNFREED_SHARE * item.d2h_bytes:
            yield _note(
                "Copies that freed no device memory",
                f"{name}: {format_bytes(kept)} of {format_bytes(item.d2h_bytes)}",
                "Something else held the memory until backward. Leave a module out of "
                "--offload-modules if this concerns most of its bytes.",
            )


def _plans(rank: RankReport) -> Iterator[Observation]:
    if rank.num_plans > MAX_PLANS and rank.num_plans > rank.num_iterations / 4:
        yield _problem(
            "Iterations differ, so plans are rebuilt repeatedly",
            f"{rank.num_plans} plans in {rank.num_iterations} iterations",
            "Keep the number of micro-batches constant.",
        )


def _moves(rank: RankReport) -> Iterator[Observation]:
    if rank.num_iterations > 1 and not rank.d2h_bytes and not rank.graphs:
        target = rank.options.target_memory_bytes if rank.options is not None else None
        peak_bytes = rank.measured_peak_bytes or rank.planned_peak_bytes
        if target is not None and 0 < peak_bytes <= target:
            yield _note(
                "Nothing needs to move",
                f"{format_bytes(peak_bytes)}, the target is {format_bytes(target)}",
                "The target for the device peak is met without offloading.",
            )
            return
        yield _problem(
            "Nothing moves",
            "",
            "See the table of groups or the plan: each group that stays has a reason.",
        )


def _timed(rank: RankReport) -> Iterator[Observation]:
    if rank.num_iterations and not (rank.measured_ms or rank.planned_ms):
        yield _note(
            "Nothing was timed",
            "",
            "Copies and computation are timed on a GPU, from the fourth iteration on. Without "
            "times, the timeline shows the time available to copies instead of their duration.",
        )


CHECKS: Sequence[Callable[[RankReport], Iterator[Observation]]] = (
    _warnings,
    _late_starts,
    _waits,
    _time_as_planned,
    _peak_as_planned,
    _target,
    _host_limit,
    _host_growth,
    _plans,
    _moves,
    _host_waste,
    _unfreed,
    _timed,
)
