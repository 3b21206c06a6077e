# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Saved bytes scale with the shape, and inconsistent shapes are refused."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest
from hypothesis import given, settings, strategies as st

from megatron.slipstream.estimate.layers import (
    MEGATRON_MODULES,
    MODULES,
    marked_modules,
    saved_tensors,
)
from megatron.slipstream.estimate.model_shapes import (
    ATTENTION_BACKENDS,
    Experts,
    GatedDeltaNet,
    LatentAttention,
    Mamba,
    ModelShape,
    Parallelism,
)
from megatron.slipstream.estimate.training_setup import usable_modules
from megatron.slipstream.plan.settings import NOTHING, WHOLE

DENSE = ModelShape(
    num_layers=8,
    hidden_size=512,
    num_attention_heads=8,
    ffn_hidden_size=1536,
    vocab_size=1024,
    seq_length=256,
    num_query_groups=4,
)
some = settings(max_examples=40, deadline=None)
EXPERTS = Experts(num_experts=8, topk=2, ffn_hidden_size=256, shared_ffn_hidden_size=128)
LATENT = LatentAttention(128, 64, 32, 16, 32)
PER_SEQUENCE = {"query_cosines", "query_sines", "key_cosines", "key_sines", "mask"}
"""Tensors whose size does not depend on the number of sequences."""


def tensors(shape: ModelShape, layer: int = 0) -> dict[str, int]:
    """Bytes of every storage of a layer."""
    return {
        item.name: item.nbytes for part in saved_tensors(shape, layer).values() for item in part
    }


def part_nbytes(shape: ModelShape, part: str) -> int:
    return sum(item.nbytes for item in saved_tensors(shape, 0)[part])


@st.composite
def shapes(draw: st.DrawFn) -> ModelShape:
    backend = draw(st.sampled_from(ATTENTION_BACKENDS))
    precisions = ["bf16", "fp16"] if backend in ("fused", "flash") else ["bf16", "fp32"]
    has_experts = draw(st.booleans())
    latent = draw(st.sampled_from([None, LATENT, replace(LATENT, q_lora_rank=None)]))
    recompute = draw(st.sets(st.sampled_from(["core_attn", "layernorm", "moe_act", "mlp"])))
    return ModelShape(
        num_layers=draw(st.integers(1, 3)) * 4,
        hidden_size=draw(st.sampled_from([256, 512])),
        num_attention_heads=8,
        ffn_hidden_size=draw(st.sampled_from([512, 768])),
        vocab_size=1024,
        seq_length=draw(st.sampled_from([64, 128])),
        micro_batch_size=draw(st.integers(1, 3)),
        num_query_groups=draw(st.sampled_from([4, 8])),
        gated_linear_unit=draw(st.booleans()),
        normalization=draw(st.sampled_from(["RMSNorm", "LayerNorm"])),
        qk_layernorm=draw(st.booleans()),
        latent_attention=latent,
        experts=EXPERTS if has_experts else None,
        precision=draw(st.sampled_from(precisions)),
        attention_backend=backend,
        bias_activation_fusion=draw(st.booleans()),
        apply_rope_fusion=draw(st.booleans()),
        attention_dropout=draw(st.sampled_from([0.0, 0.1])),
        hidden_dropout=draw(st.sampled_from([0.0, 0.1])),
        recompute_modules=frozenset(recompute),
    )


@some
@given(shapes(), st.integers(2, 4))
def test_bytes_grow_with_the_micro_batch(shape: ModelShape, factor: int) -> None:
    more = tensors(replace(shape, micro_batch_size=factor * shape.micro_batch_size))
    for name, nbytes in tensors(shape).items():
        assert more[name] == nbytes * (1 if name in PER_SEQUENCE else factor), name


@some
@given(shapes(), st.sampled_from([2, 4]))
def test_sequence_and_tensor_parallelism_together_divide_all(shape: ModelShape, tp: int) -> None:
    parallelism = Parallelism(tp=tp, sequence_parallel=True)
    divided = tensors(replace(shape, parallelism=parallelism))
    for name, nbytes in tensors(shape).items():
        assert divided[name] * (1 if name in PER_SEQUENCE else tp) == nbytes, name


