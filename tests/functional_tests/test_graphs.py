# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Transformer Engine's CUDA graphs with offloading inside and outside of them, on a GPU.

For every captured scope and set of moving modules, losses and gradients bitwise equal those of the
eager model without the engine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from typing import Any, Optional

import gpu_models
import pytest
import torch
from fp8_recipes import RECIPES, skip_without_recipe
from graphed_models import NUM_EAGER_STEPS, Training, compare, graph_memory, with_graphs
from model_case import (
    DENSE_MODULES,
    GDN_MODULES,
    MAMBA_MODULES,
    MLP_MODULES,
    MOE_MODULES,
    SHARED_EXPERTS,
    ModelCase,
)
from ranks import run_ranks
from state_space_layers import LARGE

from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.plan_cache import NUM_UNTIL_TIMED
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import releases

pytestmark = [pytest.mark.gpu, pytest.mark.releases]
has_later_options = pytest.mark.skipif(
    'not releases.is_since("0.19")',
    reason="needs an option of megatron-core 0.19",
)

DENSE = ModelCase(
    "dense",
    num_layers=5,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=2048,
    micro_batch_size=1,
    vocab_size=1024,
    bf16=True,
)
MOE = ModelCase(
    "moe",
    num_layers=4,
    hidden_size=1024,
    num_attention_heads=16,
    seq_length=1024,
    micro_batch_size=2,
    vocab_size=1024,
    bf16=True,
    overrides={"moe_permute_fusion": True},
)
HYBRID_MTP = replace(
    MOE,
    kind="hybrid",
    pattern="*E*E/*E",
    overrides={**MOE.overrides, "mtp_num_layers": 1},
)
STATE_SPACE = replace(
    DENSE, kind="hybrid", pattern="*GM-", num_layers=8, seq_length=1024, overrides=LARGE
)
"""With stand-ins for the kernels of Mamba and of gated delta nets."""
CASES = {"dense": DENSE, "moe": MOE, "hybrid, MTP": HYBRID_MTP}
OFFLOAD = {"min_offloaded_tensor_size": 1024}
NUM_STEPS = 3

Row = Callable[..., None]
Result = tuple[list[torch.Tensor], list[Optional[torch.Tensor]]]


def _train(
    case: ModelCase, modules: tuple[str, ...] = (), **options: Any
) -> tuple[Result, Training]:
    with Training(case, modules, **options) as training:
        training.step(NUM_EAGER_STEPS)
        training.capture()
        training.step(NUM_STEPS)
        return (training.losses, training.gradients), training


@cache
def _eager(kind: str) -> Result:
    """Without graphs and without the engine."""
    return _train(CASES[kind])[0]


def _assert_equal(result: Result, expected: Result) -> None:
    for ours, theirs in zip(result, expected, strict=True):
        assert len(ours) == len(theirs)
        for index, (left, right) in enumerate(zip(ours, theirs, strict=True)):
            assert (left is None) == (right is None)
            assert left is None or torch.equal(left, right), f"number {index} differs"


DENSE_SCOPES = (("attn",), ("mlp",), ("attn", "mlp"), ())
MOE_SCOPES = (("attn",), ("moe_router",), ("attn", "moe_router"))
SCOPES = [("dense", scope) for scope in DENSE_SCOPES] + [("moe", scope) for scope in MOE_SCOPES]


def _sets(kind: str) -> tuple[tuple[str, ...], ...]:
    if kind == "dense":
        return (("core_attn", "attn_proj"), ("qkv_linear",), DENSE_MODULES + MLP_MODULES)
    return (("core_attn",), ("expert_fc1", "moe_act"), MOE_MODULES)


def _cases() -> Iterator[Any]:
    for kind, scope in SCOPES:
        for modules in _sets(kind):
            yield pytest.param(kind, scope, modules, id=f"{kind} {scope} {'+'.join(modules)}")


@pytest.mark.parametrize("kind, scope", SCOPES, ids=str)
def test_graphs_without_the_engine(kind: str, scope: tuple[str, ...]) -> None:
    """The baseline is valid: graphs alone change nothing either."""
    _assert_equal(_train(with_graphs(CASES[kind], scope))[0], _eager(kind))


