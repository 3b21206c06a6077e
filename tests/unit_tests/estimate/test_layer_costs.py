# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Operations are counted by the usual formula, and GPUs have the speed of the table."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, Optional

import pytest

from megatron.slipstream.estimate.gpus import ATTENTION_SHARE, GPUS, find_speed
from megatron.slipstream.estimate.layers import (
    Cost,
    attended_pairs,
    head_costs,
    layer_parts,
)
from megatron.slipstream.estimate.model_shapes import (
    RECOMPUTE_MODULES,
    Experts,
    LatentAttention,
    ModelShape,
    Optimizer,
    Parallelism,
)
from megatron.slipstream.estimate.model_state import host_state_bytes, num_parameters, state_bytes
from megatron.slipstream.plan.settings import NOTHING, WHOLE, LayerSetting

LLAMA = ModelShape(32, 4096, 32, 14336, 128256, 8192, 1, 8)
MIXTRAL = replace(LLAMA, experts=Experts(8, 2, 14336))
LATENT = replace(LLAMA, latent_attention=LatentAttention(1536, 512, 128, 64, 128))


def layer_costs(
    shape: ModelShape, layer: int, setting: Optional[LayerSetting] = None
) -> dict[str, Cost]:
    """The costs of a layer's parts, in forward order."""
    if setting is not None:
        shape = replace(shape, layer_settings=(setting,) * shape.num_layers)
    return {part.name: part.cost for part in layer_parts(shape, layer)}


def flops(shape: ModelShape) -> float:
    """Operations of matrix products in forward, without attention's scores."""
    return sum(cost.flops for cost in head_costs(shape).values()) + sum(
        cost.flops
        for layer in range(shape.num_layers)
        for part, cost in layer_costs(shape, layer).items()
        if part != "core_attn"
    )


@pytest.mark.parametrize("shape", [LLAMA, LATENT], ids=["dense", "latent"])
def test_every_parameter_is_used_twice_for_a_token(shape: ModelShape) -> None:
    used = num_parameters(shape, 0).total - shape.vocab_size * shape.hidden_size  # embedding
    assert flops(shape) == pytest.approx(2 * shape.seq_length * used)


def test_every_parameter_of_the_chosen_experts_is() -> None:
    dense, experts = num_parameters(MIXTRAL, 0)
    used = dense - MIXTRAL.vocab_size * MIXTRAL.hidden_size + experts * 2 // 8
    assert flops(MIXTRAL) == pytest.approx(2 * MIXTRAL.seq_length * used)


def test_causal_attention_computes_half_of_the_pairs() -> None:
    cost = layer_costs(LLAMA, 0)["core_attn"]
    assert cost.flops == 2 * 2 * LLAMA.seq_length**2 / 2 * LLAMA.hidden_size
    unfused = layer_costs(replace(LLAMA, attention_backend="unfused"), 0)["core_attn"]
    assert unfused.flops == 2 * cost.flops
    assert unfused.traffic_bytes > cost.traffic_bytes == 0


def test_a_window_shortens_attention() -> None:
    assert attended_pairs(replace(LLAMA, window_size=8192)) == attended_pairs(LLAMA)
    narrow = replace(LLAMA, window_size=1024)
    assert attended_pairs(narrow) == 8192 * 1024 - 1024**2 / 2


@pytest.mark.parametrize("parallelism", [Parallelism(tp=4, sequence_parallel=True),
                                         Parallelism(cp=4)], ids=["TP", "CP"])  # fmt: skip
def test_parallelism_divides_the_work(parallelism: Parallelism) -> None:
    whole, divided = layer_costs(LLAMA, 0), layer_costs(replace(LLAMA, parallelism=parallelism), 0)
    for part, cost in whole.items():
        assert divided[part].flops == pytest.approx(cost.flops / 4)
        assert divided[part].traffic_bytes == pytest.approx(cost.traffic_bytes / 4)


def test_backward_computes_products_twice_and_recomputed_ones_again() -> None:
    speed = find_speed("h200")
    plain = layer_costs(MIXTRAL, 0)
    again = layer_costs(replace(MIXTRAL, recompute_modules=frozenset({"moe"})), 0)
    forward_ms = plain["expert_fc1"].ms(speed, "forward")
    assert plain["expert_fc1"].backward_ms(speed) == pytest.approx(2 * forward_ms)
    assert again["expert_fc1"].backward_ms(speed) == pytest.approx(3 * forward_ms)
    assert again["qkv_linear"] == plain["qkv_linear"]
    attention = plain["core_attn"]
    forward_ms = attention.ms(speed, "forward")
    assert attention.backward_ms(speed) == pytest.approx(2.5 * forward_ms)
    assert forward_ms == pytest.approx(attention.flops / speed.tflops / ATTENTION_SHARE / 1e9)


