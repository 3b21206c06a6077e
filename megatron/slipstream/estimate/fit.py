# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The longest sequence, or the largest micro-batch, that fits a device, for each way to train."""

from __future__ import annotations

import bisect
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Optional

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.model_shapes import MAX_SIZE
from megatron.slipstream.estimate.training_setup import Configured
from megatron.slipstream.estimate.ways import BUDGET, HOST, Iteration, Limits, SizedModel, Usage

STEP_TOKENS = 1024
"""Sequences are searched in multiples of this many tokens per context-parallel rank."""


class Row(NamedTuple):
    """What a way takes at a size that fits."""

    text: str
    """What it recomputes, moves and tiles."""
    label: str
    """The same in short."""
    tile_flags: tuple[str, ...]
    """Flags that turn its tiles on."""
    usage: Usage
    step_ms: float
    tokens_per_s: float
    """Tokens per second and GPU."""

    @classmethod
    def of(cls, found: Iteration) -> Row:
        """Describe an iteration."""
        return cls(
            found.describe(),
            found.label,
            found.tiles.flags,
            found.usage,
            found.step_ms,
            found.tokens_per_s,
        )


@dataclass(frozen=True)
class Fit:
    """The largest size that fits with one way."""

    way: str
    size: int
    """Tokens of a sequence, or sequences of a micro-batch; 0 if none fits."""
    row: Optional[Row]
    """What it takes at that size; None if none fits."""
    beyond: Optional[Usage]
    """What the next size would take; None if the search ended at the largest planned size."""
    wall: str
    """What exceeds a limit there: a field of :class:`Parts`, :data:`HOST`, or empty."""


@dataclass(frozen=True)
class Finder:
    """Searches the largest size that fits.

    Args:
        configured: The model and its schedule.
        speed: Speed of the GPU.
        limits: What a rank may use.
        searched: The field of :class:`ModelShape` that is searched: ``seq_length`` or
            ``micro_batch_size``.
        step: Sizes are multiples of this.
    """

    configured: Configured
    speed: Speed
    limits: Limits
    searched: str
    step: int
    _models: dict[int, SizedModel] = field(default_factory=dict, compare=False)

    def fit(self, way: str) -> Fit:
        """Return the largest size that fits with a way."""
        size = self.largest(way)
        row = self.at(way, size) if size else None
        next_size = size + self.step
        if next_size > MAX_SIZE:
            return Fit(way, size, row, None, "")
        model = self.model(next_size)
        usage = (model.least() if way == BUDGET else model.fixed(way)).usage
        # A budget's least device memory may need more of the host than there is.
        short = usage.parts.largest if self.limits.host_bytes is None else HOST
        return Fit(way, size, row, usage, usage.exceeded(self.limits) or short)

    def largest(self, way: str) -> int:
        """Return the largest size that fits with a way; 0 if none does."""
        most = MAX_SIZE // self.step
        return self.step * _largest(lambda count: self.fits(way, count * self.step), most)

    def fits(self, way: str, size: int) -> bool:
        """Return whether a size fits with a way."""
        model = self.model(size)
        if way == BUDGET:
            return model.has_budget(self.limits)
        return not model.fixed(way).usage.exceeded(self.limits)

    def at(self, way: str, size: int) -> Optional[Row]:
        """Return what a way takes at a size; None if it does not fit."""
        if not self.fits(way, size):
            return None
        model = self.model(size)
        found = model.within(self.limits) if way == BUDGET else model.fixed(way)
        return None if found is None else Row.of(found)

    def model(self, size: int) -> SizedModel:
        """Return the model at a size."""
        if size not in self._models:
            sized: dict[str, Any] = {self.searched: size}
            shape = replace(self.configured.shape, **sized)
            state = [self.limits.state_bytes(shape, n) for n in range(shape.parallelism.pp)]
            configured = replace(self.configured, shape=shape)
            self._models[size] = SizedModel(configured, self.speed, tuple(state))
        return self._models[size]


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to ``most`` that fits, where all smaller ones do; 0 if none."""
    high = 1
    while high <= most and fits(high):
        high *= 2
    counts = range(high // 2, min(high, most + 1))
    return counts[bisect.bisect_left(counts, True, lo=1, key=lambda count: not fits(count)) - 1]
