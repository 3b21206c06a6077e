# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The same equality on a GPU, through Transformer Engine, and the memory that offloading saves."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
from fp8_recipes import RECIPES, skip_without_recipe
from gpu_models import DENSE, MIN_NUMEL, MLA, MOE, PLAN_TOLERANCE
from model_case import GDN_MODULES, MAMBA_MODULES, MLP_MODULES, OWN_MODULES
from ranks import run_ranks
from state_space_layers import LARGE
from tiny_gpt import DENSE_MODULES, MOE_MODULES, ModelCase, compare, skip_without_model

from megatron.slipstream.patches import releases

pytestmark = pytest.mark.releases

TIMED_COUNTS = (2,) * 22
GIB = 1 << 30
ALLOCATOR_TOLERANCE = 0.01
"""Relative tolerance of allocated instead of requested bytes: blocks are up to 1 MiB too large."""


def _check(case: ModelCase, modules: tuple[str, ...], counts: tuple[int, ...]) -> Any:
    result = compare(0, 1, 0, case, modules, "cuda", counts, dict(MIN_NUMEL))
    print(f"{case.kind} {'+'.join(modules)}: {result}")
    assert result.difference is None
    assert result.moved_bytes > 0
    return result


def _selections(names: tuple[str, ...], fused: tuple[str, ...] = ()) -> list[tuple[str, ...]]:
    """Each module alone, then all. ``fused``: part of the next linear layer, so not marked."""
    alone = [name for name in names if name not in fused]
    single = [("core_attn", name) if name == "attn_proj" else (name,) for name in alone]
    return [*single, names]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "modules", _selections(DENSE_MODULES, fused=("attn_norm", "mlp_norm")), ids="+".join
)
def test_dense(modules: tuple[str, ...]) -> None:
    result = _check(DENSE, modules, (2, 2, 2))
    assert result.peak_drop_bytes == pytest.approx(result.planned_drop_bytes, rel=PLAN_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("modules", _selections(MOE_MODULES, fused=("attn_norm",)), ids="+".join)
def test_moe(modules: tuple[str, ...]) -> None:
    result = _check(MOE, modules, (2, 2, 2))
    assert result.peak_drop_bytes == pytest.approx(result.planned_drop_bytes, rel=PLAN_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("modules", _selections(DENSE_MODULES, fused=("mlp_norm",)), ids="+".join)
def test_mla(modules: tuple[str, ...]) -> None:
    result = _check(MLA, modules, (1, 2, 2, 1))
    assert result.peak_drop_bytes == pytest.approx(result.planned_drop_bytes, rel=PLAN_TOLERANCE)


SHARED = replace(MOE, overrides={**MOE.overrides, "moe_shared_expert_intermediate_size": 1024})
STATE_SPACE = replace(MLA, kind="hybrid", num_layers=8, pattern="*GM-", overrides=LARGE)
LATENT_LAYERS = replace(MLA, kind="hybrid", num_layers=6, pattern="+-")
OWN = [
    *((DENSE, (name,)) for name in (*MLP_MODULES, "output_layer")),
    *((SHARED, (name,)) for name in ("expert_fc2", "shared_experts")),
    *((MLA, (name,)) for name in ("mla_down_proj", "mla_up_proj")),
    (DENSE, (*DENSE_MODULES, *OWN_MODULES["dense"])),
    (SHARED, (*MOE_MODULES, *OWN_MODULES["moe"])),
    (MLA, (*DENSE_MODULES, *OWN_MODULES["mla"])),
    *((STATE_SPACE, (name,)) for name in (*GDN_MODULES, *MAMBA_MODULES)),
    (STATE_SPACE, (*DENSE_MODULES, *OWN_MODULES["hybrid"])),
    (LATENT_LAYERS, (*DENSE_MODULES, *OWN_MODULES["mla"])),
]


@pytest.mark.gpu
@pytest.mark.parametrize(
    "case, modules", OWN, ids=[f"{case.kind} {'+'.join(modules)}" for case, modules in OWN]
)
def test_modules_that_slipstream_marks(case: ModelCase, modules: tuple[str, ...]) -> None:
    skip_without_model(case)
    result = _check(case, modules, (2, 2, 2))
    assert result.peak_drop_bytes == pytest.approx(result.planned_drop_bytes, rel=PLAN_TOLERANCE)
    # The tokens are all that the embedding saves; norms are part of the next linear layer; fused
    # attention saves its output, the input of attn_proj; MLA's projections are qkv_linear.
    silent = {"embedding", "attn_norm", "mlp_norm", "attn_proj"}
    if "mla_up_proj" in modules:
        silent.add("qkv_linear")
    assert {*modules} - {*result.moved_modules} <= (silent if len(modules) > 1 else set())


@pytest.mark.gpu
def test_nearly_all_that_a_dense_layer_saves_moves() -> None:
    """megatron-core's modules save 5 of 16 times the hidden states; the last layer stays, and the
    input of the first may."""
    marked, everything = (
        _check(DENSE, modules, (1, 1, 1)).moved_bytes
        for modules in (DENSE_MODULES, (*DENSE_MODULES, *MLP_MODULES))
    )
    hidden = DENSE.seq_length * DENSE.hidden_size * 2 * (DENSE.num_layers - 1)
    assert marked == pytest.approx(5 * hidden, rel=0.06)
    assert everything == pytest.approx(16 * hidden, rel=0.03)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "overrides",
    [
        {"attention_dropout": 0.1, "hidden_dropout": 0.1},
        {"recompute_granularity": "selective", "recompute_modules": ["layernorm", "moe_act"]},
    ],
    ids=["dropout", "recompute"],
)
def test_moe_options(overrides: dict[str, Any]) -> None:
    case = ModelCase(**{**vars(MOE), "overrides": {**MOE.overrides, **overrides}})
    _check(case, MOE_MODULES, (2, 1, 2))


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DENSE, MOE, MLA], ids=lambda case: case.kind)
@pytest.mark.parametrize(
    "goal",
    [{}, {"offload_max_overhead_percent": 1.0}, {"offload_target_memory_gib": 4.0}],
    ids=["as given", "cost", "memory"],
)
def test_plans_made_from_times(case: ModelCase, goal: dict[str, float]) -> None:
    """Enough iterations to rebuild the plan three times, all of them bitwise equal."""
    modules = MOE_MODULES if case.kind == "moe" else DENSE_MODULES
    case = ModelCase(**{**vars(case), "num_layers": 4})
    result = compare(0, 1, 0, case, modules, "cuda", TIMED_COUNTS, {**MIN_NUMEL, **goal})
    print(f"{case.kind} {goal}: {result}")
    assert result.difference is None
    assert result.is_timed
    if not goal:
        assert result.moved_bytes > 0
        planned = pytest.approx(result.planned_drop_bytes, rel=PLAN_TOLERANCE)
        assert result.peak_drop_bytes == planned


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DENSE, MOE, MLA], ids=lambda case: case.kind)
def test_hooks_in_cpp(case: ModelCase) -> None:
    """As in Python: the same bits, the planned peak, the computed layout of host buffers."""
    modules = MOE_MODULES if case.kind == "moe" else DENSE_MODULES
    case = ModelCase(**{**vars(case), "num_layers": 4})
    options = {**MIN_NUMEL, "offload_native": "auto"}
    counts = (2,) * 14  # A layout is followed once a plan is made from times and warm.
    in_cpp = compare(0, 1, 0, case, modules, "cuda", counts, options)
    assert in_cpp.is_native
    options = {**MIN_NUMEL, "offload_native": "off"}
    in_python = compare(0, 1, 0, case, modules, "cuda", counts, options)
    assert not in_python.is_native
    for result in (in_cpp, in_python):  # Their plans, made from times, need not be the same.
        assert result.difference is None
        assert result.moved_bytes > 0
        planned = pytest.approx(result.planned_drop_bytes, rel=PLAN_TOLERANCE)
        assert result.peak_drop_bytes == planned
        assert result.follows_layout


