# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A budget for activations is kept in every iteration, from the first, and changes no bit."""

from __future__ import annotations

import itertools
import logging
from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import patch

import pytest
import torch
from budgeted_training import Budgeted, Run, train_within
from megatron.core.transformer.enums import AttnBackend
from model_case import DENSE_MODULES, MAMBA_MODULES, MOE_MODULES, ModelCase
from ranks import run_ranks
from state_space_layers import MAMBA
from tiny_gpt import build_chunks, initialize, make_config, train_steps

from megatron.slipstream.integration import install
from megatron.slipstream.integration.budget.batch_sizes import MicroBatches, size_of
from megatron.slipstream.integration.budget.memory_budget import NUM_UNFIT
from megatron.slipstream.integration.budget.stage_ranks import (
    StageRanks,
    check_model,
    waits_for_others,
)
from megatron.slipstream.integration.layers import layer_settings
from megatron.slipstream.integration.layers.layer_boundaries import LayerBoundaries
from megatron.slipstream.integration.packed.dynamic_context_parallel import DynamicGroupMixin
from megatron.slipstream.options.budget import complete_arguments
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.layer_visits import LayerVisits, Rerun
from megatron.slipstream.plan.relaxation import Limits, Prediction, Relaxation, Stage
from megatron.slipstream.plan.settings import NOTHING, WHOLE, Assignment, describe_setting

NORM = {"normalization": "LayerNorm"}
"""One operation, as Transformer Engine's norms are."""
DENSE = ModelCase("dense", num_layers=4, overrides=NORM)
MIXED = ModelCase("mixed", num_layers=4, overrides=NORM)
HYBRID = ModelCase("hybrid", num_layers=4, overrides=NORM)
DENSE_AS_HYBRID = replace(DENSE, kind="hybrid", pattern="*-", num_layers=2 * DENSE.num_layers)
PADDED_ON_TWO = ModelCase(
    "moe",
    num_layers=3,
    dp=2,
    ep=2,
    overrides={
        **NORM,
        "moe_expert_capacity_factor": 1.0,
        "moe_pad_expert_input_to_capacity": True,
    },
)
MAX_UNTIL_SETTLED = 11


INTERRUPTED = [
    (0, LayerBoundaries, "watch", 1),
    (6, MicroBatches, "share_of", 1),
]
"""Iterations, and what raises in a call of this number."""


def _runs(case: ModelCase) -> dict[str, Run]:
    """Trainings of one rank, in one process."""
    runs = {str(budget): Run(case, budget) for budget in (0.8, 0.5)}
    if case is DENSE_AS_HYBRID:
        del runs["0.8"]
    if case is HYBRID:
        runs["0.9"] = Run(case, 0.9)
    if case is DENSE:
        runs["nothing fits"] = Run(case, 0.05)
        runs["evaluated"] = Run(case, 0.5, evaluated_sequences=8)
        runs["evaluated with gradients"] = replace(runs["evaluated"], has_gradients=True)
        runs["room to spare"] = Run(replace(case, num_layers=6), 1.5, (2,) * 8)
        runs["late state"] = Run(case, 0.9, (1,) * 13, late=(10, 0.25))
        runs["other numbers"] = Run(case, 0.5, (2, 3, 1, 2) * 3)
        for place in INTERRUPTED:
            runs[f"{place[2]} interrupted"] = Run(case, 0.6, (2,) * 14, interrupted=place)
        for name, lengths in LENGTHS.items():
            share = 0.9 if name == "a spike, then longer for good" else 0.75
            runs[name] = Run(case, share, (2,) * len(lengths), lengths=lengths)
    return runs


SHORT, LONG = 24, 48
NUM_SHORT = 10
"""The settings are final for the last of so many iterations."""
LENGTHS = {
    "shorter": (LONG, *(SHORT, LONG, SHORT + 8) * 3, LONG),
    "longer while settling": (SHORT, SHORT, LONG, SHORT, LONG, *(SHORT,) * 6, LONG),
    "a spike, then longer for good": (*(SHORT,) * NUM_SHORT, LONG, SHORT, *(LONG,) * 13),
}
"""A longer one is planned from its size before it runs. The last step's has the longest."""