@pytest.mark.parametrize("kind, scope, modules", [*_cases()])
def test_graphs_and_offloading(
    kind: str, scope: tuple[str, ...], modules: tuple[str, ...], record_row: Row
) -> None:
    result, training = _train(with_graphs(CASES[kind], scope), modules, **OFFLOAD)
    _assert_equal(result, _eager(kind))
    attention_is_graphed = not scope or "attn" in scope
    in_attention = {"qkv_linear", "core_attn"} & set(modules)
    assert (training.graphed_bytes > 0) >= bool(attention_is_graphed and in_attention)
    _record_equality(record_row, kind, scope, modules, training)


def test_graphs_before_further_predicted_tokens_of_a_hybrid_model() -> None:
    """Graphs of the layers before them; what predicts further tokens runs eagerly and moves."""
    kind, modules = "hybrid, MTP", (*MOE_MODULES, "expert_fc2")
    result, training = _train(with_graphs(CASES[kind], ("attn", "moe_router")), modules, **OFFLOAD)
    _assert_equal(result, _eager(kind))
    assert training.graphed_bytes > 0
    assert training.engine is not None
    assert training.engine.report.d2h_bytes > 0


@pytest.mark.parametrize("kind, scope", [("dense", ()), ("moe", ("attn", "moe_router"))], ids=str)
def test_layers_that_a_framework_builds(kind: str, scope: tuple[str, ...]) -> None:
    case = replace(with_graphs(CASES[kind], scope), keeps_layers=True)
    result, training = _train(case, ("core_attn", "attn_proj"), **OFFLOAD)
    _assert_equal(result, _eager(kind))
    assert training.graphed_bytes > 0


def _record_equality(
    record_row: Row,
    case: str,
    scope: tuple[str, ...],
    modules: tuple[str, ...],
    training: Training,
) -> None:
    record_row(
        "graph_equality",
        case=case,
        scope=scope,
        modules=modules,
        graphed_bytes=training.graphed_bytes,
        graphed_modules=training.graphed_modules,
        equal=True,
        release=releases.release(),
    )


MLA = replace(gpu_models.MLA, num_layers=5)
RECOMPUTED = {"recompute_granularity": "selective"}
MORE = {
    # name: (the model, its options, captured parts, moving modules, those that move in graphs)
    "norms of dense layers": (
        replace(DENSE, has_own_norms=True),
        {},
        (),
        ("attn_norm", "mlp_norm"),
        {"mlp_norm"},
    ),
    "dropout": (
        DENSE,
        {"attention_dropout": 0.1, "hidden_dropout": 0.1},
        (),
        DENSE_MODULES,
        {"qkv_linear", "core_attn"},
    ),
    "MLA": (MLA, {}, (), DENSE_MODULES, {"qkv_linear", "core_attn"}),
    "MLA, attention": (MLA, {}, ("attn",), DENSE_MODULES, {"qkv_linear", "core_attn"}),
    "MLA, recomputed": (
        MLA,
        {**RECOMPUTED, "recompute_modules": ["mla_up_proj", "layernorm"]},
        ("attn",),
        ("core_attn", "attn_proj"),
        {"core_attn"},
    ),
    "norms recomputed": (
        replace(DENSE, has_own_norms=True),
        {**RECOMPUTED, "recompute_modules": ["layernorm"]},
        (),
        DENSE_MODULES,
        {"core_attn", "mlp_norm"},
    ),
    "experts recomputed": (
        MOE,
        {**RECOMPUTED, "recompute_modules": ["moe_act", "layernorm"]},
        ("attn", "moe_router"),
        MOE_MODULES,
        {"core_attn"},
    ),
    "dispatch": (MOE, {}, ("attn", "moe_router", "moe_preprocess"), MOE_MODULES, {"core_attn"}),
    **{
        f"FP8, {name}": (DENSE, recipe, (), DENSE_MODULES, {"qkv_linear", "core_attn"})
        for name, recipe in RECIPES.items()
    },
    "MLP of dense layers": (DENSE, {}, ("mlp",), MLP_MODULES, {*MLP_MODULES}),
    "shared experts": (
        MOE,
        SHARED_EXPERTS,
        ("attn", "moe_router"),
        ("core_attn", "expert_fc2", "shared_experts"),
        {"core_attn", "shared_experts"},
    ),
    "hybrid": (
        replace(MOE, kind="hybrid", num_layers=8),
        {},
        ("attn", "mlp", "moe_router"),
        MOE_MODULES,
        {"core_attn"},
    ),
    "hybrid, whole layers": (
        replace(DENSE, kind="hybrid", pattern="*-", num_layers=10),
        {},
        (),
        DENSE_MODULES + MLP_MODULES,
        {"qkv_linear", "core_attn"},
    ),
    "hybrid, Mamba and gated delta nets": (
        STATE_SPACE,
        {},
        (),
        (*DENSE_MODULES, *GDN_MODULES, *MAMBA_MODULES, *MLP_MODULES),
        {"core_attn", "gdn_rule", "mamba_scan"},
    ),
    "hybrid, Mamba layers": (
        STATE_SPACE,
        {},
        ("mamba",),
        ("core_attn", *GDN_MODULES, *MAMBA_MODULES),
        {"mamba_scan"},
    ),
    "projections of MLA": (
        MLA,
        {},
        (),
        ("mla_down_proj", "mla_up_proj"),
        {"mla_down_proj", "mla_up_proj"},
    ),
    "FP8, experts": (
        MOE,
        RECIPES["tensorwise"],
        ("attn", "moe_router"),
        MOE_MODULES,
        {"core_attn"},
    ),
}


