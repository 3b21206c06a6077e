# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""tools/show_packing.py shows how training would pack a corpus."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from small_corpora import write_corpus

ROOT = Path(__file__).resolve().parents[3]
FLAGS = "--seq-length 100 --thd-max-packed-sequences 4 --global-batch-size 4 --num-ranks 2".split()


@pytest.fixture(scope="module")
def tool() -> Any:
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import show_packing
    finally:
        sys.path.remove(str(ROOT / "tools"))
    return show_packing


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Eighty documents: every fourth fills a buffer, the others a quarter of one."""
    documents = [np.arange(101 if number % 4 == 0 else 26) for number in range(80)]
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents)


def test_the_table_tells_filling_and_waiting(
    tool: Any, corpus: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([corpus, *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "80 documents of 26 to 101 tokens"
    cells = {line[:48].strip(): line[48:].split() for line in lines[1:]}
    assert cells["packing"] == ["greedy", "balanced"]
    assert cells["buffers of an epoch"] == ["35", "35"]
    assert cells["filled by documents"] == ["100.0%", "100.0%"]
    assert cells["hold 4 documents, the most they may"] == ["42.9%", "42.9%"]
    greedy, balanced = cells["waiting, if ranks meet after each micro-batch"]
    assert float(greedy[:-1]) > float(balanced[:-1])
    assert len(cells["waiting, if ranks meet after each iteration"]) == 2


def test_waiting_is_what_the_slowest_rank_takes_beyond_the_mean(tool: Any) -> None:
    from megatron.slipstream.packed_sequences.dataset import PackIndex, PackingPlan
    from megatron.slipstream.packed_sequences.packing import PackLimits

    lengths = [3, 1, 1, 2, 9]  # two micro-batches of two ranks, and the begin of another batch
    pieces = np.array([[n, 0, length] for n, length in enumerate(lengths)], dtype=np.int32)
    index = PackIndex(pieces, np.arange(1, 6))
    plan = PackingPlan(PackLimits(9, 1), packs_per_batch=4, num_ranks=2)
    packed = tool.Packed(plan, index)
    assert packed.work().tolist() == [[[9, 1], [1, 4]]]
    each, whole = packed.waits()
    assert each == pytest.approx((9 + 4) / 7.5 - 1)
    assert whole == pytest.approx((9 + 1) / 7.5 - 1)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--num-ranks", "3"], "global_batch_size=4 is not a multiple of num_ranks=3; set"),
        (["--global-batch-size", "36"], "global_batch_size=36 is more than the 35 buffers"),
        (["--thd-max-packed-sequences", "0"], "thd_max_packed_sequences=0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_cannot_be_shown_is_one_line(
    tool: Any, corpus: str, flags: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([corpus, *FLAGS, *flags]) == 2
    assert words in capsys.readouterr().err


def test_a_corpus_that_is_not_there_is_named(
    tool: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert tool.main([str(tmp_path / "none"), *FLAGS]) == 2
    assert "none.idx does not exist; make it with tools/preprocess_text.py" in (
        capsys.readouterr().err
    )
