# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Megatron's own parser gives the shape of a model, and unsupported options are refused."""

from __future__ import annotations

import argparse
import dataclasses
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from ranks import import_training, run_ranks

from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.hugging_face import load_hub_config
from megatron.slipstream.estimate.layers import (
    saved_tensors,
)
from megatron.slipstream.estimate.model_shapes import (
    Experts,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    Optimizer,
    Parallelism,
)
from megatron.slipstream.estimate.model_state import num_parameters, state_bytes
from megatron.slipstream.estimate.synthetic import Workplan, synthetic_trace
from megatron.slipstream.estimate.training_command import read_flags, split_command
from megatron.slipstream.estimate.training_setup import Configured, shape_of_options
from megatron.slipstream.integration.entry.model_arguments import (
    PLAN_RULES,
    configured_by_flags,
)
from megatron.slipstream.options.fields import DEFAULTS, OffloadConfig
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.files import save_plan
from megatron.slipstream.plan.settings import NOTHING, WHOLE

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
HYBRID = LLAMA.replace("--num-layers 8 ", "")
EXPERTS = (
    "--num-experts 8 --moe-router-topk 2 --moe-ffn-hidden-size 256 --moe-grouped-gemm "
    "--moe-token-dispatcher-type alltoall "
)
LATENT = (
    "--multi-latent-attention --q-lora-rank 64 --kv-lora-rank 32 --qk-head-dim 16 "
    "--qk-pos-emb-head-dim 8 --v-head-dim 16 "
)
INPUTS = (
    "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--offload-checkpoint-inputs"
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
    "latent": BASE + LATENT,
    "offloading": LLAMA + "--fine-grained-activation-offloading --offload-modules core_attn "
    "attn_proj --min-offloaded-tensor-size 5 --activation-offload-fraction 0.5 "
    "--delta-offload-bytes-across-pp-ranks 7 --offload-max-overhead-percent 1",
    "own modules": BASE + LATENT + "--fine-grained-activation-offloading --offload-modules "
    "mla_down_proj mla_up_proj mlp_fc1 mlp_act mlp_fc2 embedding output_layer",
    "recompute": LLAMA + "--recompute-granularity selective --recompute-modules core_attn mlp",
    "tiles": LLAMA + "--mlp-sequence-tiles auto --loss-sequence-tiles auto",
    "local": LLAMA.replace("--attention-backend fused", "") + "--transformer-impl local",
    "optimizer": LLAMA + "--use-distributed-optimizer",
    "replicated": LLAMA,
}  # fmt: skip
OFFLOADED = LLAMA + "--fine-grained-activation-offloading --offload-modules core_attn "
POLICIES: dict[str, dict[str, Any]] = {
    "--activation-offload-fraction 0.5": {"activation_offload_fraction": 0.5},
    "--delta-offload-bytes-across-pp-ranks 7": {"delta_offload_bytes_across_pp_ranks": 7},
    "--fine-grained-offloading-max-inflight-offloads 3": {"max_inflight_offloads": 3},
    "--offload-release-lag 5": {"release_lag": 5},
    "--offload-prefetch-depth 4": {"prefetch_depth": 4},
    "--offload-target-memory-gib 0.5": {"target_memory_bytes": 2**29},
    "--offload-max-overhead-percent auto": {"max_overhead_percent": 1.0},
    "--offload-host-memory-limit-bytes 1000": {"host_memory_limit_bytes": 1000},
    # These change neither what moves nor when.
    "--offload-verify 2 --offload-native off --offload-backend cpu --offload-nvtx-ranges": {},
    "--offload-report-path report.json --offload-trace-path trace.json": {},
    "--offload-engine slipstream": {},
}
"""Offloading flags of a training, and what they change in its policy."""

