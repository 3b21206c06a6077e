# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Every rule of the check refuses a plan that breaks it, and every edge is needed by the proof.

Most plans here are one pass of four layers with one group each, whose steps are easily counted:
group ``g`` starts at step ``2 * g``, commits at ``2 * g + 1``, releases it at ``2 * g + 3``, starts
its copy back at ``10 - g`` and is used at ``11 - g``. The last layer stays.
"""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import pytest
from make_trace import DEFAULT_NBYTES, Model, one_f_one_b, one_pass, trace_of

from megatron.slipstream.fine_grained_activation_offload import engine, planner
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.iteration import Iteration
from megatron.slipstream.plan import operations
from megatron.slipstream.plan.actions import GroupPlan, Plan, StoragePlan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import PlanError, PlanFacts, SafetyProperty, check_plan
from megatron.slipstream.plan.edges import EDGES, EdgeRule, OpKind
from megatron.slipstream.plan.host_layout import (
    MIN_BUFFER_BYTES,
    HostBuffer,
    HostLedger,
)
from megatron.slipstream.plan.operations import Operation, derive_schedule
from megatron.slipstream.plan.trace import GroupKey, Trace

FIRST, SECOND = GroupKey(0, 0), GroupKey(0, 1)


def plan_of(trace: Trace, lag: int = 1, depth: int = 1) -> Plan:
    return build_plan(trace, PolicyOptions(release_lag=lag, prefetch_depth=depth))


FOUR_LAYERS = plan_of(one_pass(Model(num_layers=4)))
SHARED = plan_of(one_pass(Model(num_layers=5, saves={0: ("x",), 1: ("x", "y")})))
"""Groups 0 and 1 save the same storage."""
IN_FLIGHT = plan_of(trace_of(one_f_one_b(2, 0, 4), Model(num_layers=3)), depth=4)
"""Copies back of one micro-batch are in flight when the next one's copies out start."""


def change_group(plan: Plan, key: GroupKey, **changes: Any) -> Plan:
    groups = tuple(
        dataclasses.replace(group, **changes) if group.key == key else group
        for group in plan.groups
    )
    return dataclasses.replace(plan, groups=groups)


def change_storage(plan: Plan, which: int, **changes: Any) -> Plan:
    storages = tuple(
        dataclasses.replace(storage, **changes) if storage.index == which else storage
        for storage in plan.storages
    )
    return dataclasses.replace(plan, storages=storages)


def change_storage_trace(plan: Plan, index: int, **changes: Any) -> Plan:
    storages = list(plan.trace.storages)
    storages[index] = dataclasses.replace(storages[index], **changes)
    return dataclasses.replace(
        plan, trace=dataclasses.replace(plan.trace, storages=tuple(storages))
    )


def refusal(plan: Plan, *edges: EdgeRule) -> PlanError:
    with pytest.raises(PlanError) as caught:
        check_plan(plan, edges or EDGES)
    return caught.value


def assert_refused(plan: Plan, rule: SafetyProperty, action: str, *edges: EdgeRule) -> PlanError:
    """The error names the rule and the action, and points at the group's row of the plan."""
    error = refusal(plan, *edges)
    assert error.rule is rule
    assert error.action == action
    assert rule.value in str(error)
    assert f"at {action}:" in str(error)
    (row,) = (line for line in str(error).split("\n") if line.endswith("  <-- here"))
    assert row.startswith(action.rpartition(":")[0])
    return error


# Mutations: each breaks one rule, and the error names it with the action.

Rule = SafetyProperty
MOVES = {"commit_step": "D2H", "free_step": "FREE", "h2d_step": "H2D"}
STORAGES, GROUPS = FOUR_LAYERS.storages, FOUR_LAYERS.groups
MOVED_EARLY = StoragePlan(3, 1000, 7, 8, 9, 10)
STRANGER = dataclasses.replace(GROUPS[0], key=GroupKey(7, 3))
SECOND_STAYS = tuple(
    GroupPlan(SECOND, "core_attn", False, "none") if group.key == SECOND else group
    for group in SHARED.groups
)
WITHOUT_LAST_USE = dataclasses.replace(
    FOUR_LAYERS.trace, steps=FOUR_LAYERS.trace.steps[:-1] + FOUR_LAYERS.trace.steps[-2:-1]
)
FEW_BYTES = dataclasses.replace(FOUR_LAYERS.options, host_memory_limit_bytes=2 * MIN_BUFFER_BYTES)
LATE = SHARED.group_by_key[FIRST].h2d_step + 1


def changed(plan: Plan = FOUR_LAYERS, **changes: Any) -> Plan:
    return dataclasses.replace(plan, **changes)


def first(**changes: Any) -> Plan:
    return change_group(FOUR_LAYERS, FIRST, **changes)


