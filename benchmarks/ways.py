# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ways to run the iterations of a case, and the order in which they take turns."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import torch

from benchmarks.case import Case, Variant


class Way:
    """A way to run the iterations of a case, on data shared by all ways of the case."""

    label: str
    manager: Any = None
    """The offloading engine; None without one."""
    is_ours = False
    """Whether that is Slipstream's."""
    has_marks = False
    """Whether the engine is called at marks of groups, where its host time can be measured."""
    num_eager_iterations = 0
    """Iterations before :meth:`capture`; more follow before the next way is built."""
    ends_process = False
    """Whether the process cannot run other ways after an error, such as one in a capture."""
    has_memory = True
    """Whether its device memory can be distinguished from other memory."""

    def run(self, iteration: int) -> list[torch.Tensor]:
        """Run one iteration, forward and backward; return its losses."""
        raise NotImplementedError

    def capture(self) -> None:
        """Capture CUDA graphs, if they need an explicit call."""

    def on_ready(self) -> None:
        """Called after the iterations that follow :meth:`capture`."""

    def fields(self) -> dict[str, Any]:
        """Return the fields of its summary row. May run iterations."""
        return {}

    def close(self) -> None:
        """Release its resources."""


class Comparison(Protocol):
    """The ways of a case."""

    def __init__(self, case: Case) -> None: ...

    def build(self, variant: Variant, label: str, options: Mapping[str, Any]) -> Way:
        """Create a way, with options of ``OffloadConfig`` for Slipstream's engine.

        Raises:
            Exception: It cannot run here; nothing has been launched.
        """
        ...


def in_turn[T](ways: Sequence[T], round_number: int) -> list[T]:
    """Return the ways in the order of a round: random, the same on all ranks.

    The side effects of a way (heat, caches) must not always affect the same other way.
    """
    return random.Random(round_number).sample(ways, len(ways))
