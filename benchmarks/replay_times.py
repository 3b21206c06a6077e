# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host time of the replays of chunk graphs."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import torch
from megatron_models import use_gpu

from megatron.slipstream.chunk_graphs.replay import Replay

LAUNCH, TENSORS, EVENTS = "launch", "tensors", "events"
"""Graph launch; copies to and from the static tensors; events around the launch."""

PARTS: tuple[tuple[str, Any, str], ...] = (
    (LAUNCH, torch._C._CUDAGraph, "replay"),
    (TENSORS, torch.Tensor, "copy_"),
    (TENSORS, torch.Tensor, "clone"),
    (TENSORS, torch, "_foreach_copy_"),
    (EVENTS, torch.cuda.Event, "record"),
    (EVENTS, torch.cuda.Event, "wait"),
)
"""The torch calls that a replay makes: the part they belong to, their owner and their name."""


class ReplayTimes:
    """Times each replay of an iteration, and the torch calls in it."""

    def __init__(self) -> None:
        self._replays: dict[str, list[Counter[str]]] = {"forward": [], "backward": []}
        self._now: Counter[str] = Counter()

    def medians(self) -> dict[str, float]:
        """Return the us of the median replay, by direction, and by direction and part."""
        medians = {}
        for direction, replays in self._replays.items():
            median = sorted(replays, key=lambda replay: replay[""])[len(replays) // 2]
            for part in ("", LAUNCH, TENSORS, EVENTS):
                medians[f"{direction} {part}".strip()] = 1e6 * median[part]
        return medians

    @contextlib.contextmanager
    def taken(self) -> Iterator[None]:
        """Time replays inside the context."""
        with contextlib.ExitStack() as stack:
            for direction, replays in self._replays.items():
                original = getattr(Replay, direction)
                timed = staticmethod(self._replay(original, replays))
                stack.enter_context(mock.patch.object(Replay, direction, timed))
            for part, owner, name in PARTS:
                timed = self._part(getattr(owner, name), part)
                stack.enter_context(mock.patch.object(owner, name, timed))
            yield

    def _replay(self, original: Callable[..., Any], to: list[Counter[str]]) -> Callable[..., Any]:
        timed = self._part(original, "")

        def replay(*arguments: Any) -> Any:
            if use_gpu():
                torch.cuda.synchronize()  # Launching a graph that is still running blocks.
            self._now = Counter()
            result = timed(*arguments)
            to.append(self._now)
            return result

        return replay

    def _part(self, original: Callable[..., Any], part: str) -> Callable[..., Any]:
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            result = original(*arguments, **options)
            self._now[part] += time.perf_counter() - begin
            return result

        return timed