REFUSED = {
    LLAMA + "--fine-grained-activation-offloading --activation-memory-budget 10": (
        "activation_memory_budget=10.0 is not supported with a plan from flags because"
    ),
    OFFLOADED + "--offload-engine megatron": (
        "offload_engine=megatron is not supported with a plan from flags because"
    ),
    OFFLOADED + "--recompute-granularity selective --offload-checkpoint-inputs": (
        "offload_checkpoint_inputs=True is not supported with a plan from flags because"
    ),
    LLAMA + "--fp4-format e2m1 --fp4-recipe nvfp4": (
        "fp4=e2m1 is not supported with a plan from flags because"
    ),
    LLAMA + "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1 "
    "--distribute-saved-activations --tensor-model-parallel-size 2": (
        "distribute_saved_activations=True is not supported"
    ),
    LLAMA + EXPERTS.replace("--moe-grouped-gemm ", ""): "moe_grouped_gemm=False is not supported",
    LLAMA + EXPERTS.replace("topk 2", "topk 9"): "moe_router_topk=9 is not supported with num_e",
    LLAMA + EXPERTS.replace("alltoall", "allgather") + "--expert-model-parallel-size 2": (
        "moe_token_dispatcher_type=allgather is not supported with a plan from flags"
    ),
    LLAMA + "--mlp-sequence-tiles 4": "mlp_sequence_tiles=4 is not supported with a plan",
    LLAMA + "--loss-sequence-tiles 4": "loss_sequence_tiles=4 is not supported with a plan",
    LLAMA + "--mtp-num-layers 1": "mtp_num_layers=1 is not supported",
    BASE.replace("--num-layers 8 ", "")
    + LATENT
    + "--disable-bias-linear --hybrid-layer-pattern D-D-": (
        "because what D (sparse attention) saves"
    ),
    HYBRID + "--hybrid-layer-pattern M-*- --disable-mamba-mem-eff-path": (
        "use_mamba_mem_eff_path=False is not supported with a plan from flags because"
    ),
    HYBRID + "--hybrid-layer-pattern G-*- --deterministic-mode": (
        "deterministic_mode=True is not supported with a plan from flags because"
    ),
    HYBRID + "--hybrid-layer-pattern *E": "num_experts is not set",
    LLAMA.replace("--vocab-size 1000 ", ""): "vocab_size is not set",
    LLAMA + "--num-lyers 3": "did you mean --num-layers?",
    LLAMA + "--pipeline-model-parallel-size 3": "divisible",
    LLAMA + "--help": "the flags ask for help",
    LLAMA + "--yaml-cfg model.yaml": "yaml_cfg is not supported",
    LLAMA + "--fine-grained-activation-offloading --offload-modules moe_act": (
        "names expert modules, but the model has no experts"
    ),
}

