# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Copies without an engine: as many bytes as Slipstream moves, and only in their own turn."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
from megatron_models import initialize
from model_case import ModelCase

from benchmarks.case import Case, Variant
from benchmarks.copies_alone import CopiesAlone
from benchmarks.engines import BaseModel, Comparison, Engine

CASE = Case("tiny", "", ModelCase(num_layers=3), (), num_micro_batches=2)
NUM_COPIES = 3 * 2


@pytest.fixture
def base() -> BaseModel:
    initialize(CASE.model, 0, 1, 0)
    return BaseModel(CASE)


def test_each_layer_copies_both_ways(base: BaseModel, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[tuple[int, int, int]] = []
    copy = CopiesAlone._copy

    def note(way: CopiesAlone, to: int, source: int, stream: int) -> None:
        moved.append((to, source, way._nbytes))
        copy(way, to, source, stream)

    monkeypatch.setattr(CopiesAlone, "_copy", note)
    manager = SimpleNamespace(report=SimpleNamespace(d2h_bytes=100 * NUM_COPIES))
    off = Engine("off", base, base.chunks)
    copies = CopiesAlone(base, Engine("slipstream", base, base.chunks, manager))
    expected = off.run(0)
    assert moved == []
    assert all(map(torch.equal, copies.run(0), expected))
    # The input of the first layer is the embedding's output, which has a gradient too.
    assert sorted(moved) == [(1, 0, 100)] * NUM_COPIES + [(2, 3, 100)] * NUM_COPIES
    moved.clear()
    off.run(0)
    copies.close()
    copies.run(0)
    assert moved == []


def test_it_needs_the_engine_whose_bytes_it_copies() -> None:
    initialize(CASE.model, 0, 1, 0)
    with pytest.raises(ValueError, match="needs 'slipstream' before it"):
        Comparison(CASE).build(Variant(("core_attn",)), "copies", {})
