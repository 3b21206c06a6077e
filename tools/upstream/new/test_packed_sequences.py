# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed documents train like documents one by one, with and without planned offloading."""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

# Helpers of planned offloading, whose tests need no GPU either.
sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline_parallel" / "offload_support"))

from megatron.core.pipeline_parallel.offload_engine.select import deselect, select
from offloaded_models import (
    MODULES,
    VOCAB_SIZE,
    Arguments,
    build,
    finish,
    initialize,
    pack,
    packs,
    same,
    train,
)
from small_corpora import END_OF_DOCUMENT, batches_of, dataset_config, write_corpus

from megatron.slipstream.integration.packed import packed_sequences
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.options.packing import check_packing
from megatron.slipstream.options.rules import require
from megatron.slipstream.packed_sequences.packing import PackLimits, Piece, balanced, greedy

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="trains in float32, which fused attention does not take",
)
LENGTHS = (7, 1, 12, 9)
PACKED = {
    "sequence_packing": "greedy",
    "thd_max_packed_sequences": 6,
    "seq_length": 32,
    "micro_batch_size": 1,
    "eval_micro_batch_size": 1,
    "context_parallel_size": 1,
    "transformer_impl": "local",
}


@pytest.fixture(scope="module", autouse=True)
def _shims_are_undone() -> Iterator[None]:
    initialize()
    yield
    finish()


def documents() -> list[np.ndarray]:
    draw = np.random.RandomState(3)
    return [draw.randint(1, VOCAB_SIZE, length + 1) for length in LENGTHS]


@pytest.mark.parametrize("packing", ["greedy", "balanced"])
def test_each_document_is_in_one_pack(packing: str) -> None:
    draw = random.Random(7)
    pieces = [Piece(number, 0, draw.randint(1, 64)) for number in range(200)]
    limits = PackLimits(64, 5, alignment=4)
    made = greedy(pieces, limits) if packing == "greedy" else balanced(pieces, limits, 8, 4)
    found = list(made)
    assert sorted(piece for pack in found for piece in pack) == pieces
    assert max(sum(limits.footprint(piece.length) for piece in pack) for pack in found) <= 64
    assert max(map(len, found)) <= 5


def losses_of(model: Any, batch: dict[str, Any]) -> torch.Tensor:
    """The losses of the labels that count."""
    counts = batch.pop("loss_mask").bool()
    with torch.no_grad():
        return model(**batch)[counts]


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_no_document_sees_another_or_padding(kind: str) -> None:
    model, texts = build(kind), documents()
    limits = PackLimits(40, 6, alignment=4)
    expected = losses_of(model, pack(texts, limits))
    assert torch.equal(losses_of(model, pack(texts, limits, padding=5)), expected)
    others = [texts[0], *((text + 1) % VOCAB_SIZE for text in texts[1:])]
    found = losses_of(model, pack(others, limits))
    assert torch.equal(found[: LENGTHS[0]], expected[: LENGTHS[0]])
    assert not torch.equal(found, expected)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_a_pack_trains_like_its_documents_one_by_one(kind: str) -> None:
    model, texts = build(kind), documents()
    together = losses_of(model, pack(texts, PackLimits(40, 6)))
    alone = [losses_of(model, pack([text], PackLimits(len(text) - 1, 1))) for text in texts]
    torch.testing.assert_close(torch.cat(alone), together, rtol=0, atol=5e-6)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_offloading_changes_no_bit(kind: str) -> None:
    expected = train(build(kind), batches=packs)
    manager = select(OffloadConfig(offload_backend="cpu-lazy", offload_native="off"))
    try:
        found = train(build(kind, MODULES[kind]), batches=packs)
        assert same(expected, found)
        assert manager.report.d2h_bytes > 0
    finally:
        deselect()


def test_training_reads_documents(tmp_path: Path, monkeypatch: Any) -> None:
    texts = [np.append(text, END_OF_DOCUMENT).astype(np.uint16) for text in documents() * 3]
    prefix = write_corpus(tmp_path, texts)
    args = Arguments(
        **PACKED, seed=5, global_batch_size=2, eval_global_batch_size=2, data_parallel_size=1
    )
    monkeypatch.setattr(packed_sequences, "get_args", lambda: args)
    monkeypatch.setattr(packed_sequences, "report_sequence_lengths", lambda lengths: None)
    base = dataset_config(PACKED["seq_length"], prefix, cache=tmp_path)
    train_set, *_ = packed_sequences.datasets((4, 1, 0), base)
    model = build("dense")
    model.vp_stage = None
    output, mask = packed_sequences.forward(batches_of(train_set), model)
    assert output.shape == mask.shape == (1, PACKED["seq_length"])
    sample = train_set[0]
    words = {tuple(text[:-1].tolist()) for text in texts}
    ends = sample["cu_seqlens"].tolist()
    read = [
        tuple(sample["tokens"][begin:end].tolist())
        for begin, end in zip(ends, ends[1:], strict=False)
        if begin < end
    ]
    assert len(read) > 1
    assert words >= set(read)
    assert mask.sum() == ends[-1]


def test_what_is_not_supported_is_an_error() -> None:
    require(check_packing(Arguments(**PACKED)))
    with pytest.raises(ValueError, match="micro_batch_size=2"):
        require(check_packing(Arguments(**PACKED | {"micro_batch_size": 2})))
    with pytest.raises(ValueError, match="cuda_graph_impl=local .* leave it out"):
        require(check_packing(Arguments(**PACKED, cuda_graph_impl="local")))