def second(**changes: Any) -> Plan:
    return change_group(FOUR_LAYERS, SECOND, **changes)


MUTATIONS = [
    ("a stranger", changed(groups=(*GROUPS, STRANGER)), Rule.KNOWN_GROUP, "7.3 D2H"),
    *[
        (f"{name} {at}", second(**{name: at}), Rule.KNOWN_STEP, f"0.1 {action}")
        for name, action in MOVES.items()
        for at in (-1, 12, 1000)
    ],
    ("kept", first(kept_storages={1: "a reason"}), Rule.KNOWN_STORAGE, "0.0 D2H"),
    ("use elsewhere", first(use_step=10), Rule.KNOWN_USE, "0.0 BU"),
    # It would not be reloaded before the iteration ends.
    ("never used", changed(trace=WITHOUT_LAST_USE), Rule.KNOWN_USE, "0.0 BU"),
    *[
        (f"{name} before commit", second(**{name: 2}), Rule.AFTER_COMMIT, f"0.1 {action}")
        for name, action in MOVES.items()
    ],
    # The order of a storage's moves. At its own use the engine would neither copy nor release.
    ("free before D2H", first(commit_step=5), Rule.D2H_BEFORE_FREE, "0.0 FREE"),
    ("H2D 9", first(free_step=10, h2d_step=9), Rule.FREE_BEFORE_H2D, "0.0 H2D"),
    ("H2D 2", first(free_step=3, h2d_step=2), Rule.FREE_BEFORE_H2D, "0.0 H2D"),
    ("H2D 1", first(free_step=3, h2d_step=1), Rule.FREE_BEFORE_H2D, "0.0 H2D"),
    ("shared", change_group(SHARED, SECOND, free_step=LATE), Rule.FREE_BEFORE_H2D, "0.1 H2D"),
    ("late free", first(free_step=11, h2d_step=11), Rule.LEAVES_BEFORE_USE, "0.0 FREE"),
    (
        *("late D2H", first(commit_step=11, free_step=11, h2d_step=11)),
        *(Rule.LEAVES_BEFORE_USE, "0.0 D2H"),
    ),
    ("used before", second(h2d_step=11), Rule.BACK_BEFORE_USE, "0.1 H2D"),
    ("moved twice", changed(storages=STORAGES + STORAGES), Rule.ONCE, "0.0 D2H"),
    # The holders of a storage.
    ("a holder stays", changed(SHARED, groups=SECOND_STAYS), Rule.ALL_RELEASE, "0.0 D2H"),
    (
        *("a holder keeps it", change_group(SHARED, SECOND, kept_storages={0: "none"})),
        *(Rule.ALL_RELEASE, "0.0 D2H"),
    ),
    ("host memory", changed(options=FEW_BYTES), Rule.WITHIN_HOST_MEMORY, "0.2 D2H"),
    (
        *("held outside", change_storage_trace(FOUR_LAYERS, 1, held_outside=True)),
        *(Rule.HELD_OUTSIDE, "0.1 D2H"),
    ),
    # The statements of the plan.
    *[
        (
            *(name, change_storage(FOUR_LAYERS, 1, **{name: getattr(STORAGES[1], name) + 1})),
            *(Rule.AS_STATED, "0.1 D2H"),
        )
        for name in ("nbytes", "d2h_step", "free_step", "h2d_step", "use_step")
    ],
    ("not stated", changed(storages=STORAGES[1:]), Rule.AS_STATED, "0.0 D2H"),
    ("not moved", changed(storages=(*STORAGES, MOVED_EARLY)), Rule.AS_STATED, "0.3 D2H"),
    ("other bytes", second(moved_nbytes=999), Rule.AS_STATED, "0.1 D2H"),
]


@pytest.mark.parametrize(
    ("plan", "rule", "action"), [pytest.param(*m[1:], id=m[0]) for m in MUTATIONS]
)
def test_a_plan_that_breaks_a_rule_is_refused(plan: Plan, rule: Rule, action: str) -> None:
    assert_refused(plan, rule, action.replace(" ", ".core_attn:"))


UNSEEN = [
    (changed(groups=GROUPS[1:]), Rule.KNOWN_GROUP, "0.0.core_attn:D2H", 0),
    (change_storage(FOUR_LAYERS, 0, index=-1), Rule.KNOWN_STORAGE, "storage -1", 0),
    (change_storage(FOUR_LAYERS, 0, index=4), Rule.KNOWN_STORAGE, "storage 4", 0),
    (changed(groups=GROUPS + GROUPS[:1]), Rule.ONCE, "0.0.core_attn:D2H", 2),
]


