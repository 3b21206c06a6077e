# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The largest size that fits: against what ran on an H100, and what stands in the way."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.slipstream.estimate.frontier import frontier_png, sweep_budgets
from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.hugging_face import load_hub_config
from megatron.slipstream.estimate.model_shapes import Experts, ModelShape, Parallelism
from megatron.slipstream.estimate.synthetic import Workplan
from megatron.slipstream.estimate.training_setup import Configured, usable_modules
from megatron.slipstream.estimate.ways import (
    BUDGET,
    BUILT_IN,
    FULL,
    HOST,
    OFF,
    SELECTIVE,
    WAYS,
    Finder,
    _largest,
    selective_setting,
)
from megatron.slipstream.plan.assignments import Limits
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.settings import WHOLE
from megatron.slipstream.plan.walk import simulate

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "models"
GIB = 2**30


def finder(
    shape: ModelShape,
    device_gib: float,
    state_gib: float = 0.0,
    host_gib: float | None = None,
    step: int = 1024,
    field: str = "seq_length",
) -> Finder:
    limits = Limits(int(device_gib * GIB), None if host_gib is None else int(host_gib * GIB))
    num_micro_batches = 1 if shape.parallelism.pp == 1 else 2 * shape.parallelism.pp
    modules = usable_modules(shape)
    configured = Configured("a model", shape, modules, num_micro_batches, state_gib=state_gib)
    return Finder(configured, find_speed("h100"), limits, field, step)


def example(name: str, **changes: Any) -> ModelShape:
    fields = load_hub_config(EXAMPLES / f"{name}.json").fields
    return ModelShape(**{**fields, "seq_length": 4096, **changes})


def llama(**changes: Any) -> ModelShape:
    return example("llama3_8b", **{"seq_length": 8192, "cross_entropy": "te", **changes})


EXCESSES = {
    "a line": (lambda size, limit: size - limit, 8),
    "attention scores": (lambda size, limit: size**2 - limit**2, 14),
    "only whether": (lambda size, limit: math.copysign(1, size - limit), 40),
}


@pytest.mark.parametrize("largest", [0, 1, 2, 9, 10, 511, 100_000, MOST := 1 << 17])
@pytest.mark.parametrize("kind", EXCESSES)
def test_few_sizes_are_asked(kind: str, largest: int) -> None:
    """Memory grows about linearly; of a budget it is only known whether it suffices."""
    excess, most_asked = EXCESSES[kind]
    asked: list[int] = []

    def counted(size: int) -> float:
        asked.append(size)
        return excess(size, largest + 0.5)

    assert _largest(counted, 0, MOST) == largest
    assert len(asked) <= most_asked
    assert len(asked) == len(set(asked))
    if largest < MOST:
        assert _largest(counted, largest, MOST) == largest


FULL_WITH_INPUTS = "full with inputs"


def taken(way: str, shape: ModelShape, state_gib: float = 0.0) -> tuple[float, float]:
    """GiB on the device and seconds of a step; full recomputation may move the layers' inputs."""
    if way != FULL_WITH_INPUTS:
        found = finder(shape, 80, state_gib).model(shape.seq_length).fixed(way)
        return found.usage.parts.total / GIB, found.step_ms / 1e3
    work = Workplan(shape, find_speed("h100"), (), 1)
    rank = work.rank_templates(0, int(state_gib * GIB), [WHOLE])
    plan = build_plan(rank.compose((WHOLE,) * shape.num_layers), PolicyOptions())
    return max(plan.device_bytes) / GIB, simulate(plan).total_ms / 1e3


EIGHT_LAYERS = {"num_layers": 8, "vocab_size": 32_000}


@pytest.mark.parametrize(
    "way, thousands, gib",
    [
        (OFF, 32, 38.5),
        (OFF, 49, 57.7),
        (SELECTIVE, 32, 16.2),
        (SELECTIVE, 64, 32.4),
        (FULL, 32, 8.3),
        (FULL, 64, 16.5),
        (BUILT_IN, 32, 8.3),
        (BUILT_IN, 64, 16.5),
        (FULL_WITH_INPUTS, 32, 6.8),
        (FULL_WITH_INPUTS, 64, 13.5),
    ],
)
def test_memory_is_that_of_an_h100(way: str, thousands: int, gib: float) -> None:
    """Above weights and gradients, of eight layers with fused cross entropy."""
    # 49k is a multiple of 8k tokens, too.
    tokens = {49: 49_152}.get(thousands, thousands * 1024)
    assert taken(way, llama(**EIGHT_LAYERS, seq_length=tokens))[0] == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    "way, thousands, seconds",
    [(OFF, 8, 0.1829), (OFF, 16, 0.4203), (SELECTIVE, 32, 1.2086), (FULL, 32, 1.3752)],
)
def test_times_are_those_of_an_h100(way: str, thousands: int, seconds: float) -> None:
    shape = llama(**EIGHT_LAYERS, seq_length=thousands * 1024)
    assert taken(way, shape)[1] == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    "way, thousands, gib, seconds",
    [(FULL, 32, 54.5, 5.46), (FULL, 40, 60.8, 7.54), (FULL_WITH_INPUTS, 32, 47.0, 5.46)],
)
def test_all_layers_take_what_an_h100_reserved(
    way: str, thousands: int, gib: float, seconds: float
) -> None:
    """With full recomputation, 30 GiB of state and little reserved beyond what is allocated."""
    found = taken(way, llama(seq_length=thousands * 1024), state_gib=30.0)
    assert 0.98 * gib < found[0] <= gib
    assert found[1] == pytest.approx(seconds, rel=0.03)