SHARED = Experts(8, 2, 14336, shared_ffn_hidden_size=4096)
RERUNS = {
    "core_attn": (LLAMA, {"core_attn"}),
    "mlp": (LLAMA, {"mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2"}),
    "layernorm": (replace(LATENT, experts=MIXTRAL.experts), {"attn_norm", "mlp_norm"}),
    "mla_up_proj": (LATENT, {"qkv_linear", "rotary"}),
    "moe_act": (MIXTRAL, {"moe_act"}),
    "shared_experts": (replace(MIXTRAL, experts=SHARED), {"shared_experts"}),
    "moe": (
        replace(MIXTRAL, experts=SHARED),
        {"router", "shared_experts", "expert_fc1", "moe_act", "expert_fc2", "combine"},
    ),
}


@pytest.mark.parametrize("module", RECOMPUTE_MODULES)
def test_backward_runs_the_parts_of_a_recomputed_module_again(module: str) -> None:
    shape, parts = RERUNS[module]
    found = layer_costs(shape, 0, frozenset({module}))
    assert {part for part, cost in found.items() if cost.rerun_share} == parts
    assert layer_costs(shape.with_setting(frozenset({module})), 0) == found
    assert not any(cost.rerun_share for cost in layer_costs(shape, 0).values())


def test_only_the_up_projections_of_latent_attention_run_again() -> None:
    found = layer_costs(LATENT, 0, frozenset({"mla_up_proj"}))["qkv_linear"]
    down = 2 * LATENT.seq_length * LATENT.hidden_size * (1536 + 512 + 64)
    assert found.rerun_share * found.flops == pytest.approx(found.flops - down)


@pytest.mark.parametrize("setting", [{"mlp"}, {"layernorm"}], ids=["mlp", "norms"])
def test_what_a_layer_of_another_kind_has_does_not_run_again(setting: set[str]) -> None:
    # Norms before a dense layer's products are fused with them; experts are no MLP.
    shape = LLAMA if setting == {"layernorm"} else MIXTRAL
    found = layer_costs(shape, 0, frozenset(setting))
    assert not any(cost.rerun_share for cost in found.values())


@pytest.mark.parametrize("shape", [LLAMA, LATENT, MIXTRAL], ids=["dense", "latent", "experts"])
def test_backward_of_a_recomputed_layer_is_its_forward_and_its_backward(shape: ModelShape) -> None:
    speed = find_speed("h200")
    plain, whole = layer_costs(shape, 0).values(), layer_costs(shape, 0, WHOLE).values()
    total = sum(cost.ms(speed, "forward") + cost.backward_ms(speed) for cost in plain)
    assert sum(cost.backward_ms(speed) for cost in whole) == pytest.approx(total)


def test_each_layer_has_its_setting() -> None:
    settings = (WHOLE, *[NOTHING] * 30, frozenset({"mlp"}))
    shape = replace(LLAMA, layer_settings=settings)
    for layer, setting in enumerate(settings):
        assert layer_costs(shape, layer) == layer_costs(LLAMA, layer, setting)


def test_state_is_weights_gradients_and_a_share_of_the_optimizer() -> None:
    count = num_parameters(LLAMA, 0).total
    assert state_bytes(LLAMA, 0) == count * (2 + 4 + 12)
    assert state_bytes(replace(LLAMA, parallelism=Parallelism(dp=8)), 0) == count * 7.5
    by_context = Parallelism(cp=8)
    assert state_bytes(replace(LLAMA, parallelism=by_context), 0) == count * 7.5
    whole = replace(by_context, dp=2, shards_optimizer=False)
    assert state_bytes(replace(LLAMA, parallelism=whole), 0) == count * 18
    fp32 = replace(LLAMA, precision="fp32", attention_backend="unfused")
    assert state_bytes(fp32, 0) == count * (4 + 4 + 8)


def test_an_optimizer_on_the_host_leaves_weights_and_gradients() -> None:
    count = num_parameters(LLAMA, 0).total
    half = replace(LLAMA, optimizer=Optimizer(gradient_bytes=2, host_share=0.5))
    assert state_bytes(half, 0) == count * (2 + 2 + 12 / 2)
    assert host_state_bytes(half, 0) == count * 16 / 2
    assert host_state_bytes(LLAMA, 0) == 0
    small = replace(LLAMA, optimizer=Optimizer(main_bytes=2, moment_bytes=4))
    assert state_bytes(small, 0) == count * (2 + 4 + 6)