@pytest.mark.gpu
@pytest.mark.exclusive  # the target counts the whole device, including other processes' memory
@pytest.mark.parametrize("case", [DENSE, MOE], ids=lambda case: case.kind)
def test_the_peak_keeps_to_the_memory_that_is_allowed(case: ModelCase) -> None:
    """The target is half of what could be saved, so that a plan which ignores it is noticed."""
    modules = MOE_MODULES if case.kind == "moe" else DENSE_MODULES
    given = compare(0, 1, 0, case, modules, "cuda", TIMED_COUNTS, dict(MIN_NUMEL))
    target_bytes = given.reported_baseline_bytes - given.peak_drop_bytes // 2
    goal = {"offload_target_memory_gib": target_bytes / GIB}
    result = compare(0, 1, 0, case, modules, "cuda", TIMED_COUNTS, {**MIN_NUMEL, **goal})
    print(f"{case.kind} {target_bytes}: {result}; as given: {given}")
    assert result.difference is None
    assert result.is_timed
    peak_bytes = result.reported_baseline_bytes - result.peak_drop_bytes
    assert peak_bytes <= target_bytes * (1 + PLAN_TOLERANCE)
    assert 0 < result.moved_bytes < given.moved_bytes


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DENSE, MOE], ids=lambda case: case.kind)
def test_layers_that_predict_further_tokens(case: ModelCase) -> None:
    case = replace(case, overrides={**case.overrides, "mtp_num_layers": 1})
    _check(case, MOE_MODULES if case.kind == "moe" else DENSE_MODULES, (2, 2, 2))