def test_longest_sequences_are_those_that_ran_in_30_gib() -> None:
    """Multiples of 8k: the next one died in the allocator."""
    search = finder(llama(**EIGHT_LAYERS), 29.4, state_gib=7.6, step=8192)
    assert search.fit(OFF).size == 16 * 1024
    assert search.fit(FULL).size == 80 * 1024


def test_llama_3_8b_runs_10k_tokens_without_offloading_and_not_12k() -> None:
    """As measured with gradients of 2 bytes, no optimizer, and full recomputation at 40k."""
    search = finder(llama(), 0.98 * 80, state_gib=30.0, host_gib=125)
    assert 10_240 <= search.fit(OFF).size < 12_288
    full = search.fit(FULL)
    assert full.size >= 40_960
    row = search.at(FULL, 40_960)
    assert row is not None
    assert row.usage.parts.total / GIB <= 60.8  # what the allocator reserved
    assert row.step_ms == pytest.approx(7540, rel=0.05)
    budget = search.fit(BUDGET)
    assert budget.size >= 262_144
    faster = search.at(BUDGET, 40_960)
    assert faster is not None
    assert faster.step_ms < 0.9 * row.step_ms


WALLS = {
    "state": (OFF, llama(), {"device_gib": 10, "state_gib": 12}),
    "layers": (OFF, llama(num_layers=64, vocab_size=1000), {"device_gib": 40}),
    "backward": (FULL, llama(num_layers=2, vocab_size=1000), {"device_gib": 40}),
    "logits": (FULL, llama(num_layers=2, vocab_size=512_000), {"device_gib": 40}),
    HOST: (BUDGET, llama(num_layers=64), {"device_gib": 80, "host_gib": 4}),
}


@pytest.mark.parametrize("wall", WALLS)
def test_the_wall_is_named(wall: str) -> None:
    way, shape, limits = WALLS[wall]
    found = finder(shape, **limits).fit(way)
    assert found.wall == wall
    assert (found.size == 0) == (wall == "state")
    assert (found.found is None) == (wall == "state")


def test_host_memory_without_a_limit_is_no_wall() -> None:
    found = finder(llama(num_layers=2), 12).fit(BUDGET)
    assert found.size > 0
    assert found.wall in ("layers", "backward", "logits")


def test_the_largest_planned_size_has_no_wall() -> None:
    tiny = llama(num_layers=1, hidden_size=64, ffn_hidden_size=64, vocab_size=1, window_size=1)
    found = finder(tiny, 2**20, step=1 << 20).fit(OFF)
    assert (found.size, found.beyond, found.wall) == (1 << 27, None, "")


MODELS = {
    "dense": llama(num_layers=8),
    "unfused": llama(num_layers=8, attention_backend="unfused"),
    "experts": example(
        "mixtral_8x7b", num_layers=8, layer_kinds=(), parallelism=Parallelism(pp=2, ep=8, dp=8)
    ),
    "latent": example(
        "deepseek_v3",
        num_layers=8,
        layer_kinds=(),
        parallelism=Parallelism(pp=2, vpp=2, ep=64, dp=64),
    ),
}


def fits(search: Finder, way: str, size: int) -> bool:
    """Whether a size fits, whatever other sizes do."""
    model, ways = search.model(size), [way] if way != BUDGET else WAYS[: WAYS.index(BUDGET)]
    does_any = any(not model.fixed(each).usage.exceeded(search.limits) for each in ways)
    return does_any or (way == BUDGET and model.has_budget(search.limits))