@pytest.fixture(scope="module")
def trained() -> Callable[[ModelCase, str], Budgeted]:
    results: dict[str, dict[str, Budgeted]] = {}

    def train(case: ModelCase, name: str) -> Budgeted:
        key = repr(case)
        if key not in results:
            runs = _runs(case)
            (found,) = run_ranks(1, train_within, *runs.values())
            results[key] = dict(zip(runs, found, strict=True))
        return results[key][name]

    return train


def _train_together(run: Run) -> list[Budgeted]:
    num_ranks = run.case.tp * run.case.pp * run.case.dp
    return [result for (result,) in run_ranks(num_ranks, train_within, run)]


def _check(result: Budgeted) -> None:
    assert result.error == ""
    assert result.difference is None
    assert max(result.activation_bytes) <= result.budget_bytes
    assert set(result.assignments[0]) == {WHOLE}
    assert result.num_until_settled <= MAX_UNTIL_SETTLED


def _check_report(result: Budgeted) -> None:
    """The report has the settings, and what moves adds up to what the engine counts."""
    assert abs(result.reported_bytes - result.budget_bytes) <= 1
    final = result.assignments[-1]
    assert [layer.setting for layer in result.layers] == [*map(describe_setting, final)]
    assert [layer.kind for layer in result.layers] == [*result.kinds]
    assert {layer.reason for layer in result.layers} == {"the least time that fits"}
    moved = 2 * sum(layer.moved_bytes for layer in result.layers)
    assert moved == pytest.approx(result.moved_bytes, abs=2 * len(final))
    assert result.moved_bytes == result.planned_moved_bytes
    kept = {layer.kind for layer in result.layers if layer.setting == describe_setting(NOTHING)}
    for layer in result.layers:
        is_whole = layer.setting == describe_setting(WHOLE)
        assert layer.recomputed_bytes > 0 or not (is_whole and layer.kind in kept)
    for layer, setting, least in zip(result.layers, final, result.least, strict=True):
        assert not layer.recomputed_bytes or setting != least
        assert layer.moved_bytes + layer.recomputed_bytes <= layer.saved_bytes


def _train_choosing(
    rank: int, world_size: int, port: int, run: Run, first: Assignment
) -> list[Budgeted]:
    """Train with another first choice, which is said to fit as the one in its place."""
    choose, assignments = Relaxation.choose, iter([first])

    def choose_first(self: Relaxation, limits: Limits) -> Prediction:
        chosen = choose(self, limits)
        return chosen._replace(assignment=next(assignments, chosen.assignment))

    with patch.object(Relaxation, "choose", choose_first):
        return train_within(rank, world_size, port, run)


def test_a_choice_is_not_followed_if_its_plan_exceeds_the_budget() -> None:
    """It fits while it is recorded, since all that may moves then, the latest groups too."""
    case = ModelCase("mla", num_layers=4, overrides=NORM)
    run = Run(case, 0.7265, (2,) * 10, "cpu", MOE_MODULES, {"min_offloaded_tensor_size": 1})
    recomputed = frozenset({"mla_up_proj"})
    first = (NOTHING, NOTHING, recomputed, recomputed)
    ((result,),) = run_ranks(1, _train_choosing, run, first)
    _check(result)
    assert result.assignments.count(first) == 1


@pytest.mark.parametrize("budget", ["0.8", "0.5"])
@pytest.mark.parametrize("case", [DENSE, MIXED, HYBRID], ids=lambda case: case.kind)
def test_training_is_bitwise_that_without_and_never_above_the_budget(
    trained: Any, case: ModelCase, budget: str
) -> None:
    result = trained(case, budget)
    _check(result)
    assert result.planned_bytes == pytest.approx(result.activation_bytes[-1], rel=0.01)
    _check_report(result)
    used = max(result.activation_bytes[result.num_until_settled :]) / result.budget_bytes
    assert used > 0.5, "what there is room for is kept"


def test_the_layers_of_a_pattern_have_each_its_own_setting(trained: Any) -> None:
    result = trained(HYBRID, "0.9")
    _check(result)
    assert result.kinds == ("attention", "dense mlp", "attention", "moe mlp")
    assert len({*result.assignments[-1]}) > 1
    for kind in result.kinds:
        places = [place for place, one in enumerate(result.kinds) if one == kind]
        tried = {each[place] for each in result.assignments for place in places}
        assert {WHOLE, NOTHING} < tried or len(places) == 1
        assert NOTHING in tried
        assert kind != "attention" or any("core_attn" in setting for setting in tried)