SHARDED = LLAMA + "--use-distributed-optimizer "
OTHER_STATE = {
    SHARDED + "--fp8-format hybrid --fp8-recipe tensorwise --fp8-param-gather": "fp8_param_gather",
    SHARDED + "--num-distributed-optimizer-instances 2": "num_distributed_optimizer_instances",
    LLAMA + "--optimizer sgd": "optimizer",
    LLAMA + "--freeze-all-layers": "freeze_all_layers",
    SHARDED + "--ckpt-format fsdp_dtensor --use-megatron-fsdp": "use_megatron_fsdp",
}
"""Flags with which the state has other sizes, and the refused option."""
AWARE = SHARDED + "--use-precision-aware-optimizer "
OPTIMIZERS = {
    LLAMA: Optimizer(),
    LLAMA + "--grad-reduce-in-bf16": Optimizer(gradient_bytes=2),
    LLAMA.replace("--bf16", "--fp16"): Optimizer(gradient_bytes=2),
    # Transformer Engine's keeps the lower half of a main weight.
    AWARE: Optimizer(main_bytes=2),
    AWARE + "--main-params-dtype fp16 --main-grads-dtype bf16 --exp-avg-dtype bf16 "
    "--exp-avg-sq-dtype bf16": Optimizer(gradient_bytes=2, main_bytes=2, moment_bytes=4),
    LLAMA + "--fp8-format hybrid": Optimizer(weight_bytes=4.0),
    AWARE + "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather "
    "--reuse-grad-buf-for-mxfp8-param-ag": Optimizer(weight_bytes=2 + 2 / 32),
    AWARE + "--optimizer-cpu-offload --optimizer-offload-fraction 0.5": Optimizer(host_share=0.5),
}
"""Flags of gradients and optimizer, and what they take."""
FULL = LLAMA + "--pipeline-model-parallel-size 2 --recompute-granularity full "
CHECKPOINTED = {
    FULL + "--recompute-method uniform --recompute-num-layers 1": ((WHOLE,) * 8, 8),
    FULL + "--recompute-method uniform --recompute-num-layers 3": ((WHOLE,) * 8, 4),
    FULL + "--recompute-method block --recompute-num-layers 1": (
        (WHOLE, NOTHING, NOTHING, NOTHING) * 2,
        2,
    ),
}
"""Flags of full recomputation: the setting of each layer, and how many inputs are saved."""
LOSSES = {
    "": "unfused",
    "--cross-entropy-loss-fusion": "native",
}
EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
HUB_MODELS = ("llama3_8b", "mixtral_8x7b", "deepseek_v3")
OF_HUB_MODELS = (
    "--seq-length 4096 --max-position-embeddings 4096 --micro-batch-size 1 --global-batch-size 8 "
    "--bf16 --lr 1e-4 --train-iters 10 --mock-data --position-embedding-type rope "
    "--swiglu --normalization RMSNorm --disable-bias-linear --attention-dropout 0 "
    "--hidden-dropout 0 --attention-backend fused --make-vocab-size-divisible-by 1 "
    "--use-distributed-optimizer --moe-grouped-gemm --moe-token-dispatcher-type alltoall"
)
"""What a Hugging Face configuration does not say, or says of all its models."""
PUBLISHED_FLAGS = EXAMPLES / "flags/deepseek_v3_gb200.txt"
QWEN_FLAGS = PUBLISHED_FLAGS.with_name("qwen3_235b_gb200.txt")
TABLE_3 = {
    "--pipeline-model-parallel-size 8": "--pipeline-model-parallel-size 4",
    "--expert-model-parallel-size 32": "--expert-model-parallel-size 64",
    "Et|(tt|)*30L": "Ettt|(tttt|)*14ttL",
    "--fp8-format e4m3 --fp8-recipe mxfp8 --fp8-param-gather": "",
    "--reuse-grad-buf-for-mxfp8-param-ag": "",
    "--use-precision-aware-optimizer --exp-avg-dtype bf16 --exp-avg-sq-dtype bf16": "",
    "--recompute-granularity selective --recompute-modules mlp": "",
    "--global-batch-size 2048": "--global-batch-size 1024",
}
"""What the published breakdown of memory in bfloat16 has in place of some of these flags."""
NOTED = {
    LLAMA.replace("type rope", "type learned_absolute"): "leaves out the position embeddings",
    LLAMA + "--fp8-format hybrid": "derived, not measured",
    LLAMA + "--deterministic-mode": "is planned as on Hopper",
}


WORDS = re.compile(
    r"offload|fsdp|shard|_dtype|fp32|in_bf16|instances|param_gather|optimizer|wgrad|fus(ed|ion)|"
    r"stash|capacity|recompute|chunks|freeze|grouped|residual|remat"
)
"""Words in the names of options that change what a rank keeps in memory."""
MODELLED = {
    *("activation_offload_fraction", "apply_rope_fusion", "attention_softmax_in_fp32"),
    *("bias_gelu_fusion", "bias_swiglu_fusion", "delta_offload_bytes_across_pp_ranks"),
    *("fine_grained_activation_offloading", "grad_reduce_in_bf16", "main_grads_dtype"),
    *("min_offloaded_tensor_size", "moe_layer_recompute", "offload_modules"),
    *("recompute_activations", "recompute_modules", "use_distributed_optimizer"),
    *("cpu_offloading_num_layers", "tensor_parallel_num_weight_shards"),
    *("expert_tensor_parallel_num_weight_shards", "accumulate_allreduce_grads_in_fp32"),
    *("cross_entropy_loss_fusion", "optimizer_cpu_offload", "recompute_granularity"),
    "use_precision_aware_optimizer",
}
"""Options that a plan follows, or that set one which it refuses."""
OF_OTHERS = re.compile(
    r"(megatron_)?fsdp_|torch_fsdp2|moe_paged_stash_|dsa_|inference_|mamba_|muon_|fp8_|rl_|dino_|"
    r"cpu_offloading_|(data_parallel|outer_dp)_sharding|enable_full_sharding_in_hsdp|exp_avg_|"
    r"main_params_dtype|optimizer_offload_fraction|overlap_cpu_optimizer|use_torch_optimizer_for|"
    r"ddp_(param_name|reduce_scatter)_|recompute_(method|num_layers)|wgrad_deferral_limit|"
    r"ckpt_|dist(rib)?_|save_|logits_save|strict_fsdp|data_sharding|num_layers_at_|"
    r"cross_entropy_fusion_impl|moe_pad_expert_input_to_capacity"
)
"""Options of checkpoints and vision models, or that need one which is refused or noted."""
WITHOUT_EFFECT = {
    *("align_param_gather", "apply_residual_connection_post_layernorm", "bias_dropout_fusion"),
    *("delay_offload_until_cuda_graph", "gradient_accumulation_fusion", "tp_comm_bulk_wgrad"),
    *("gradient_reduce_div_fusion", "masked_softmax_fusion", "mla_down_proj_fusion"),
    *(
        "fp16_lm_cross_entropy",
        "mlp_chunks_for_prefill",
        "moe_permute_fusion",
        "moe_permute_fusion_into_hybridep",
    ),
    *("moe_router_dtype", "moe_router_fusion", "moe_single_grouped_bias", "optimizer_cuda_graph"),
    *("moe_single_grouped_weight", "overlap_param_gather"),
    "overlap_param_gather_with_optimizer_step",
    # The engine's bound on copies in flight; it changes when memory is free, not how much.
    "fine_grained_offloading_max_inflight_offloads",
}
"""Options that change no size by more than a few percent."""


