# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A trace scaled to another sequence length is near the one that this length would give."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from megatron.slipstream.cli import main
from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.model_shapes import ModelShape
from megatron.slipstream.estimate.synthetic import Workplan, synthetic_trace
from megatron.slipstream.estimate.what_if import assumptions, at_length, state_bytes
from megatron.slipstream.plan.files import load_trace, save_trace
from megatron.slipstream.plan.trace import MemoryReading, Trace

STATE = 10 << 30
MODULES = ("qkv_linear", "core_attn", "attn_proj")


def trace_of(seq_length: int, modules: tuple[str, ...] = MODULES) -> Trace:
    shape = ModelShape(4, 1024, 8, 4096, 32_000, seq_length)
    work = Workplan(shape, find_speed("h200"), modules, 2, min_numel=0)
    return replace(synthetic_trace(work, 0, STATE), seq_length=seq_length)


def test_a_longer_sequence_gives_the_trace_of_that_length() -> None:
    scaled, longer = at_length(trace_of(4096), 16_384), trace_of(16_384)
    assert scaled.storages == longer.storages
    assert scaled.steps == longer.steps
    # Between two marks there is more than attention.
    assert sum(scaled.step_ms) == pytest.approx(sum(longer.step_ms), rel=0.05)
    for got, expected in zip(scaled.memory, longer.memory, strict=True):
        assert got.peak_bytes == pytest.approx(expected.peak_bytes, rel=0.001)
        assert got.allocated_bytes == pytest.approx(expected.allocated_bytes, rel=0.001)


def test_the_same_length_changes_nothing() -> None:
    trace = trace_of(4096)
    assert at_length(trace, 4096) == trace


def test_bytes_on_the_host_and_gradients_are_accounted_for() -> None:
    first, *others = trace_of(4096).memory
    reading = MemoryReading(STATE + 500, STATE + 1000, 200, STATE + 1000 - 50)
    trace = replace(trace_of(4096), memory=(replace(first, allocated_bytes=STATE), reading,
                                            *others[1:]))  # fmt: skip
    assert state_bytes(trace) == STATE
    scaled = at_length(trace, 8192).memory[1]
    assert scaled == MemoryReading(STATE + 1000, STATE + 2000, 400, STATE + 2000 - 50)


def test_what_is_taken_for_granted_is_said() -> None:
    assert "core_attn with its square" in assumptions(at_length(trace_of(4096), 8192), 4096)[1]
    without = trace_of(4096, ("qkv_linear",))
    assert "counted too short" in assumptions(at_length(without, 8192), 4096)[1]


def test_a_trace_is_planned_at_another_length(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    save_trace(trace_of(4096), path)
    assert (
        main(["plan", str(path), "--seq-length", "8k", "--output", str(tmp_path / "p.json")]) == 0
    )
    assert "Scaled from 4,096 to 8,192 tokens" in capsys.readouterr().out
    assert load_trace(path).seq_length == 4096
    assert main(["plan", str(path), "--recorded-seq-length", "2k", "--seq-length", "8k"]) == 2
    assert "because that says 4096" in capsys.readouterr().err


def test_a_trace_without_a_length_needs_one(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "trace.json"
    save_trace(replace(trace_of(4096), seq_length=0), path)
    assert main(["plan", str(path), "--seq-length", "8k"]) == 2
    assert "set --recorded-seq-length" in capsys.readouterr().err
    assert main(["plan", str(path), "--seq-length", "8k", "--recorded-seq-length", "4k"]) == 0
    assert "Scaled from 4,096 to 8,192 tokens" in capsys.readouterr().out
    assert main(["plan", str(path), "--recorded-seq-length", "4k"]) == 2
    assert main(["plan", str(path), "--seq-length", "0", "--recorded-seq-length", "4k"]) == 2