@some
@given(shapes(), st.sampled_from([2, 4]))
def test_tensor_parallelism_alone_leaves_the_residual_whole(shape: ModelShape, tp: int) -> None:
    shape = replace(shape, experts=None)
    divided = tensors(replace(shape, parallelism=Parallelism(tp=tp)))
    whole = ("layer_input", "normed_input", "attended", "normed_attended", "query_latent",
             "key_value_latent", "mlp_dropout_mask")  # fmt: skip
    for name, nbytes in tensors(shape).items():
        if name in whole:
            assert divided[name] == nbytes, name
        elif name in ("query", "attention_output", "probabilities", "mlp_projected"):
            assert divided[name] * tp == nbytes, name


@some
@given(shapes(), st.sampled_from([2, 4]))
def test_context_parallelism_divides_all_but_scores(shape: ModelShape, cp: int) -> None:
    shape = replace(shape, attention_backend="fused", precision="bf16")
    divided = tensors(replace(shape, parallelism=Parallelism(cp=cp)))
    for name, nbytes in tensors(shape).items():
        assert divided[name] * cp == nbytes, name


@some
@given(shapes())
def test_expert_parallelism_changes_nothing_with_even_routing(shape: ModelShape) -> None:
    shape = replace(shape, experts=EXPERTS)
    assert tensors(replace(shape, parallelism=Parallelism(ep=4))) == tensors(shape)


@some
@given(shapes(), st.integers(1, 4))
def test_experts_save_for_each_chosen_expert(shape: ModelShape, topk: int) -> None:
    one, more = (replace(shape, experts=replace(EXPERTS, topk=k)) for k in (1, topk))
    for name, nbytes in tensors(one).items():
        is_routed = name.startswith(("expert_", "routing_"))
        assert tensors(more)[name] == nbytes * (topk if is_routed else 1), name


def test_ranks_that_share_an_expert_take_in_the_same_rows_and_divide_its_width() -> None:
    def sizes(etp: int) -> dict[str, int]:
        parallelism = Parallelism(tp=2, sequence_parallel=True, etp=etp)
        return tensors(replace(DENSE, experts=EXPERTS, parallelism=parallelism))

    assert sizes(2)["expert_input"] == 2 * sizes(1)["expert_input"]
    assert sizes(2)["expert_projected"] == sizes(1)["expert_projected"]


@some
@given(shapes())
def test_every_marked_module_is_a_part_that_saves(shape: ModelShape) -> None:
    # The operation after a recomputed norm may save nothing: its input is discarded.
    shape = replace(shape, recompute_modules=shape.recompute_modules - {"layernorm"})
    marked = marked_modules(shape, 0)
    saved = saved_tensors(shape, 0)
    assert set(marked) <= set(saved)
    # A checkpoint of the module saves its input instead.
    checkpointed = {"core_attn", "mlp_fc1", "shared_experts"}
    assert set(saved) & set(MODULES) <= {*marked, *checkpointed}
    for part in saved.values():
        assert all(item.nbytes > 0 and item.numel > 0 for item in part)


def test_fewer_query_groups_make_keys_and_values_smaller() -> None:
    sizes = [tensors(replace(DENSE, num_query_groups=groups)) for groups in (8, 2)]
    assert sizes[0]["key"] == sizes[0]["query"] == 4 * sizes[1]["key"] == 4 * sizes[1]["value"]
    local = replace(DENSE, attention_backend="local")
    assert tensors(local)["key"] == tensors(local)["query"]  # repeated for every query


def test_a_gate_makes_the_first_projection_twice_as_wide() -> None:
    plain = replace(DENSE, gated_linear_unit=False)
    assert tensors(DENSE)["mlp_projected"] == 2 * tensors(plain)["mlp_projected"]
    assert tensors(DENSE)["mlp_activated"] == tensors(plain)["mlp_activated"]