LIKE_A_PATTERN = {
    "llama": HYBRID + "--hybrid-layer-pattern " + "*-" * 8,
    "uneven": HYBRID + "--pipeline-model-parallel-size 2 --decoder-first-pipeline-num-layers 6 "
    "--hybrid-layer-pattern " + "*-" * 8,
    "layout": HYBRID + "--pipeline-model-parallel-size 2 --hybrid-override-pattern "
    + "*-" * 5 + "|" + "*-" * 3,
    "pipeline": HYBRID + "--tensor-model-parallel-size 2 --sequence-parallel "
    "--pipeline-model-parallel-size 2 --hybrid-layer-pattern " + "|".join(["*-*-"] * 4),
    "every second layer": HYBRID + EXPERTS + "--hybrid-layer-pattern " + "*E*-" * 4,
    "recompute": HYBRID + "--recompute-granularity selective --recompute-modules core_attn mlp "
    "--hybrid-layer-pattern " + "*-" * 8,
}  # fmt: skip
STATE_SPACE = (
    HYBRID + EXPERTS + "--mamba-state-dim 64 --mamba-head-dim 32 --mamba-num-groups 4 "
    "--pipeline-model-parallel-size 2 --hybrid-layer-pattern ME*-|MGE/*E/*E"
)
"""Flags of the same transformer as those of PLANNED, by a pattern."""
LATENT_PATTERN = "--hybrid-layer-pattern +-+-"


def flags_of(options: dict[str, Any]) -> list[str]:
    """Write options as flags."""
    words: list[str] = []
    for name, value in options.items():
        flag = "--" + name.replace("num_moe_experts", "num_experts").replace("_", "-")
        if value is True:
            words.append(flag)
        elif isinstance(value, list):
            words += [flag, str([int(item) for item in value]).replace(" ", "")]
        elif value not in (None, False):
            words += [flag, str(value)]
    heads = options.get("num_query_groups")
    return [*words, *(["--group-query-attention"] if heads else [])]


