# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A plan from a configuration has the sizes that megatron-core's layers save, group by group.

All models are built and run on the CPU, in one separate process.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from model_case import GDN_MODULES, MAMBA_MODULES, MLP_MODULES
from ranks import run_ranks
from shape_recordings import Recording, record_all
from state_space_layers import GATED_DELTA_NET, MAMBA
from tiny_gpt import DENSE_MODULES, ModelCase

from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.layers import (
    CHECKPOINT_INPUTS,
    marked_modules,
    saved_tensors,
)
from megatron.slipstream.estimate.model_shapes import ModelShape
from megatron.slipstream.estimate.synthetic import Workplan, synthetic_trace
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import GroupTrace, StepKind, Trace

TOLERANCE = 0.02
NUM_MICRO_BATCHES = 2


def _recompute(*modules: str) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules)}


def _case(kind: str, bf16: bool = True, num_layers: int = 2, **overrides: Any) -> ModelCase:
    return ModelCase(kind, num_layers=num_layers, bf16=bf16, overrides=overrides)


DROPOUT = {"attention_dropout": 0.1, "hidden_dropout": 0.1}
WHOLE_LAYERS = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}
FEWER_KEYS = {**GATED_DELTA_NET, "linear_num_key_heads": 2, "linear_value_head_dim": 48}
FURTHER = {"mtp_num_layers": 1, "mtp_loss_scaling_factor": 0.1}


def _hybrid(pattern: str, bf16: bool = True, **overrides: Any) -> ModelCase:
    num_layers = len(pattern.partition("/")[0])
    return ModelCase(
        "hybrid", num_layers=num_layers, pattern=pattern, bf16=bf16, overrides=overrides
    )


MODELS: dict[str, ModelCase] = {
    "GQA": _case("dense"),
    "GQA, fp32": _case("dense", bf16=False),
    "no GQA": _case("dense", num_query_groups=4),
    "no GQA, fp32": _case("dense", bf16=False, num_query_groups=4),
    "layer norm": _case("dense", normalization="LayerNorm"),
    "QK norm": _case("dense", qk_layernorm=True),
    "softmax in 16 bits": _case("dense", attention_softmax_in_fp32=False),
    "dropout": _case("dense", **DROPOUT),
    "dropout, softmax in 16 bits": _case("dense", attention_softmax_in_fp32=False, **DROPOUT),
    "dropout, fp32": _case("dense", bf16=False, **DROPOUT),
    "odd sizes": ModelCase(
        "dense",
        num_layers=2,
        hidden_size=132,
        num_attention_heads=6,
        seq_length=29,
        micro_batch_size=3,
    ),
    "experts": _case("moe"),
    "experts, fp32": _case("moe", bf16=False),
    "experts, top 3 of 8": _case("moe", num_moe_experts=8, moe_router_topk=3),
    "experts, not gated": _case("moe", gated_linear_unit=False),
    "experts, a shared one": _case("moe", moe_shared_expert_intermediate_size=96),
    "dense and expert layers": _case("mixed"),
    "MLA": _case("mla"),
    "MLA, fp32": _case("mla", bf16=False),
    "MLA, QK norm": _case("mla", qk_layernorm=True),
    "MLA, queries not compressed": _case("mla", q_lora_rank=None),
    "MLA up projection recomputed": _case("mla", num_layers=3, **_recompute("mla_up_proj")),
    "attention and MLP recomputed": _case("dense", **_recompute("core_attn", "mlp")),
    "norms and activation recomputed": _case(
        "moe", num_layers=3, **_recompute("layernorm", "moe_act")
    ),
    "shared experts recomputed": _case(
        "moe", moe_shared_expert_intermediate_size=96, **_recompute("shared_experts")
    ),
    "whole layers recomputed": _case("moe", **WHOLE_LAYERS),
    "Mamba": _hybrid("MM", **MAMBA),
    "Mamba, fp32": _hybrid("MM", bf16=False, **MAMBA),
    "gated delta net": _hybrid("GG", **GATED_DELTA_NET),
    "gated delta net, fewer keys": _hybrid("GG", **FEWER_KEYS),
    "gated delta net, norms recomputed": _hybrid(
        "GGG", **GATED_DELTA_NET, **_recompute("layernorm")
    ),
    "pattern": _hybrid("M*-GEM*-GE", **MAMBA, **GATED_DELTA_NET),
    "further tokens": _hybrid("*-/*-", **FURTHER),
}

WITH_ONE_MORE_LAYER = (
    "GQA",
    "experts",
    "experts, a shared one",
    "MLA",
    "dropout",
    "whole layers recomputed",
    "Mamba",
    "gated delta net",
    "gated delta net, fewer keys",
    "further tokens",
)
WITHOUT_MAMBA = [name for name, case in MODELS.items() if "M" not in case.hybrid_layer_pattern]
"""Without models whose plain norm has marks of its own."""


@pytest.fixture(scope="module")
def recordings() -> dict[str, Recording]:
    cases = {name: (case, _modules(case)) for name, case in MODELS.items()}
    for name in WITH_ONE_MORE_LAYER:
        more = replace(MODELS[name], num_layers=MODELS[name].num_layers + 1)
        if name == "further tokens":
            more = _hybrid("*-/*-/*-", **{**FURTHER, "mtp_num_layers": 2})
        cases[f"{name}, one more layer"] = more, ()
    (found,) = run_ranks(1, record_all, cases, NUM_MICRO_BATCHES)
    return found