def test_experts_have_an_optimizer_of_fewer_shares() -> None:
    shape = replace(MIXTRAL, parallelism=Parallelism(ep=8, dp=8))
    dense, experts = num_parameters(shape, 0)
    assert experts == num_parameters(MIXTRAL, 0).experts / 8
    assert state_bytes(shape, 0) == dense * (6 + 12 / 8) + experts * (6 + 12)
    by_context = replace(shape, parallelism=Parallelism(ep=4, cp=8))
    experts = num_parameters(by_context, 0).experts
    assert state_bytes(by_context, 0) == dense * (6 + 12 / 8) + experts * (6 + 12 / 2)


def test_pipeline_ranks_divide_the_parameters() -> None:
    shape = replace(LLAMA, parallelism=Parallelism(pp=4))
    counts = [num_parameters(shape, rank).total for rank in range(4)]
    assert sum(counts) == num_parameters(LLAMA, 0).total
    assert counts[1] == counts[2] < counts[0] == counts[3]
    tied = replace(LLAMA, share_embeddings_and_output_weights=True)
    assert num_parameters(tied, 0).total == counts[0] + sum(counts[1:3]) + counts[1]


def test_a_measured_link_is_used_and_another_is_scaled() -> None:
    h200, a100 = find_speed("h200"), find_speed("A100")
    assert h200.is_link_measured
    assert not a100.is_link_measured
    assert a100.bandwidth == pytest.approx([rate / 2 for rate in h200.bandwidth], abs=0.01)


def test_given_rates_take_the_place_of_the_table() -> None:
    speed = find_speed("h100", tflops=400, gb_per_s=25)
    assert speed.tflops == 400
    assert speed.bandwidth[:2] == (25, 25)
    assert speed.bandwidth.d2h_both_gb_per_s < 25
    assert speed.compute_ms(400e9, 0) == pytest.approx(1.0)


DEEPSEEK = replace(
    LLAMA,
    **{"num_layers": 61, "hidden_size": 7168, "num_attention_heads": 128, "ffn_hidden_size": 18432},
    **{"vocab_size": 129280, "seq_length": 4096, "num_query_groups": None, "qk_layernorm": True},
    latent_attention=LatentAttention(1536, 512, 128, 64, 128),
    experts=Experts(256, 8, 2048, 2048),
    layer_kinds=("*-",) * 3 + ("*E",) * 58,
)
QWEN3 = ModelShape(
    *(94, 4096, 64, 12288, 151936, 4096, 1, 4, 128),
    qk_layernorm=True,
    experts=Experts(128, 8, 1536),
)


# arXiv 2603.07685, table 11: tokens per second and GPU, on 256 GB200 in bfloat16 and MXFP8.
@pytest.mark.parametrize(
    "shape, rates, tolerance", [(DEEPSEEK, (3298, 4020), 0.05), (QWEN3, (5100, 6212), 0.2)]
)
def test_fp8_saves_the_time_that_was_published(
    shape: ModelShape, rates: tuple[int, int], tolerance: float
) -> None:
    """What is not modelled, communication above all, takes the same time in both."""
    speed = find_speed("gb200")

    def step_ms(shape: ModelShape) -> float:
        costs = [layer_costs(shape, layer).values() for layer in range(shape.num_layers)]
        every = [*itertools.chain(*costs), *head_costs(shape).values()]
        return sum(cost.ms(speed, "forward") + cost.backward_ms(speed) for cost in every)

    saved_ms = step_ms(shape) - step_ms(replace(shape, fp8_recipe="mxfp8"))
    published_ms = 1e3 * shape.seq_length * (1 / rates[0] - 1 / rates[1])
    assert saved_ms == pytest.approx(published_ms, rel=tolerance)


def test_a_gpu_has_the_fp8_that_transformer_engine_has_there() -> None:
    able = {name for name, facts in GPUS.items() if "mxfp8" in facts.fp8_recipes}
    assert able == {"b200", "gb200"}
    assert find_speed("a100").fp8_recipes == ()


@pytest.mark.parametrize(
    "arguments, message",
    [
        ({"name": "h2000"}, "--gpu=h2000 is not in the table; did you mean 'h200'?"),
        ({"name": "tpu"}, "set --tflops and --gb-per-s"),
        ({"name": "h200", "tflops": -1}, "--tflops=-1 must be above 0"),
        ({"name": "h200", "gb_per_s": float("nan")}, "--gb-per-s=nan must be above 0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_speeds_that_make_no_sense_are_refused(arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        find_speed(**arguments)
    assert message in str(error.value)