def parse_all(rank: int, world_size: int, port: int) -> dict[str, Any]:
    """Every command line in one process, which the CPU shims change."""
    from megatron.training.arguments import add_megatron_arguments

    found: dict[str, Any] = {}
    for name, flags in PLANNED.items():
        num_processes = 16 if name in ("optimizer", "replicated") else None
        found[name] = configured_by_flags(flags.split(), num_processes)
    for flags in POLICIES:
        found[flags] = configured_by_flags((OFFLOADED + flags).split())
    for name, flags in LIKE_A_PATTERN.items():
        found["pattern", name] = configured_by_flags(flags.split())
    found["latent pattern"] = configured_by_flags((BASE + LATENT + LATENT_PATTERN).split())
    found["state space"] = configured_by_flags(STATE_SPACE.split())
    found["counted"] = configured_by_flags(LLAMA.split(), num_micro_batches=5)
    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    found["options"] = {action.dest for action in parser._actions}
    for flags in (*NOTED, *OPTIMIZERS, *CHECKPOINTED, *(LLAMA + flags for flags in LOSSES)):
        found[flags] = configured_by_flags(flags.split())
    for name in HUB_MODELS:
        options = load_hub_config(EXAMPLES / f"models/{name}.json").options
        found[name] = configured_by_flags([*OF_HUB_MODELS.split(), *flags_of(options)])
    command = split_command(read_flags(PUBLISHED_FLAGS))
    found["published"] = configured_by_flags(command.flags, 256)
    qwen = split_command(read_flags(QWEN_FLAGS))
    found["qwen"] = configured_by_flags(qwen.flags, 256)
    flags = " ".join(command.flags)
    for before, after in TABLE_3.items():
        assert before in flags
        flags = flags.replace(before, after)
    found["table 3"] = configured_by_flags(flags.split(), 256, num_micro_batches=16)
    found["inputs"] = configured_by_flags((OFFLOADED + INPUTS).split())
    for flags in OTHER_STATE:
        found[flags, "given"] = configured_by_flags(flags.split(), 2, state_gib=3.0)
    for flags in (*REFUSED, *OTHER_STATE):
        try:
            found[flags] = configured_by_flags(flags.split(), 2 if flags in OTHER_STATE else None)
        except ValueError as error:
            found[flags] = str(error)
    return found


@pytest.fixture(scope="module")
def parsed() -> dict[str, Any]:
    import_training()
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


@pytest.mark.parametrize("name", LIKE_A_PATTERN)
def test_a_pattern_gives_the_plans_of_the_same_transformer(
    parsed: dict[Any, Configured], name: str, tmp_path: Path
) -> None:
    by_flags, by_pattern = parsed[name], parsed["pattern", name]
    assert by_pattern.shape.num_layers == 2 * by_flags.shape.num_layers
    assert by_pattern.modules == by_flags.modules
    for rank in range(by_flags.shape.parallelism.pp):
        found = []
        for each in (by_flags, by_pattern):
            work = Workplan(each.shape, find_speed("h100"), each.modules, each.num_micro_batches)
            state = state_bytes(each.shape, rank)
            save_plan(build_plan(synthetic_trace(work, rank, state), each.policy), tmp_path / "p")
            found.append((tmp_path / "p").read_bytes())
        assert found[0] == found[1]


def test_latent_attention_of_a_pattern(parsed: dict[str, Configured]) -> None:
    shape = parsed["latent pattern"].shape
    assert shape.layer_kinds == ("*", "-", "*", "-")
    assert shape.latent_attention == LatentAttention(64, 32, 16, 8, 16)
    assert parsed["pattern", "llama"].shape.latent_attention is None  # type: ignore[index]


def test_state_space_layers_and_further_tokens_of_a_pattern(parsed: dict[str, Configured]) -> None:
    found = parsed["state space"]
    shape = found.shape
    assert shape.layer_kinds == (*"ME*-", *"MGE", *"/*E", *"/*E")
    assert shape.mamba == Mamba(num_heads=32, head_dim=32, state_dim=64, num_groups=4)
    assert shape.gated_delta_net == GatedDeltaNet(16, 32, 128, 128, 4)
    assert [len(chunk.layers) for chunk in shape.chunks] == [4, 9]
    assert {"mamba_scan", "gdn_rule", "expert_fc1"} <= {*found.modules}
    # Weights of the second stage, with those of both predictions and a copy of the embedding.
    hidden, inner = 512, 1024
    mamba = hidden * (3 * inner + 2 * 4 * 64 + 32) + (inner + 2 * 4 * 64) * 4
    delta = hidden * (2 * 2048 + 3 * 4096 + 2 * 32) + (2 * 2048 + 4096) * 4
    attention, experts = hidden * 64 * (2 * 8 + 2 * 4), hidden * 8 + 8 * 3 * hidden * 256
    further = 2 * hidden * hidden + attention + experts
    vocabulary = 2 * hidden * shape.vocab_size
    total = mamba + delta + experts + 2 * further + vocabulary
    assert num_parameters(shape, 1).total == total


@pytest.mark.parametrize("flags", POLICIES)
def test_every_offloading_flag_reaches_the_plan(flags: str, parsed: dict[str, Configured]) -> None:
    assert parsed[flags].policy == PolicyOptions(**POLICIES[flags])


