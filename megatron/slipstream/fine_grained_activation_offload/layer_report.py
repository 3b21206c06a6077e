# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What each layer of a rank keeps, moves and recomputes, and why."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Optional

from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.settings import NOTHING, describe_setting


@dataclass
class LayerReport:
    """One transformer layer in a micro-batch. All layers of a rank are listed in forward order."""

    setting: str = describe_setting(NOTHING)
    """What backward recomputes, as ``describe_setting`` writes it."""
    kind: str = ""
    """What layers of the same shape have in common, such as 'dense' or 'experts'."""
    saved_bytes: int = 0
    """What it saves for backward if it recomputes nothing."""
    moved_bytes: int = 0
    """Part of that which is in host memory until backward."""
    recomputed_bytes: int = 0
    """Part of that which backward computes again."""
    recomputed_ms: Optional[float] = None
    """Time of that computation; None if unknown."""
    reason: str = ""
    """Why it has this setting."""


class LayerRow(NamedTuple):
    """Layers of one kind with one setting and reason."""

    layers: str
    kind: str
    setting: str
    kept: str
    moved: str
    recomputed: str
    ms: str
    reason: str


HEADS = LayerRow(
    "layers", "kind", "recomputes", "kept", "moved", "recomputed", "backward longer by", "why"
)


def layer_rows(layers: Sequence[LayerReport]) -> list[LayerRow]:
    """Return a row for each kind, setting and reason, with the sums of its layers."""
    places: dict[tuple[str, str, str], list[int]] = {}
    for place, layer in enumerate(layers):
        places.setdefault((layer.kind, layer.setting, layer.reason), []).append(place)
    rows = []
    for (kind, setting, reason), numbers in places.items():
        own = [layers[number] for number in numbers]
        moved = sum(layer.moved_bytes for layer in own)
        recomputed = sum(layer.recomputed_bytes for layer in own)
        kept = sum(layer.saved_bytes for layer in own) - moved - recomputed
        known_ms = [layer.recomputed_ms for layer in own if layer.recomputed_ms is not None]
        ms = f"{sum(known_ms):.1f} ms" if len(known_ms) == len(own) else ""
        rows.append(
            LayerRow(
                layers=format_ranges(numbers),
                kind=kind,
                setting="nothing" if setting == describe_setting(NOTHING) else setting,
                kept=format_bytes(kept),
                moved=format_bytes(moved),
                recomputed=format_bytes(recomputed),
                ms=ms,
                reason=reason,
            )
        )
    return rows


def format_ranges(numbers: Iterable[int]) -> str:
    """Format ascending numbers as text such as ``"0, 2, 5 to 7"``."""
    parts: list[str] = []
    # Within a run of consecutive numbers, number minus index is constant.
    for _, run in itertools.groupby(enumerate(numbers), lambda pair: pair[1] - pair[0]):
        first, *others = (number for _, number in run)
        parts += [f"{first} to {others[-1]}"] if len(others) > 1 else map(str, [first, *others])
    return ", ".join(parts)
