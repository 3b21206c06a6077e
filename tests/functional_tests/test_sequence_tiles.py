# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trainings in tiles of the sequence learn as those without, in the memory of a tile."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch
from gpu_models import DENSE, MIN_NUMEL, MOE
from loss_curves import STABLE_RATE, distance, losses
from ranks import TIMEOUT_S, run_ranks
from tiny_gpt import DENSE_MODULES, ModelCase, build_chunks, compare, initialize, make_config, train
from training_runs import result_of, train_on_ranks

from megatron.slipstream.plan import tiles

MODEL = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 2
    --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 4
    --eval-interval 2 --eval-iters 1 --log-interval 1 --bf16
    --use-distributed-optimizer --overlap-grad-reduce --overlap-param-gather
    --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-layer-freq 2
    --moe-token-dispatcher-type alltoall
""".split()
TILES = "--loss-sequence-tiles 3 --mlp-sequence-tiles 4".split()
ENGINE = """
    --fine-grained-activation-offloading --offload-modules core_attn
    --min-offloaded-tensor-size 1 --offload-checkpoint-inputs
""".split()
BOTH = {"loss_sequence_tiles": 4, "mlp_sequence_tiles": 4}


@pytest.mark.releases
def test_flags_train_as_without_them_and_bitwise_alike_with_the_engine(tmp_path: Path) -> None:
    plain, tiled, moved = (
        [result_of(record) for record in train_on_ranks(2, flags, tmp_path / name, moves)]
        for name, flags, moves in (
            ("plain.json", MODEL, False),
            ("tiled.json", [*MODEL, *TILES], False),
            ("moved.json", [*MODEL, *TILES, *ENGINE], True),
        )
    )
    assert moved == tiled
    assert plain[0]["weights"] != tiled[0]["weights"], "tiles were not used"
    assert tiled[0]["losses"] == pytest.approx(plain[0]["losses"], abs=1e-2)


@pytest.mark.parametrize("kind", ["dense", "moe"])
def test_without_a_gpu_losses_stay_close_for_thirty_steps(kind: str) -> None:
    plain = ModelCase(kind, num_layers=2)
    tiled = dataclasses.replace(plain, **BOTH)
    (expected,), (actual,) = (run_ranks(1, losses, case, 7, 30) for case in (plain, tiled))
    assert expected[-1] < expected[0] - 0.1
    assert 0 < distance(expected, actual) < 1e-3


FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "te"}
GPU_CASES = {
    "dense": dataclasses.replace(DENSE, num_layers=4, seq_length=1024),
    "dense, fused loss": dataclasses.replace(DENSE, num_layers=4, seq_length=1024, overrides=FUSED),
    "experts": dataclasses.replace(MOE, num_layers=4, seq_length=512),
    "dropless experts": dataclasses.replace(
        MOE, num_layers=4, seq_length=512, sync_free_experts=True
    ),
}


@pytest.mark.gpu
@pytest.mark.timeout(TIMEOUT_S + 60)
@pytest.mark.parametrize("name", GPU_CASES)
def test_two_hundred_steps_are_within_the_spread_of_two_seeds(name: str) -> None:
    plain = GPU_CASES[name]
    tiled = dataclasses.replace(plain, **BOTH)
    ((expected,), (actual,), (other,)) = (
        run_ranks(1, losses, case, seed, 200, STABLE_RATE)
        for case, seed in ((plain, 7), (tiled, 7), (plain, 8))
    )
    spread = distance(expected, other)
    print(f"{name}: {distance(expected, actual):.4f} from the whole, two seeds {spread:.4f}")
    assert expected[-1] < expected[0] - 1
    assert distance(expected, actual) < spread


@pytest.mark.gpu
@pytest.mark.parametrize("name", GPU_CASES)
def test_offloading_changes_no_bit(name: str) -> None:
    case = dataclasses.replace(GPU_CASES[name], **BOTH)
    options = {**MIN_NUMEL, "offload_checkpoint_inputs": True}
    result = compare(0, 1, 0, case, DENSE_MODULES, "cuda", (2, 2, 2), options)
    assert result.difference is None
    assert "checkpoint_inputs" in result.moved_modules


def peak_bytes(case: ModelCase) -> int:
    """Device memory of a step above what is there before it."""
    initialize(case)
    config = make_config(case)
    chunks = build_chunks(case, config)
    train(case, config, chunks, (1,))  # kernels with workspaces
    for chunk in chunks:
        chunk.zero_grad(set_to_none=False)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    train(case, config, chunks, (1,))
    return torch.cuda.max_memory_allocated() - before


@pytest.fixture
def no_deterministic_attention(monkeypatch: pytest.MonkeyPatch) -> None:
    """Attention whose backward needs memory that grows with the sequence, not with its square.

    The deterministic one would be the peak of these models, with tiles and without.
    """
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "1")


@pytest.mark.gpu
@pytest.mark.exclusive
@pytest.mark.usefixtures("no_deterministic_attention")
@pytest.mark.parametrize("is_fused", [False, True])
def test_the_peak_falls_by_the_logits_outside_of_a_tile(is_fused: bool) -> None:
    """The logits of a model of one layer are its peak, with tiles and without."""
    case = dataclasses.replace(
        DENSE,
        num_layers=1,
        seq_length=16384,
        vocab_size=32000,
        hidden_size=512,
        overrides=FUSED if is_fused else {},
    )
    drop = peak_bytes(case) - peak_bytes(dataclasses.replace(case, loss_sequence_tiles=2))
    function: tiles.CrossEntropy = "te" if is_fused else "unfused"
    per_token = tiles.logits_bytes_per_token(case.vocab_size, 2, function)
    of_weights = [
        tiles.gradient_bytes(case.vocab_size * case.hidden_size, 2, one) for one in (False, True)
    ]
    expected = case.seq_length // 2 * per_token - (of_weights[0] - of_weights[1])
    assert drop == pytest.approx(expected, rel=0.1)


@pytest.mark.gpu
@pytest.mark.exclusive
@pytest.mark.usefixtures("no_deterministic_attention")
def test_the_peak_falls_by_the_mlp_outside_of_a_tile() -> None:
    """What one MLP needs in backward, of a model whose layers are recomputed as a whole."""
    full: dict[str, Any] = {
        "recompute_granularity": "full",
        "recompute_method": "uniform",
        "recompute_num_layers": 1,
        "ffn_hidden_size": 16384,
    }
    case = dataclasses.replace(
        DENSE, num_layers=2, seq_length=16384, vocab_size=1024, hidden_size=1024, overrides=full
    )
    drop = peak_bytes(dataclasses.replace(case, mlp_sequence_tiles=2))
    drop -= peak_bytes(dataclasses.replace(case, mlp_sequence_tiles=4))
    per_token = tiles.mlp_bytes_per_token(case.hidden_size, 16384, 2, is_gated=True)
    assert drop == pytest.approx(case.seq_length // 4 * per_token, rel=0.1)
