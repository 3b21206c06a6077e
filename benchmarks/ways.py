# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ways to run the iterations of a case, and the order in which they take turns."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from benchmarks.case import Case, Variant


class Way:
    """A way to run the iterations of a case, on the data that all ways of the case have."""

    label: str
    manager: Any = None
    """The offloading engine; None without one."""
    is_ours = False
    """Whether that is Slipstream's."""
    has_marks = False
    """Whether the engine is called at marks of groups, where its host time can be measured."""
    num_eager_iterations = 0
    """Before :meth:`capture`; more of them follow before the next way is built."""
    ends_process = False
    """Whether an error leaves the process unfit for the other ways, as that of a capture does."""
    has_memory = True
    """Whether its device memory can be told from other memory."""

    def run(self, iteration: int) -> list[torch.Tensor]:
        """One iteration, forward and backward. Returns its losses."""
        raise NotImplementedError

    def capture(self) -> None:
        """Capture CUDA graphs, if that is to be asked for."""

    def on_ready(self) -> None:
        """Called after the iterations that follow :meth:`capture`."""

    def fields(self) -> dict[str, Any]:
        """Of its summary row. May run iterations."""
        return {}

    def close(self) -> None:
        """Release what it holds."""


class Comparison(Protocol):
    """The ways of a case."""

    def __init__(self, case: Case) -> None: ...

    def build(self, variant: Variant, label: str, options: Mapping[str, Any]) -> Way:
        """Make a way.

        Args:
            variant: What moves.
            label: Of the way.
            options: Options of ``OffloadConfig``, for Slipstream's engine.

        Raises:
            Exception: It cannot run here; nothing has been launched.
        """
        ...


def in_turn[T](ways: Sequence[T], round_number: int) -> list[T]:
    """The ways in the order of a round: a random one, the same on all ranks.

    What a way leaves behind (heat, caches) must not always meet the same other one.
    """
    return random.Random(round_number).sample(ways, len(ways))