@pytest.mark.parametrize("backend", ["fused", "flash"])
def test_fused_attention_saves_statistics_and_others_the_scores(backend: Any) -> None:
    statistics = DENSE.seq_length * DENSE.num_attention_heads * 4
    scores = DENSE.seq_length**2 * DENSE.num_attention_heads * 2
    fused = tensors(replace(DENSE, attention_backend=backend))
    assert fused["log_sum_exp"] == statistics
    assert "probabilities" not in fused
    unfused = tensors(replace(DENSE, attention_backend="unfused"))
    assert unfused["probabilities"] == scores
    assert "log_sum_exp" not in unfused


def test_norms_in_front_of_linear_layers_have_no_mark_in_transformer_engine() -> None:
    def marked(**changes: Any) -> tuple[str, ...]:
        found = marked_modules(replace(DENSE, **changes), 0)
        return tuple(name for name in found if name in MEGATRON_MODULES)

    attention = ("qkv_linear", "core_attn", "attn_proj")
    assert marked() == attention
    assert marked(latent_attention=LATENT) == ("attn_norm", *attention)
    assert marked(experts=EXPERTS) == (*attention, "mlp_norm", "expert_fc1", "moe_act")
    assert marked(attention_backend="local") == ("attn_norm", *attention, "mlp_norm")


def test_the_fused_norm_is_saved_by_its_linear_layer() -> None:
    rows = DENSE.seq_length
    hidden = rows * DENSE.hidden_size * 2
    assert part_nbytes(DENSE, "qkv_linear") == 2 * hidden + 4 * rows
    layer_norm = replace(DENSE, normalization="LayerNorm")
    assert part_nbytes(layer_norm, "qkv_linear") == 2 * hidden + 8 * rows


def test_all_to_all_context_parallelism_saves_the_output_twice() -> None:
    def names(kind: Any) -> set[str]:
        shape = replace(DENSE, parallelism=Parallelism(cp=2, cp_comm_type=kind))
        saved = saved_tensors(shape, 0)
        parts = [{item.name for item in saved[part]} for part in ("core_attn", "attn_proj")]
        return parts[0] & parts[1]

    assert names("p2p") == names("all_gather") == {"attention_output"}
    assert names("a2a") == names("a2a+p2p") == set()


def test_recomputed_inputs_move_and_recomputed_outputs_take_nothing() -> None:
    shape = replace(DENSE, experts=EXPERTS, recompute_modules=frozenset({"layernorm", "moe_act"}))
    saved = saved_tensors(shape, 0)
    kept = {part: {item.is_kept for item in saved[part]} for part in ("mlp_norm", "moe_act")}
    assert kept == {"mlp_norm": {False}, "moe_act": {False}}
    assert "expert_fc2" not in saved
    assert "normed_attended" not in tensors(shape)


def test_recomputed_modules_have_no_mark() -> None:
    shape = replace(DENSE, experts=EXPERTS, recompute_modules=frozenset({"core_attn", "moe"}))
    assert marked_modules(shape, 0) == ("qkv_linear", "attn_proj", "mlp_norm")


def test_a_recomputed_mlp_keeps_its_input_alone() -> None:
    saved = saved_tensors(replace(DENSE, recompute_modules=frozenset({"mlp"})), 0)
    assert [item.name for item in saved["mlp_fc1"]] == ["attended"]
    assert not {"mlp_act", "mlp_fc2"} & set(saved)


def test_unfused_attention_of_long_sequences_has_no_kernel() -> None:
    short = replace(DENSE, attention_backend="unfused", seq_length=16384)
    long = replace(short, seq_length=16392)
    assert not {"mask", "softmax"} & set(tensors(short))
    assert tensors(long)["softmax"] == 2 * tensors(long)["probabilities"]
    assert tensors(long)["mask"] == 16392**2