@pytest.mark.parametrize(("plan", "rule", "action", "num_rows"), UNSEEN)
def test_what_has_no_row_of_its_own_or_two_is_refused(
    plan: Plan, rule: Rule, action: str, num_rows: int
) -> None:
    error = refusal(plan)
    assert (error.rule, error.action) == (rule, action)
    assert str(error).count("<-- here") == num_rows


def test_a_holder_that_stays_is_named() -> None:
    assert "group 0.1" in str(refusal(changed(SHARED, groups=SECOND_STAYS)))


# The edges.


def without(edge_id: str) -> tuple[EdgeRule, ...]:
    return tuple(edge for edge in EDGES if edge.id != edge_id)


@pytest.mark.parametrize(
    "edge_id, rule, action",
    [
        ("E1", SafetyProperty.COPY_OUT_READS_WRITTEN, "0.0.core_attn:D2H"),
        ("E2", SafetyProperty.BUFFER_REUSED_AFTER_COPY, "3.0.core_attn:D2H"),
        ("E3", SafetyProperty.REUSED_AFTER_COPY_OUT, "0.0.core_attn:FREE"),
        ("E4", SafetyProperty.COPY_IN_READS_WRITTEN, "0.2.core_attn:H2D"),
        ("E5", SafetyProperty.BACKWARD_READS_WRITTEN, "0.2.core_attn:BU"),
        ("E6", SafetyProperty.UNREAD_REUSED_AFTER_COPY_IN, "3.1.core_attn:H2D"),
    ],
)
def test_without_any_one_edge_the_proof_fails(
    edge_id: str, rule: SafetyProperty, action: str
) -> None:
    assert_refused(IN_FLIGHT, rule, action, *without(edge_id))


def test_an_edge_from_a_copy_out_to_its_copy_in_would_not_replace_the_wait_for_compute() -> None:
    # It would order the host buffer; the memory that the copy back writes is compute's until then.
    shortcut = EdgeRule("E4", OpKind.COPY_OUT, OpKind.COPY_IN)
    edges = (*without("E4"), shortcut)
    assert_refused(IN_FLIGHT, SafetyProperty.COPY_IN_AFTER_LAST_USE, "0.2.core_attn:H2D", *edges)


def test_a_plan_whose_buffers_serve_once_is_proved_without_their_edge() -> None:
    # The proof requires the edges that a plan needs, not a fixed list.
    assert not any(b.used_before for b in derive_schedule(FOUR_LAYERS).buffers.values())
    check_plan(FOUR_LAYERS, without("E2"))


def test_no_queue_waits_for_what_is_issued_later() -> None:
    circle = EdgeRule("circle", OpKind.COPY_OUT, OpKind.START_OUT)
    assert_refused(FOUR_LAYERS, SafetyProperty.NO_CYCLE, "0.0.core_attn:D2H", *EDGES, circle)


# Derived operations.


def issued(plan: Plan) -> list[str]:
    """The operations without those that only mark the passing of steps, as text."""

    def text(operation: Operation) -> str:
        storages = ",".join(str(index) for index in operation.storages)
        return f"{operation.step} {operation.kind.name} {storages}"

    schedule = derive_schedule(plan)
    return [text(op) for op in schedule.operations if op.kind is not OpKind.COMPUTE]


def test_the_operations_of_three_layers() -> None:
    assert issued(plan_of(one_pass(Model(num_layers=3)))) == [
        "1 WRITE 0",
        "1 START_OUT 0",
        "1 COPY_OUT 0",
        "3 WRITE 1",
        "3 START_OUT 1",
        "3 COPY_OUT 1",
        "3 RELEASE 0",
        "5 RELEASE 1",
        "6 START_IN 1",
        "6 COPY_IN 1",
        # The mark precedes the use that it announces: a copy back is started before the read.
        "7 START_IN 0",
        "7 COPY_IN 0",
        "7 USE 1",
        "8 USE 0",
    ]


def test_a_shared_storage_is_copied_once_and_read_by_all_its_groups() -> None:
    of_shared = [line for line in issued(SHARED) if "0" in line.split()[2].split(",")]
    assert [line.split()[1] for line in of_shared] == [
        *("WRITE", "START_OUT", "COPY_OUT", "SAVE", "RELEASE"),
        *("START_IN", "COPY_IN", "USE", "USE"),
    ]


def test_the_storages_of_a_group_move_in_one_batch() -> None:
    plan = plan_of(one_pass(Model(num_layers=3, saves={0: ("x", "y")})))
    assert "1 COPY_OUT 0,1" in issued(plan)
    assert "7 COPY_IN 0,1" in issued(plan)


