# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Whole trainings through the entry of ``pretrain_gpt.py``, and their results.

The ranks are forked from the tests' process, which has imported what they need: starting them from
a shell takes longer than the training.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from ranks import import_training, run_ranks


class _NoMeter(contextlib.AbstractContextManager["_NoMeter"]):
    """Does not read a CPU's memory, which would take a third of a training's time."""

    allocated_bytes = peak_bytes = 0

    def __bool__(self) -> bool:
        return False  # A backend has no reading then.

    def reset_peak(self) -> None:
        pass

    def __exit__(self, *_: Any) -> None:
        pass


def train_on_ranks(
    num_ranks: int,
    flags: list[str],
    record: Path,
    reads_memory: bool = True,
    prepare: Callable[[], None] | None = None,
) -> list[dict[str, Any]]:
    """Train with these flags and return each rank's record; ``record`` is the first rank's.

    Without ``reads_memory`` peaks are 0, and an engine plans without them. ``prepare`` is called on
    each rank before it trains.
    """
    import_training()
    flags = [*flags, "--run-record-path", str(record)]
    folder = record.parent
    done = run_ranks(num_ranks, train_main, folder, flags, reads_memory, prepare)
    assert done == [0] * num_ranks
    return read_records(num_ranks, record)


def train_main(
    rank: int,
    num_ranks: int,
    port: int,
    folder: Path,
    flags: list[str],
    reads_memory: bool = True,
    prepare: Callable[[], None] | None = None,
) -> int:
    """Run the entry on one rank, in ``folder``."""
    from megatron.slipstream.integration.entry import training
    from megatron.slipstream.integration.record import monitor

    os.chdir(folder)
    if prepare is not None:
        prepare()
    meter = monitor.DeviceMemoryMeter if reads_memory else _NoMeter
    with patch.object(monitor, "DeviceMemoryMeter", meter):
        return training.main(flags)


def read_records(num_ranks: int, record: Path) -> list[dict[str, Any]]:
    """Each rank's record; ``record`` is the path of the first rank's."""
    records = [record, *(record.with_suffix(f".rank{r}.json") for r in range(1, num_ranks))]
    return [json.loads(path.read_text()) for path in records]


def result_of(record: dict[str, Any]) -> dict[str, Any]:
    """The results of a training, without times and bytes."""
    return {
        "losses": [iteration["loss"] for iteration in record["iterations"]],
        "evaluations": record["evaluations"],
        "gradients": record["gradients_sha256"],
        "weights": record["weights_sha256"],
    }