def test_linear_layers_in_fp8_save_copies_of_their_own() -> None:
    hidden = 256 * 512

    def added(**changes: Any) -> dict[str, float]:
        shape = replace(DENSE, **changes)
        before, after = tensors(shape), tensors(replace(shape, fp8_recipe="mxfp8"))
        assert set(before) <= set(after)
        found = {name: after[name] - before.get(name, 0) for name in after}
        return {name: nbytes for name, nbytes in found.items() if nbytes}

    smaller = 33 / 32 - 2
    assert added() == {
        "normed_input": smaller * hidden,
        "attention_output_quantized": 33 / 32 * hidden,
        "normed_attended": smaller * hidden,
        "mlp_activated": smaller * 256 * 1536,
    }
    found = added(experts=EXPERTS, latent_attention=LATENT)
    # The router reads the norm's output in 16 bits; two down-projections have a copy each.
    assert found["normed_input"] == (2 * 33 / 32 - 2) * hidden
    assert found["normed_attended_quantized"] == 33 / 32 * hidden
    assert found["expert_input"] == smaller * 2 * hidden
    recomputed = added(experts=EXPERTS, recompute_modules=frozenset({"layernorm", "moe_act"}))
    assert not {"normed_attended_quantized", "expert_activated"} & set(recomputed)


@pytest.mark.parametrize("changes", [{}, {"experts": EXPERTS}, {"latent_attention": LATENT}])
def test_a_recomputed_layer_saves_its_input(changes: dict[str, Any]) -> None:
    shape = replace(DENSE, layer_settings=(WHOLE,) * 8, **changes)
    (tensor,) = saved_tensors(shape, 0)["checkpoint_inputs"]
    assert (tensor.name, tensor.nbytes) == ("layer_input", 256 * 512 * 2)
    assert marked_modules(shape, 0) == ("checkpoint_inputs",)
    assert saved_tensors(shape.with_setting(WHOLE), 0) == saved_tensors(shape, 0)


def test_a_checkpoint_of_several_layers_saves_the_input_of_the_first() -> None:
    pipeline = Parallelism(pp=2)
    shape = replace(DENSE, recompute_modules=WHOLE, layers_per_checkpoint=3, parallelism=pipeline)
    saving = [layer for layer in range(8) if saved_tensors(shape, layer)]
    assert saving == [0, 3, 4, 7]
    assert [layer for layer in range(8) if marked_modules(shape, layer)] == saving


def test_each_layer_saves_what_its_setting_leaves() -> None:
    settings_ = (NOTHING, WHOLE, frozenset({"mlp"}), *[NOTHING] * 5)
    shape = replace(DENSE, layer_settings=settings_)
    for layer, setting in enumerate(settings_):
        assert saved_tensors(shape, layer) == saved_tensors(DENSE.with_setting(setting), layer)


def test_layers_are_divided_in_the_order_of_the_model() -> None:
    shape = replace(DENSE, parallelism=Parallelism(pp=2, vpp=2))
    assert [chunk.layers for chunk in shape.chunks] == [(0, 1), (2, 3), (4, 5), (6, 7)]
    assert [(chunk.pp_rank, chunk.vp_stage) for chunk in shape.chunks] == [
        (0, 0),
        (1, 0),
        (0, 1),
        (1, 1),
    ]
    assert [chunk.is_first for chunk in shape.chunks] == [True, False, False, False]
    assert [chunk.is_last for chunk in shape.chunks] == [False, False, False, True]
    uneven = replace(DENSE, parallelism=Parallelism(pp=2), layers_per_chunk=((3,), (5,)))
    assert [len(chunk.layers) for chunk in uneven.chunks] == [3, 5]


def par(**fields: Any) -> dict[str, Any]:
    return {"parallelism": Parallelism(**fields)}


