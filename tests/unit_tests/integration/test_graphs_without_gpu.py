# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Without a GPU, training and doctor refuse options of CUDA graphs, or use eager graphs."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from forked import Done, run_module, run_script

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the messages are those of a machine without a GPU"
)

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-layers 2 --hidden-size 32
    --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1
    --global-batch-size 1 --lr 1e-3 --train-iters 5 --eval-iters 0 --eval-interval 5
    --log-interval 1
""".split()
OFFLOAD = ["--fine-grained-activation-offloading", "--offload-modules", "core_attn", "attn_proj"]
TE = ["--cuda-graph-impl", "transformer_engine"]

REFUSED = {
    "transformer_engine": (TE, "cuda_graph_impl=transformer_engine"),
    "transformer_engine, offloading": ([*OFFLOAD, *TE], "cuda_graph_impl=transformer_engine"),
    "local": (["--cuda-graph-impl", "local"], "cuda_graph_impl=local"),
    "by its older name": (["--enable-cuda-graph"], "enable_cuda_graph=True"),
    "of the optimizer": (["--optimizer-cuda-graph"], "optimizer_cuda_graph=True"),
}
CHUNK = ["--cuda-graph-granularity", "chunk"]


def train(folder: Path, *flags: str) -> Done:
    return run_script(ROOT / "pretrain_gpt.py", *FLAGS, *flags, folder=folder)


@pytest.fixture(scope="module")
def trains(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., bool]:
    """Whether these flags train; the same flags are tried once."""

    @functools.cache
    def run(*flags: str) -> bool:
        return train(tmp_path_factory.mktemp("trains"), *flags).returncode == 0

    return run


def examine(folder: Path, *flags: str) -> Done:
    words = ["doctor", "--no-bandwidth", "--", *FLAGS, *flags]
    return run_module("megatron.slipstream.cli", *words, folder=folder)


@pytest.mark.parametrize("name", REFUSED)
def test_graphs_are_refused_and_the_doctor_agrees(
    name: str, trains: Callable[..., bool], tmp_path: Path
) -> None:
    flags, option = REFUSED[name]
    message = f"{option} is not supported without a GPU because CUDA graphs are captured"
    done = train(tmp_path, *flags)
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert message in error
    assert "Traceback" not in done.stderr
    done = examine(tmp_path, *flags)
    assert done.returncode == 1
    assert message in " ".join(done.stdout.split())
    without = [word for word in flags if word not in (*TE, "local", flags[-1])]
    assert trains(*without), "what the message says helps"


def test_graphs_of_chunks_are_imitated_and_said_to_be(tmp_path: Path) -> None:
    done = train(tmp_path, *CHUNK)
    assert done.returncode == 0, done.stderr
    assert "without a GPU graphs are imitated" in done.stderr
    assert "eager graphs of model chunk 0: 1 slots" in done.stderr
    assert " 0 B" not in done.stderr
