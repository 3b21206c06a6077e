# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The largest size that fits: against what ran on an H100, and what stands in the way."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from megatron.slipstream.estimate.fit import HOST, Finder, Limits
from megatron.slipstream.estimate.frontier_budgets import sweep_budgets
from megatron.slipstream.estimate.frontier_picture import frontier_png
from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.hugging_face import load_hub_config
from megatron.slipstream.estimate.model_shapes import Experts, ModelShape, Parallelism
from megatron.slipstream.estimate.synthetic import Workplan
from megatron.slipstream.estimate.training_setup import Configured, usable_modules
from megatron.slipstream.estimate.ways import (
    BUDGET,
    BUILT_IN,
    FULL,
    OFF,
    SELECTIVE,
    WAYS,
    Mix,
    mixes_of,
    selective_setting,
)
from megatron.slipstream.plan.choose import choose
from megatron.slipstream.plan.settings import NOTHING, WHOLE

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
    limits = Limits(
        int(device_gib * GIB),
        None if host_gib is None else int(host_gib * GIB),
        lambda shape, rank: int(state_gib * GIB),
    )
    num_micro_batches = 1 if shape.parallelism.pp == 1 else 2 * shape.parallelism.pp
    configured = Configured("a model", shape, usable_modules(shape), num_micro_batches)
    return Finder(configured, find_speed("h100"), limits, field, step)


def example(name: str, **changes: Any) -> ModelShape:
    fields = load_hub_config(EXAMPLES / f"{name}.json").fields
    return ModelShape(**{**fields, "seq_length": 4096, **changes})


def llama(**changes: Any) -> ModelShape:
    return example("llama3_8b", **{"seq_length": 8192, "cross_entropy": "te", **changes})


def with_inputs_moved(shape: ModelShape) -> Mix:
    """Full recomputation with offloaded inputs and no tiles, one of the budget's mixes."""
    mixes = mixes_of(BUDGET, shape, usable_modules(shape))
    (found,) = (
        mix
        for mix in mixes
        if mix.first.describe() == "whole layers recomputed; layers' inputs offloaded"
        and not mix.tiles_logits
    )
    return found


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
        ("full with inputs", 32, 6.8),
        ("full with inputs", 64, 13.5),
    ],
)
def test_memory_is_that_of_an_h100(way: str, thousands: int, gib: float) -> None:
    """Above weights and gradients, of eight layers with fused cross entropy."""
    shape = llama(**EIGHT_LAYERS)
    mix = with_inputs_moved(shape)
    if way in WAYS:
        (mix,) = mixes_of(way, shape, usable_modules(shape))
    # 49k is a multiple of 8k tokens, too.
    tokens = {49: 49_152}.get(thousands, thousands * 1024)
    usage = finder(shape, 80).estimate(tokens).usage(mix)
    assert usage.parts.total / GIB == pytest.approx(gib, rel=0.02)


@pytest.mark.parametrize(
    "way, thousands, seconds",
    [(OFF, 8, 0.1829), (OFF, 16, 0.4203), (SELECTIVE, 32, 1.2086), (FULL, 32, 1.3752)],
)
def test_times_are_those_of_an_h100(way: str, thousands: int, seconds: float) -> None:
    shape = llama(**EIGHT_LAYERS)
    (mix,) = mixes_of(way, shape, usable_modules(shape))
    step_ms = finder(shape, 80).estimate(thousands * 1024).step_ms(mix)
    assert step_ms / 1e3 == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    "moves_inputs, thousands, gib, seconds",
    [(False, 32, 54.5, 5.46), (False, 40, 60.8, 7.54), (True, 32, 47.0, 5.46)],
)
def test_all_layers_take_what_an_h100_reserved(
    moves_inputs: bool, thousands: int, gib: float, seconds: float
) -> None:
    """With full recomputation, 30 GiB of state and little reserved beyond what is allocated."""
    shape = llama()
    (mix,) = mixes_of(FULL, shape, usable_modules(shape))
    mix = with_inputs_moved(shape) if moves_inputs else mix
    estimate = finder(shape, 80, state_gib=30.0).estimate(thousands * 1024)
    assert 0.98 * gib < estimate.usage(mix).parts.total / GIB <= gib
    assert estimate.step_ms(mix) / 1e3 == pytest.approx(seconds, rel=0.03)


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
    assert (found.row is None) == (wall == "state")


def test_the_largest_planned_size_has_no_wall() -> None:
    tiny = llama(num_layers=1, hidden_size=64, ffn_hidden_size=64, vocab_size=1, window_size=1)
    found = finder(tiny, 2**20, step=1 << 20).fit(OFF)
    assert (found.size, found.beyond, found.wall) == (1 << 27, None, "")


MODELS = {
    "dense": llama(),
    "unfused": llama(attention_backend="unfused"),
    "experts": example("mixtral_8x7b", parallelism=Parallelism(pp=4, ep=8, dp=8)),
    "latent": example(
        "deepseek_v3",
        num_layers=8,
        moe_layers=(),
        parallelism=Parallelism(pp=2, vpp=2, ep=64, dp=64),
    ),
}


