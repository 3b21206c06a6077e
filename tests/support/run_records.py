# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The records that the ranks of a training write with ``--run-record-path``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any


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
