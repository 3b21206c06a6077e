# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Slipstream and megatron-core's built-in engine under stalled copy streams.

The suspected faults of the built-in engine were found by reading its code. These runs show which of
them occur. Only Slipstream's outcome is asserted; the other engine's is recorded.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest
from facade_toy import outcome
from toy_model import SCHEDULES

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive]

ONE_F_ONE_B = SCHEDULES["1F1B first of two"]
FOUR = SCHEDULES["1F1B first of four"]
INTERLEAVED = SCHEDULES["interleaved first of two"]

CASES = {
    "no stall": ([ONE_F_ONE_B] * 4, None, 1, 3),
    "copies in stalled: host buffers in use while read": ([FOUR] * 4, "h2d_stream", 1, 3),
    "copies out stalled: inline reload after its own copy": ([FOUR] * 4, "d2h_stream", 1, 3),
    "copies in stalled, interleaved": ([INTERLEAVED] * 4, "h2d_stream", 2, 3),
    "copies out stalled, interleaved": ([INTERLEAVED] * 4, "d2h_stream", 2, 3),
    "more micro-batches than in the first iteration": (
        ["F0.0 B0.0", "F0.0 B0.0", SCHEDULES["accumulation"], SCHEDULES["accumulation"]],
        None,
        1,
        3,
    ),
    "a forward-only pass first": (["E0.9", ONE_F_ONE_B, ONE_F_ONE_B, ONE_F_ONE_B], None, 1, 3),
    "a forward-only pass in between": (
        [ONE_F_ONE_B, ONE_F_ONE_B, "E0.9", ONE_F_ONE_B, ONE_F_ONE_B],
        None,
        1,
        3,
    ),
    "one layer per chunk": ([INTERLEAVED] * 3, None, 2, 1),
}


@pytest.mark.parametrize("name", CASES)
def test_slipstream_is_right_and_the_other_engine_is_on_record(
    name: str, record_row: Callable[..., None]
) -> None:
    iterations, stream, num_chunks, num_layers = CASES[name]
    outcomes = {
        engine: outcome(engine, iterations, stream, num_chunks, num_layers)
        for engine in ("slipstream", "megatron")
    }
    record_row("engines_under_stalls", case=name, **outcomes)
    assert outcomes["slipstream"] == "right"
