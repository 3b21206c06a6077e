# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The meter of memory in C++ counts what its reference in Python counts."""

from __future__ import annotations

from unittest.mock import patch

import pytest
from model_case import ModelCase
from ranks import run_ranks
from tiny_gpt import build_chunks, initialize, make_config, train_steps

from megatron.slipstream.integration.cpu import cpu_memory
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter


def count_in_both(rank: int, world_size: int, port: int, case: ModelCase) -> list[tuple[int, ...]]:
    """What a meter in Python and one in C++ count in each step, first now and then at the peak."""
    initialize(case, rank, world_size, port)
    with patch.object(cpu_memory, "loaded_module", lambda: None):
        in_python = DeviceMemoryMeter()
    assert type(in_python) is DeviceMemoryMeter
    assert type(DeviceMemoryMeter()) is not DeviceMemoryMeter
    counted = []
    with DeviceMemoryMeter() as in_cpp, in_python:
        config = make_config(case)
        for _ in train_steps(case, config, build_chunks(case, config), (1, 2)):
            now = in_cpp.allocated_bytes, in_python.allocated_bytes
            counted.append((*now, in_cpp.peak_bytes, in_python.peak_bytes))
            in_cpp.reset_peak()
            in_python.reset_peak()
    return counted


@pytest.mark.parametrize("kind", ["mixed", "mla", "hybrid"])
def test_a_training_needs_as_much_whichever_meter_counts(kind: str) -> None:
    case = ModelCase(kind, num_layers=4, overrides={"hidden_dropout": 0.1})
    (counted,) = run_ranks(1, count_in_both, case)
    for now, expected_now, peak, expected_peak in counted:
        assert now == expected_now > 0
        assert peak == expected_peak > now
