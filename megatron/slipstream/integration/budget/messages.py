# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What users are told of a budget: that it has settled, or why it is not kept and what would be."""

from __future__ import annotations

import logging
import math
import re
from collections import Counter
from typing import Optional

import torch

from megatron.slipstream.integration.budget.stage_ranks import Lack
from megatron.slipstream.plan.relaxation import Limits, Relaxation
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.settings import describe_setting

logger = logging.getLogger(__name__)


_WARNINGS = {
    "blind": "activation_memory_budget={budget} is not followed, because backend {backend} does "
    "not count device memory: every layer is recomputed, and all that may moves; leave "
    "activation_memory_budget out, or train on a GPU",
    "larger": "a micro-batch of {batch} x {length} tokens would not fit with the settings that "
    "smaller ones have within activation_memory_budget={budget}: every layer is recomputed for it, "
    "and for others like it",
    "more": "more micro-batches are in flight than the {number} for which settings were chosen "
    "within activation_memory_budget={budget}: every layer is recomputed for those beyond, and "
    "settings are chosen again from the next iteration on",
    "over": "an iteration needed {needed} of activations, and activation_memory_budget={budget} "
    "allows {allowed}: settings are chosen again for that much (experts that drop no token need "
    "more where more are routed to them)",
    "less": "{left} are left for activations by activation_memory_budget={budget}, after {before} "
    "when settings were chosen (an optimizer's first step may have come late): they are chosen "
    "again",
    "ran out": "device memory ran out in the forward of a micro-batch of {batch} x {length} tokens "
    "within activation_memory_budget={budget}: what it had saved is freed, every layer is "
    "recomputed until the iteration ends, and the forward is repeated ({tried} were asked for); "
    "settings are then chosen for less memory",
}
"""Warnings by the event."""


class Messages:
    """Warnings, each given once, and errors. Shapes are sequence length and batch."""

    def __init__(self, budget: object, rank: int) -> None:
        self._budget = budget
        self._rank = rank
        self._told: set[object] = set()

    def warn(self, event: str, number: Optional[int] = None, **values: object) -> None:
        """Warn of an event of :data:`_WARNINGS`, with its values, once for each number."""
        if (event, number) not in self._told:
            text = _WARNINGS[event].format(budget=self._budget, number=number, **values)
            logger.warning("rank %d: %s", self._rank, text)
        self._told.add((event, number))

    def settled(self, relaxation: Relaxation, limits: Limits, planned_ms: float) -> None:
        """Log what was chosen, and the time of an iteration by its plan; 0 if there is none yet."""
        counts = Counter(map(describe_setting, relaxation.assignment))
        predicted = relaxation.predicted
        log = logger.info if self._rank == 0 else logger.debug
        log(
            "activation_memory_budget=%s has settled: layers %s; the device peak may be %s, of "
            "which activations %s; at most %s is predicted%s",
            self._budget,
            ", ".join(f"{number} {name}" for name, number in sorted(counts.items())),
            format_bytes(limits.device_bytes),
            format_bytes(limits.allowed_bytes),
            format_bytes(predicted.peak_bytes if predicted is not None else 0),
            f", and {planned_ms:.1f} ms for an iteration" if planned_ms else "",
        )

    def nothing_fits(self, lack: Lack, shape: tuple[int, int]) -> ValueError:
        """Return the error for a model that exceeds the budget with the most frugal settings."""
        needed_gib = math.ceil(lack.needed_bytes / 2**30 * 100) / 100
        cures = [f"set activation_memory_budget to {needed_gib:.2f} or more"]
        if self._budget == "auto":
            cures = ["spread the model over more devices"]
        cures += _smaller_sizes(lack.allowed_bytes / lack.needed_bytes, shape)
        return ValueError(
            f"activation_memory_budget={self._budget} is not supported with this model because "
            f"rank {lack.rank} needs {format_bytes(lack.needed_bytes)} for activations even if "
            "every layer is recomputed and its input offloaded, and "
            f"{format_bytes(max(0, lack.allowed_bytes))} are allowed; " + ", or ".join(cures)
        )

    def ran_out(
        self,
        failure: torch.OutOfMemoryError,
        used_bytes: int,
        shape: tuple[int, int],
        because: str,
        is_frugal: bool,
    ) -> torch.OutOfMemoryError:
        """Return the error for a pass that ran out of memory and is not repeated."""
        tried_bytes = bytes_tried(failure)
        cures = _smaller_sizes(used_bytes / max(1, used_bytes + tried_bytes), shape)
        less_gib = math.floor((used_bytes - tried_bytes) / 2**30 * 100) / 100
        if less_gib > 0 and not is_frugal:
            cures.insert(0, f"activation_memory_budget to at most {less_gib:.2f}")
        return torch.OutOfMemoryError(
            f"activation_memory_budget={self._budget} is not supported with this micro-batch "
            f"because rank {self._rank} ran out of device memory with {format_bytes(used_bytes)} "
            f"of activations, and {because}; "
            + ("set " + ", or ".join(cures) if cures else "spread the model over more devices")
        )


def bytes_tried(failure: torch.OutOfMemoryError) -> int:
    """Return the bytes of the allocation that failed, as torch's message says; 0 if it does not."""
    found = re.search(r"Tried to allocate ([0-9.]+) (b|K|M|G)", str(failure))
    return 0 if found is None else int(float(found[1]) * 1024 ** "bKMG".index(found[2]))


def _smaller_sizes(share: float, shape: tuple[int, int]) -> list[str]:
    """Return settings with which a micro-batch of this shape takes a share of its memory."""
    length, batch = shape
    cures = []
    if batch > 1 and int(batch * share):
        cures.append(f"micro_batch_size to at most {int(batch * share)} (it is {batch})")
    if int(length * share):
        cures.append(f"seq_length to at most {int(length * share)} (it is {length})")
    return cures
