# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Medians and their uncertainty."""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Optional


class Spread(NamedTuple):
    """A median and the spread of its samples, in the samples' unit."""

    median: float
    interquartile: float
    standard_error: float
    """Standard error of the median; infinite for fewer than two samples."""

    @property
    def relative_error(self) -> float:
        """The standard error as a fraction of the median."""
        return self.standard_error / abs(self.median) if self.median else math.inf


def spread_of(samples: Sequence[float]) -> Spread:
    """Return the median, interquartile range and standard error of the median of ``samples``.

    The standard error is that of a normal distribution's median, 1.2533 sigma / sqrt(n), with
    sigma taken from the median absolute deviation (1.4826 MAD), so that a few slow iterations do
    not count.

    Raises:
        ValueError: ``samples`` is empty.
    """
    if not samples:
        raise ValueError("no samples")
    median = statistics.median(samples)
    if len(samples) == 1:
        return Spread(median, 0.0, math.inf)
    quartiles = statistics.quantiles(samples, n=4, method="inclusive")
    deviation = statistics.median(abs(sample - median) for sample in samples)
    error = 1.2533 * 1.4826 * deviation / math.sqrt(len(samples))
    return Spread(median, quartiles[2] - quartiles[0], error)


def overhead_percent(samples: Sequence[float], base: Sequence[float]) -> Spread:
    """Return how much longer ``samples`` take than ``base``, in percent.

    The two were measured alternately, so each sample is compared to its neighbour in time, and
    common drift (clocks, temperature) cancels.
    """
    return spread_of([100 * (a / b - 1) for a, b in zip(samples, base, strict=True)])


def loss_difference(ours: Iterable[float], base: Iterable[float]) -> Optional[float]:
    """Return the largest relative difference of a loss to its counterpart; None without losses.

    It is infinite if either is not finite.
    """
    differences = []
    for loss, expected in zip(ours, base, strict=True):
        finite = math.isfinite(loss) and math.isfinite(expected)
        differences.append(abs(loss / expected - 1) if finite else math.inf)
    return max(differences, default=None)