def test_a_transformer_recomputes_no_more_as_a_pattern(trained: Any) -> None:
    """Its layers are half as large, so the budget is used more closely."""
    gpt, hybrid = trained(DENSE, "0.5"), trained(DENSE_AS_HYBRID, "0.5")
    _check(hybrid)
    assert hybrid.planned_bytes == pytest.approx(hybrid.activation_bytes[-1], rel=0.01)
    assert hybrid.budget_bytes == gpt.budget_bytes, "a share of the same activations"
    tried = {pair for each in hybrid.assignments for pair in zip(hybrid.kinds, each, strict=True)}
    assert {kind for kind, setting in tried if setting != WHOLE} == {*hybrid.kinds}
    ours, theirs = (sum(one.recomputed_bytes for one in each.layers) for each in (hybrid, gpt))
    assert 0 < ours <= theirs
    # While backward runs one layer again, the inputs of the others are kept.
    assert hybrid.activation_bytes[0] < gpt.activation_bytes[0]


def offered_by_a_pattern(rank: int, world_size: int, port: int) -> dict[str, set[str]]:
    """What the settings of each kind of layer recompute."""
    initialize(HYBRID, rank, world_size, port)
    layers = layer_settings.layers_of(build_chunks(HYBRID, make_config(HYBRID)))
    return {one.kind: set().union(*one.settings) for one in layers}


def test_a_layer_of_a_pattern_offers_what_it_consists_of() -> None:
    (found,) = run_ranks(1, offered_by_a_pattern)
    assert found == {
        "attention": {*WHOLE, "core_attn", "layernorm"},
        "dense mlp": {*WHOLE, "mlp", "layernorm"},
        "moe mlp": {*WHOLE, "moe", "moe_act", "layernorm"},
    }


def test_layers_that_only_slipstream_marks_are_kept_as_far_as_they_fit() -> None:
    case = ModelCase("hybrid", num_layers=4, pattern="M", overrides={**NORM, **MAMBA})
    (result,) = _train_together(Run(case, 0.8, modules=MAMBA_MODULES))
    _check(result)
    _check_report(result)
    settings = {layer.setting for layer in result.layers}
    assert settings == {describe_setting(WHOLE), describe_setting(NOTHING)}
    assert min(layer.recomputed_bytes for layer in result.layers if layer.setting == "layer") > 0


def test_with_room_to_spare_nothing_is_recomputed_and_nothing_moves(trained: Any) -> None:
    result = trained(DENSE, "room to spare")
    _check(result)
    assert result.assignments[-1] == result.least
    assert result.moved_bytes == 0


def test_where_nothing_fits_an_error_names_what_would(trained: Any) -> None:
    result = trained(DENSE, "nothing fits")
    assert "even if every layer is recomputed" in result.error
    assert "set activation_memory_budget to 0.01 or more, or seq_length to at most" in result.error


@pytest.mark.parametrize("name", ["other numbers", *LENGTHS])
def test_other_numbers_and_lengths_of_micro_batches_stay_within_it(trained: Any, name: str) -> None:
    result = trained(DENSE, name)
    assert result.error == ""
    assert result.difference is None
    assert max(result.activation_bytes) <= result.budget_bytes
    assert Stage.SETTLED in result.stages


def test_where_all_get_longer_settings_are_chosen_for_them(trained: Any) -> None:
    """Otherwise every layer would be recomputed until training ends."""
    result = trained(DENSE, "a spike, then longer for good")
    first = NUM_SHORT + 2 + NUM_UNFIT
    assert {*result.stages[NUM_SHORT - 1 : first]} == {Stage.SETTLED}
    assert result.stages[first] is not Stage.SETTLED
    assert result.stages[-1] is Stage.SETTLED
    assert set(result.assignments[-1]) != {WHOLE}


def test_auto_chooses_again_when_the_state_of_an_optimizer_appears_late(trained: Any) -> None:
    """The device has as many bytes as before, and fewer for activations."""
    result = trained(DENSE, "late state")
    step, _ = _runs(DENSE)["late state"].late or (0, 0.0)
    assert result.num_until_settled < step
    _check(result)
    assert result.assignments[-1] != result.assignments[step - 1]
    assert any("settings were chosen (an optimizer's first step" in w for w in result.warnings)


