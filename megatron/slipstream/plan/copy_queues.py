# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Simulates the two copy queues and the link that they share."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S
from megatron.slipstream.plan.trace import Bandwidth


class _Queue:
    """One copy direction: copies run one after another, at a rate that may change."""

    def __init__(self, alone_gb_per_s: float, both_gb_per_s: float) -> None:
        self.alone = alone_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
        self.both = both_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
        """Rate while the other direction is busy too."""
        self.waiting: deque[tuple[int, float, list[int]]] = deque()
        """Number and size of each copy, and the copies of the other queue that it waits for."""
        self.running = -1
        """Number of the running copy; -1 for none."""
        self.end_ms = math.inf
        """Time at which it ends at the current rate."""
        self._left_bytes = 0.0
        self._since_ms = 0.0
        self._rate = 0.0

    def start_next(self, ends_ms: dict[int, float], starts_ms: dict[int, float], ms: float) -> None:
        """Start the next copy, with no rate yet, if the copies that it waits for have ended."""
        number, nbytes, waits_for = self.waiting[0]
        while waits_for:
            if waits_for[-1] not in ends_ms:
                return
            waits_for.pop()
        self.waiting.popleft()
        starts_ms[number] = ms
        self.running, self.end_ms = number, math.inf
        self._left_bytes, self._since_ms, self._rate = nbytes, ms, 0.0

    def set_rate(self, rate: float, ms: float) -> None:
        """Set the rate from ``ms`` on, in bytes per millisecond."""
        # If unchanged, do not recompute the end time, to avoid rounding it again.
        if self.running < 0 or rate == self._rate:
            return
        if ms > self._since_ms:  # 0 ms at an infinite rate would give NaN bytes.
            done_bytes = (ms - self._since_ms) * self._rate
            self._left_bytes = max(0.0, self._left_bytes - done_bytes)
        self._since_ms, self._rate = ms, rate
        self.end_ms = ms + self._left_bytes / rate


class CopyQueues:
    """The d2h and h2d queues, simulated up to a given time. Each copy has a unique number.

    Args:
        bandwidth: Copy bandwidth. Rates change only after all events at the same time, so that
            back-to-back copies do not change the other direction's rate.
    """

    def __init__(self, bandwidth: Bandwidth) -> None:
        self.starts_ms: dict[int, float] = {}
        """The start time of each copy that has started."""
        self.ends_ms: dict[int, float] = {}
        """The end time of each copy that has ended."""
        self._now_ms = 0.0
        self.next_ms = math.inf
        """The earliest time at which the next copy ends."""
        self._out = _Queue(bandwidth.d2h_gb_per_s, bandwidth.d2h_both_gb_per_s)
        self._in = _Queue(bandwidth.h2d_gb_per_s, bandwidth.h2d_both_gb_per_s)

    def add(
        self, number: int, nbytes: float, waits_for: Sequence[int], is_out: bool, ms: float
    ) -> None:
        """Add a copy at the time that the queues have reached.

        Args:
            number: Number of the copy.
            nbytes: Size of the copy.
            waits_for: The copies of the other direction that must end before it starts.
            is_out: Whether it copies to the host.
            ms: The current time.
        """
        (self._out if is_out else self._in).waiting.append((number, nbytes, list(waits_for)))
        self._now_ms = self.next_ms = ms

    def run_to(self, ms: float) -> None:
        """Advance to time ``ms``. Copies added later must not start before it."""
        while self._find_next_end() <= ms:
            self._end_next()

    def run_until(self, number: int) -> float:
        """Advance until the given copy has ended, and return its end time."""
        while number not in self.ends_ms:
            if self._find_next_end() == math.inf:
                raise AssertionError(f"copy {number} never ends")
            self._end_next()
        return self.ends_ms[number]

    def run_to_end(self) -> None:
        """Advance until all copies have ended."""
        while self._find_next_end() < math.inf:
            self._end_next()

    def _find_next_end(self) -> float:
        """Start the copies that can start now, and return when the next copy ends."""
        out, back, now_ms = self._out, self._in, self._now_ms
        if out.running < 0 and out.waiting:
            out.start_next(self.ends_ms, self.starts_ms, now_ms)
        if back.running < 0 and back.waiting:
            back.start_next(self.ends_ms, self.starts_ms, now_ms)
        are_both_busy = out.running >= 0 and back.running >= 0
        out.set_rate(out.both if are_both_busy else out.alone, now_ms)
        back.set_rate(back.both if are_both_busy else back.alone, now_ms)
        self.next_ms = min(out.end_ms, back.end_ms)
        return self.next_ms

    def _end_next(self) -> None:
        now_ms = self._now_ms = self.next_ms
        for queue in (self._out, self._in):
            if queue.running >= 0 and queue.end_ms <= now_ms:
                self.ends_ms[queue.running] = queue.end_ms
                queue.running, queue.end_ms = -1, math.inf
