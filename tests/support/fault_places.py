# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Raises at one place of an iteration: at a call of the backend, or at a line of the engine."""

from __future__ import annotations

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import megatron.slipstream.fine_grained_activation_offload as engine
from megatron.slipstream.fine_grained_activation_offload.backend import Backend

ENGINE = str(Path(engine.__file__).parent)
DEVICES = (
    *("backend.py", "backends.py", "cpu_backends.py", "cuda_backend.py"),
    "multiprocessing/reductions.py",
)
"""Files that imitate or call a device, whose calls are not interrupted halfway; torch's weak
reference to a storage, in Python, fails in its destructor if its constructor is interrupted."""


QUERIES = frozenset(
    ("manages", "current_stream", "current_stream_id", "stream_id", "here", "memory")
    + ("peak_bytes", "obtainable_bytes", "is_capturing", "profiler_range", "elapsed_ms")
)
"""Methods of a backend that change nothing, so that a fault after one is a fault before it."""


class Fault(BaseException):
    """Raised at the place. Like an interrupt, it is not an ``Exception``."""


class Place:
    """Counts places, and raises at one of them.

    Args:
        number: The place at which to raise, from 0.
        is_after: Whether a call raises when it has done its work, not before.
    """

    def __init__(self, number: int, is_after: bool = False) -> None:
        self._number = number
        self._is_after = is_after
        self.num_passed = 0
        self.line = ""
        """The line that raised, if lines are the places."""

    @property
    def is_reached(self) -> bool:
        return self.num_passed > self._number

    def come(self) -> bool:
        """Whether to raise here."""
        self.num_passed += 1
        return self.num_passed == self._number + 1

    @contextlib.contextmanager
    def among_calls(self, backend: Backend, is_native: bool) -> Iterator[None]:
        """Within the context, the calls of the backend's methods are the places.

        A query that fails is another place in C++ only: those in Python are among its lines.
        """
        names = [name for name in dir(Backend) if callable(getattr(Backend, name))]
        names = [name for name in names if not name.startswith("_")]
        if self._is_after or not is_native:
            names = [name for name in names if name not in QUERIES]
        for name in names:
            setattr(backend, name, self._failing(getattr(backend, name)))
        try:
            yield
        finally:
            for name in names:
                delattr(backend, name)

    def _failing(self, method: Callable[..., Any]) -> Callable[..., Any]:
        def failing(*arguments: Any, **options: Any) -> Any:
            is_here = self.come()
            if is_here and not self._is_after:
                raise Fault
            result = method(*arguments, **options)
            if is_here:
                raise Fault
            return result

        return failing

    @contextlib.contextmanager
    def among_lines(self, files: str = ENGINE) -> Iterator[None]:
        """Within the context, lines of Python of such a file are the places, as of a signal.

        ``files`` is a folder or a file: those of the engine if it is not given.
        """
        before = sys.gettrace()

        def trace(frame: FrameType, _: str, __: Any) -> Any:
            file = frame.f_code.co_filename
            # Once for each frame, since its callers stay: not for each of its lines.
            if not file.startswith(files) or is_in_device(frame):
                return None
            return on_line

        def on_line(frame: FrameType, event: str, _: Any) -> Any:
            if event == "line" and self.come():
                self.line = f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno}"
                raise Fault
            return on_line

        sys.settrace(trace)
        try:
            yield
        finally:
            sys.settrace(before)


class Alarm:
    """Raises in the running iteration when time is up, as a user's interrupt does.

    Args:
        iteration: The function that runs an iteration. Nothing is raised outside of it.
        seconds: The time.
    """

    def __init__(self, iteration: Callable[..., Any], seconds: float) -> None:
        self._code = iteration.__code__
        self._seconds = seconds
        self._again_s = 1e-5
        self.has_raised = False

    def __enter__(self) -> None:
        self._before = signal.signal(signal.SIGALRM, self._ring)
        signal.setitimer(signal.ITIMER_REAL, self._seconds)

    def __exit__(self, *_: object) -> None:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, self._before)

    def _ring(self, _: int, frame: FrameType | None) -> None:
        codes = {each.f_code for each in frames(frame)}
        if self._code not in codes:
            return
        if is_in_device(frame):
            # On a busy machine it rings again before this function returns: without end, if it
            # always rings as soon.
            self._again_s *= 2
            signal.setitimer(signal.ITIMER_REAL, self._again_s)
            return
        self.has_raised = True
        raise Fault


def frames(frame: FrameType | None) -> Iterator[FrameType]:
    """The frame and its callers."""
    while frame is not None:
        yield frame
        frame = frame.f_back


def is_in_device(frame: FrameType | None) -> bool:
    """Whether a call of the device is running."""
    return any(each.f_code.co_filename.endswith(DEVICES) for each in frames(frame))
