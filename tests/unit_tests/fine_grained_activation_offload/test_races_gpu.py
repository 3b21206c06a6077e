# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""On a GPU, each edge of the table is needed: with it the result is right, without it wrong."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from hand_driven import HandDriven
from race_scenarios import FURTHER_SCENARIOS, KINDS, SCENARIOS, Scenario, without_edge

from megatron.slipstream.plan.edges import Edge

pytestmark = [pytest.mark.gpu, pytest.mark.exclusive]

Row = Callable[..., None]


def test_every_edge_has_a_scenario() -> None:
    assert SCENARIOS.keys() == set(Edge)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edge", Edge, ids=lambda edge: edge.name)
def test_right_with_the_edge(edge: Edge, kind: str) -> None:
    for _ in range(3):
        assert SCENARIOS[edge](kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("edge", Edge, ids=lambda edge: edge.name)
def test_wrong_without_the_edge(edge: Edge, kind: str) -> None:
    with without_edge(edge):
        assert not any(SCENARIOS[edge](kind) for _ in range(3))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", FURTHER_SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_right_with_every_wait_of_an_edge(scenario: Scenario, kind: str) -> None:
    for _ in range(3):
        assert scenario(kind)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("scenario", FURTHER_SCENARIOS, ids=lambda scenario: scenario.__name__)
def test_wrong_without_the_waits_of_that_edge(scenario: Scenario, kind: str) -> None:
    with without_edge(FURTHER_SCENARIOS[scenario]):
        assert not any(scenario(kind) for _ in range(3))


def test_host_memory_that_was_not_returned_can_be_registered_again() -> None:
    """A pool that is forgotten, not closed, must not leave its addresses registered."""
    for _ in range(20):
        hand = HandDriven("cuda")
        group = hand.group()
        saved = hand.save(group, torch.ones(1 << 20, device="cuda"))
        hand.send(group)
        assert bool((hand.store.read(saved) == 1.0).all())


@pytest.mark.parametrize("kind", KINDS)
def test_each_scenario_depends_on_its_own_edge_only(kind: str, record_row: Row) -> None:
    """The mutation run: every edge deleted in turn, every scenario run. Its rows are kept."""
    table = {}
    for deleted in [None, *Edge]:
        for scenario in Edge:
            if deleted is None:
                right = SCENARIOS[scenario](kind)
            else:
                with without_edge(deleted):
                    right = SCENARIOS[scenario](kind)
            table[deleted, scenario] = right
            name = deleted.name if deleted else None
            row = {"kind": kind, "deleted": name, "scenario": scenario.name, "right": right}
            record_row("edge_mutations", **row)
    assert all(table[None, scenario] for scenario in Edge)
    for deleted in Edge:
        assert not table[deleted, deleted]
