# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The longest sequence, or the largest micro-batch, that fits a device, for each way to train."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.model_shapes import MAX_SIZE, ModelShape
from megatron.slipstream.estimate.training_setup import Configured
from megatron.slipstream.estimate.ways import BUDGET, HOST, WAYS, Iteration, SizedModel, Usage
from megatron.slipstream.plan.assignments import Limits

STEP_TOKENS = 1024
"""Sequences are searched in multiples of this many tokens per context-parallel rank."""


@dataclass(frozen=True)
class Fit:
    """The largest size that fits with one way."""

    way: str
    size: int
    """Tokens of a sequence, or sequences of a micro-batch; 0 if none fits."""
    found: Optional[Iteration]
    """What it takes at that size; None if none fits."""
    beyond: Optional[Usage]
    """What the next size would take; None if the search ended at the largest planned size."""
    wall: str
    """What exceeds a limit there: a field of :class:`Parts`, :data:`HOST`, or empty."""


@dataclass(frozen=True)
class Finder:
    """Searches the largest size that fits: a ``seq_length`` or ``micro_batch_size``.

    Sizes are multiples of ``step``; ``state_bytes`` returns the state of a pipeline rank.
    """

    configured: Configured
    speed: Speed
    limits: Limits
    searched: str
    step: int
    state_bytes: Callable[[ModelShape, int], int]
    _models: dict[int, SizedModel] = field(default_factory=dict, compare=False)
    _sizes: dict[str, int] = field(default_factory=dict, compare=False)

    def fit(self, way: str) -> Fit:
        size = self.largest(way)
        found = self.at(way, size) if size else None
        next_size = size + self.step
        if next_size > MAX_SIZE:
            return Fit(way, size, found, None, "")
        model = self.model(next_size)
        usage = (model.least() if way == BUDGET else model.fixed(way)).usage
        # A budget's least device memory may need more of the host than there is.
        short = usage.parts.largest if self.limits.host_bytes is None else HOST
        return Fit(way, size, found, usage, usage.exceeded(self.limits) or short)

    def largest(self, way: str) -> int:
        """Return the largest size that fits with a way; 0 if none does."""
        if way not in self._sizes:
            low = 0
            if way == BUDGET:  # It may choose what another way does.
                low = max(self.largest(other) for other in WAYS if other != BUDGET) // self.step
            most = MAX_SIZE // self.step
            found = _largest(lambda count: self._excess(way, count * self.step), low, most)
            self._sizes[way] = self.step * found
        return self._sizes[way]

    def at(self, way: str, size: int) -> Optional[Iteration]:
        """Return an iteration of a size; None if it does not fit."""
        model = self.model(size)
        if way == BUDGET:
            return model.within(self.limits)
        found = model.fixed(way)
        return None if found.usage.exceeded(self.limits) else found

    def _excess(self, way: str, size: int) -> float:
        """Return the bytes above the limits; of a budget only whether there are any, as -1 or 1."""
        model = self.model(size)
        if way == BUDGET:
            return -1.0 if model.has_budget(self.limits) else 1.0
        return model.fixed(way).usage.excess_bytes(self.limits)

    def model(self, size: int) -> SizedModel:
        if size not in self._models:
            sized: dict[str, Any] = {self.searched: size}
            shape = replace(self.configured.shape, **sized)
            state = [self.state_bytes(shape, n) for n in range(shape.parallelism.pp)]
            configured = replace(self.configured, shape=shape)
            self._models[size] = SizedModel(configured, self.speed, tuple(state))
        return self._models[size]


def _largest(excess: Callable[[int], float], low: int, most: int) -> int:
    """Return the largest count up to ``most`` without excess, where no smaller one has any.

    Memory grows about linearly, so the line through two known counts leads to the next one.
    ``low`` fits, or is 0.
    """
    high = most + 1
    fits: tuple[int, float] = (low, math.nan)
    fails: tuple[int, float] = (high, math.nan)
    before = fits
    for turn in itertools.count():
        if high - low <= 1:
            return low
        if fails[0] <= most:
            count = low + (high - low) // 2 if turn % 3 == 2 else _crossing(fits, fails)
        else:
            count = max(2 * low, min(16 * low, _crossing(before, fits)))
        count = min(max(count, low + 1), high - 1)
        value = excess(count)
        if value > 0:
            high, fails = count, (count, value)
        else:
            low, before, fits = count, fits, (count, value)
    raise AssertionError("unreachable")


def _crossing(one: tuple[int, float], other: tuple[int, float]) -> int:
    """Return where the line through two points is 0; the middle if that is not known."""
    (x, at_x), (y, at_y) = one, other
    share = at_x / (at_x - at_y) if at_x != at_y else 0.5
    return x + math.floor((y - x) * (share if math.isfinite(share) else 0.5))