@has_later_options
@pytest.mark.parametrize("name", MORE)
def test_more_models_and_options(name: str, record_row: Row) -> None:
    case, options, scope, modules, expected = MORE[name]
    skip_without_recipe(options)
    case = with_graphs(replace(case, overrides={**case.overrides, **options}), scope)
    result, training = _train(case, modules, **OFFLOAD)
    _assert_equal(result, _train(case)[0])
    _record_equality(record_row, name, scope, modules, training)
    assert expected <= training.graphed_modules.keys()


@has_later_options
@pytest.mark.parametrize("fraction", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("kind, scope", [("dense", ("attn", "mlp")), ("moe", ("attn",))], ids=str)
def test_fractions(kind: str, scope: tuple[str, ...], fraction: float) -> None:
    case, modules = with_graphs(CASES[kind], scope), ("core_attn",)
    whole = _train(case, modules, **OFFLOAD)[1].graphed_bytes
    result, training = _train(case, modules, activation_offload_fraction=fraction, **OFFLOAD)
    _assert_equal(result, _eager(kind))
    assert (training.graphed_bytes > 0) == (fraction > 0)
    assert (training.graphed_bytes == whole) == (fraction == 1)


@has_later_options
@pytest.mark.parametrize("modules", [("core_attn", "expert_fc1", "moe_act"), MOE_MODULES], ids=str)
def test_deferred_commit(modules: tuple[str, ...]) -> None:
    case = with_graphs(MOE, ("attn", "moe_router"))
    result, training = _train(case, modules, delay_offload_until_cuda_graph=True, **OFFLOAD)
    _assert_equal(result, _eager("moe"))
    assert training.graphed_bytes > 0


@pytest.mark.parametrize("kind, scope", [("dense", ()), ("moe", ("attn", "moe_router"))], ids=str)
def test_twenty_steps_of_training(kind: str, scope: tuple[str, ...]) -> None:
    """With weights that change, an evaluation in between, and the graphs captured once more."""
    results = []
    for case, modules in (
        (CASES[kind], ()),
        (with_graphs(CASES[kind], scope), ("qkv_linear", "core_attn")),
    ):
        offload = OFFLOAD if modules else {}
        with Training(case, modules, learning_rate=1e-3, **offload) as training:
            training.step(NUM_EAGER_STEPS)
            training.capture()
            training.step(8)
            training.evaluate()
            training.step(2)
            if modules:
                training.delete_graphs()
            training.step(2)
            training.capture()
            training.step(8)
            weights: list[Optional[torch.Tensor]] = [p.detach() for p in training.parameters]
            results.append((training.losses, [w.clone() for w in weights if w is not None]))
    _assert_equal(results[1], results[0])


STAGES = {"PP2": {"pp": 2}, "PP2 VPP2": {"pp": 2, "vpp": 2}}


@pytest.mark.gpus2
@pytest.mark.parametrize("stages", STAGES)
@pytest.mark.parametrize(
    "kind, scope",
    [("dense", ()), ("dense", ("attn", "mlp")), ("moe", ("attn", "moe_router"))],
    ids=str,
)
def test_pipeline_stages(kind: str, scope: tuple[str, ...], stages: str, record_row: Row) -> None:
    """With a set of graphs for each micro-batch, and an evaluation in between."""
    case = ModelCase(**{**vars(CASES[kind]), "num_layers": 8, **STAGES[stages]})
    results = run_ranks(2, compare, case, scope, ("qkv_linear", "core_attn"), 4)
    graphed_bytes = [result.graphed_bytes for result in results]
    record_row("graph_stages", case=kind, scope=scope, stages=stages, graphed_bytes=graphed_bytes)
    assert [result.difference for result in results] == [None, None]
    # The last stage's backward follows directly; with two chunks, not that of its first one.
    assert graphed_bytes[0] > 0


@has_later_options
@pytest.mark.gpus2
@pytest.mark.parametrize(
    "kind, scope, sequence_parallel",
    [("dense", (), False), ("dense", (), True), ("moe", ("attn", "moe_router"), True)],
    ids=str,
)
def test_tensor_parallel_ranks(
    kind: str, scope: tuple[str, ...], sequence_parallel: bool, record_row: Row
) -> None:
    """Experts are trained with sequence parallelism only: megatron-core requires it."""
    options = {**CASES[kind].overrides, "sequence_parallel": sequence_parallel}
    case = replace(CASES[kind], tp=2, overrides=options)
    results = run_ranks(2, compare, case, scope, ("qkv_linear", "core_attn"), 2)
    graphed_bytes = [result.graphed_bytes for result in results]
    record_row(
        "graph_layouts",
        case=kind,
        scope=scope,
        layout="TP2" + ", sequence parallel" * sequence_parallel,
        graphed_bytes=graphed_bytes,
    )
    assert [result.difference for result in results] == [None, None]
    assert min(graphed_bytes) > 0


@pytest.mark.parametrize("num_eager_steps", [NUM_EAGER_STEPS, NUM_UNTIL_TIMED])
def test_a_target_is_followed_inside_graphs_that_are_captured_late_enough(
    num_eager_steps: int, caplog: pytest.LogCaptureFixture
) -> None:
    """Nothing needs to move; earlier, everything moves in graphs and a warning says so."""
    results = []
    settings = OffloadConfig(offload_target_memory_gib=1000.0)
    for case, modules in ((DENSE, ()), (with_graphs(DENSE, ()), DENSE_MODULES)):
        with Training(case, modules, settings=settings, **(OFFLOAD if modules else {})) as training:
            training.step(num_eager_steps)
            training.capture()
            training.step(NUM_STEPS)
            results.append((training.losses, training.gradients))
            graphed_bytes, figures = training.graphed_bytes, training.reported_bytes
    _assert_equal(results[1], results[0])
    is_late_enough = num_eager_steps == NUM_UNTIL_TIMED
    assert (graphed_bytes == 0) is is_late_enough
    assert figures == 2 * graphed_bytes, "of both micro-batches"
    said = [message for message in caplog.messages if "is not followed inside" in message]
    assert len(said) == (0 if is_late_enough else 1)


LARGE = ModelCase(**{**vars(DENSE), "num_layers": 8, "hidden_size": 2048, "seq_length": 8192})


@pytest.mark.exclusive
@pytest.mark.parametrize("modules", [("core_attn", "attn_proj"), DENSE_MODULES], ids=str)
def test_the_graphs_need_less_memory(modules: tuple[str, ...], record_row: Row) -> None:
    """Memory drops by the bytes offloaded at once: those of a replay except one reloaded layer.

    In a separate process: how well the allocator packs the graphs' tensors depends on its
    history.
    """
    ((sizes, moved),) = run_ranks(1, graph_memory, with_graphs(LARGE, ()), modules, OFFLOAD)
    per_layer = moved // (LARGE.num_layers - 1)
    record_row("graph_memory", modules=modules, pool=sizes[0], pool_offloaded=sizes[1], moved=moved)
    assert sizes[0] - sizes[1] >= 0.99 * (moved - per_layer)


@pytest.mark.parametrize("direction", ["copy_out", "copy_in"])
def test_late_copies_in_graphs(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A sleep is captured before every copy, so that a read without a wait is too early."""
    original = getattr(CopyStreams, direction)

    def sleeping(streams: CopyStreams, *arguments: Any, **options: Any) -> Any:
        stream = streams.d2h if direction == "copy_out" else streams.h2d
        # Joins the capture, which the copies themselves would do otherwise.
        stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(stream):
            torch.cuda._sleep(4_000_000)
        return original(streams, *arguments, **options)

    monkeypatch.setattr(CopyStreams, direction, sleeping)
    result, training = _train(with_graphs(DENSE, ()), ("qkv_linear", "core_attn"), **OFFLOAD)
    _assert_equal(result, _eager("dense"))
    assert training.graphed_bytes > 0