def _modules(case: ModelCase) -> tuple[str, ...]:
    options, modules = case.overrides, DENSE_MODULES
    if options.get("recompute_granularity") == "full":
        return (CHECKPOINT_INPUTS, "core_attn")
    recomputed = options.get("recompute_modules", ())
    if case.kind == "hybrid":
        modules += (*GDN_MODULES, *MAMBA_MODULES)
    if case.kind != "moe" and "mlp" not in recomputed:
        modules += MLP_MODULES
    if case.has_experts:
        modules += ("expert_fc1", "moe_act")
        modules += () if "moe_act" in recomputed else ("expert_fc2",)
        shared = "moe_shared_expert_intermediate_size" in options
        shared = shared and "shared_experts" not in recomputed
        modules += ("shared_experts",) if shared else ()
    return modules


def _groups_of_second_pass(trace: Trace) -> list[GroupTrace]:
    """The groups of a pass; the plain norm of a Mamba layer is part of its projection's group."""
    found: list[GroupTrace] = []
    for group in trace.groups:
        if group.key.chunk_pass != 1:
            continue
        if found and found[-1].name == group.name == "mamba_in_proj":
            found[-1] = replace(found[-1], storages=found[-1].storages + group.storages)
        else:
            found.append(group)
    return found


@pytest.mark.parametrize("name", MODELS)
def test_each_group_saves_what_was_computed(recordings: dict[str, Recording], name: str) -> None:
    shape, trace, _, _ = recordings[name]
    modules = _modules(MODELS[name])
    computed = []
    for layer in range(shape.num_layers):
        saved = saved_tensors(shape, layer)
        saved_by_router = {item.name for item in saved.get("router", ())}
        for module in marked_modules(shape, layer):
            if module in modules:
                own = [item for item in saved.get(module, ()) if not item.is_kept]
                movable = [item.nbytes for item in own if item.name not in saved_by_router]
                computed.append((module, sum(movable)))
    groups = _groups_of_second_pass(trace)
    assert [group.name for group in groups] == [module for module, _ in computed]
    # The last layer never moves, so other holders of its tensors are not detected.
    for group, (module, nbytes) in zip(groups[: len(groups) // 2], computed, strict=False):
        storages = [trace.storages[index] for index in group.storages]
        recorded = sum(item.nbytes for item in storages if not item.held_outside)
        if shape.recomputes("layernorm") and module == "qkv_linear":
            recorded = 0  # The norm's output is discarded after the group has saved it.
        assert nbytes == pytest.approx(recorded, rel=TOLERANCE), f"{group.key} {module}"


@pytest.mark.parametrize("name", WITHOUT_MAMBA)
def test_marks_come_in_the_order_in_which_layers_make_them(
    recordings: dict[str, Recording], name: str
) -> None:
    shape, trace, _, _ = recordings[name]
    # Only real layers mark where backward leaves a group.
    recorded = tuple(step for step in trace.steps if step.kind is not StepKind.BACKWARD_END)
    assert _synthetic(shape, name).steps == recorded


@pytest.mark.parametrize(
    "name", [name for name in WITHOUT_MAMBA if "recomputed" not in name and "dropout" not in name]
)
def test_as_much_leaves_as_planned(recordings: dict[str, Recording], name: str) -> None:
    shape, _, d2h_bytes, _ = recordings[name]
    plan = build_plan(_as_followed(_synthetic(shape, name)), PolicyOptions())
    assert plan.moved_nbytes == pytest.approx(d2h_bytes, rel=TOLERANCE)
    assert d2h_bytes > 0


@pytest.mark.parametrize("name", WITH_ONE_MORE_LAYER)
def test_one_more_layer_saves_what_all_parts_of_it_do(
    recordings: dict[str, Recording], name: str
) -> None:
    more, fewer = recordings[f"{name}, one more layer"], recordings[name]
    recorded = more.saved_bytes - fewer.saved_bytes
    computed = _saved_bytes(more, name) - _saved_bytes(fewer, name)
    assert computed == pytest.approx(recorded, rel=TOLERANCE)


def _saved_bytes(recording: Recording, name: str) -> int:
    """Bytes that a pass keeps, including parts without marks."""
    return _workplan(recording.shape, name).chunks[0, 0].saved_bytes


def _workplan(shape: ModelShape, name: str) -> Workplan:
    return Workplan(shape, find_speed("h200"), _modules(MODELS[name]), NUM_MICRO_BATCHES, 1)


def _synthetic(shape: ModelShape, name: str) -> Trace:
    return synthetic_trace(_workplan(shape, name), 0)


def _as_followed(trace: Trace) -> Trace:
    """As on a CPU: without times, and the model's input, which lingers, stays."""
    storages = (
        replace(item, held_outside=item.held_outside or item.lingers_until > 0)
        for item in trace.storages
    )
    return replace(trace, storages=tuple(storages), step_ms=(), bandwidth=None)
