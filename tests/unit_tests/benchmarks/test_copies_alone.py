# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Copies without an engine: as many bytes as Slipstream moves, and only in their own turn."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import torch
from megatron_models import initialize
from model_case import ModelCase
from ranks import run_ranks

from benchmarks.case import Case, Variant
from benchmarks.copies_alone import CopiesAlone
from benchmarks.engines import BaseModel, Comparison, Engine

CASE = Case("tiny", "", ModelCase(num_layers=3), (), num_micro_batches=2)
NUM_COPIES = 3 * 2
Copies = list[tuple[int, int, int]]


def run_in_turn(rank: int, num_ranks: int, port: int) -> tuple[bool, list[Copies]]:
    """Whether losses are equal, and the copies of each of four turns."""
    initialize(CASE.model, rank, num_ranks, port)
    base = BaseModel(CASE)
    manager = SimpleNamespace(report=SimpleNamespace(d2h_bytes=100 * NUM_COPIES))
    off = Engine("off", base, base.chunks)
    ours = Engine("slipstream", base, base.chunks, manager)
    copies = CopiesAlone(off, base.chunks, CASE.num_micro_batches, ours)
    seen: Copies = []
    copy = CopiesAlone._copy

    def note(way: CopiesAlone, to: int, source: int, stream: int) -> None:
        seen.append((to, source, way._nbytes))
        copy(way, to, source, stream)

    losses, turns = [], []
    with patch.object(CopiesAlone, "_copy", note):
        for way in (off, copies, off, copies):
            losses.append(way.run(0))
            turns.append(sorted(seen))
            seen.clear()
            if len(turns) == 3:
                copies.close()
    return all(torch.equal(*pair) for pair in zip(*losses[:2], strict=True)), turns


def test_each_layer_copies_both_ways() -> None:
    ((is_equal, turns),) = run_ranks(1, run_in_turn)
    assert is_equal
    # The input of the first layer is the embedding's output, which has a gradient too.
    assert turns == [[], [(1, 0, 100)] * NUM_COPIES + [(2, 3, 100)] * NUM_COPIES, [], []]


def build_alone(rank: int, num_ranks: int, port: int) -> str:
    initialize(CASE.model, rank, num_ranks, port)
    try:
        Comparison(CASE).build(Variant(("core_attn",)), "copies", {})
    except ValueError as error:
        return str(error)
    return ""


def test_it_needs_the_engine_whose_bytes_it_copies() -> None:
    (error,) = run_ranks(1, build_alone)
    assert "needs 'slipstream' before it" in error
