# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The trace of a recorded iteration, had its sequences another length."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from megatron.slipstream.plan.trace import MemoryReading, StepKind, Trace

ATTENTION = "core_attn"
"""The module whose time grows with the square of the length."""


def at_length(trace: Trace, seq_length: int) -> Trace:
    """Scale a trace to another sequence length.

    Storages, and memory above what is in use between iterations, grow with the length; so do times,
    except for those inside the groups of core attention, which grow with its square. Raises
    ``ValueError`` if the trace does not say how long its sequences were.
    """
    if not trace.seq_length:
        raise ValueError(
            "the trace does not say how long its sequences were, so it cannot be scaled; set "
            "--recorded-seq-length"
        )
    factor = seq_length / trace.seq_length
    state = state_bytes(trace)
    storages = (replace(item, nbytes=round(item.nbytes * factor)) for item in trace.storages)
    return replace(
        trace,
        storages=tuple(storages),
        memory=tuple(_reading(item, state, factor) for item in trace.memory),
        step_ms=tuple(_times_ms(trace, factor)),
        seq_length=seq_length,
    )


def state_bytes(trace: Trace) -> int:
    """Return the device memory in use whatever the length: the least of all readings, or 0."""
    return min((item.allocated_bytes + item.absent_bytes for item in trace.memory), default=0)


def assumptions(trace: Trace, recorded_length: int) -> list[str]:
    """Return what a scaled trace takes for granted, as lines of text."""
    lines = [
        f"Scaled from {recorded_length:,} to {trace.seq_length:,} tokens: saved bytes and memory "
        "grow with the length above what was in use between iterations"
    ]
    if trace.step_ms and any(step.name == ATTENTION for step in trace.steps):
        lines.append(f"times grow with the length, those of {ATTENTION} with its square")
    elif trace.step_ms:
        lines.append(
            f"times grow with the length; no group is {ATTENTION}, so longer attention is counted "
            "too short"
        )
    return lines


def _times_ms(trace: Trace, factor: float) -> Iterator[float]:
    inside = (StepKind.FORWARD_START, StepKind.BACKWARD_USE)
    for step, ms in zip(trace.steps, trace.step_ms, strict=False):
        is_attention = step.name == ATTENTION and step.kind in inside
        yield ms * (factor**2 if is_attention else factor)


def _reading(reading: MemoryReading, state: int, factor: float) -> MemoryReading:
    def scaled(nbytes: int) -> int:
        # Absent bytes make up for what the reading lacks, at both lengths.
        total = state + round((nbytes + reading.absent_bytes - state) * factor)
        return total - absent

    absent = round(reading.absent_bytes * factor)
    peak = scaled(reading.peak_bytes)
    gradients = reading.peak_bytes - reading.peak_beside_gradients_bytes
    beside = peak - gradients if reading.peak_beside_gradients_bytes else 0
    return MemoryReading(scaled(reading.allocated_bytes), peak, absent, beside)
