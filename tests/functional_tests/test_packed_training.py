# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Whole training runs of packed sequences, from text to losses, with the entry's own flags.

The text is one play, cut into its speeches: documents of 1 to some hundred tokens. Each layout
trains twice, engine off and on; losses, the last gradients and the final weights are compared on
every rank, as hashes of their bytes.
"""

from __future__ import annotations

import functools
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from ranks import run_ranks
from training_runs import read_records, result_of, train_main, train_on_ranks

ROOT = Path(__file__).parents[2]
PLAY = ROOT / "examples" / "data" / "first_folio" / "macbeth.txt"

COMMON = """
    --num-layers 4 --hidden-size 32 --num-attention-heads 4 --swiglu --disable-bias-linear
    --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 1 --global-batch-size 4 --lr 1e-2 --train-iters 6
    --eval-interval 6 --eval-iters 1 --eval-before-training --split 90,10,0 --log-interval 1
    --calculate-per-token-loss --thd-max-packed-sequences 12
""".split()
MOE = """
    --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
    --moe-router-score-function sigmoid --moe-router-enable-expert-bias
    --moe-expert-capacity-factor 1.0 --moe-pad-expert-input-to-capacity
""".split()
MODULES = "attn_norm qkv_linear core_attn attn_proj mlp_norm".split()

PP2 = "--sequence-packing balanced --pipeline-model-parallel-size 2".split()
DYNAMIC = "--sequence-packing balanced --dynamic-context-parallel".split()
VPP2 = "--num-layers-per-virtual-pipeline-stage 1".split()

GREEDY = "--sequence-packing greedy".split()
TWO_LAYERS = ["--num-layers", "2"]
HYBRID = ["--hybrid-layer-pattern", "*-*E", *MOE]

LAYOUTS = [
    pytest.param(1, [*GREEDY, *TWO_LAYERS], id="greedy"),
    pytest.param(2, [*DYNAMIC, *TWO_LAYERS], id="dynamic context parallelism"),
    pytest.param(2, [*DYNAMIC, *HYBRID], id="hybrid model, dynamic context parallelism"),
    pytest.param(2, [*PP2, *VPP2, *MOE], id="balanced, PP2 VPP2, MoE", marks=pytest.mark.releases),
]


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """Flags that name the speeches of a play and their tokenizer."""
    sys.path.insert(0, str(ROOT / "tools"))
    try:
        import preprocess_text
    finally:
        sys.path.remove(str(ROOT / "tools"))
    prefix = tmp_path_factory.mktemp("corpus") / "speeches"
    preprocess_text.preprocess([PLAY], prefix, vocab_size=512, min_document_chars=1)
    return ["--data-path", str(prefix), "--tokenizer-json", f"{prefix}-tokenizer.json"]


@pytest.fixture(scope="module")
def train_without(
    corpus: list[str], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[int, list[str]], list[Any]]:
    """Trains a layout without the engine and without graphs, once for all tests."""

    @functools.cache
    def train(num_ranks: int, flags: str) -> list[dict[str, Any]]:
        record = tmp_path_factory.mktemp("off") / "off.json"
        return train_on_ranks(num_ranks, [*COMMON, *corpus, *flags.split()], record, False)

    return lambda num_ranks, flags: train(num_ranks, " ".join(flags))


@pytest.mark.parametrize("num_ranks, flags", LAYOUTS)
def test_packed_training_learns_the_same_with_the_engine(
    num_ranks: int,
    flags: list[str],
    corpus: list[str],
    train_without: Callable[[int, list[str]], list[Any]],
    tmp_path: Path,
) -> None:
    modules = [*MODULES, "expert_fc1", "moe_act"] if "--num-experts" in flags else MODULES
    offload = ["--fine-grained-activation-offloading", "--offload-modules", *modules]
    offload += ["--min-offloaded-tensor-size", "1"]
    off = train_without(num_ranks, flags)
    record = tmp_path / "on.json"
    on = train_on_ranks(num_ranks, [*COMMON, *corpus, *flags, *offload], record, False)
    assert [result_of(record) for record in on] == [result_of(record) for record in off]
    assert all(record["iterations"][-1]["bytes_offloaded"] > 0 for record in on)
    last = result_of(off[-1])
    assert last["losses"][-1] < last["losses"][0] - 0.3
    before, after = (evaluation["loss"] for evaluation in last["evaluations"][:2])
    assert after < before - 0.3


SYNC_FREE = """
    --moe-sync-free-experts --expert-model-parallel-size 2 --num-experts 4 --moe-router-topk 2
    --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
""".split()
CHUNK_GRAPHS = "--cuda-graph-granularity chunk".split()


def _main_replayed(rank: int, num_ranks: int, port: int, folder: Path, flags: list[str]) -> int:
    """Train; returns how many forward passes were replayed."""
    from megatron.slipstream.integration.graphs import chunks as chunk_graphs

    made: list[Any] = []
    replay_chunks = chunk_graphs.replay_chunks

    def noted(*arguments: Any, **options: Any) -> Any:
        made.extend(replay_chunks(*arguments, **options))
        return made

    chunk_graphs.replay_chunks = noted
    assert train_main(rank, num_ranks, port, folder, flags, False) == 0
    return sum(graphs.num_replays for graphs in made)


@pytest.mark.parametrize(
    "num_ranks, flags, more",
    [
        (1, [*GREEDY, *TWO_LAYERS], []),
        (2, [*PP2, *VPP2, *MOE], []),
        (2, [*DYNAMIC, *TWO_LAYERS, *SYNC_FREE], ["--dynamic-context-parallel-verify"]),
    ],
    ids=[
        "greedy",
        "balanced, PP2 VPP2, MoE",
        "dynamic, EP2, sync-free",
    ],
)
def test_packed_training_learns_the_same_with_chunk_graphs(
    num_ranks: int,
    flags: list[str],
    more: list[str],
    corpus: list[str],
    train_without: Callable[[int, list[str]], list[Any]],
    tmp_path: Path,
) -> None:
    off = train_without(num_ranks, flags)
    record = tmp_path / "on.json"
    graphs = [*more, *CHUNK_GRAPHS, "--cuda-graph-warmup-steps", "2"]
    graphs = [*COMMON, *corpus, *flags, *graphs, "--run-record-path", str(record)]
    num_replays = run_ranks(num_ranks, _main_replayed, tmp_path, graphs)
    on = read_records(num_ranks, record)
    assert [result_of(record) for record in on] == [result_of(record) for record in off]
    num_chunks = 2 if VPP2[0] in flags else 1
    num_micro_batches = 2 if DYNAMIC[-1] in flags else 4
    assert num_replays == [(6 - 2) * num_micro_batches * num_chunks] * num_ranks
