# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Experts of further tokens in megatron-core's log of auxiliary losses."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.slipstream.patches.training_loop import record_in_range


@pytest.mark.parametrize(("layer", "expected"), [(1, 1), (5, 5), (6, 5), (None, None)])
def test_a_layer_behind_the_last_entry_is_counted_in_it(layer: Any, expected: Any) -> None:
    recorded = []

    def record(tracker: Any, name: str, value: Any, layer_number: Any, num_layers: int,
               **options: Any) -> None:  # fmt: skip
        recorded.append((name, value, layer_number, num_layers, options))

    record_in_range(record)(None, "z_loss", 0.5, layer, num_layers=5, needs_dp_avg=False)
    assert recorded == [("z_loss", 0.5, expected, 5, {"needs_dp_avg": False})]
