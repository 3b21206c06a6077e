# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The two copy queues in simulated time, for a planner that decides while they run.

``simulate`` times a finished plan from its operations. Here copies are added as the planner decides
them, up to the present, which is all that decides when they end. Both share the link's model and
give the same times; a test compares them.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence

from megatron.slipstream.plan.model import BYTES_PER_MS_AT_1_GB_PER_S
from megatron.slipstream.plan.trace import Bandwidth


class Direction:
    """One direction of the link: the copy that runs there, at a rate that may change."""

    def __init__(self, alone_gb_per_s: float, both_gb_per_s: float) -> None:
        self.alone = alone_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
        self.both = both_gb_per_s * BYTES_PER_MS_AT_1_GB_PER_S
        """Its rate while the other direction is busy too."""
        self.running = -1
        """The copy that runs; -1 for none."""
        self.end_ms = math.inf
        """When it ends at the present rate."""
        self._left_bytes = 0.0
        self._since_ms = 0.0
        self._rate = 0.0

    def start(self, number: int, nbytes: float, now_ms: float) -> None:
        """Start a copy. It has no rate yet."""
        self.running, self.end_ms = number, math.inf
        self._left_bytes, self._since_ms, self._rate = nbytes, now_ms, 0.0

    def set_rate(self, rate: float, now_ms: float) -> None:
        """From ``now_ms`` on, copy ``rate`` bytes per millisecond."""
        # As long as nothing changes the end is not computed again, so that it is not rounded again.
        if self.running < 0 or rate == self._rate:
            return
        if now_ms > self._since_ms:  # 0 ms at an infinite rate are no number of bytes.
            done_bytes = (now_ms - self._since_ms) * self._rate
            self._left_bytes = max(0.0, self._left_bytes - done_bytes)
        self._since_ms, self._rate = now_ms, rate
        self.end_ms = now_ms + self._left_bytes / rate

    def stop(self) -> None:
        """The copy has ended."""
        self.running, self.end_ms = -1, math.inf


def share_link(out: Direction, back: Direction, now_ms: float) -> None:
    """From ``now_ms`` on, each copy that runs has the rate that the other direction leaves it."""
    are_both_busy = out.running >= 0 and back.running >= 0
    out.set_rate(out.both if are_both_busy else out.alone, now_ms)
    back.set_rate(back.both if are_both_busy else back.alone, now_ms)


class _Queue(Direction):
    """Copies run one after another, in the order in which they were added."""

    def __init__(self, alone_gb_per_s: float, both_gb_per_s: float) -> None:
        super().__init__(alone_gb_per_s, both_gb_per_s)
        self.waiting: deque[tuple[int, float, Sequence[int]]] = deque()
        """Number, bytes, and the copies of the other queue that it waits for."""
        self.ends: dict[int, float] = {}
        """When each copy that has ended did."""

    @property
    def is_idle(self) -> bool:
        return self.running < 0 and not self.waiting

    def start_next(self, other: _Queue, now_ms: float) -> None:
        if self.running < 0 and self.waiting:
            number, nbytes, waits_for = self.waiting[0]
            if all(item in other.ends for item in waits_for):
                self.waiting.popleft()
                self.start(number, nbytes, now_ms)

    def end_running(self) -> None:
        self.ends[self.running] = self.end_ms
        self.stop()


class CopyQueues:
    """The d2h and the h2d queue up to :attr:`now_ms`. Copies have numbers, by direction."""

    def __init__(self, bandwidth: Bandwidth) -> None:
        self.now_ms = 0.0
        self._out = _Queue(bandwidth.d2h_gb_per_s, bandwidth.d2h_both_gb_per_s)
        self._in = _Queue(bandwidth.h2d_gb_per_s, bandwidth.h2d_both_gb_per_s)

    @property
    def out_ends_ms(self) -> dict[int, float]:
        """When each copy out that has ended did."""
        return self._out.ends

    def add_out(self, number: int, nbytes: float, after_in: Sequence[int]) -> None:
        """Add a copy out that also waits for these copies in, whose host memory it takes over."""
        self._out.waiting.append((number, nbytes, after_in))

    def add_in(self, number: int, nbytes: float) -> None:
        """Add a copy in."""
        self._in.waiting.append((number, nbytes, ()))

    def run_to(self, ms: float) -> None:
        """Let time pass until ``ms``. Nothing may be added that would have started before."""
        if not (self._out.is_idle and self._in.is_idle):
            while self._next_end_ms() <= ms:
                self._end_next()
        self.now_ms = ms

    def run_to_out(self, number: int) -> float:
        """Let time pass until a copy out that was added has ended. Returns the time."""
        return self._run_until(self._out, number)

    def run_to_in(self, number: int) -> float:
        """Let time pass until a copy in that was added has ended. Returns the time."""
        return self._run_until(self._in, number)

    def _run_until(self, queue: _Queue, number: int) -> float:
        while number not in queue.ends:
            if self._next_end_ms() == math.inf:
                raise AssertionError(f"copy {number} never ends")
            self._end_next()
        return max(self.now_ms, queue.ends[number])

    def _next_end_ms(self) -> float:
        """Start what can start now; when does the next copy end?"""
        out, back = self._out, self._in
        if out.running < 0 and out.waiting:
            out.start_next(back, self.now_ms)
        if back.running < 0 and back.waiting:
            back.start_next(out, self.now_ms)
        share_link(out, back, self.now_ms)
        return min(out.end_ms, back.end_ms)

    def _end_next(self) -> None:
        self.now_ms = min(self._out.end_ms, self._in.end_ms)
        for queue in (self._out, self._in):
            if queue.running >= 0 and queue.end_ms <= self.now_ms:
                queue.end_running()
