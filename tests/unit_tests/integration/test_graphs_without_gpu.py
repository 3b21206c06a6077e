# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Without a GPU, training and doctor refuse options of CUDA graphs, or use eager graphs."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from forked import Done, run_module, run_script

from megatron.slipstream.options.rules import check_rules
from megatron.slipstream.options.training import MACHINE_RULES

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

CHUNK = ["--cuda-graph-granularity", "chunk"]


def train(folder: Path, *flags: str) -> Done:
    return run_script(ROOT / "pretrain_gpt.py", *FLAGS, *flags, folder=folder)


def examine(folder: Path, *flags: str) -> Done:
    words = ["doctor", "--no-bandwidth", "--", *FLAGS, *flags]
    return run_module("megatron.slipstream.cli", *words, folder=folder)


def test_graphs_are_refused_and_the_doctor_agrees(tmp_path: Path) -> None:
    message = (
        "cuda_graph_impl=transformer_engine is not supported without a GPU because CUDA graphs are "
        "captured"
    )
    done = train(tmp_path, *OFFLOAD, *TE)
    assert done.returncode == 2, done.stderr
    (error,) = [line for line in done.stderr.splitlines() if line.startswith("error:")]
    assert message in error
    assert "Traceback" not in done.stderr
    done = examine(tmp_path, *OFFLOAD, *TE)
    assert done.returncode == 1
    assert message in " ".join(done.stdout.split())
    assert train(tmp_path, *OFFLOAD).returncode == 0, "what the message says helps"


@pytest.mark.parametrize(
    "option, value, off",
    [
        ("cuda_graph_impl", "transformer_engine", "none"),
        ("cuda_graph_impl", "local", "none"),
        ("enable_cuda_graph", True, False),
        ("external_cuda_graph", True, False),
        ("optimizer_cuda_graph", True, False),
    ],
)
def test_graphs_of_layers_and_of_the_optimizer_need_a_gpu(
    option: str, value: Any, off: Any
) -> None:
    (rule,) = [rule for rule in MACHINE_RULES if rule.name == option]

    def found(has_gpu: bool, value: Any) -> list[str]:
        facts = SimpleNamespace(has_gpu=has_gpu, sequence_packing=None, **{option: value})
        return [finding.text for finding in check_rules((rule,), facts)]

    (message,) = found(False, value)
    assert message.startswith(f"{option}={value} is not supported without a GPU because CUDA")
    assert message.endswith(f"set {option}={off}, or leave it out")
    assert found(True, value) == found(False, off) == []


def test_graphs_of_chunks_are_imitated_and_said_to_be(tmp_path: Path) -> None:
    done = train(tmp_path, *CHUNK)
    assert done.returncode == 0, done.stderr
    assert "without a GPU, replays run the chunk eagerly" in done.stderr
    assert "eager graphs of model chunk 0: 1 slots" in done.stderr
    assert " 0 B" not in done.stderr