def test_no_offloading_flag_is_left_out_of_these_cases() -> None:
    given = {word for flags in (*POLICIES, *REFUSED) for word in flags.split() if "--" in word}
    options = {field.name for field in dataclasses.fields(OffloadConfig)} | {*DEFAULTS}
    # It needs CUDA graphs, which are refused.
    options -= {"delay_offload_until_cuda_graph"}
    # PLANNED has it.
    options -= {"min_offloaded_tensor_size"}
    assert {"--" + name.replace("_", "-") for name in options} <= given


def test_modules_that_slipstream_marks_are_planned(parsed: dict[str, Configured]) -> None:
    found = parsed["own modules"]
    assert found.modules == ("qkv_linear", "mlp_fc1", "mlp_act", "mlp_fc2")
    assert found.notes[-3:-1] == (
        "planned as qkv_linear, which contains them: mla_down_proj, mla_up_proj",
        "planned as if they stayed: embedding, output_layer",
    )


@pytest.mark.parametrize("name", HUB_MODELS)
def test_a_hugging_face_configuration_is_that_of_its_flags(
    parsed: dict[str, Configured], name: str
) -> None:
    options = load_hub_config(EXAMPLES / f"models/{name}.json").options
    by_flags = parsed[name].shape
    training = {"parallelism": by_flags.parallelism, "layers_per_chunk": by_flags.layers_per_chunk}
    shape = shape_of_options(SimpleNamespace(**options), seq_length=4096, **training)
    every_layer = tuple(map(shape.kind_of, range(shape.num_layers)))
    for field in dataclasses.fields(shape):
        values = [getattr(each, field.name) for each in (shape, by_flags)]
        if field.name in ("kv_channels", "num_query_groups"):  # megatron sets the defaults.
            values = [(each.head_dim, each.query_groups) for each in (shape, by_flags)]
        elif field.name == "layer_kinds":
            values = [value or every_layer for value in values]
        assert values[0] == values[1], field.name


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
        tp=2, sequence_parallel=True, pp=2, vpp=2, group_size=2, etp=2, shards_optimizer=False
    )
    assert found.shape.layers_per_chunk == ((2, 2), (2, 2))
    assert found.shape.parallelism.num_gpus == 4
    assert parsed["uneven"].shape.layers_per_chunk == ((3,), (5,))
    assert parsed["layout"].shape.layers_per_chunk == ((5,), (3,))
    for name, is_sharded in (("optimizer", True), ("replicated", False)):
        found = parsed[name]
        assert found.shape.parallelism == Parallelism(
            dp=16, group_size=1, shards_optimizer=is_sharded
        )
        assert found.shape.parallelism.num_gpus == 16


def test_experts(parsed: dict[str, Configured]) -> None:
    shape = parsed["experts"].shape
    assert shape.experts == Experts(8, 2, 256, 128)
    assert shape.layer_kinds == ("*-", *["*E"] * 7)
    assert (shape.parallelism.ep, shape.parallelism.etp) == (4, 1)
    assert parsed["every second layer"].shape.layer_kinds == ("*E", "*-") * 4
    assert parsed["experts"].modules[-2:] == ("expert_fc1", "moe_act")


def test_latent_attention(parsed: dict[str, Configured]) -> None:
    assert parsed["latent"].shape.latent_attention == LatentAttention(64, 32, 16, 8, 16)


def test_what_moves(parsed: dict[str, Configured]) -> None:
    found = parsed["offloading"]
    assert found.modules == ("core_attn", "attn_proj")
    assert found.min_numel == 5
    assert not any("planned as if all" in note for note in found.notes)
    assert any("planned as if all modules" in note for note in parsed["llama"].notes)


def test_recomputation_and_plain_modules(parsed: dict[str, Configured]) -> None:
    assert parsed["recompute"].shape.recompute_modules == {"core_attn", "mlp"}
    assert parsed["llama"].shape.recompute_modules == frozenset()
    assert parsed["local"].shape.attention_backend == "local"
    for name, has_tiles in (("tiles", True), ("llama", False)):
        shape = parsed[name].shape
        assert (shape.mlp_sequence_tiles, shape.loss_sequence_tiles) == (has_tiles, has_tiles)


