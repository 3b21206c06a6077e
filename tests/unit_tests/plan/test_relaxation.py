# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Iterations of an imitated model relax within a limit, whatever its layers hold."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest

from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.layer_visits import Boundary, Place, RankLayer
from megatron.slipstream.plan.relaxation import Limits, NothingFitsError, Relaxation, Stage
from megatron.slipstream.plan.settings import NOTHING, WHOLE, LayerSetting
from megatron.slipstream.plan.trace import Bandwidth

PARTS = [LayerSetting(parts) for parts in (("mlp", "layernorm"), ("mlp",), ("layernorm",))]
SETTINGS = (WHOLE, *PARTS, NOTHING)
LINK = Bandwidth(50.0, 50.0, 40.0, 40.0)
RESIDENT = 10_000
MAX_ITERATIONS = 12


@dataclass
class Machine:
    """A model whose layers hold these bytes and take these times."""

    layers: Sequence[RankLayer]
    held: dict[tuple[str, LayerSetting], int]
    transient: int
    """Bytes that backward of a layer needs beside what it recomputes."""
    logits: int
    num_in_flight: int = 1

    def run(self, relaxation: Relaxation) -> tuple[list[Boundary], int]:
        """An iteration with nothing offloaded: its boundaries, and the peak of activations."""
        now, peak = RESIDENT, RESIDENT
        found: list[Boundary] = []

        def come(place: Place, layer: int, change: int, above: int, ms: float) -> None:
            nonlocal now, peak
            found.append(Boundary(place, 0, layer, now, now, None))
            top = now + max(change, above, 0)
            now, peak = now + change, max(peak, top)
            pending.append((top, ms))

        pending: list[tuple[int, float]] = []
        held = [
            self.held[layer.kind, setting]
            for layer, setting in zip(self.layers, relaxation.assignment, strict=True)
        ]
        most = [self.held[layer.kind, NOTHING] for layer in self.layers]
        for _ in range(self.num_in_flight):
            come(Place.CALL, -1, 0, 0, 1.0)
            for index, nbytes in enumerate(held):
                come(Place.LAYER, index, nbytes, most[index], 10.0)
            come(Place.LAYERS_END, -1, self.logits, 0, 1.0)
        for _ in range(self.num_in_flight):
            come(Place.RETURN, -1, -self.logits, 0, 1.0)
            for index in reversed(range(len(held))):
                again = most[index] - held[index]
                ms = 20.0 + 10.0 * again / most[index]
                come(Place.GRADIENT, index, -held[index], again + self.transient, ms)
            come(Place.INPUT_GRADIENT, -1, 0, 0, 1.0)
        found.append(Boundary(Place.END, -1, -1, now))
        timed = [
            boundary._replace(peak_bytes=top, ms=ms)
            for boundary, (top, ms) in zip(found[1:], pending, strict=True)
        ]
        return [found[0]._replace(peak_bytes=RESIDENT), *timed], peak - RESIDENT


def machines(number: int) -> Iterator[Machine]:
    draw = random.Random(7)
    for _ in range(number):
        kinds = draw.choice([["dense"], ["dense", "moe"]])
        layers = [RankLayer(draw.choice(kinds), 0, SETTINGS) for _ in range(draw.randint(2, 9))]
        held = {}
        for kind in kinds:
            sizes = sorted(draw.randint(10, 1000) for _ in SETTINGS)
            held |= {(kind, s): n for s, n in zip(SETTINGS, sizes, strict=True)}
        yield Machine(layers, held, draw.randint(0, 500), draw.randint(0, 2000))


def relax(machine: Machine, allowed: int) -> tuple[Relaxation, list[int]]:
    """Iterations until settled; the activations of each."""
    relaxation = Relaxation(machine.layers, PolicyOptions())
    needed = []
    while not relaxation.is_settled and len(needed) <= MAX_ITERATIONS:
        boundaries, activations = machine.run(relaxation)
        needed.append(activations)
        relaxation.note(boundaries, [0] * len(machine.layers), activations)
        relaxation.advance(Limits(RESIDENT + allowed, RESIDENT, RESIDENT, LINK))
    return relaxation, needed


def frugal_bytes(machine: Machine) -> int:
    return machine.run(Relaxation(machine.layers, PolicyOptions()))[1]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.2])
def test_no_iteration_needs_more_than_the_limit(share: float) -> None:
    """``share``: of what all layers hold at most, above what the most frugal assignment needs."""
    for machine in machines(8):
        most = sum(machine.held[layer.kind, NOTHING] for layer in machine.layers)
        allowed = frugal_bytes(machine) + int(share * most)
        relaxation, needed = relax(machine, allowed)
        assert relaxation.stage is Stage.SETTLED
        assert len(needed) <= MAX_ITERATIONS
        needed.append(machine.run(relaxation)[1])
        assert max(needed) <= allowed


def test_with_room_for_all_nothing_is_recomputed() -> None:
    for machine in machines(6):
        relaxation, _ = relax(machine, 100_000)
        assert set(relaxation.assignment) == {NOTHING}


def test_what_the_frugal_assignment_needs_is_the_least() -> None:
    machine = next(machines(1))
    needed = frugal_bytes(machine)
    with pytest.raises(NothingFitsError) as refused:
        relax(machine, needed - 1)
    assert refused.value.needed_bytes == needed
    assert refused.value.allowed_bytes == needed - 1


def test_the_numbers_of_another_rank_replace_those_measured() -> None:
    """Ranks that take the same numbers choose alike, though they measured different ones."""
    first, second = (
        Machine(
            [RankLayer("dense", 0, SETTINGS)] * 4,
            {("dense", s): factor * (100 + 200 * i) for i, s in enumerate(SETTINGS)},
            transient=10,
            logits=100,
        )
        for factor in (1, 2)
    )
    ranks = [Relaxation(machine.layers, PolicyOptions()) for machine in (first, second)]
    allowed = 2 * frugal_bytes(second)
    while not all(rank.is_settled for rank in ranks):
        for rank, machine in zip(ranks, (first, second), strict=True):
            boundaries, activations = machine.run(rank)
            rank.note(boundaries, [0] * 4, activations)
        largest = [max(pair) for pair in zip(*(rank.numbers() for rank in ranks), strict=True)]
        for rank in ranks:
            rank.take(largest)
            rank.advance(Limits(RESIDENT + allowed, RESIDENT, RESIDENT, LINK))
        assert ranks[0].assignment == ranks[1].assignment


def test_several_micro_batches_in_flight_are_counted() -> None:
    machine = next(machines(1))
    machine.num_in_flight = 3
    relaxation, needed = relax(machine, 2 * frugal_bytes(machine))
    assert relaxation.visits.num_in_flight == 3
    assert max([*needed, machine.run(relaxation)[1]]) <= 2 * frugal_bytes(machine)
