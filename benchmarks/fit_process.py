# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Starts and asks the process in which ``benchmarks.fit`` measures. Does not import torch."""

from __future__ import annotations

import contextlib
import json
import select
import signal
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, Optional

from benchmarks.fit_ways import Setup
from benchmarks.run import rank_environment
from megatron.slipstream.launcher import free_port


class Worker:
    """The process that measures points of one way; a new one after a point that died.

    Args:
        setup: The way.
        kill_seconds: The process is ended where a point takes longer.
    """

    def __init__(self, setup: Setup, kill_seconds: float) -> None:
        self._setup, self._kill_seconds = setup, kill_seconds
        self._process: Optional[subprocess.Popen[str]] = None

    def measure(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return the fields of the row of a point: its figures, or ``error`` and ``dies``."""
        process = self._process = self._process or self._start()
        assert process.stdin is not None
        assert process.stdout is not None
        with contextlib.suppress(BrokenPipeError):
            process.stdin.write(json.dumps(point) + "\n")
            process.stdin.flush()
        fields: dict[str, Any]
        is_ready, _, _ = select.select([process.stdout], [], [], self._kill_seconds)
        line = process.stdout.readline() if is_ready else ""
        if line:
            fields = json.loads(line)
        elif is_ready:
            status = process.wait()
            # The kernel ends a process when host memory runs out.
            fields = {"error": f"ended with status {status}", "dies": status == -signal.SIGKILL}
        else:
            fields = {"error": f"took longer than {self._kill_seconds:.0f} s", "dies": False}
        if "error" in fields:
            self.close()
        return fields

    def _start(self) -> subprocess.Popen[str]:
        return subprocess.Popen(
            [sys.executable, "-m", "benchmarks.fit", "--worker", json.dumps(asdict(self._setup))],
            env=rank_environment(0, 1, free_port()),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def close(self) -> None:
        """End the process."""
        if self._process is not None:
            self._process.kill()
            self._process.communicate()
        self._process = None
