# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A group around any operations, marked as megatron-core's layers mark theirs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch


class offload_group:
    """Context manager that groups the operations inside it.

    Example:
        with offload_group(manager, "mlp") as group:
            y = mlp(x)
        y = group.commit(y)
    """

    def __init__(self, manager: Any, name: str) -> None:
        self._manager = manager
        self._name = name

    def __enter__(self) -> offload_group:
        self._manager.pop_forward_chunk(self._name)
        self._manager.__enter__()
        return self

    def __exit__(self, *exception: object) -> None:
        self._manager.__exit__(*exception)

    def commit(self, tensor: torch.Tensor) -> torch.Tensor:
        """Mark the end of the group on one of its outputs. Return the output unchanged."""
        marked: torch.Tensor = self._manager.end_on(tensor, self._name)
        return marked


def run_in_group(
    manager: Optional[Any], name: str, run: Callable[[torch.Tensor], torch.Tensor], x: torch.Tensor
) -> torch.Tensor:
    """Run operations on ``x`` in a group that starts there; without a manager, in none."""
    if manager is None:
        return run(x)
    manager.start_on(x, name)
    with manager:
        y = run(x)
    ended: torch.Tensor = manager.end_on(y, name)
    return ended