@pytest.mark.parametrize("place", INTERRUPTED, ids=lambda place: place[2])
def test_an_interrupted_iteration_is_not_measured(place: Any, trained: Any) -> None:
    _check(trained(DENSE, f"{place[2]} interrupted"))


@pytest.mark.parametrize("name", ["evaluated", "evaluated with gradients"])
def test_evaluation_before_and_between_iterations_ends_none(trained: Any, name: str) -> None:
    """megatron-core ends the schedule of an evaluation as it ends one of training.

    What an evaluation leaves, with micro-batches four times as large, lies beside activations.
    """
    result = trained(DENSE, name)
    _check(result)
    assert set(result.assignments[-1]) != {WHOLE}
    # On a CPU, whatever moves does so without times, which a warning says.
    others = [text for text in result.warnings if "there are no times" not in text]
    assert others == [] or name != "evaluated"


def test_the_stages_of_a_pipeline_have_each_its_own() -> None:
    case = ModelCase("dense", num_layers=8, pp=2, vpp=2, overrides=NORM)
    for result in _train_together(Run(case, 0.6, backend="cpu-lazy")):
        _check(result)


def test_more_micro_batches_in_flight_are_foreseen() -> None:
    """The first stage of two holds one until there are two; all is then measured again."""
    case = ModelCase("dense", num_layers=4, pp=2, overrides=NORM)
    first, second = _train_together(Run(case, 0.74, (1,) * 10 + (2,) * 10, "cpu-lazy"))
    for result in (first, second):
        _check(result)
        assert result.stages[-1] is Stage.SETTLED
    told = ["more micro-batches are in flight than the 1" in text for text in first.warnings]
    assert told == [True], first.warnings
    assert first.stages[11] is Stage.FRUGAL
    assert second.warnings == []


@pytest.mark.parametrize("sizes", [{"pp": 2}, {"dp": 2}], ids=str)
def test_where_nothing_fits_on_one_rank_all_raise_the_same_error(sizes: dict[str, int]) -> None:
    """Others would wait for a rank that raised it alone: in a schedule, or for its gradients."""
    case = ModelCase("dense", num_layers=2, overrides=NORM, **sizes)
    first, second = _train_together(Run(case, (1.0, 0.01), (2,) * 3, "cpu-lazy"))
    assert "because rank 1 needs" in first.error
    # Their budgets differ here.
    assert first.error.partition(" is not ")[2] == second.error.partition(" is not ")[2]


def _check_alike(results: list[Budgeted]) -> None:
    """Otherwise one rank would wait for a collective of a recomputation that the other has not."""
    for result in results:
        _check(result)
    assert results[0].assignments == results[1].assignments


def test_ranks_that_share_experts_choose_alike() -> None:
    """Experts are padded: where tokens of a rank vary, an iteration can need more than the budget,
    as the guide says."""
    _check_alike(_train_together(Run(PADDED_ON_TWO, 0.7)))


def test_what_one_rank_needs_beyond_the_budget_counts_in_a_new_choice_of_all() -> None:
    """As where experts get more tokens than in the iterations that were measured."""
    step = MAX_UNTIL_SETTLED + 1
    results = _train_together(Run(PADDED_ON_TWO, 0.7, (2,) * (step + 12), more=(step, 1, 0.2)))
    for rank, result in enumerate(results):
        assert result.difference is None
        over = [nbytes > result.budget_bytes for nbytes in result.activation_bytes]
        assert [n for n, is_over in enumerate(over) if is_over] == [step] * rank
        assert result.stages[step] is result.stages[-1] is Stage.SETTLED
        assert any("settings are chosen again for" in text for text in result.warnings)
    assert results[0].assignments == results[1].assignments


def train_with_more_on_one(rank: int, world_size: int, port: int, run: Run) -> list[Budgeted]:
    """Train, and on the first rank find more micro-batches in flight before and after settling."""
    begin, numbers = MicroBatches.begin, itertools.count(1)

    def find_more(self: MicroBatches) -> None:
        begin(self)
        self.are_more |= rank == 0 and next(numbers) in (2, 13)

    with patch.object(MicroBatches, "begin", find_more):
        return train_within(rank, world_size, port, run)


