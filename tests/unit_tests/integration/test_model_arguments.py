# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Megatron's own parser gives the shape of a model, and unsupported options are refused."""

from __future__ import annotations

from typing import Any

import pytest
from ranks import run_ranks

from megatron.slipstream.chunk_graphs.slots import PipelineLayout, passes
from megatron.slipstream.estimate.model_shapes import Experts, LatentAttention, Parallelism
from megatron.slipstream.estimate.schedules import rank_schedule
from megatron.slipstream.estimate.training_setup import Configured
from megatron.slipstream.integration.model_arguments import configured_by_flags
from megatron.slipstream.integration.schedules import MEGATRON_SCHEDULES

BASE = (
    "--num-layers 8 --hidden-size 512 --num-attention-heads 8 --seq-length 2048 "
    "--max-position-embeddings 2048 --micro-batch-size 2 --global-batch-size 32 --bf16 "
    "--position-embedding-type rope --vocab-size 1000 --lr 1e-4 --train-iters 10 --mock-data "
)
LLAMA = BASE + (
    "--swiglu --normalization RMSNorm --disable-bias-linear --group-query-attention "
    "--num-query-groups 4 --ffn-hidden-size 1536 --untie-embeddings-and-output-weights "
    "--attention-dropout 0 --hidden-dropout 0 --attention-backend fused "
)
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall "
)
PLANNED = {
    "llama": LLAMA,
    "defaults": BASE,
    "pipeline": LLAMA + "--tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --num-layers-per-virtual-pipeline-stage 2",
    "uneven": LLAMA + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 3",
    "layout": LLAMA + "--pipeline-model-parallel-size 2 --pipeline-model-parallel-layout Et*5|t*3L",
    "experts": LLAMA + EXPERTS + "--expert-model-parallel-size 4 --moe-layer-freq ([0]+[1]*7) "
    "--moe-shared-expert-intermediate-size 128 --moe-permute-fusion",
    "every second layer": LLAMA + EXPERTS + "--moe-layer-freq 2",
    "latent": BASE + "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16",
    "offloading": LLAMA + "--fine-grained-activation-offloading --offload-modules core_attn "
    "attn_proj --min-offloaded-tensor-size 5 --activation-offload-fraction 0.5 "
    "--delta-offload-bytes-across-pp-ranks 7 --offload-max-overhead-percent 1",
    "recompute": LLAMA + "--recompute-granularity selective --recompute-modules core_attn mlp",
    "local": LLAMA.replace("--attention-backend fused", "") + "--transformer-impl local",
    "optimizer": LLAMA + "--use-distributed-optimizer",
    "replicated": LLAMA,
}  # fmt: skip
REFUSED = {
    LLAMA + "--fp8-format hybrid": "fp8=hybrid is not supported with a plan from flags because",
    LLAMA + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1": (
        "recompute_granularity=full is not supported"
    ),
    LLAMA + EXPERTS.replace("--moe-grouped-gemm ", ""): "moe_grouped_gemm=False is not supported",
    LLAMA + "--mtp-num-layers 1": "mtp_num_layers=1 is not supported",
    LLAMA.replace("--vocab-size 1000 ", ""): "vocab_size is not set",
    LLAMA + "--num-lyers 3": "did you mean --num-layers?",
    LLAMA + "--pipeline-model-parallel-size 3": "divisible",
    LLAMA + "--help": "the flags ask for help",
    LLAMA + "--yaml-cfg model.yaml": "yaml_cfg is not supported",
    LLAMA + "--fine-grained-activation-offloading --offload-modules moe_act": (
        "names expert modules, but the model has no experts"
    ),
}


