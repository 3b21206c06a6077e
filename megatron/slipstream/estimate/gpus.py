# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Speeds of GPUs and their host links, for planning a training run that has not been timed."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Literal, Optional

from megatron.slipstream.options.rules import nearest_name
from megatron.slipstream.plan.trace import Bandwidth

ACHIEVED_SHARE = 0.65
"""Average fraction of a GPU's peak rate that the matrix products of a training step reach, for a
GPU without a fraction of its own."""

H100_SHARE = 0.7
"""That of an H100 (benchmarks/results)."""

ATTENTION_SHARE = 0.78
"""Rate of attention's products, forward and backward, as a fraction of that of other products
(measured on an H100, 8k to 80k tokens)."""

FP8_RATE = 2.0
"""Rate of matrix products in fp8, as a multiple of that of 16 bits, where a GPU has them."""

HBM_SHARE = 0.8
"""Fraction of the device memory's bandwidth that memory-bound operations reach."""


HOPPER_RECIPES = ("tensorwise", "delayed", "blockwise")
BLACKWELL_RECIPES = (*HOPPER_RECIPES, "mxfp8")


Products = Literal["16 bits", "attention", "fp8"]
_RATES: Mapping[Products, float] = {"16 bits": 1.0, "attention": ATTENTION_SHARE, "fp8": FP8_RATE}


@dataclass(frozen=True)
class Speed:
    """GPU speed assumed when planning an untimed training run."""

    name: str
    tflops: float
    """Rate that matrix products in 16 bits reach."""
    hbm_gb_per_s: float
    """Rate that memory-bound operations reach."""
    bandwidth: Bandwidth
    memory_gib: float
    """Device memory as the driver shows it, rounded."""
    is_link_measured: bool = False
    """Whether ``bandwidth`` was measured on that GPU or given by the user."""
    fp8_recipes: tuple[str, ...] = ()

    def compute_ms(
        self, flops: float, traffic_bytes: float = 0.0, kind: Products = "16 bits"
    ) -> float:
        """Return the milliseconds of matrix products plus those of memory-bound operations."""
        rate = self.tflops * _RATES[kind]
        return flops / (1e9 * rate) + traffic_bytes / (1e6 * self.hbm_gb_per_s)


_H200 = Bandwidth(55.3, 55.4, 50.7, 52.0)
"""Measured bandwidth of pinned copies (benchmarks/results/overhead_h200_202611/moe_by_time.jsonl)
over a link of 64 GB/s."""


def _scaled(factor: float) -> Bandwidth:
    return Bandwidth(*(round(rate * factor, 2) for rate in _H200))


_TABLE: tuple[tuple[str, float, float, float, float, float, bool, tuple[str, ...]], ...] = (
    ("a100", 312, ACHIEVED_SHARE, 2039, 80, 32, False, ()),
    ("b200", 2250, ACHIEVED_SHARE, 8000, 179, 64, False, BLACKWELL_RECIPES),
    # NVLink-C2C, of which two GPUs share the 450 GB/s each way of a processor.
    ("gb200", 2500, ACHIEVED_SHARE, 8000, 185, 225, False, BLACKWELL_RECIPES),
    ("h100", 989, H100_SHARE, 3350, 80, 64, False, HOPPER_RECIPES),
    ("h20", 148, ACHIEVED_SHARE, 4000, 96, 64, False, HOPPER_RECIPES),
    ("h200", 989, ACHIEVED_SHARE, 4800, 140, 64, True, HOPPER_RECIPES),
    ("l40s", 362, ACHIEVED_SHARE, 864, 45, 32, False, HOPPER_RECIPES[:2]),
)
"""By datasheet: name, TFLOP/s of dense products in bfloat16 (and the fraction reached), GB/s of
device memory, its GiB, GB/s of the link each way (and whether copies are measured), fp8 recipes."""

GPUS: Mapping[str, Speed] = {
    name: Speed(
        name, tflops * share, hbm * HBM_SHARE, _scaled(link / 64), gib, is_measured, recipes
    )
    for name, tflops, share, hbm, gib, link, is_measured, recipes in _TABLE
}
"""SXM boards (the L40S is a PCIe card) on PCIe 4 or 5 with 16 lanes, except for the GB200, by
command-line name."""


def find_speed(
    name: str, tflops: Optional[float] = None, gb_per_s: Optional[float] = None
) -> Speed:
    """Return the speed of a GPU in :data:`GPUS`, with rates of the user's in place of the table's.

    An unmeasured link is assumed to reach the same fraction of its rate as the H200's. Raises
    ``ValueError`` if the GPU is not in the table, or a number is invalid.
    """
    speed = GPUS.get(name.lower())
    if speed is None:
        hint = nearest_name(name.lower(), GPUS, cutoff=0.4)
        raise ValueError(
            f"--gpu={name} is not in the table; {hint}Known: {', '.join(GPUS)}. For another GPU, "
            "name the most similar one and set --tflops and --gb-per-s"
        )
    for option, value in (("--tflops", tflops), ("--gb-per-s", gb_per_s)):
        if value is not None and not 0 < value < math.inf:
            raise ValueError(f"{option}={value} must be above 0")
    if gb_per_s is not None and gb_per_s < 0.1:  # The table's rates have two decimals.
        raise ValueError(f"--gb-per-s={gb_per_s} must be 0.1 or more")
    if tflops is not None:
        speed = replace(speed, tflops=tflops)
    if gb_per_s is None:
        return speed
    given = _scaled(gb_per_s / _H200.d2h_gb_per_s)
    given = given._replace(d2h_gb_per_s=gb_per_s, h2d_gb_per_s=gb_per_s)
    return replace(speed, bandwidth=given, is_link_measured=True)
