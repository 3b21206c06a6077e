# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Whole trainings through the entry of ``pretrain_gpt.py``, and what they come to.

The ranks are forked from the tests' process, which has imported what they need: to start them from
a shell takes longer than they train.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

from ranks import run_ranks


def train_on_ranks(num_ranks: int, flags: list[str], record: Path) -> list[dict[str, Any]]:
    """Train with these flags and return each rank's record; ``record`` is the first rank's."""
    import megatron.slipstream.integration.providers  # noqa: F401  (once, for all that fork)

    flags = [*flags, "--run-record-path", str(record)]
    assert run_ranks(num_ranks, train_main, record.parent, flags) == [0] * num_ranks
    return read_records(num_ranks, record)


def train_main(rank: int, num_ranks: int, port: int, folder: Path, flags: list[str]) -> int:
    """The entry, on one rank, in ``folder``."""
    from megatron.slipstream.integration import training

    os.chdir(folder)
    return training.main(flags)


def read_records(num_ranks: int, record: Path) -> list[dict[str, Any]]:
    """Each rank's record, of which ``record`` is the first rank's."""
    records = [record, *(record.with_suffix(f".rank{r}.json") for r in range(1, num_ranks))]
    return [json.loads(path.read_text()) for path in records]


def result_of(record: dict[str, Any]) -> dict[str, Any]:
    """What a training comes to, without its times and bytes."""
    return {
        "losses": [iteration["loss"] for iteration in record["iterations"]],
        "evaluations": record["evaluations"],
        "gradients": record["gradients_sha256"],
        "weights": record["weights_sha256"],
    }