@pytest.mark.parametrize(
    "name, field",
    [*((name, "seq_length") for name in MODELS), ("dense", "micro_batch_size")],
)
def test_every_smaller_size_fits_and_the_next_one_does_not(name: str, field: str) -> None:
    step = 1 if field == "micro_batch_size" else 1024
    search = finder(MODELS[name], 120, state_gib=20, host_gib=60, step=step, field=field)
    for way in WAYS:
        largest = search.largest(way)
        counts = range(1, largest // step + 1)
        for count in {*counts[:2], *counts[-2:], *counts[:: max(1, len(counts) // 4)]}:
            assert fits(search, way, count * step), (way, count)
        assert not fits(search, way, largest + step)
    for way in {*WAYS} - {BUDGET}:
        size = search.largest(way)
        assert search.largest(BUDGET) >= size
        ours, row = search.at(BUDGET, size), search.at(way, size)
        assert ours is not None
        assert row is not None
        assert ours.step_ms <= row.step_ms, "the budget takes what any way takes, and no longer"


@pytest.mark.parametrize("field", ["seq_length", "micro_batch_size"])
def test_a_pattern_fits_as_far_as_the_same_transformer(field: str) -> None:
    shape = llama(num_layers=4)
    pattern = replace(shape, num_layers=8, layer_kinds=("*", "-") * 4)
    step = 1 if field == "micro_batch_size" else 1024
    gpt, hybrid = (finder(each, 60, 20, step=step, field=field) for each in (shape, pattern))
    for way in (OFF, SELECTIVE, BUILT_IN):
        assert hybrid.largest(way) == gpt.largest(way) > 0
        size = gpt.largest(way)
        assert hybrid.model(size).fixed(way).usage == gpt.model(size).fixed(way).usage
        assert hybrid.model(size).fixed(way).step_ms == gpt.model(size).fixed(way).step_ms
    # Each of its layers is a checkpoint of its own.
    assert 0 < hybrid.largest(FULL) <= gpt.largest(FULL)
    assert hybrid.largest(BUDGET) > hybrid.largest(BUILT_IN)


def test_a_budget_is_used_up_by_layers_that_keep_more() -> None:
    """Between what two ways take, some layers recompute and the others do not."""
    search = finder(llama(num_layers=8), 15, state_gib=8)
    found = search.at(BUDGET, 16_384)
    assert found is not None
    assert " recomputed (" in found.describe()
    keeping = replace(search, limits=search.limits._replace(device_bytes=200 * GIB))
    fastest = keeping.at(BUDGET, 16_384)
    full = keeping.at(FULL, 16_384)
    assert fastest is not None
    assert full is not None
    assert fastest.step_ms < found.step_ms < full.step_ms


def test_the_frontier_of_budgets_is_below_every_way() -> None:
    """Each way is on the line of budgets or above it, and each budget is kept to."""
    seen: list[tuple[int, int]] = []
    search = finder(llama(num_layers=8), 50, state_gib=30, host_gib=25)
    frontier = sweep_budgets(search, 4, lambda done, total: seen.append((done, total)))
    assert [marker.name for marker in frontier.markers] == [OFF, SELECTIVE, FULL, BUILT_IN]
    assert seen == [(done, 4) for done in range(5)]
    off = frontier.markers[0]
    assert (off.total_ms, off.overhead_percent) == (frontier.compute_ms, 0.0)
    for point in frontier.points:
        assert point.peak_bytes <= point.value + 30 * GIB
        assert point.peak_host_bytes <= 25 * GIB
        typed = float(point.flag.removeprefix("--activation-memory-budget "))
        assert int(typed * GIB) == point.value
    for marker in frontier.markers:
        limits = search.limits._replace(device_bytes=marker.peak_bytes)
        ours = replace(search, limits=limits).at(BUDGET, 8192)
        assert ours is not None
        assert ours.step_ms <= marker.total_ms
    rows = frontier.render().split("\n")[1:-5]
    assert [row.split(": ")[1] for row in rows] == [point.text for point in frontier.pareto]
    assert frontier_png(frontier).startswith(b"\x89PNG")


def test_host_memory_is_a_limit_of_the_choice() -> None:
    """With less of it, fewer layers' inputs move, down to none."""
    hosts = (0.125, 1, 4, 256)
    shape = llama(num_layers=8)
    sizes = [finder(shape, 20, 8, host).largest(BUDGET) for host in hosts]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    row = finder(shape, 20, 8, 4).at(BUDGET, sizes[2])
    assert row is not None
    assert 0 < row.usage.host_bytes <= 4 * GIB


@pytest.mark.parametrize(
    "shape, expected",
    [
        (llama(), {"mlp", "layernorm"}),
        (llama(attention_backend="unfused"), {"core_attn"}),
        (llama(recompute_modules=frozenset({"mlp"})), {"mlp"}),
        (llama(recompute_modules=WHOLE), {"mlp", "layernorm"}),
        (llama(experts=Experts(8, 2, 64)), {"moe_act", "layernorm"}),
        (MODELS["latent"], {"moe_act", "layernorm", "mla_up_proj"}),
    ],
)
def test_selective_recomputation_suits_the_model(shape: ModelShape, expected: set[str]) -> None:
    assert selective_setting(shape) == expected


def test_what_the_training_recomputes_itself_does_not_matter() -> None:
    """Nor what it can therefore move."""
    plain, full = llama(num_layers=4), llama(num_layers=4, recompute_modules=WHOLE)
    for way in WAYS:
        fits = [finder(shape, 60, state_gib=8, host_gib=30).fit(way) for shape in (plain, full)]
        ours, theirs = (
            (fit.size, fit.beyond, fit.wall, fit.found and (fit.found.usage, fit.found.step_ms))
            for fit in fits
        )
        assert ours == theirs


def test_a_stage_holds_the_passes_in_flight() -> None:
    """The first of four stages holds four passes, of which one layer runs its backward."""
    shapes = [
        llama(parallelism=Parallelism(pp=4), vocab_size=1000),
        *(llama(num_layers=count, vocab_size=1000) for count in (8, 16)),
    ]
    four, one, two = (finder(s, 80).model(8192).fixed(OFF).usage.parts.layers for s in shapes)
    assert four == 4 * (two - one)
