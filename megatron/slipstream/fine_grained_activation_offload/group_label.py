# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The label of a group."""

from __future__ import annotations

from typing import NamedTuple

from megatron.slipstream.plan.trace import GroupKey


class GroupLabel(NamedTuple):
    """A group's position in the iteration and in the model."""

    key: GroupKey
    name: str
    layer: int = 0
    """Number of earlier groups of this name in the pass."""
    micro_batch: int = 0
    """Number of earlier passes through this model chunk in the iteration."""
    vp_stage: int = 0

    def __str__(self) -> str:
        return f"{self.key}.{self.name}"

    def describe(self) -> str:
        """Describe the group for error messages."""
        return (
            f"{self.name} of layer {self.layer} (of this model chunk, {self.vp_stage}) in "
            f"micro-batch {self.micro_batch}"
        )
