# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A rank that fails ends the training: it does not wait for the others, which wait for it."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from forked import TAIL, run_module

ROOT = Path(__file__).parents[2]
FLAGS = """
    --num-layers 2 --hidden-size 64 --num-attention-heads 2 --seq-length 64
    --max-position-embeddings 64 --micro-batch-size 1 --global-batch-size 2 --lr 1e-3
    --train-iters 6 --eval-iters 0 --eval-interval 6 --log-interval 1
    --mock-data --tokenizer-type NullTokenizer --vocab-size 64
    --fine-grained-activation-offloading --offload-modules core_attn
""".split()
MUCH_S = 150
"""Timeout; the test takes a fifth of it. NCCL's own timeout is ten minutes."""


@pytest.mark.gpus2
@pytest.mark.skipif(
    "CUDA_MPS_PIPE_DIRECTORY" in os.environ,
    reason="ends a rank with work in flight, and with it every process that shares MPS",
)
def test_a_rank_that_fails_ends_the_training(tmp_path: Path) -> None:
    script = ROOT / "tests" / "support" / "failing_rank.py"
    done = run_module(
        "torch.distributed.run",
        *("--standalone", "--nproc-per-node", "2", "-m", "tools.shared_gpus"),
        *(str(script), *FLAGS),
        folder=tmp_path,
        environment={"PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])},
        timeout_s=MUCH_S,
    )
    assert done.returncode != 0
    assert "RuntimeError: this rank fails" in done.stderr, done.stderr[-TAIL:]
