# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Properties of the plan of any schedule, any model and any options."""

from __future__ import annotations

import dataclasses
from collections import Counter
from random import Random

from hypothesis import HealthCheck, given, settings, strategies as st
from make_trace import Model, Schedule, interleaved, one_f_one_b, trace_of

from megatron.slipstream.plan.actions import ActionKind, Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions, select_groups
from megatron.slipstream.plan.render import render_plan
from megatron.slipstream.plan.trace import GroupKey, MemoryReading, StepKind, Trace

LABELS = ("a", "b", "c", "d", "e", "f")
MODULES = ("attn_norm", "core_attn", "mlp_norm")


@st.composite
def schedules(draw: st.DrawFn) -> Schedule:
    pp_size = draw(st.sampled_from([1, 2, 3, 4, 8]))
    pp_rank = draw(st.integers(0, pp_size - 1))
    vp_size = draw(st.sampled_from([None, 1, 2, 3, 4]))
    if vp_size is None:
        return one_f_one_b(pp_size, pp_rank, draw(st.integers(1, 8)))
    return interleaved(pp_size, pp_rank, pp_size * draw(st.integers(1, 8 // pp_size)), vp_size)


@st.composite
def models(draw: st.DrawFn) -> Model:
    modules = MODULES[: draw(st.integers(1, 3))]
    num_layers = draw(st.integers(1, 3))
    groups = range(num_layers * len(modules))
    saves = st.lists(st.sampled_from(LABELS), max_size=3, unique=True)
    return Model(
        num_layers=num_layers,
        modules=modules,
        encloses=draw(st.booleans()),
        saves=draw(st.dictionaries(st.sampled_from(groups), saves)),
        nbytes=draw(st.dictionaries(st.sampled_from(LABELS), st.integers(1, 1 << 30))),
        one_for_all_passes=draw(st.frozensets(st.sampled_from(LABELS[-2:]))),
        held_outside=draw(st.frozensets(st.sampled_from(LABELS), max_size=2)),
        without_use=draw(st.frozensets(st.sampled_from(groups), max_size=1)),
    )


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    return trace_of(draw(schedules()), draw(models()), draw(st.integers(0, 7)))


options_of_plans = st.builds(
    PolicyOptions,
    activation_offload_fraction=st.one_of(st.just(1.0), st.floats(0.0, 1.0)),
    delta_offload_bytes_across_pp_ranks=st.sampled_from([0, 0, 1, 1500, 1 << 20]),
    release_lag=st.integers(0, 6),
    prefetch_depth=st.integers(0, 6),
)


def moving_keys(plan: Plan) -> set[GroupKey]:
    return {group.key for group in plan.groups if group.moves}


def check_the_order_of_each_storages_steps(plan: Plan) -> None:
    index = plan.trace.step_index
    for storage in plan.storages:
        holders = plan.trace.storages[storage.index].holders
        first_commit = min(index[StepKind.FORWARD_COMMIT, key] for key in holders)
        first_use = min(index[StepKind.BACKWARD_USE, key] for key in holders)
        assert first_commit <= storage.d2h_step <= storage.free_step
        assert storage.free_step < storage.h2d_step <= storage.use_step == first_use
        for key in holders:
            # The last group to save it must still find it, so it cannot be freed before that.
            assert index[StepKind.FORWARD_COMMIT, key] <= storage.free_step


def check_that_groups_and_storages_agree_on_what_moves(plan: Plan) -> None:
    planned = {storage.index for storage in plan.storages}
    moving = moving_keys(plan)
    for storage in plan.storages:
        assert set(plan.trace.storages[storage.index].holders) <= moving
        assert not plan.trace.storages[storage.index].held_outside
    for group in plan.groups:
        storages = plan.trace.group_by_key[group.key].storages
        if not group.moves:
            assert group.reason
            assert not planned & set(storages)
            continue
        stays = {place for place, index in enumerate(storages) if index not in planned}
        assert set(group.kept_storages) == stays
        assert all(group.kept_storages.values())
        assert len(stays) < len(storages)
        assert group.commit_step <= group.free_step < group.h2d_step <= group.use_step


def check_that_bytes_add_up(plan: Plan) -> None:
    assert plan.moved_nbytes == sum(group.moved_nbytes for group in plan.groups)
    assert plan.moved_nbytes == sum(storage.nbytes for storage in plan.storages)
    assert len({storage.index for storage in plan.storages}) == len(plan.storages)
    assert min(plan.absent_bytes) >= 0
    assert max(plan.absent_bytes) <= plan.moved_nbytes
    # Everything that was offloaded is reloaded before the iteration ends.
    assert plan.absent_bytes[-1] == 0


def follow(plan: Plan) -> tuple[list[int], Counter[int]]:
    """Carry out a plan's actions as the engine does, checking each.

    Returns:
        The bytes on the host after each step, and how often each storage was copied out.
    """
    trace = plan.trace
    waits_for = {index: set(storage.holders) for index, storage in enumerate(trace.storages)}
    leaving: set[int] = set()
    away: set[int] = set()
    copies_out: Counter[int] = Counter()
    absent = []
    for step, due in zip(trace.steps, plan.actions, strict=True):
        for action in due:
            storages = trace.group_by_key[action.key].storages
            stays = plan.group_by_key[action.key].kept_storages
            if action.kind is ActionKind.D2H:
                new = {storages[place] for place in range(len(storages)) if place not in stays}
                new -= leaving | copies_out.keys()
                leaving |= new
                copies_out.update(new)
            elif action.kind is ActionKind.FREE:
                for index in storages:
                    waits_for[index].discard(action.key)
                    if index in leaving and not waits_for[index]:
                        leaving.remove(index)
                        away.add(index)
            else:
                away -= set(storages)
        if step.kind is not StepKind.FORWARD_COMMIT:
            # Its operations run next, and save or read each of its storages.
            assert not away & set(trace.group_by_key[step.key].storages)
        absent.append(sum(trace.storages[index].nbytes for index in away))
    assert not leaving
    return absent, copies_out


def check_that_its_actions_do_what_it_says(plan: Plan) -> None:
    # Plan.storages describes each storage; the engine reads only Plan.actions.
    absent, copies_out = follow(plan)
    assert absent == list(plan.absent_bytes)
    assert copies_out == Counter(storage.index for storage in plan.storages)


def check_that_groups_stay_for_the_first_reason_that_was_found(plan: Plan) -> None:
    selected, kept = select_groups(plan.trace, plan.options)
    assert moving_keys(plan) <= selected
    assert all(plan.group_by_key[key].reason == reason for key, reason in kept.items())


def check_that_the_peak_is_not_raised(plan: Plan, random: Random) -> None:
    peaks = [random.randrange(1 << random.randint(0, 34)) for _ in plan.trace.steps]
    memory = tuple(MemoryReading(peak, peak, 0) for peak in peaks)
    measured = dataclasses.replace(plan, trace=dataclasses.replace(plan.trace, memory=memory))
    drop = measured.peak_drop_bytes
    assert drop is not None
    assert 0 <= drop <= max(plan.absent_bytes)


def check_its_drawing(plan: Plan, width: int, max_rows: int) -> None:
    lines = render_plan(plan, width, max_rows).split("\n")
    num_hidden = max(0, len(plan.groups) - max_rows)
    reasons = {reason for g in plan.groups if g.moves for reason in g.kept_storages.values()}
    num_rows = min(len(plan.groups), max_rows) + bool(num_hidden)
    assert len(lines) == 1 + num_rows + 2 + len(reasons)


def check_that_more_lag_or_depth_frees_no_more(plan: Plan, name: str, more: int) -> None:
    wider = {name: getattr(plan.options, name) + more}
    wide = build_plan(plan.trace, dataclasses.replace(plan.options, **wider))
    assert moving_keys(wide) <= moving_keys(plan)
    assert all(b <= a for a, b in zip(plan.absent_bytes, wide.absent_bytes, strict=True))


# The same cases in every run: a failure is a failure of the change under test. The deadline is off
# because the machine may be busy. Drawing a case takes longer than all checks of its plan.
@settings(
    max_examples=300,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)
@given(
    plan=st.builds(build_plan, traces(), options_of_plans),
    random=st.builds(Random, st.integers(0, 2**32)),
)
def test_any_plan_is_consistent(plan: Plan, random: Random) -> None:
    check_the_order_of_each_storages_steps(plan)
    check_that_groups_and_storages_agree_on_what_moves(plan)
    check_that_bytes_add_up(plan)
    check_that_its_actions_do_what_it_says(plan)
    check_that_groups_stay_for_the_first_reason_that_was_found(plan)
    check_that_the_peak_is_not_raised(plan, random)
    check_its_drawing(plan, width=random.randint(1, 60), max_rows=random.randint(0, 8))
    for name in ("release_lag", "prefetch_depth"):
        check_that_more_lag_or_depth_frees_no_more(plan, name, more=random.randint(1, 3))
