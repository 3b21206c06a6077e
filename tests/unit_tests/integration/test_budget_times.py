# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A budget predicts the time of its choice, also on a device that is slower under load."""

from __future__ import annotations

import itertools
import logging
import re
from dataclasses import replace
from typing import Any, Optional
from unittest.mock import patch

import pytest
from budgeted_training import Budgeted, Run, train_within
from model_case import DENSE_MODULES, MLP_MODULES, ModelCase
from ranks import run_ranks
from simulated_device import SimulatedDevice, simulated_on_cpu

from megatron.slipstream.fine_grained_activation_offload import planner
from megatron.slipstream.fine_grained_activation_offload.lifecycle import Lifecycle
from megatron.slipstream.fine_grained_activation_offload.plan_cache import Phase
from megatron.slipstream.integration.budget import messages
from megatron.slipstream.plan.layer_visits import LayerVisits
from megatron.slipstream.plan.relaxation import Limits, Prediction, Relaxation, Stage
from megatron.slipstream.plan.settings import Assignment

CASE = ModelCase("dense", num_layers=6, overrides={"normalization": "LayerNorm"})
RUN = Run(
    CASE, 0.75, (1,) * 15, "cpu", (*DENSE_MODULES, *MLP_MODULES), {"min_offloaded_tensor_size": 1}
)
GB_PER_S = 0.15
"""With it, iterations that move everything wait for a third of their time."""
MAX_ERROR = 0.03
MAX_UNTIL_SETTLED = 12


def train_on_device(
    rank: int, world_size: int, port: int, run: Run, most_boost: float
) -> tuple[Budgeted, list[tuple[object, ...]], list[tuple[float, float]], list[float]]:
    """Train on a simulated device.

    Returns:
        What is measured; the figures that are logged of iterations that follow the plan; for each
        iteration in which layers were timed, computation and waits in milliseconds; the times that
        are logged of what was chosen.
    """
    told: list[tuple[object, ...]] = []
    said: list[str] = []
    timed: list[tuple[float, float]] = []
    add = LayerVisits.add

    def add_noted(self: LayerVisits, assignment: Assignment, cuts: Any, *rest: Any) -> None:
        timed.append((sum(one.ms or 0.0 for one in cuts), sum(one.waited_ms for one in cuts)))
        add(self, assignment, cuts, *rest)

    handler = logging.Handler()
    handler.emit = lambda record: told.append(record.args)  # type: ignore[method-assign]
    handler.addFilter(lambda record: "follow the plan" in record.msg)
    planner.logger.addHandler(handler)
    settled = logging.Handler()
    settled.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    messages.logger.addHandler(settled)
    for module in (planner, messages):
        module.logger.setLevel(logging.INFO)
    device = SimulatedDevice(GB_PER_S, most_boost)
    with simulated_on_cpu(device), patch.object(LayerVisits, "add", add_noted):
        (result,) = train_within(rank, world_size, port, run)
    predicted = [float(ms) for text in said for ms in re.findall(r"and ([\d.]+) ms for", text)]
    return result, told, [one for one in timed if one[0]], predicted


@pytest.mark.parametrize("most_boost", [0.0, 0.09])
def test_the_time_of_a_choice_is_predicted_before_it_is_followed(most_boost: float) -> None:
    """All moves while it is measured, and the device is faster by ``most_boost`` for its waits."""
    ((result, told, timed, predicted),) = run_ranks(1, train_on_device, RUN, most_boost)
    assert result.error == ""
    assert result.difference is None
    assert result.moved_bytes > 0
    compute_ms, waited_ms = timed[-1]
    assert waited_ms > 0.3 * compute_ms, "the choice is measured while all moves"
    assert compute_ms == pytest.approx(result.followed_ms / (1 + most_boost), rel=0.03)
    assert result.num_until_settled <= MAX_UNTIL_SETTLED
    assert result.planned_ms == pytest.approx(result.followed_ms, rel=MAX_ERROR)
    assert predicted == [pytest.approx(result.followed_ms, rel=MAX_ERROR)]
    measured_ms, waited_ms, planned_ms = told[-1]
    assert (measured_ms, planned_ms) == (result.followed_ms, result.planned_ms)
    assert 0 <= waited_ms < 0.02 * measured_ms


def train_behind(rank: int, world_size: int, port: int, run: Run) -> list[Optional[float]]:
    """Train on a device that has finished an iteration only when the next one begins.

    Returns:
        For each timed iteration of a choice, the waits by the plan made from its times.
    """
    finish, note = Lifecycle.finish, Relaxation.note
    noted: list[Optional[float]] = []

    def finish_early(*arguments: Any) -> None:
        with patch.object(Lifecycle, "read_clocks", lambda _: None):
            finish(*arguments)

    def note_waits(relaxation: Relaxation, *arguments: Any) -> None:
        if relaxation.predicted is not None and relaxation.stage is Stage.TIMED:
            noted.append(arguments[-1])
        note(relaxation, *arguments)

    device = SimulatedDevice(GB_PER_S, 0.0)
    with (
        simulated_on_cpu(device),
        patch.object(Lifecycle, "finish", finish_early),
        patch.object(Relaxation, "note", note_waits),
    ):
        train_within(rank, world_size, port, run)
    return noted


def test_the_waits_of_a_choice_are_known_though_the_device_is_behind_the_host() -> None:
    (noted,) = run_ranks(1, train_behind, replace(RUN, counts=(1,) * 10))
    assert noted
    assert all(waits_ms is not None and waits_ms > 0 for waits_ms in noted)


def train_with_a_worse_choice(
    rank: int, world_size: int, port: int, run: Run
) -> tuple[Budgeted, list[Phase]]:
    """Train with a second choice that is slower than predicted.

    Returns:
        What is measured; for each iteration, how far its plan has come when it begins.
    """
    choose, begin = Relaxation.choose, Lifecycle.begin
    num_choices = itertools.count()
    phases: list[Phase] = []

    def choose_worse(relaxation: Relaxation, limits: Limits) -> Prediction:
        chosen = choose(relaxation, limits)
        if next(num_choices) != 1:
            return chosen
        worse = (*relaxation.frugal[:3], *chosen.assignment[3:])
        return chosen._replace(assignment=worse, ms=0.9 * chosen.ms)

    def note_phase(lifecycle: Lifecycle, now: Any) -> None:
        phases.append(lifecycle.phase)
        begin(lifecycle, now)

    with (
        simulated_on_cpu(SimulatedDevice(GB_PER_S, 0.0)),
        patch.object(Relaxation, "choose", choose_worse),
        patch.object(Lifecycle, "begin", note_phase),
    ):
        (result,) = train_within(rank, world_size, port, run)
    return result, phases


def test_the_plan_of_a_choice_is_kept_while_another_one_is_measured() -> None:
    ((result, phases),) = run_ranks(1, train_with_a_worse_choice, RUN)
    assert result.error == ""
    assert result.difference is None
    settled = result.num_until_settled
    assert result.assignments[settled] == result.assignments[settled - 4]
    assert result.assignments[settled] != result.assignments[settled - 1]
    assert phases[settled - 4 : settled] == [Phase.RECORD, Phase.TIMED] * 2
    assert phases[settled : settled + 3] == [Phase.MEMORY_READ, Phase.TIMED, Phase.SETTLED]
    assert result.planned_ms == pytest.approx(result.followed_ms, rel=MAX_ERROR)
    assert settled + 2 <= MAX_UNTIL_SETTLED
