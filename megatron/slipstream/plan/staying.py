# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Kinds of saved tensors that stay on the device whatever the plan."""

from __future__ import annotations

import enum


class Staying(enum.Enum):
    """Why a saved tensor cannot move. The values are for reports; C++ knows the order."""

    SMALL = "tensors smaller than min_offloaded_tensor_size"
    PARAMETER = "parameters and buffers"
    SUBCLASS = "tensors of subclasses"
    NESTED = "nested tensors"
    NOT_DENSE = "sparse, quantized and opaque tensors"
    ELSEWHERE = "tensors on another device"
    LAZY = "conjugate and negative views"
    DUAL = "forward-mode dual tensors"
    MARKED = "tensors marked to stay"
    EMPTY = "tensors without elements"
    DISCARDED = "tensors that are recomputed before backward reads them"
    TAKEN = "tensors that other saved-tensor hooks take"

    def __init__(self, text: str) -> None:
        self.text = text
        self.bit = 1 << len(type(self).__members__)
        """Its place in a group's set of kinds."""


COMMON = frozenset({Staying.SMALL, Staying.PARAMETER, Staying.MARKED, Staying.EMPTY})
"""Kinds that most groups save too, which takes no notable memory."""


def texts_of(kinds: int) -> tuple[str, ...]:
    """Return the texts of a set of kinds, given by their bits."""
    return tuple(kind.text for kind in Staying if kinds & kind.bit)