@pytest.mark.parametrize(
    "changes, message",
    [
        ({"ffn_hidden_size": 0, "experts": EXPERTS}, "ffn_hidden_size=0 must be positive"),
        (
            {
                "experts": replace(EXPERTS, shared_ffn_hidden_size=129),
                **par(tp=2, sequence_parallel=True),
            },
            "moe_shared_expert_intermediate_size=129 is not a multiple of tensor_model_parallel",
        ),
        (par(cp=2, cp_comm_type="ring"), "cp_comm_type='ring' is not modelled"),
        ({"recompute_modules": frozenset({"gdn"})}, "recompute_modules contains 'gdn'"),
        ({"layers_per_checkpoint": 0}, "recompute_num_layers=0 must be positive"),
        (
            {"attention_backend": "local", **par(cp=2)},
            "context_parallel_size=2 is not supported with attention_backend='local'",
        ),
        (
            {"attention_backend": "unfused", **par(cp=2)},
            "context_parallel_size=2 is not supported with attention_backend='unfused'",
        ),
        ({"precision": "fp32"}, "attention_backend='fused' is not supported with precision='fp32'"),
        ({"recompute_modules": frozenset({"mla_up_proj"})}, "contains 'mla_up_proj', but"),
        ({"seq_length": 258, **par(cp=2)}, "seq_length=258 is not a multiple of 2 * context"),
        (
            {"seq_length": 257, **par(tp=2, sequence_parallel=True)},
            "seq_length / context_parallel_size=257 is not a multiple",
        ),
        (
            {"num_attention_heads": 12, "num_query_groups": 4, "kv_channels": 64, **par(tp=6)},
            "num_query_groups=4 and tensor_model_parallel_size=6 must divide one another",
        ),
        ({"experts": EXPERTS, **par(etp=3)}, "moe_ffn_hidden_size=256 is not a multiple"),
        ({"experts": EXPERTS, **par(tp=2)}, "with experts without sequence_parallel"),
        ({"experts": EXPERTS, "layer_kinds": ("*E",)}, "moe_layer_freq has 1 entries"),
        ({"layer_kinds": ("*E",) * 8}, "moe_layer_freq names layers with experts, but num_experts"),
        ({"layer_kinds": (*"*E*E*E*E",)}, "hybrid_layer_pattern names layers with experts, but"),
        (par(vpp=2), "virtual_pipeline_model_parallel_size=2 is not supported"),
        (par(pp=3), "num_layers=8 cannot be divided evenly among pipeline_model_parallel_size=3"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError) as error:
        replace(DENSE, **changes)
    assert message in str(error.value)
    assert ";" in str(error.value), "no cure"


NUMBERS = [
    *("num_layers", "hidden_size", "num_attention_heads", "ffn_hidden_size", "vocab_size"),
    *("seq_length", "micro_batch_size", "num_query_groups", "kv_channels", "window_size"),
]


@pytest.mark.parametrize("value", [0, -1, 1 << 28])
def test_no_number_of_a_shape_is_absurd(value: int) -> None:
    wrong: list[dict[str, Any]] = [{name: value} for name in NUMBERS]
    parts = {
        "parallelism": (Parallelism(vpp=2, group_size=4), {"shards_optimizer"}),
        "experts": (replace(EXPERTS, num_groups=4, group_topk=2), set()),
        "latent_attention": (LATENT, set()),
    }
    for name, (part, others) in parts.items():
        for field in fields(part):
            is_number = field.name not in others and type(getattr(part, field.name)) is int
            # 0 is a model without shared experts.
            if is_number and (field.name, value) != ("shared_ffn_hidden_size", 0):
                wrong.append({name: replace(part, **{field.name: value})})
    assert len(wrong) >= len(NUMBERS) + 18
    for changes in wrong:
        with pytest.raises(ValueError, match=f"={value} (must be positive|is too large to plan); "):
            replace(DENSE, **changes)


def test_each_module_that_may_move_is_named_once_in_layer_order() -> None:
    parts = {"mamba": Mamba(8, 64, 32, 2), "gated_delta_net": GatedDeltaNet(4, 8, 64, 64, 4)}
    shape = replace(DENSE, num_layers=4, layer_kinds=(*"*GM-",), **parts)
    found = usable_modules(shape)
    assert {"gdn_rule", "mamba_scan"} < {*found}
    assert [*found] == [name for name in MODULES if name in found]