@pytest.mark.parametrize(
    "name, field",
    [*((name, "seq_length") for name in MODELS), ("dense", "micro_batch_size")],
)
def test_every_smaller_size_fits(name: str, field: str) -> None:
    step = 1 if field == "micro_batch_size" else 1024
    search = finder(MODELS[name], 120, state_gib=20, host_gib=60, step=step, field=field)
    for way in WAYS:
        found = search.fit(way)
        counts = range(1, found.size // step + 1)
        for count in {*counts[:2], *counts[-2:], *counts[:: max(1, len(counts) // 4)]}:
            assert search.at(way, count * step) is not None, (way, count)
        assert search.at(way, found.size + step) is None


@pytest.mark.parametrize("name", MODELS)
def test_the_budget_takes_what_any_way_takes_and_no_longer(name: str) -> None:
    search = finder(MODELS[name], 120, state_gib=20)
    fits = {way: search.fit(way) for way in WAYS}
    for fit in fits.values():
        assert fits[BUDGET].size >= fit.size
        if fit.row is not None:
            ours = search.at(BUDGET, fit.size)
            assert ours is not None
            assert ours.step_ms <= fit.row.step_ms


def test_a_budget_is_used_up_by_layers_that_keep_more() -> None:
    """Between what two ways take, some layers recompute and the others do not."""
    shape = llama()
    search = finder(shape, 60, state_gib=30)
    found = search.at(BUDGET, 16_384)
    assert found is not None
    assert " layers: " in found.text
    keeping = replace(search, limits=replace(search.limits, device_bytes=200 * GIB))
    fastest = keeping.at(BUDGET, 16_384)
    full = keeping.at(FULL, 16_384)
    assert fastest is not None
    assert full is not None
    assert fastest.step_ms < found.step_ms < full.step_ms


def test_the_frontier_of_budgets_is_below_every_way() -> None:
    """Each way is on the line of budgets or above it, and each budget is kept to."""
    seen: list[tuple[int, int]] = []
    search = finder(llama(), 80, state_gib=30, host_gib=100)
    frontier = sweep_budgets(search, 12, lambda done, total: seen.append((done, total)))
    assert [marker.name for marker in frontier.markers] == [OFF, SELECTIVE, FULL, BUILT_IN]
    assert seen == [(done, 12) for done in range(13)]
    off = frontier.markers[0]
    assert (off.total_ms, off.overhead_percent) == (frontier.compute_ms, 0.0)
    for point in frontier.points:
        assert point.peak_bytes <= point.value + 30 * GIB
        assert point.peak_host_bytes <= 100 * GIB
        typed = float(point.flag.removeprefix("--activation-memory-budget "))
        assert int(typed * GIB) == point.value
    for marker in frontier.markers:
        limits = replace(search.limits, device_bytes=marker.peak_bytes)
        ours = replace(search, limits=limits).at(BUDGET, 8192)
        assert ours is not None
        assert ours.step_ms <= marker.total_ms
    rows = frontier.render().split("\n")[1:-5]
    assert [row.split(": ")[1] for row in rows] == [point.text for point in frontier.pareto]
    assert frontier_png(frontier).startswith(b"\x89PNG")


@pytest.mark.parametrize(
    "own",
    [
        ("core_attn", "attn_proj"),
        ("qkv_linear", "core_attn", "attn_proj", "mlp_fc1", "mlp_act", "mlp_fc2"),
    ],
)
def test_the_budgets_time_is_that_of_the_planned_choice(own: tuple[str, ...]) -> None:
    """The mix of two ways is about as fast as what the planner finds layer by layer."""
    shape = llama(**EIGHT_LAYERS, seq_length=32_768)
    search = finder(shape, 30, state_gib=7.6, host_gib=100)
    estimate = search.estimate(32_768)
    mixes = [
        mix for mix in mixes_of(BUDGET, shape, own) if not (mix.tiles_logits or mix.first.is_tiled)
    ]
    ours = min(map(estimate.step_ms, search.fitting(estimate, mixes)))
    work = Workplan(shape, search.speed, own, 1)
    state = int(7.6 * GIB)
    templates = work.rank_templates(0, state, (NOTHING, frozenset({"mlp"}), WHOLE))
    planned = choose(templates, search.limits.device_bytes, search.limits.host_bytes)
    assert planned.fits
    assert ours == pytest.approx(planned.total_ms, rel=0.03)


def test_host_memory_is_a_limit_of_the_choice() -> None:
    """With less of it, fewer layers' inputs move, down to none."""
    sizes = [finder(llama(), 78, 30, host).fit(BUDGET).size for host in (0.5, 16, 64, 1024)]
    assert sizes == sorted(sizes)
    assert len(set(sizes)) == len(sizes)
    for host in (0.5, 16):
        row = finder(llama(), 78, 30, host).fit(BUDGET).row
        assert row is not None
        assert row.usage.host_bytes <= host * GIB


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
        assert fits[0] == fits[1]


def test_a_stage_holds_the_passes_in_flight() -> None:
    """The first of four stages holds four passes, of which one layer runs its backward."""
    four = llama(parallelism=Parallelism(pp=4), vocab_size=1000)
    one = llama(num_layers=8, vocab_size=1000)
    layers = [
        finder(shape, 80).estimate(8192).usage(mixes_of(OFF, shape, ())[0]).parts.layers
        for shape in (four, one)
    ]
    assert layers[0] * 7 == layers[1] * 31
