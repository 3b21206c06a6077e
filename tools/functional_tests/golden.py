# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Golden values: what a case's metrics were when somebody looked at them and found them right.

The files and the way of comparing are Megatron-LM's: values have five decimals. With deterministic
kernels a loss has to be the same; without, and for bytes, 5% more or less is allowed, in all steps
but one (or 1% of them).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple, Union

from pydantic import BaseModel, ConfigDict, TypeAdapter, ValidationError

from megatron.slipstream.plan.whole_files import write_whole
from tools.functional_tests.launch import Result

DECIMALS = 5
TOLERANCE = 0.05
MEGATRON_METRICS = ("lm loss", "num-zeros")
"""What METRICS may name: exact where kernels are deterministic."""
OUR_METRICS = ("activation-peak-bytes", "offloaded-bytes")
"""What is compared beside METRICS where a case offloads: the most that activations of a rank occupy
at once, and what leaves the devices of all ranks in an iteration. Only without a GPU: with one,
plans follow measured times."""

Values = Mapping[int, float]
"""By iteration."""


class GoldenMetric(BaseModel):
    """One metric in a file."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    start_step: int
    end_step: int
    step_interval: int
    values: dict[int, Union[float, str]]


_FILE = TypeAdapter(dict[str, GoldenMetric])


class Difference(NamedTuple):
    """Where a metric first is not what it was; ``now`` is NaN where there is none."""

    step: int
    golden: float
    now: float


def measured(result: Result) -> dict[str, Values]:
    """All metrics of a training."""
    metrics: dict[str, Values] = {
        "lm loss": result.losses(),
        "num-zeros": result.num_zeros,
        "activation-peak-bytes": {
            step: float(max(ranks))
            for step, ranks in result.by_iteration("activation_peak_bytes").items()
        },
        "offloaded-bytes": {
            step: float(sum(ranks))
            for step, ranks in result.by_iteration("bytes_offloaded").items()
        },
    }
    return {name: {step: round(value, DECIMALS) for step, value in metrics[name].items()}
            for name in metrics}  # fmt: skip


def read_golden(path: Path) -> dict[str, Values]:
    """The golden values of a file.

    Raises:
        ValueError: It is not there or not in the format.
    """
    try:
        content = _FILE.validate_json(path.read_bytes())
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror}); --record writes it") from error
    except ValidationError as error:
        raise ValueError(f"{path}: {error.errors()[0]['msg']}; --record writes it anew") from error
    return {
        name: {step: float(value) for step, value in metric.values.items()}
        for name, metric in content.items()
    }


def write_golden(path: Path, metrics: Mapping[str, Values]) -> None:
    """Write golden values, whole or not at all."""
    content = {
        name: {
            "start_step": min(values),
            "end_step": max(values),
            "step_interval": 1,
            "values": {str(step): value for step, value in values.items()},
        }
        for name, values in metrics.items()
    }
    write_whole(path, (json.dumps(content, indent=4) + "\n").encode())


def compare(metric: str, golden: Values, now: Values, is_deterministic: bool) -> list[Difference]:
    """The steps in which a metric is not what it was, if they are more than may be."""
    exact = metric in MEGATRON_METRICS and is_deterministic
    found = [
        Difference(step, value, now.get(step, math.nan))
        for step, value in golden.items()
        if not _is_same(value, now.get(step, math.nan), exact)
    ]
    # With one step there is none to spare.
    allowed = 0 if exact or len(golden) == 1 else max(len(golden) // 100, 1)
    return found if len(found) > allowed else []


def _is_same(golden: float, now: float, exact: bool) -> bool:
    if exact:
        return golden == now
    return abs(now - golden) <= TOLERANCE * abs(golden)