def test_host_memory_is_lent_again_once_its_copy_back_was_started() -> None:
    schedule = derive_schedule(IN_FLIGHT)
    order = {(op.kind, storage): i for i, op in enumerate(schedule.operations) for storage in op[3]}
    again = {s: buffer.used_before for s, buffer in schedule.buffers.items() if buffer.used_before}
    assert again
    for storage, used_before in again.items():
        for before in used_before:
            assert order[OpKind.COPY_IN, before] < order[OpKind.COPY_OUT, storage]


def test_a_buffer_names_all_that_had_bytes_of_it_before() -> None:
    ledger = HostLedger()
    first, second, last = (ledger.allocate(64 << 10) for _ in range(3))
    assert ledger.in_use_bytes == 3 * (64 << 10)
    ledger.free(first, 0)
    ledger.free(second, 1)
    assert ledger.allocate(96 << 10) == HostBuffer(0, 96 << 10, (0, 1))
    assert last.used_before == ()


def test_a_host_buffer_that_is_lent_while_another_copy_reads_it_is_found() -> None:
    # The pool's list of earlier users of the bytes is not trusted.
    class ForgetfulLedger(HostLedger):
        def allocate(self, nbytes: int) -> HostBuffer:
            return super().allocate(nbytes)._replace(used_before=())

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "HostLedger", ForgetfulLedger)
        assert_refused(IN_FLIGHT, SafetyProperty.BUFFER_REUSED_AFTER_COPY, "3.0.core_attn:D2H")


@pytest.mark.parametrize("shift", [0, MIN_BUFFER_BYTES // 2])
def test_a_host_buffer_that_is_lent_twice_at_once_is_found(shift: int) -> None:
    # Two storages in the same bytes: the second copy out waits for the first, on the same queue.
    class OverlappingLedger(HostLedger):
        def __init__(self) -> None:
            super().__init__()
            self.num_lent = 0

        def allocate(self, nbytes: int) -> HostBuffer:
            self.num_lent += 1
            start = shift * self.num_lent
            return HostBuffer(start, start + MIN_BUFFER_BYTES, ())

        def free(self, buffer: HostBuffer, storage: int) -> None:
            pass

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(operations, "HostLedger", OverlappingLedger)
        error = refusal(FOUR_LAYERS)
        assert error.rule is SafetyProperty.COPY_IN_READS_WRITTEN
        assert "overwritten" in str(error)


# Facts.


def test_the_facts_of_four_layers() -> None:
    # Layers 0 to 2 are freed one layer after their own and reloaded one before, so that there are
    # never more than two. Each has five operations that move it, a write and a use.
    facts = check_plan(FOUR_LAYERS)
    assert facts == PlanFacts(
        peak_device_bytes=2 * DEFAULT_NBYTES,
        peak_host_bytes=3 * MIN_BUFFER_BYTES,
        num_operations=12 + 3 * 7,
    )


def test_an_empty_plan_is_safe() -> None:
    assert check_plan(plan_of(Trace((), (), ()))) == PlanFacts(0, 0, 0)


@pytest.mark.parametrize("place", [0, 63, 64, 99])
def test_the_row_of_the_group_is_shown_however_long_the_plan(place: int) -> None:
    plan = plan_of(one_pass(Model(num_layers=101)))
    key = GroupKey(0, place)
    broken = change_group(plan, key, free_step=0)
    assert_refused(broken, SafetyProperty.AFTER_COMMIT, f"0.{place}.core_attn:FREE")


def test_the_engine_follows_no_plan_that_was_not_proved() -> None:
    made = engine.OffloadEngine(CpuBackend())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner, "build_plan", lambda *_: FOUR_LAYERS)
        assert made.lifecycle._plan_recorded(Iteration(), 0).plan is FOUR_LAYERS
        broken = change_group(FOUR_LAYERS, FIRST, free_step=0)
        patch.setattr(planner, "build_plan", lambda *_: broken)
        with pytest.raises(PlanError):
            made.lifecycle._plan_recorded(Iteration(), 0)


# Cost.


def best_of(function: Callable[[], object], times: int = 3) -> float:
    durations = []
    for _ in range(times):
        start = time.process_time()
        function()
        durations.append(time.process_time() - start)
    return min(durations)


def test_the_cost_of_a_check_grows_linearly_with_the_plan() -> None:
    modules = ("attn_norm", "qkv_linear", "core_attn", "attn_proj")

    def plan(num_layers: int) -> Plan:
        model = Model(num_layers=num_layers, modules=modules, encloses=True)
        return plan_of(trace_of(one_f_one_b(4, 0, 8), model))

    small, large = plan(4), plan(32)
    assert small.actions
    assert large.actions
    # Eight times the plan; a check that looked at pairs would take 64 times as long.
    assert best_of(lambda: check_plan(large)) < 24 * best_of(lambda: check_plan(small))
