# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What the steps of a plan do, in Python and in C++, in situations that few iterations reach."""

from __future__ import annotations

import sys
from functools import partial
from types import SimpleNamespace
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from hand_driven import LAZY_NATIVE, HandDriven

from megatron.slipstream.fine_grained_activation_offload.group import GroupState
from megatron.slipstream.fine_grained_activation_offload.iteration import Iteration
from megatron.slipstream.fine_grained_activation_offload.native import native_module
from megatron.slipstream.fine_grained_activation_offload.plan_cache import PlanEntry
from megatron.slipstream.fine_grained_activation_offload.plan_executor import PlanExecutor
from megatron.slipstream.fine_grained_activation_offload.storage import Residence
from megatron.slipstream.fine_grained_activation_offload.verify import Verifier
from megatron.slipstream.plan.actions import Action, ActionKind
from megatron.slipstream.plan.trace import GroupKey, Step, StepKind

KEY = GroupKey(0, 0)
MARK = Step(StepKind.OUTPUT_START, GroupKey(0, -2), "output_layer")
"""A mark of no group, so that it changes no group's state."""
NBYTES = 16384


class OneGroup:
    """An iteration with one committed group, whose plan has all actions of :class:`ActionKind`."""

    def __init__(self, backend: str) -> None:
        self.hand = HandDriven(backend)
        self.hand.recorder.reads_memory = False
        self.store = self.hand.store
        self.now = Iteration()
        chunk = self.store.make_pass(0, 0, 1, 0)
        self.now.begin_pass(chunk)
        self.group = chunk.open_group("group")
        self.saved = self.hand.save(self.group, torch.arange(NBYTES // 4, dtype=torch.float32))
        chunk.commit_group("group")
        self.store.commit(self.group)
        self.executor = PlanExecutor(self.store, self.hand.recorder, Mock())

    @property
    def residence(self) -> Residence:
        """Where the group's storage is."""
        residence: Residence = self.saved.storage.residence
        return residence

    def perform(self, kind: ActionKind) -> None:
        """Come to a step with one action."""
        action = Action(kind, KEY, "group")
        trace = SimpleNamespace(
            steps=(MARK,),
            steps_key=None,
            group_by_key={KEY: SimpleNamespace(storages=(0,))},
        )
        plan: Any = SimpleNamespace(
            trace=trace,
            actions=((action,),),
            group_by_key={KEY: SimpleNamespace(kept_storages={})},
            silent=(),
            tracks=lambda _: True,
        )
        self.now.entry, self.now._num_steps = PlanEntry(plan, Mock()), 0
        self.now.native, steps = None, self.store.compile_steps(plan)
        if steps is not None and not self.hand.recorder.reads_memory:
            layout = self.store.host_pool.layout if self.now.has_layout else None
            self.now.native = steps.begin(self.now.passes, None, layout, False)
        self.executor.come_to(self.now, MARK.kind, MARK)
        assert self.now.plan is plan, "it did not depart"


@pytest.fixture(params=["cpu-lazy", LAZY_NATIVE])
def one(request: pytest.FixtureRequest) -> OneGroup:
    return OneGroup(request.param)


def test_actions_move_a_group(one: OneGroup) -> None:
    residences = []
    for kind in (ActionKind.D2H, ActionKind.FREE, ActionKind.H2D):
        one.perform(kind)
        residences.append(one.residence)
    assert residences == [Residence.OFFLOADING, Residence.HOST, Residence.RELOADING]


def test_a_group_in_use_is_not_copied_out(one: OneGroup) -> None:
    one.group.move_to(GroupState.IN_USE)
    one.perform(ActionKind.D2H)
    assert one.residence is Residence.DEVICE
    assert one.hand.copies == 0


def test_a_group_in_use_is_not_released(one: OneGroup) -> None:
    one.perform(ActionKind.D2H)
    one.group.move_to(GroupState.IN_USE)
    one.perform(ActionKind.FREE)
    assert one.residence is Residence.OFFLOADING


@pytest.mark.parametrize("kind", ActionKind, ids=lambda kind: kind.value)
@pytest.mark.parametrize("why", ["verified", "crosses streams", "memory is read", "timed"])
def test_what_cpp_does_not_do_python_does(
    one: OneGroup, kind: ActionKind, why: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = one.saved.storage.residence
    for earlier in ActionKind:
        if earlier is kind:
            break
        one.perform(earlier)
        expected = one.residence
    if why == "verified":
        one.store.verifier = Verifier(one.hand.backend)
    elif why == "crosses streams":
        one.store.crosses_streams = True
    elif why == "memory is read":
        one.hand.recorder.reads_memory = True
        one.hand.recorder.steps.append(MARK)
    else:
        one.store.copy_streams.timings = Mock(is_of_graph=True)
    streams, in_python = one.store.copy_streams, []
    for method in (streams.copy_out, streams.copy_in):
        note = partial(_noted, method, in_python)
        monkeypatch.setattr(streams, method.__name__, note)
    one.perform(kind)
    assert one.residence is not expected, "it was done"
    # Releases are in C++ with either; what is special about them is in the storage.
    assert bool(in_python) is (kind is not ActionKind.FREE)


def _noted(method: Any, noted: list[str], *arguments: Any, **options: Any) -> Any:
    noted.append(method.__name__)
    return method(*arguments, **options)


@pytest.mark.parametrize("has_layout", [True, False])
def test_planned_buffers_are_used_only_where_the_layout_is_followed(
    one: OneGroup, has_layout: bool
) -> None:
    """Another plan's layout may still be there, from the iteration before."""
    pool = one.store.host_pool
    pool._add_slab(4 * NBYTES)
    assert pool.follow(pool.make_layout({0: (2 * NBYTES, 3 * NBYTES, (), 0)}))
    one.now.has_layout = has_layout
    one.perform(ActionKind.D2H)
    offset = one.saved.storage.allocation.buffer.start - pool._slab_bytes[0].start
    assert (offset == 2 * NBYTES) is has_layout
    assert pool.follows_layout is has_layout


def test_steps_keep_no_references() -> None:
    """Numbers above 256 are objects, one for each step."""
    native = native_module()
    assert native is not None
    one, num_steps = OneGroup(LAZY_NATIVE), 3000
    steps = native.Steps(
        one.store.native,
        ((MARK.kind, MARK.key, MARK.name, []) for _ in range(num_steps)),
        [],
        [],
        None,
    )

    def run() -> None:
        now = steps.begin(one.now.passes, None, None, False)
        for _ in range(num_steps):
            assert now.come_to(MARK.kind, MARK) == ()

    run()
    before = sys.getallocatedblocks()
    run()
    assert sys.getallocatedblocks() - before < num_steps // 10