def test_ranks_that_share_a_stage_choose_alike_and_measure_again_together() -> None:
    case = ModelCase("dense", num_layers=3, overrides=NORM, tp=2)
    run = Run(case, 0.8, (1,) * 16)
    results = [result for (result,) in run_ranks(2, train_with_more_on_one, run)]
    _check_alike(results)
    for result in results:
        assert len({*result.assignments}) > 2
        assert result.stages[2] is result.stages[13] is Stage.FRUGAL
        assert result.stages[12] is Stage.SETTLED
    assert results[0].assignments == results[1].assignments


class Attention(DynamicGroupMixin):
    """Not megatron-core's, which needs a model."""

    __init__ = torch.nn.Module.__init__


class Router(torch.nn.Module):
    """With the statistics of ``global_aux_loss``."""

    global_tokens_per_expert = 0


@pytest.mark.parametrize(
    "config, module, expected",
    [
        ({"tensor_model_parallel_size": 2, "variable_seq_lengths": True}, None, 1.0),
        ({"expert_model_parallel_size": 2}, None, None),
        ({"expert_model_parallel_size": 2, "variable_seq_lengths": True}, None, 9.0),
        ({"expert_tensor_parallel_size": 2, "variable_seq_lengths": True}, None, 9.0),
        ({"variable_seq_lengths": True}, Attention, 9.0),
        ({"variable_seq_lengths": True}, Router, 9.0),
    ],
    ids=["same data", "same sizes", "experts", "parts of experts", "dynamic CP", "global loss"],
)
def test_ranks_that_wait_for_others_with_other_data_choose_for_the_largest(
    config: dict[str, Any], module: Any, expected: Optional[float], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunk: Any = torch.nn.Sequential(*([module()] if module else []))
    chunk.config = SimpleNamespace(**config)
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    for world_size in (1, 2):
        monkeypatch.setattr(torch.distributed, "get_world_size", lambda size=world_size: size)
        ranks = StageRanks()
        ranks.add(chunk)
        monkeypatch.setattr(ranks, "largest", lambda _: [9.0])
        assert ranks.agreed_size(1.0) == (expected if world_size > 1 else 1.0)
        if module is not None:
            assert (waits_for_others(chunk) is not None) == (world_size > 1)


@pytest.mark.parametrize(
    "backend, allowed, share",
    [("fused", None, 4), ("fused", "1", 4), ("fused", "0", 16), ("unfused", None, 16)],
)
def test_a_longer_micro_batch_needs_the_square_where_scores_are_in_memory(
    backend: str, allowed: Optional[str], share: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Transformer Engine's attention is one module, whatever its kernels."""
    if allowed is None:
        monkeypatch.delenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", raising=False)
    else:
        monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", allowed)
    chunk: Any = torch.nn.Linear(1, 1)
    chunk.config = SimpleNamespace(attention_backend=AttnBackend[backend])
    sizes = [size_of(chunk, (length, 2)) for length in (8, 32)]
    assert sizes[0] is not None
    assert sizes[1] == share * sizes[0]


def exchange_sizes(rank: int, world_size: int, port: int) -> list[float]:
    """The largest of two sizes, on ranks of which one has made a group that the other has not."""
    initialize(ModelCase("moe", dp=2, ep=2), rank, world_size, port)
    if rank == 0:
        torch.distributed.new_group([0], use_local_synchronization=True)
    ranks = StageRanks()
    ranks._is_shared = True
    with patch.object(torch.distributed, "new_group"):
        return [ranks.largest([size])[0] for size in (1.0 + rank, 4.0 - rank)]


def test_hosts_exchange_sizes_whatever_other_groups_a_rank_has_made() -> None:
    """The name of a new group would have the number of those before; ranks would wait."""
    assert run_ranks(2, exchange_sizes) == [[2.0, 4.0]] * 2


@pytest.mark.parametrize("kind", ["torch", "megatron", "hybrid"])
def test_models_whose_ranks_cannot_choose_alike_are_refused(kind: str) -> None:
    chunk = torch.nn.Linear(1, 1)
    check_model(chunk, "auto")
    if kind == "hybrid":
        chunk.config = SimpleNamespace(hybrid_context_parallel=True)  # type: ignore[assignment]
    elif kind == "torch":
        chunk.__class__ = type("Sharded", (torch.distributed.fsdp.FSDPModule, torch.nn.Linear), {})
    else:
        chunk.weight.__fsdp_param__ = True  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="budget=auto is not supported with (FSDP|hyb.*) because"):
        check_model(chunk, "auto")


def measure_mlps(rank: int, world_size: int, port: int) -> tuple[list[Rerun], dict[str, int]]:
    """What layers of a first iteration leave when they run again, and what settings then hold."""
    found: list[LayerVisits] = []
    reruns: list[Rerun] = []
    original = LayerVisits.add

    def add(visits: LayerVisits, assignment: Assignment, boundaries: Any, *others: Any) -> None:
        if visits not in found:
            found.append(visits)
            reruns.extend(cut.rerun for cut in boundaries if cut.rerun is not None)
        original(visits, assignment, boundaries, *others)

    with patch.object(LayerVisits, "add", add):
        train_within(rank, world_size, port, Run(DENSE, 0.9, (1,) * 6))
    (visits,) = found
    settings = [WHOLE, frozenset(("mlp",))]
    return reruns, {describe_setting(one): visits.held_bytes("dense", one) for one in settings}


def test_what_an_mlp_leaves_is_measured_before_a_setting_recomputes_it() -> None:
    """The bound of such settings is not below what they hold, and at most two tensors above."""
    ((reruns, held),) = run_ranks(1, measure_mlps)
    assert len(reruns) == DENSE.num_layers
    hidden = 4 * DENSE.micro_batch_size * DENSE.seq_length * DENSE.hidden_size
    for rerun in reruns:
        assert rerun.output_bytes == hidden
        bound = held["layer"] + rerun.nbytes - rerun.mlp_bytes
        assert 0 <= bound - held["mlp"] <= 2 * hidden


EXPERTS = ModelCase(
    "mla",
    num_layers=8,
    hidden_size=32,
    seq_length=64,
    vocab_size=64,
    overrides={
        **NORM,
        **{"q_lora_rank": 16, "kv_lora_rank": 16, "qk_head_dim": 8, "qk_pos_emb_head_dim": 8},
        **{"v_head_dim": 8, "ffn_hidden_size": 128, "moe_layer_freq": [0, *[1] * 7]},
        **{"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 32},
        **{"moe_shared_expert_intermediate_size": 32, "moe_token_dispatcher_type": "alltoall"},
    },
)


def compose_choices(
    rank: int, world_size: int, port: int, run: Run
) -> tuple[Budgeted, list[int], list[tuple[int, int]]]:
    """What iterations needed, what is resident in each, and for each choice what it is composed to
    need and has needed beside that, with nothing offloaded."""
    resident: list[int] = []
    composed: list[int] = []
    compared: list[tuple[int, int]] = []
    advance, add = Relaxation.advance, LayerVisits.add

    def note_composed(relaxation: Relaxation, limits: Limits) -> Assignment:
        assignment = advance(relaxation, limits)
        resident.append(limits.resident_bytes)
        if relaxation.predicted is not None and relaxation.stage is Stage.RECORDED:
            left_bytes = limits.base_bytes - limits.resident_bytes - relaxation.visits.left_bytes
            composed.append(left_bytes + relaxation.visits.most_bytes(assignment))
        return assignment

    def note_needed(
        visits: LayerVisits, assignment: Assignment, cuts: Any, movable: Any, *others: Any
    ) -> None:
        if composed and movable:
            # Cuts are without gradients, which are as large as the weights of the first iteration.
            weights = resident[-1] // 2
            compared.append((composed.pop(), max(cut.peak_bytes for cut in cuts) - weights))
        add(visits, assignment, cuts, movable, *others)

    with (
        patch.object(Relaxation, "advance", note_composed),
        patch.object(LayerVisits, "add", note_needed),
    ):
        (result,) = train_within(rank, world_size, port, run)
    return result, resident, compared


@pytest.mark.parametrize("number", [1, 2])
def test_what_experts_keep_until_they_run_again_counts_once(number: int) -> None:
    """It depends on the setting, and is neither resident nor what another layer saves."""
    run = Run(EXPERTS, 0.75, (number,) * 7, modules=MOE_MODULES)
    ((_, resident, compared),) = run_ranks(1, compose_choices, run)
    assert max(resident) - min(resident) < 64, "counters of modules"
    assert compared
    for composed, needed in compared:
        assert composed == pytest.approx(needed, rel=0.015)


def test_forward_frees_what_experts_kept_since_they_ran_again() -> None:
    """Without it, what is composed for recomputed layers is a hidden state too high for each."""
    ((_, _, compared),) = run_ranks(1, compose_choices, Run(EXPERTS, 0.4, (2,) * 7))
    assert compared
    for composed, needed in compared:
        assert composed == pytest.approx(needed, rel=0.01)


STAGES = ModelCase(
    "moe",
    num_layers=8,
    hidden_size=64,
    seq_length=64,
    vocab_size=64,
    pp=2,
    overrides={
        **NORM,
        **{"num_moe_experts": 8, "moe_router_topk": 2, "moe_ffn_hidden_size": 64},
        "moe_token_dispatcher_type": "allgather",
    },
)


def test_what_pipeline_stages_exchange_does_not_add_up_to_resident_memory() -> None:
    """It did by a hidden state per iteration: the last stage exceeded this budget by 3%."""
    run = Run(STAGES, 0.5, (6,) * 8)
    for result, resident, _ in run_ranks(2, compose_choices, run):
        assert len(resident) > 4
        assert len(set(resident)) == 1
        assert max(result.activation_bytes) <= result.budget_bytes


def train_without_readings(rank: int, world_size: int, port: int) -> tuple[list[str], Stage]:
    """The warnings about the budget, and the stage after two iterations."""
    case = ModelCase(num_layers=2)
    initialize(case, rank, world_size, port)
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("megatron.slipstream").addHandler(handler)
    manager = install.install(OffloadConfig(offload_backend="cpu", activation_memory_budget=1.0))
    config = make_config(case, DENSE_MODULES)
    chunks = build_chunks(case, config)
    for _ in train_steps(case, config, chunks, (1, 1)):
        assert set(layer_settings.assignment_of(chunks)) == {WHOLE}
    assert manager.budget is not None
    told = [text for text in said if "is not followed" in text]
    return told, manager.budget.relaxation.stage


def test_without_readings_of_memory_layers_stay_recomputed_and_a_warning_says_so() -> None:
    (((warning, *others), stage),) = run_ranks(1, train_without_readings)
    assert "activation_memory_budget=1.0 is not followed" in warning
    assert not others
    assert stage is Stage.FRUGAL


def test_auto_needs_a_device_with_an_end() -> None:
    with pytest.raises(ValueError, match="activation_memory_budget='auto' .* set the GiB"):
        install.install(OffloadConfig(offload_backend="cpu", activation_memory_budget="auto"))


@pytest.mark.parametrize(
    "model, has, lacks",
    [
        ({}, {"core_attn", "mlp_fc2"}, {"expert_fc1", "fused_group_mlp", "mla_up_proj"}),
        ({"num_experts": 4, "moe_grouped_gemm": True}, {"expert_fc1", "expert_fc2"}, set()),
        ({"recompute_granularity": "selective", "recompute_modules": ["mlp"]}, set(), {"mlp_fc2"}),
        ({"hybrid_layer_pattern": "MG-"}, {"gdn_rule", "mamba_scan"}, {"mla_up_proj"}),
        ({"hybrid_layer_pattern": "M+"}, {"mla_up_proj", "mamba_scan"}, {"gdn_rule"}),
        ({"experimental_attention_variant": "gated_delta_net"}, {"gdn_rule"}, {"mamba_scan"}),
    ],
    ids=["dense", "experts", "MLP recomputed", "Mamba", "hybrid MLA", "gated delta net"],
)
def test_the_flag_alone_moves_all_that_the_model_can(
    model: dict[str, Any], has: set[str], lacks: set[str]
) -> None:
    args = SimpleNamespace(
        **{
            "activation_memory_budget": 1.0,
            "offload_engine": "slipstream",
            "fine_grained_activation_offloading": False,
            "offload_modules": None,
            "num_experts": None,
            "multi_latent_attention": False,
            "hybrid_layer_pattern": None,
            **model,
        }
    )
    complete_arguments(args)
    assert args.fine_grained_activation_offloading
    assert has <= set(args.offload_modules)
    assert not lacks & set(args.offload_modules)


def test_modules_that_are_given_stay_as_they_are() -> None:
    args = SimpleNamespace(
        activation_memory_budget="auto",
        offload_engine="slipstream",
        fine_grained_activation_offloading=True,
        offload_modules=["core_attn"],
    )
    complete_arguments(args)
    assert args.offload_modules == ["core_attn"]
