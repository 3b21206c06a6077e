# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What there is to run on GPUs, and in which order."""

from __future__ import annotations

import difflib
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Optional

from benchmarks.cases import CASES, Case, Variant, short_name
from megatron.slipstream.patches.releases import TESTED_RELEASES
from tools.functional_tests.recipes import load_jobs

RELEASES = (None, *TESTED_RELEASES[:-1])
"""Of megatron-core: that of the environment, which is the newest, and the older ones."""

OUTPUT, NUM_WORKERS = "{output}", "{workers}"
"""In a command: the folder for what the job writes, and the processes that its shares are enough
for."""

ONE_GPU = "gpu and not gpus2 and not gpus4"
"""Tests that are marked for several GPUs may be marked for one too, with all of their file."""

PLATFORM, FUNCTIONAL_SECONDS = "h200", 160
"""Whose golden values the functional cases are compared with, and what one of them takes beside
others."""

VARIANT_SECONDS, TUNING_SECONDS = 100, 130
"""A set of modules with three engines, and what each more of ours takes, which plans at length."""


SHARES = 12
"""Of a GPU: what others do not disturb takes some of them, and leaves the rest to others. How many
tests run side by side on them follows from the GPU's memory."""


@dataclass(frozen=True)
class Job:
    """A command that gets some GPUs, to itself or with others."""

    name: str
    num_gpus: int
    seconds: int
    """What it takes on H200s, roughly: none is started that would be cut off."""
    command: tuple[str, ...]
    release: Optional[str] = None
    """Of megatron-core; None is the one of the environment."""
    shares: int = SHARES
    """What it takes of each of its GPUs, and of their share of the CPU cores."""
    ranks_per_gpu: int = 1
    """How many of a test's ranks are on each of its GPUs."""

    def with_more(self, arguments: Sequence[str], prefix: str) -> Job:
        """With more arguments, if its name begins so."""
        if not self.name.startswith(prefix):
            return self
        return replace(self, command=(*self.command, *arguments))

    def on_fewer_gpus(self, ranks_per_gpu: int) -> Job:
        """With so many ranks on a GPU, unless it measures something."""
        num_ranks = min(ranks_per_gpu, self.num_gpus)
        if self.shares == SHARES or num_ranks == 1:
            return self
        return replace(
            self,
            num_gpus=-(-self.num_gpus // num_ranks),
            shares=min(self.shares * num_ranks, SHARES - 1),
            seconds=self.seconds * num_ranks,
            ranks_per_gpu=num_ranks,
        )


def _tests(
    name: str,
    num_gpus: int,
    seconds: int,
    marks: str,
    shares: int = SHARES,
    release: Optional[str] = None,
) -> Job:
    """With an older release of megatron-core only what touches that.

    What has all shares measures, one test at a time.
    """
    workers = "1" if shares == SHARES else NUM_WORKERS
    of_release = f"{marks} and releases" if release else marks
    command = ["-m", "pytest", "-q", "-m", of_release, "-n", workers, "--dist", "worksteal"]
    command += ["--durations", "10", f"--junit-xml={OUTPUT}/tests.xml"]
    suffix = f":{release}" if release else ""
    return Job(f"{name}{suffix}", num_gpus, seconds, (sys.executable, *command), release, shares)


def _functional_case(case: str, num_gpus: int) -> Job:
    """A training of Megatron's format, with offloading and without, against its golden values."""
    command = ("-m", "tools.functional_tests", case, "--platform", PLATFORM)
    words = (sys.executable, *command, "--output-dir", OUTPUT)
    return Job(f"functional:{case}", num_gpus, FUNCTIONAL_SECONDS, words, shares=1)


def _measurement(case: Case, variant: Variant) -> Job:
    """A set of modules, so that several GPUs share a case."""
    name = f"bench:{case.name}:{short_name(variant.name).replace(' ', '+')}"
    seconds = VARIANT_SECONDS + TUNING_SECONDS * len(variant.tunings)
    command = ["-m", "benchmarks.run", "--case", case.name, "--modules", variant.name]
    command += ["--output", OUTPUT, "--name", "rows"]
    return Job(name, case.num_ranks, seconds, (sys.executable, *command))


def _script(name: str, num_gpus: int, seconds: int, *arguments: str) -> Job:
    command = (sys.executable, "-m", f"benchmarks.{arguments[0]}", *arguments[1:])
    return Job(name, num_gpus, seconds, (*command, "--output", f"{OUTPUT}/rows.jsonl"))


JOBS: tuple[Job, ...] = (
    *(
        _tests("tests", 1, seconds, f"{ONE_GPU} and not exclusive", 4, release)
        for release, seconds in zip(RELEASES, (450, 200, 200), strict=True)
    ),
    *(
        _tests("tests-exclusive", 1, seconds, f"{ONE_GPU} and exclusive", release=release)
        for release, seconds in zip(RELEASES, (160, 80, 80), strict=True)
    ),
    *(
        _tests("tests-two-gpus", 2, seconds, "gpus2", shares, release)
        for release, seconds, shares in zip(RELEASES, (500, 250, 250), (5, 2, 2), strict=True)
    ),
    _tests("tests-four-gpus", 4, 300, "gpus4", 4),
    *(_functional_case(job.case, job.num_ranks) for job in load_jobs() if job.platform == PLATFORM),
    *(_measurement(case, variant) for case in CASES if case.needs_gpu for variant in case.variants),
    *(
        _script(f"layer-graphs:{case}", 1, 150, "layer_graphs", "--case", case)
        for case in ("dense", "moe", "moe_experts", "launch_bound")
    ),
    *(
        _script(f"chunk-graphs:{case}", 1, 150, "chunk_graphs", "--case", case)
        for case in ("launch_bound_thd", "launch_bound", "compute_bound", "experts")
    ),
    _script("attached", 1, 200, "attached"),
    *(
        _script(f"graph-bank:{ranks}-ranks", ranks, 200, "graph_bank", "--ranks", str(ranks))
        for ranks in (2, 4)
    ),
)


def select(patterns: Sequence[str], jobs: Sequence[Job] = JOBS) -> list[Job]:
    """The jobs whose names match any of the patterns; all of them without a pattern.

    Raises:
        ValueError: A pattern matches none; names those that are near.
    """
    for pattern in patterns:
        if not any(fnmatchcase(job.name, pattern) for job in jobs):
            near = difflib.get_close_matches(pattern, [job.name for job in jobs])
            cure = f"near: {', '.join(near)}" if near else "--list shows what there is"
            raise ValueError(f"no job is called {pattern}; {cure}")
    return [job for job in jobs if not patterns or _matches(job, patterns)]


def _matches(job: Job, patterns: Sequence[str]) -> bool:
    return any(fnmatchcase(job.name, pattern) for pattern in patterns)


def in_order(jobs: Sequence[Job]) -> list[Job]:
    """Those that share GPUs first, the longest of them before all others.

    Of those that do not, those that need most GPUs first, since they wait for all others.
    """
    sharing = sorted((job for job in jobs if job.shares < SHARES), key=lambda job: -job.seconds)
    alone = [job for job in jobs if job.shares == SHARES]
    return [*sharing, *sorted(alone, key=lambda job: (-job.num_gpus, -job.seconds))]


def next_job(
    waiting: Sequence[Job], free: Mapping[int, int], seconds_left: float
) -> Optional[tuple[Job, tuple[int, ...]]]:
    """What to start now, and on which GPUs: the first that fits, unless a larger one waits.

    Args:
        waiting: In order.
        free: Shares of each GPU that nothing runs on.
        seconds_left: Until everything has to end.
    """
    job = next((job for job in waiting if job.seconds <= seconds_left), None)
    if job is None:
        return None
    possible = [gpu for gpu, shares in free.items() if shares >= job.shares]
    if len(possible) < job.num_gpus:
        # What comes later needs less, and would keep this one waiting for ever.
        return None
    emptiest = sorted(possible, key=lambda gpu: -free[gpu])[: job.num_gpus]
    return job, tuple(sorted(emptiest))