@pytest.mark.parametrize("flags", CHECKPOINTED, ids=["each", "three", "block"])
def test_full_recomputation(parsed: dict[str, Configured], flags: str) -> None:
    shape = parsed[flags].shape
    settings, num_inputs = CHECKPOINTED[flags]
    assert tuple(map(shape.setting_of, range(8))) == settings
    saved = [saved_tensors(shape, layer) for layer in range(8)]
    assert sum("checkpoint_inputs" in parts for parts in saved) == num_inputs
    assert "checkpoint_inputs" in parsed[flags].modules


def test_inputs_of_checkpoints_move_if_the_flags_say_so(parsed: dict[str, Configured]) -> None:
    assert parsed["inputs"].modules == ("checkpoint_inputs", "core_attn")
    trace = synthetic_trace(
        Workplan(parsed["inputs"].shape, find_speed("h100"), parsed["inputs"].modules, 1), 0
    )
    assert [group.name for group in trace.groups] == ["checkpoint_inputs"] * 8


def peak_gb(found: Configured, rank: int, moving: bool) -> float:
    """Return the device peak of a pipeline rank in GB."""
    work = Workplan(found.shape, find_speed("gb200"), found.modules, found.num_micro_batches)
    trace = synthetic_trace(work, rank, state_bytes(found.shape, rank))
    peaks = build_plan(trace, PolicyOptions()).peak_bytes()
    assert peaks is not None
    return peaks[moving] / 1e9


# arXiv 2603.07685, tables 3 and 5. The rank is the one with the highest peak.
@pytest.mark.parametrize(
    "name, rank, moving, gb",
    [("table 3", 1, False, 199.5), ("published", 2, False, 169), ("published", 2, True, 151)],
    ids=["bf16", "MXFP8", "offloading"],
)
def test_the_published_memory_is_predicted(
    parsed: dict[str, Configured], name: str, rank: int, moving: bool, gb: float
) -> None:
    assert peak_gb(parsed[name], rank, moving) == pytest.approx(gb, rel=0.02)


def test_the_flags_of_our_own_take_what_the_page_says(parsed: dict[str, Configured]) -> None:
    """docs/user-guide/planning.md: NVIDIA published too little of Qwen3-235B to compare with."""
    peaks = [peak_gb(parsed["qwen"], 0, moving) for moving in (False, True)]
    assert peaks == pytest.approx([96.9, 84.3], abs=0.1)
    assert state_bytes(parsed["qwen"].shape, 0) / 1e9 == pytest.approx(26.3, abs=0.1)


@pytest.mark.parametrize("flags", OPTIMIZERS, ids=[flags.split()[-1] for flags in OPTIMIZERS])
def test_gradients_and_optimizer(parsed: dict[str, Configured], flags: str) -> None:
    assert parsed[flags].shape.optimizer == OPTIMIZERS[flags]


@pytest.mark.parametrize("flags", LOSSES)
def test_the_loss(parsed: dict[str, Configured], flags: str) -> None:
    assert parsed[LLAMA + flags].shape.cross_entropy == LOSSES[flags]


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


@pytest.mark.parametrize("flags", OTHER_STATE, ids=[flags.split()[-1] for flags in OTHER_STATE])
def test_another_state_is_refused_unless_its_size_is_given(
    parsed: dict[Any, Any], flags: str
) -> None:
    assert parsed[flags].startswith(f"{OTHER_STATE[flags]}=")
    assert parsed[flags].endswith("; set --state-gib to the GiB of weights, gradients and "
                                  "optimizer on a rank")  # fmt: skip
    assert isinstance(parsed[flags, "given"], Configured)


def test_no_option_that_changes_memory_is_ignored(parsed: dict[str, Any]) -> None:
    known = MODELLED | WITHOUT_EFFECT | {rule.name for rule in PLAN_RULES}
    options = {option for option in parsed["options"] if WORDS.search(option)}
    assert {option for option in options - known if not OF_OTHERS.match(option)} == set()


@pytest.mark.parametrize("flags", NOTED)
def test_what_is_left_out_is_noted(parsed: dict[str, Configured], flags: str) -> None:
    assert any(NOTED[flags] in note for note in parsed[flags].notes)
    assert not any(NOTED[flags] in note for note in parsed["llama"].notes)