@pytest.mark.gpu
def test_fused_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Like Transformer Engine's operations, which save tensors themselves."""
    if not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has no fused_group_mlp")
    monkeypatch.setenv("NVTE_CUTEDSL_FUSED_GROUPED_MLP", "1")
    case = replace(MOE, overrides={**MOE.overrides, "use_transformer_engine_op_fuser": True})
    result = _check(case, ("fused_group_mlp",), (2, 2, 2))
    assert result.moved_modules == ("fused_group_mlp",)
    assert result.peak_drop_bytes == pytest.approx(result.planned_drop_bytes, rel=PLAN_TOLERANCE)


@pytest.mark.gpu
@pytest.mark.parametrize("case", [DENSE, MLA], ids=lambda case: case.kind)
def test_what_others_hold_is_not_copied(case: ModelCase) -> None:
    """In the last layer too, plans made from times move the output of core_attn, which the next
    layer saves as well."""
    result = compare(0, 1, 0, case, ("core_attn",), "cuda", TIMED_COUNTS, dict(MIN_NUMEL))
    print(f"{case.kind}: {result}")
    assert result.difference is None
    assert result.is_timed
    assert result.freed_bytes == result.moved_bytes > 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", RECIPES)
def test_fp8(recipe: str) -> None:
    """Quantized weights, which modules keep, stay; tensors that forward quantized move."""
    skip_without_recipe(RECIPES[recipe])
    case = ModelCase(**{**vars(DENSE), "overrides": RECIPES[recipe]})
    result = _check(case, DENSE_MODULES + MLP_MODULES, (2, 2, 2))
    assert result.peak_drop_bytes == pytest.approx(result.planned_drop_bytes, rel=PLAN_TOLERANCE)


@pytest.mark.gpu
def test_fp8_experts() -> None:
    case = ModelCase(**{**vars(MOE), "overrides": {**MOE.overrides, **RECIPES["tensorwise"]}})
    _check(case, (*MOE_MODULES, "expert_fc2"), (2, 1, 2))


HYBRID = replace(MOE, kind="hybrid", num_layers=8)
PREDICTING = {"overrides": {**MOE.overrides, "mtp_num_layers": 2}}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {"num_layers": 12},
        {"num_layers": 6, "pattern": "*E*-*E/*E/*E", **PREDICTING},
        {"num_layers": 12, "overrides": {**MOE.overrides, **RECIPES["tensorwise"]}},
    ],
    ids=["attention, MLP, experts", "multi-token prediction", "FP8"],
)
def test_hybrid(options: dict[str, Any]) -> None:
    case = ModelCase(**{**vars(MOE), "kind": "hybrid", **options})
    skip_without_model(case)
    modules = MOE_MODULES
    if case.overrides.get("fp8"):
        skip_without_recipe(case.overrides)
        _check(case, modules, (2, 2, 1, 2))
        # If expert_fc1 moves, megatron-core saves its bfloat16 input instead of the FP8 one, which
        # is half as large: without the engine the model saves less than the plan starts from.
        modules = tuple(name for name in modules if name != "expert_fc1")
    result = _check(case, modules, (2, 2, 1, 2))
    assert result.peak_drop_bytes == pytest.approx(result.planned_drop_bytes, rel=PLAN_TOLERANCE)