def parse_all(rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Every command line in one process, which the CPU shims change."""
    found: dict[str, Any] = {}
    for name, flags in PLANNED.items():
        num_processes = 16 if name in ("optimizer", "replicated") else None
        found[name] = configured_by_flags(flags.split(), num_processes)
    found["counted"] = configured_by_flags(LLAMA.split(), num_micro_batches=5)
    for flags in REFUSED:
        try:
            found[flags] = configured_by_flags(flags.split())
        except ValueError as error:
            found[flags] = str(error)
    return found


@pytest.fixture(scope="module")
def parsed() -> dict[str, Any]:
    (found,) = run_ranks(1, parse_all)
    return found


def test_flags_give_the_shape(parsed: dict[str, Configured]) -> None:
    shape = parsed["llama"].shape
    assert (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size) == (8, 512, 1536)
    assert (shape.query_groups, shape.head_dim, shape.seq_length) == (4, 64, 2048)
    assert (shape.micro_batch_size, shape.precision, shape.attention_backend) == (
        2,
        "bf16",
        "fused",
    )
    assert (shape.gated_linear_unit, shape.normalization) == (True, "RMSNorm")
    assert shape.bias_activation_fusion
    assert shape.apply_rope_fusion
    assert shape.vocab_size == 1024  # padded to a multiple of 128
    assert not shape.share_embeddings_and_output_weights
    assert parsed["llama"].modules == ("qkv_linear", "core_attn", "attn_proj")
    assert "core_attn" in parsed["recompute"].modules  # which 'attn_proj' is refused without


def test_megatrons_defaults_hold(parsed: dict[str, Configured]) -> None:
    shape = parsed["defaults"].shape
    assert (shape.ffn_hidden_size, shape.query_groups) == (4 * 512, 8)
    assert (shape.gated_linear_unit, shape.normalization) == (False, "LayerNorm")
    assert shape.attention_dropout == shape.hidden_dropout == 0.1
    assert shape.share_embeddings_and_output_weights
    assert shape.attention_backend == "fused"
    assert any("attention_backend=auto" in note for note in parsed["defaults"].notes)


def test_parallelism(parsed: dict[str, Configured]) -> None:
    found = parsed["pipeline"]
    assert found.shape.parallelism == Parallelism(
        tp=2, sequence_parallel=True, pp=2, vpp=2, group_size=2, etp=2
    )
    assert found.shape.layers_per_chunk == ((2, 2), (2, 2))
    assert "on 4 GPUs" in found.title
    assert parsed["uneven"].shape.layers_per_chunk == ((3,), (5,))
    assert parsed["layout"].shape.layers_per_chunk == ((5,), (3,))
    assert parsed["optimizer"].shape.parallelism.dp == 16
    assert parsed["replicated"].shape.parallelism.dp == 1
    assert "on 16 GPUs" in parsed["replicated"].title


def test_experts(parsed: dict[str, Configured]) -> None:
    shape = parsed["experts"].shape
    assert shape.experts == Experts(8, 2, 256, 128)
    assert shape.moe_layers == (False, *[True] * 7)
    assert (shape.parallelism.ep, shape.parallelism.etp) == (4, 1)
    assert parsed["every second layer"].shape.moe_layers == (True, False) * 4
    assert parsed["experts"].modules[-2:] == ("expert_fc1", "moe_act")


def test_latent_attention(parsed: dict[str, Configured]) -> None:
    assert parsed["latent"].shape.latent_attention == LatentAttention(64, 32, 16, 8, 16)


def test_what_moves(parsed: dict[str, Configured]) -> None:
    found = parsed["offloading"]
    assert found.modules == ("core_attn", "attn_proj")
    assert (found.min_numel, found.fraction, found.delta_bytes) == (5, 0.5, 7)
    assert not any("planned as if all" in note for note in found.notes)
    assert any("planned as if all modules" in note for note in parsed["llama"].notes)


def test_recomputation_and_plain_modules(parsed: dict[str, Configured]) -> None:
    assert parsed["recompute"].shape.recompute_modules == {"core_attn", "mlp"}
    assert parsed["llama"].shape.recompute_modules == frozenset()
    assert parsed["local"].shape.attention_backend == "local"


def test_as_many_micro_batches_as_show_what_repeats(parsed: dict[str, Configured]) -> None:
    assert parsed["llama"].num_micro_batches == 2
    assert any("2 of 16 micro-batches" in note for note in parsed["llama"].notes)
    assert parsed["pipeline"].num_micro_batches == 4
    assert parsed["optimizer"].num_micro_batches == 1  # 32 sequences, 16 ranks, 2 in each
    assert parsed["counted"].num_micro_batches == 5
    assert not any("micro-batches" in note for note in parsed["counted"].notes)


@pytest.mark.parametrize("flags", REFUSED, ids=[flags.split()[-2] for flags in REFUSED])
def test_what_cannot_be_planned_is_refused(parsed: dict[str, Any], flags: str) -> None:
    assert isinstance(parsed[flags], str)
    assert REFUSED[flags] in parsed[flags]


@pytest.mark.parametrize("vpp, group", [(None, None), (2, None), (3, 5)])
@pytest.mark.parametrize("pp", [2, 4])
def test_schedules_are_megatrons(pp: int, vpp: int | None, group: int | None) -> None:
    count = 2 * (group or pp)
    for rank in range(pp):
        layout = PipelineLayout(pp, rank, vpp, group)
        expected = [
            ("F" if item.direction == "forward" else "B", item.micro_batch, item.chunk)
            for item in passes(layout, count, MEGATRON_SCHEDULES)
        ]
        assert list(map(tuple, rank_schedule(pp, rank, count, vpp, group))) == expected
