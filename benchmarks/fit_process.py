# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Starts and asks the processes in which ``benchmarks.fit`` measures. Does not import torch."""

from __future__ import annotations

import contextlib
import json
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from benchmarks.cases import find_case
from benchmarks.fit_ways import Setup
from benchmarks.run import rank_environment
from megatron.slipstream.launcher import free_port

MEMORY = ("resident_bytes", "peak_bytes", "highest_bytes", "reserved_bytes", "moved_bytes")
"""Fields of a point of which the rank with the most counts."""


class Worker:
    """The processes that measure points of one way, one a rank; new ones after a point that died.

    Args:
        setup: The way.
        kill_seconds: The processes are ended where a point takes longer.
        is_deterministic: Whether kernels must be deterministic.
    """

    def __init__(self, setup: Setup, kill_seconds: float, is_deterministic: bool = False) -> None:
        self._setup, self._kill_seconds = setup, kill_seconds
        self._is_deterministic = is_deterministic
        self._ranks: list[subprocess.Popen[str]] = []

    def measure(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the row of a point: its figures, or ``error`` and ``dies``."""
        self._ranks = self._ranks or self._start()
        for rank in self._ranks:
            assert rank.stdin is not None
            with contextlib.suppress(BrokenPipeError):
                rank.stdin.write(json.dumps(point) + "\n")
                rank.stdin.flush()
        answers = self._answers()
        errors = [fields for fields in answers.values() if "error" in fields]
        if errors:
            self.close()
            return errors[0]
        return merge_ranks([answers[number] for number in range(len(answers))])

    def _answers(self) -> dict[int, dict[str, Any]]:
        """Return the answer of each rank; only the first with an error, for which others wait."""
        answers: dict[int, dict[str, Any]] = {}
        deadline_s = time.monotonic() + self._kill_seconds
        with selectors.DefaultSelector() as selector:
            for number, rank in enumerate(self._ranks):
                assert rank.stdout is not None
                selector.register(rank.stdout, selectors.EVENT_READ, number)
            while len(answers) < len(self._ranks):
                ready = selector.select(max(0.0, deadline_s - time.monotonic()))
                if not ready:
                    text = f"took longer than {self._kill_seconds:.0f} s"
                    return {0: {"error": text, "dies": False}}
                for key, _ in ready:
                    selector.unregister(key.fileobj)
                    answers[key.data] = self._answer(self._ranks[key.data])
                    if "error" in answers[key.data]:
                        return {key.data: answers[key.data]}
        return answers

    @staticmethod
    def _answer(rank: subprocess.Popen[str]) -> dict[str, Any]:
        assert rank.stdout is not None
        line = rank.stdout.readline()
        if line:
            fields: dict[str, Any] = json.loads(line)
            return fields
        status = rank.wait()
        # The kernel ends a process when host memory runs out.
        return {"error": f"ended with status {status}", "dies": status == -signal.SIGKILL}

    def _start(self) -> list[subprocess.Popen[str]]:
        num_ranks, port = find_case(self._setup.case).num_ranks, free_port()
        setup = json.dumps(asdict(self._setup))
        command = [sys.executable, "-m", "benchmarks.fit", "--worker", setup]
        forced = {"NVTE_ALLOW_NONDETERMINISTIC_ALGO": "0"} if self._is_deterministic else {}
        return [
            subprocess.Popen(
                command,
                env=rank_environment(number, num_ranks, port) | forced,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
            for number in range(num_ranks)
        ]

    def close(self) -> None:
        """End the processes."""
        for rank in self._ranks:
            rank.kill()
        for rank in self._ranks:
            rank.communicate()
        self._ranks = []


def merge_ranks(ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the fields of the first rank, with the highest memory of all ranks."""
    merged = dict(ranks[0])
    if len(ranks) > 1:
        merged["ranks"] = [{name: rank[name] for name in MEMORY if name in rank} for rank in ranks]
        merged |= {name: max(rank[name] for rank in ranks) for name in MEMORY if name in merged}
    return merged