@pytest.mark.gpu
def test_fp32() -> None:
    sizes = {"seq_length": 1024, "hidden_size": 1024}
    unfused = {"attention_backend": _unfused()}  # fused attention has no fp32
    case = ModelCase(**{**vars(DENSE), **sizes, "bf16": False, "overrides": unfused})
    _check(case, DENSE_MODULES, (2, 2))


def _unfused() -> Any:
    from megatron.core.transformer.enums import AttnBackend

    return AttnBackend.unfused


def _sequence_parallel(case: ModelCase) -> ModelCase:
    overrides = {**case.overrides, "sequence_parallel": True}
    return ModelCase(**{**vars(case), "tp": 2, "overrides": overrides})


@pytest.mark.gpus2
@pytest.mark.parametrize(
    "case, counts",
    [
        (ModelCase(**{**vars(DENSE), "pp": 2}), (4, 4, 2, 6)),
        (ModelCase(**{**vars(DENSE), "pp": 2, "vpp": 2, "num_layers": 4}), (4, 4, 8, 4)),
        (ModelCase(**{**vars(MOE), "pp": 2}), (4, 4, 3)),
        (ModelCase(**{**vars(MOE), "ep": 2}), (2, 2, 2)),
        (ModelCase(**{**vars(MOE), "pp": 2, "vpp": 2, "num_layers": 4}), (4,) * 14),
        (_sequence_parallel(DENSE), (2, 3, 2)),
        (_sequence_parallel(MOE), (2, 3, 2)),
        (ModelCase(**{**vars(DENSE), "cp": 2}), (2, 3, 2)),
        (_sequence_parallel(HYBRID), (2, 3, 2)),
        (replace(HYBRID, cp=2), (2, 3, 2)),
    ],
    ids=[
        *("PP2", "PP2 VPP2, one layer per chunk", "PP2, MoE", "EP2", "PP2 VPP2, MoE, timed"),
        *("TP2, sequence parallel", "TP2, sequence parallel, MoE", "CP2"),
        *("TP2, sequence parallel, hybrid", "CP2, hybrid"),
    ],
)
def test_two_ranks(case: ModelCase, counts: tuple[int, ...]) -> None:
    modules = (*DENSE_MODULES, *MLP_MODULES, "output_layer")
    if case.has_experts:
        modules = (*MOE_MODULES, "expert_fc2", "output_layer")
    results = run_ranks(2, compare, case, modules, "cuda", counts, dict(MIN_NUMEL))
    print(*results, sep="\n")
    assert [result.difference for result in results] == [None, None]
    assert results[0].moved_bytes > 0
    # An iteration that began like another one is recorded without reading memory.
    if counts[-1] == counts[0]:
        for result in results:
            planned = pytest.approx(result.planned_drop_bytes, rel=ALLOCATOR_TOLERANCE)
            assert result.peak_drop_bytes == planned


@pytest.mark.gpus2
def test_later_stages_keep_more() -> None:
    if not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has no delta_offload_bytes_across_pp_ranks")
    case, kept_bytes = ModelCase(**{**vars(DENSE), "pp": 2}), 100 << 20
    offload = {**MIN_NUMEL, "delta_offload_bytes_across_pp_ranks": kept_bytes}
    without, found = (
        run_ranks(2, compare, case, ("core_attn",), "cuda", (4, 4, 4), options)
        for options in (dict(MIN_NUMEL), offload)
    )
    print(*without, *found, sep="\n")
    assert [result.difference for result in found] == [None, None]
    kept = [a.moved_bytes - b.moved_bytes for a, b in zip(without, found, strict=True)]
    assert kept[0] == 0
    assert kept_bytes <= kept[1] < without[1].moved_bytes
