# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trainings with sync-free experts are, bit by bit, those with megatron-core's experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from training_runs import train_on_ranks

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 2
    --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --log-interval 1 --eval-iters 0 --bf16
    --eval-interval 20 --lr-decay-iters 20
    --clip-grad 0 --attention-dropout 0 --hidden-dropout 0
""".split()
"""Without a limit of the gradients' norm, which is summed parameter by parameter."""
SYNC_FREE = ["--moe-sync-free-experts"]


STEPS = ["--moe-grouped-gemm", "--use-distributed-optimizer"]


def _losses(folder: Path, num_steps: int, *flags: str) -> list[Any]:
    folder.mkdir(exist_ok=True)
    flags = (*FLAGS, "--train-iters", str(num_steps), *flags)
    records = train_on_ranks(1, list(flags), folder / "run.json", reads_memory=False)
    return [iteration["loss"] for iteration in records[-1]["iterations"]]


def test_twenty_steps_are_those_of_megatrons_grouped_experts(tmp_path: Path) -> None:
    theirs = _losses(tmp_path / "theirs", 20, *STEPS)
    ours = _losses(tmp_path / "ours", 20, *STEPS, *SYNC_FREE)
    assert ours == theirs
    assert len(set(ours)) == 20


@pytest.mark.parametrize(
    "first, then", [([], SYNC_FREE), (SYNC_FREE, [])], ids=["to ours", "from ours"]
)
def test_a_training_continues_with_the_other_experts(
    first: list[str], then: list[str], tmp_path: Path
) -> None:
    """Weights and optimizer state go through a checkpoint, between one parameter and many."""
    checkpoint = ["--save", str(tmp_path / "saved"), "--ckpt-format", "torch_dist"]
    whole = _losses(tmp_path / "whole", 6, *first, *checkpoint, "--save-interval", "3")
    (tmp_path / "saved" / "latest_checkpointed_iteration.txt").write_text("3")
    load = ["--load", str(tmp_path / "saved"), "--ckpt-format", "torch_dist"]
    assert _losses(tmp_path / "then", 6, *then, *load) == whole[3:]
