# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Iterations of an imitated model relax within a limit, whatever its layers hold."""

from __future__ import annotations

import itertools
import os
import random
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Optional

import pytest

from megatron.slipstream.plan import assignments
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.layer_visits import Boundary, LayerVisits, Place, RankLayer, Rerun
from megatron.slipstream.plan.model import IterationModel
from megatron.slipstream.plan.pace import MAX_PACE, pace
from megatron.slipstream.plan.relaxation import (
    Limits,
    NothingFitsError,
    Prediction,
    Relaxation,
    Stage,
)
from megatron.slipstream.plan.settings import FEED_FORWARD, NOTHING, WHOLE, Assignment, LayerSetting
from megatron.slipstream.plan.trace import Bandwidth, Trace
from megatron.slipstream.plan.walk import simulate

PARTS = [LayerSetting(parts) for parts in (("mlp", "layernorm"), ("mlp",), ("layernorm",))]
SETTINGS = (WHOLE, *PARTS, NOTHING)
LINK = Bandwidth(50.0, 50.0, 40.0, 40.0)
RESIDENT = 10_000
MAX_ITERATIONS = 12


def limits_of(allowed: int) -> Limits:
    return Limits(RESIDENT + allowed, RESIDENT, RESIDENT, LINK)


@dataclass
class Machine:
    """A model whose layers hold these bytes and take these times."""

    layers: Sequence[RankLayer]
    held: dict[tuple[str, LayerSetting], int]
    transient: int
    """Bytes that backward of a layer needs beside what it recomputes."""
    logits: int
    mlp_output: int = 0
    """Bytes of an MLP's output, which backward has twice more if it recomputes the MLP."""
    passes: str = "FB"
    """Forward and backward of micro-batches, in order."""
    outside: int = 0
    """Bytes of a micro-batch that are held outside the model until its backward has ended."""
    before_backward: int = 0
    """The same until the iteration's first backward."""
    unseen: int = 0
    """Bytes that an iteration needs beside those at its boundaries."""
    unevenness: float = 0.0
    """By which share all layers but the last two hold more."""
    movable_share: float = 0.0
    """The share of what layers hold that can be offloaded."""
    waits: float = 0.0
    """By which share layers take longer in iterations in which most of them are not frugal: all
    that may moves, and compute waits for the link."""
    boost: float = 0.0
    """By which share layers are faster in such iterations, which wait for as long as they compute:
    a device has a higher clock where it waits."""

    def held_bytes(self, index: int, setting: LayerSetting) -> int:
        more = self.unevenness if index < len(self.layers) - 2 else 0.0
        return int(self.held[self.layers[index].kind, setting] * (1 + more))

    def movable(self, relaxation: Relaxation) -> list[int]:
        return [
            int(self.movable_share * self.held_bytes(index, setting))
            for index, setting in enumerate(relaxation.assignment)
        ]

    def trace(self, relaxation: Relaxation) -> Trace:
        """The trace of an iteration."""
        visits = LayerVisits(self.layers)
        visits.add(relaxation.assignment, self.run(relaxation)[0], self.movable(relaxation))
        return visits.templates(LINK, RESIDENT).compose(relaxation.assignment)

    def peak(self, relaxation: Relaxation, allowed: int) -> int:
        """The peak of activations if everything moves by count at first, then by a plan."""
        if not self.movable_share:
            return self.run(relaxation)[1]
        trace = self.trace(relaxation)
        target: Optional[int] = relaxation.target_bytes(limits_of(allowed))
        if relaxation.stage in (Stage.FRUGAL, Stage.RECORDED):
            trace, target = replace(trace, step_ms=(), bandwidth=None), None
        plan = build_plan(trace, PolicyOptions(target_memory_bytes=target))
        return max(plan.device_bytes) - RESIDENT + self.unseen

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
            self.held_bytes(index, setting) for index, setting in enumerate(relaxation.assignment)
        ]
        most = [self.held_bytes(index, NOTHING) for index in range(len(self.layers))]
        frugal = [one == WHOLE for one in relaxation.assignment]
        is_moved = 2 * sum(frugal) < len(frugal)
        slower = (1 + self.waits) / (1 + self.boost) if is_moved else 1.0
        early = 0
        for direction, following in itertools.pairwise(self.passes + " "):
            # Backward frees the logits before it comes to a layer.
            freed = self.logits if following == "B" else 0
            if direction == "F":
                come(Place.CALL, -1, 0, 0, 1.0)
                for index, nbytes in enumerate(held):
                    come(Place.LAYER, index, nbytes, most[index], 10.0 * slower)
                come(Place.LAYERS_END, -1, self.logits, 0, 1.0)
                early += self.before_backward
                if following == "B":
                    freed, early = freed + early, 0
                made = self.outside + self.before_backward
                come(Place.RETURN, -1, made - freed, made, 1.0)
                continue
            for index in reversed(range(len(held))):
                again = most[index] - held[index]
                ms = (20.0 + 10.0 * again / most[index]) * slower
                above = again + self.transient
                if relaxation.assignment[index] & FEED_FORWARD:
                    above += 2 * self.mlp_output
                come(Place.GRADIENT, index, -held[index], above, ms)
                if again:
                    within = most[index] - self.held_bytes(index, LayerSetting(("mlp",)))
                    found[-1] = found[-1]._replace(rerun=Rerun(again, within, self.mlp_output))
            come(Place.INPUT_GRADIENT, -1, -self.outside - freed, 0, 1.0)
        found.append(Boundary(Place.END, -1, -1, now))
        timed = [
            boundary._replace(
                peak_bytes=top, ms=ms, waited_ms=ms if self.boost and is_moved else 0.0
            )
            for boundary, (top, ms) in zip(found[1:], pending, strict=True)
        ]
        peak += self.unseen
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


def relax(machine: Machine, allowed: int, *later: int) -> tuple[Relaxation, list[int]]:
    """Iterations until settled; the activations of each. ``later``: allowed after each choice."""
    relaxation = Relaxation(machine.layers, PolicyOptions())
    return relaxation, settle(machine, relaxation, allowed, *later)


def settle(machine: Machine, relaxation: Relaxation, allowed: int, *later: int) -> list[int]:
    """The activations of each iteration until it is settled."""
    needed: list[int] = []
    following = iter(later)
    while not relaxation.is_settled and len(needed) <= MAX_ITERATIONS:
        boundaries, _ = machine.run(relaxation)
        needed.append(machine.peak(relaxation, allowed))
        relaxation.note(boundaries, machine.movable(relaxation), needed[-1])
        if relaxation.predicted is not None and relaxation.stage is Stage.TIMED:
            allowed = next(following, allowed)
        relaxation.advance(limits_of(allowed))
    return needed


def frugal_bytes(machine: Machine) -> int:
    return machine.run(Relaxation(machine.layers, PolicyOptions()))[1]


def dense(num_layers: int, **others: Any) -> Machine:
    """Layers of one kind."""
    held = {("dense", s): n for s, n in zip(SETTINGS, (100, 300, 500, 700, 1000), strict=True)}
    layers = [RankLayer("dense", 0, SETTINGS)] * num_layers
    return replace(Machine(layers, held, transient=100, logits=500), **others)


def kept_bytes(machine: Machine, num_kept: int) -> int:
    """The peak of activations if the last layers recompute nothing, and the others everything."""
    relaxation = Relaxation(machine.layers, PolicyOptions())
    num_frugal = len(machine.layers) - num_kept
    relaxation.assignment = (WHOLE,) * num_frugal + (NOTHING,) * num_kept
    return machine.run(relaxation)[1]


def test_the_last_layer_tries_what_no_other_has_room_for() -> None:
    """What it holds is gone before backward runs other layers again."""
    machine = dense(8, logits=100)
    frugal = frugal_bytes(machine)
    allowed = frugal + machine.held["dense", NOTHING] // 2
    relaxation, needed = relax(machine, allowed)
    assert relaxation.visits.is_measured("dense", NOTHING)
    assert relaxation.visits.is_measured("dense", PARTS[0])
    assert relaxation.assignment != relaxation.frugal
    assert max(needed) <= allowed
    assert len(needed) <= MAX_ITERATIONS


def test_a_setting_that_recomputes_the_mlp_is_tried_in_less_room() -> None:
    """What the MLP has left when its layer ran again is known before any setting is tried."""
    machine = dense(8, logits=2000)
    held = machine.held["dense", PARTS[1]] - machine.held["dense", WHOLE]
    allowed = int(1.05 * (frugal_bytes(machine) + held))
    relaxation, needed = relax(machine, allowed)
    assert not relaxation.visits.is_measured("dense", NOTHING)
    assert relaxation.assignment != relaxation.frugal
    assert max(needed) <= allowed
    assert len(needed) <= MAX_ITERATIONS


@pytest.mark.parametrize("room", [100, 200])
def test_a_recomputed_mlp_needs_its_output_twice_more(room: int) -> None:
    machine = dense(4, logits=0, mlp_output=150)
    allowed = int(1.02 * (frugal_bytes(machine) + room))
    assert max(relax(machine, allowed)[1]) <= allowed


@pytest.mark.parametrize("share", [0.0, 0.3, 0.7, 1.2])
def test_no_iteration_needs_more_than_the_limit(share: float) -> None:
    """``share``: of what all layers hold at most, above what the most frugal assignment needs."""
    for machine in machines(5):
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


def test_where_no_setting_has_room_none_is_tried() -> None:
    machine = dense(4)
    relaxation, needed = relax(machine, frugal_bytes(machine))
    assert len(needed) == 1
    assert relaxation.assignment == relaxation.frugal


@pytest.mark.parametrize("setting", [NOTHING, PARTS[1]], ids=str)
def test_bounds_of_untried_settings_grow_with_micro_batches(setting: LayerSetting) -> None:
    machine = dense(4)
    relaxation = Relaxation(machine.layers, PolicyOptions())
    boundaries, needed = machine.run(relaxation)
    relaxation.note(boundaries, machine.movable(relaxation), needed)
    trial = (*relaxation.frugal[:2], setting, *relaxation.frugal[3:])
    bound = relaxation.visits.most_bytes(trial)
    relaxation.note_larger(2.0, 2 * needed)
    assert relaxation.visits.most_bytes(trial) == 2 * bound


def test_an_estimate_of_what_is_frugal_is_no_reason_to_refuse() -> None:
    """Of larger micro-batches, of which none has run."""
    machine = dense(4)
    relaxation, _ = relax(machine, 100_000)
    relaxation.note_larger(2.0, 2 * frugal_bytes(machine))
    relaxation.choose_again(limits_of(frugal_bytes(machine)))
    assert relaxation.assignment == relaxation.frugal


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
            rank.advance(limits_of(allowed))
        assert ranks[0].assignment == ranks[1].assignment


def test_ranks_have_their_numbers_in_one_order() -> None:
    """The order within a set differs from process to process."""
    script = (
        "import runpy, sys; tests = runpy.run_path(sys.argv[1]); machine = tests['dense'](4);"
        "print(tests['relax'](machine, 2 * tests['frugal_bytes'](machine))[0].visits.numbers())"
    )
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", script, __file__],
            env={**os.environ, "PYTHONHASHSEED": str(seed)},
            stdout=subprocess.PIPE,
            text=True,
        )
        for seed in range(4)
    ]
    printed = [rank.communicate(timeout=60)[0] for rank in ranks]
    assert printed[0].startswith("[")
    assert printed == printed[:1] * 4


@pytest.mark.parametrize("passes", ["FFFBBB", "FFFBFBBB"])
def test_several_micro_batches_in_flight_are_counted(passes: str) -> None:
    machine = replace(next(machines(1)), passes=passes)
    relaxation, needed = relax(machine, 2 * frugal_bytes(machine))
    assert "".join(one.direction for one in relaxation.visits.schedule) == passes
    assert not any(one.extra_bytes for one in relaxation.visits.schedule)
    assert max([*needed, machine.run(relaxation)[1]]) <= 2 * frugal_bytes(machine)


def test_each_of_few_layers_tries_a_setting_though_backward_needs_much() -> None:
    """As in the layers of a hybrid pattern: what they hold is little beside their backward."""
    kinds = ("attention", "mlp", "attention", "moe")
    sizes = zip(SETTINGS, (100, 300, 500, 700, 1000), strict=True)
    held = {(kind, setting): nbytes for setting, nbytes in sizes for kind in kinds}
    machine = Machine([RankLayer(kind, 0, SETTINGS) for kind in kinds], held, 3000, 500)
    allowed = int(1.5 * frugal_bytes(machine))
    relaxation, needed = relax(machine, allowed)
    assert max([*needed, machine.run(relaxation)[1]]) <= allowed
    assert all(relaxation.visits.is_measured(kind, NOTHING) for kind in kinds)
    assert relaxation.assignment.count(NOTHING) == 3


@pytest.mark.parametrize("num_kept", [3, 4])
def test_what_is_held_outside_the_model_is_within_the_limit(num_kept: int) -> None:
    """No template has it: only the excess of the trials over what templates add up to shows it."""
    machine = dense(4, passes="FFFBBB", outside=200)
    # Without it these layers would fit, with more than the margin to spare.
    allowed = int(kept_bytes(dense(4, passes="FFFBBB"), num_kept) * 1.02)
    relaxation, needed = relax(machine, allowed)
    assert max([*needed, machine.run(relaxation)[1]]) <= allowed
    assert relaxation.assignment != relaxation.frugal


def test_what_is_held_outside_is_seen_though_a_trials_peak_is_elsewhere() -> None:
    """The peak of a trial is in recomputation, that of the chosen assignment before backward."""
    machine = dense(4, passes="FFFBBB", before_backward=400, logits=0, transient=800)
    machine.layers = [RankLayer("dense", 0, (WHOLE, NOTHING))] * 4
    allowed = kept_bytes(machine, 4) - 200
    relaxation, needed = relax(machine, allowed)
    assert max([*needed, machine.run(relaxation)[1]]) <= allowed
    assert relaxation.assignment != relaxation.frugal


@pytest.mark.parametrize("num_kept", [2, 3, 4])
def test_what_a_choice_needed_beyond_its_prediction_counts_for_the_next_one(num_kept: int) -> None:
    """The limit falls after the first choice has run, to what a prediction without it needs."""
    machine = dense(4, unseen=200)
    later = int(kept_bytes(dense(4), num_kept) * 1.02)
    relaxation, needed = relax(machine, 100_000, later)
    assert max(needed) == kept_bytes(machine, 4) > later, "everything was kept before"
    assert relaxation.stage is Stage.SETTLED
    assert machine.run(relaxation)[1] <= later
    assert relaxation.assignment != relaxation.frugal


def test_a_settled_choice_that_needs_more_is_made_again_for_that_much() -> None:
    machine = dense(6)
    allowed = int(kept_bytes(machine, 5) * 1.02)
    relaxation, _ = relax(machine, allowed)
    for machine.unseen in (300, 600):
        needed = machine.run(relaxation)[1]
        assert needed > allowed
        assert relaxation.note_needed(needed, limits_of(allowed))
        relaxation.choose_again(limits_of(allowed))
        assert max(settle(machine, relaxation, allowed)) <= allowed
        needed = machine.run(relaxation)[1]
        assert needed <= allowed
        assert relaxation.assignment != relaxation.frugal
        assert not relaxation.note_needed(needed, limits_of(allowed))


def test_a_limit_that_falls_again_after_the_second_choice_is_kept() -> None:
    machine = dense(4)
    relaxation, _ = relax(machine, 100_000, 3900, 3000)
    assert relaxation.stage is Stage.SETTLED
    assert relaxation.predicted is not None
    assert relaxation.predicted.assignment == relaxation.assignment
    assert machine.run(relaxation)[1] <= 3000


@pytest.mark.parametrize("num_kept", [5, 6])
def test_layers_that_hold_a_little_more_than_those_measured_are_within_the_limit(
    num_kept: int,
) -> None:
    machine = dense(6, unevenness=0.008)
    allowed = kept_bytes(dense(6), num_kept)
    assert kept_bytes(machine, num_kept) > allowed
    relaxation, needed = relax(machine, allowed)
    assert max([*needed, machine.run(relaxation)[1]]) <= allowed
    assert relaxation.assignment != relaxation.frugal


@pytest.mark.parametrize(("num_layers", "share"), [(6, 0.8), (8, 0.6), (12, 0.6)])
def test_a_choice_that_fits_is_not_replaced_by_one_that_recomputes_more(
    num_layers: int, share: float
) -> None:
    """Once layers that hold more than others have run, all layers seem to hold as much."""
    machine = dense(num_layers, unevenness=0.03)

    def recomputed_bytes(assignment: Assignment) -> int:
        return sum(machine.held["dense", NOTHING] - machine.held["dense", s] for s in assignment)

    allowed = frugal_bytes(machine) + int(share * 900 * num_layers)
    relaxation = Relaxation(machine.layers, PolicyOptions())
    needed, chosen = [], []
    while not relaxation.is_settled:
        boundaries, _ = machine.run(relaxation)
        needed.append(machine.peak(relaxation, allowed))
        chosen += [relaxation.assignment] if relaxation.predicted is not None else []
        relaxation.note(boundaries, machine.movable(relaxation), needed[-1])
        relaxation.advance(limits_of(allowed))
    assert max([*needed, machine.peak(relaxation, allowed)]) <= allowed
    other = relaxation.choose(limits_of(allowed)).assignment
    assert recomputed_bytes(other) > recomputed_bytes(chosen[0])
    assert relaxation.assignment == chosen[0]


@pytest.mark.parametrize("waits_ms", [(0.0, None), (40.0, 50.0), (50.0, 40.0)], ids=str)
def test_a_choice_that_was_followed_is_judged_by_the_waits_of_its_plan(
    waits_ms: tuple[float, Optional[float]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """By templates, another assignment is faster each time; the last returns to the best."""
    machine = dense(6)
    choices = [
        (NOTHING,) * 6,
        (*PARTS[-1:] * 1, *(NOTHING,) * 5),
        (*PARTS[-1:] * 2, *(NOTHING,) * 4),
    ]
    relaxation = Relaxation(machine.layers, PolicyOptions())
    least_ms = 30.0 * 6
    predicted = [Prediction(one, RESIDENT, least_ms + 20.0 - n) for n, one in enumerate(choices)]
    left = iter(predicted)
    monkeypatch.setattr(Relaxation, "choose", lambda *_: next(left))
    waits, followed = iter(waits_ms), []
    while not relaxation.is_settled:
        is_choice = relaxation.predicted is not None and relaxation.stage is Stage.TIMED
        now = next(waits) if is_choice else None
        followed += [relaxation.assignment] if is_choice else []
        boundaries, needed = machine.run(relaxation)
        relaxation.note(boundaries, machine.movable(relaxation), needed, waits_ms=now)
        relaxation.advance(limits_of(100_000))
    expected = choices[1] if waits_ms[0] == 50.0 else choices[0]
    assert relaxation.assignment == expected
    assert relaxation.predicted is not None
    assert relaxation.predicted.assignment == expected
    assert followed == choices[: 1 if waits_ms[1] is None else 2]


def test_waits_of_iterations_that_move_everything_are_no_time_of_layers() -> None:
    """Else recomputing all seems no slower than what was chosen, and nothing to wait for."""
    machine = dense(16, movable_share=0.9)
    limit = frugal_bytes(machine) + 1500
    chosen, _ = relax(machine, limit)
    assert WHOLE not in chosen.assignment
    assert relax(replace(machine, waits=0.8), limit)[0].assignment == chosen.assignment


@pytest.mark.parametrize("share", [0.3, 0.5, 0.7])
def test_iterations_that_wait_and_are_faster_for_it_do_not_shorten_times(share: float) -> None:
    """``share``: of what all layers hold at most, above what the most frugal assignment needs."""
    slow = dense(16, movable_share=0.9)
    fast = replace(slow, boost=0.09)
    limit = frugal_bytes(slow) + int(share * 900 * 16)
    expected, chosen = relax(slow, limit)[0], relax(fast, limit)[0]
    assert chosen.assignment == expected.assignment
    assert WHOLE not in chosen.assignment
    boundaries, _ = slow.run(chosen)
    total_ms = sum(cut.ms or 0.0 for cut in boundaries)
    assert chosen.predicted is not None
    assert chosen.predicted.ms == pytest.approx(total_ms, rel=0.03)
    assert chosen.visits.pass_ms(chosen.assignment) == pytest.approx(total_ms, rel=0.001)


def test_a_time_that_cannot_be_a_clock_yields_to_that_of_an_iteration_that_waits() -> None:
    """As where the host was late in the only iteration that tried a setting."""
    machine = dense(4)
    relaxation = Relaxation(machine.layers, PolicyOptions())
    relaxation.assignment = (NOTHING,) * 4
    boundaries, _ = machine.run(relaxation)
    late = [cut._replace(ms=3 * (cut.ms or 0.0)) for cut in boundaries]
    waiting = [cut._replace(waited_ms=cut.ms or 0.0) for cut in boundaries]
    for cuts in (late, waiting):
        relaxation.visits.add(relaxation.assignment, cuts, machine.movable(relaxation))
    own_ms = sum(cut.ms or 0.0 for cut in boundaries)
    assert relaxation.visits.pass_ms(relaxation.assignment) == pytest.approx(own_ms * MAX_PACE)


def test_a_pass_of_settings_that_were_not_timed_has_no_time() -> None:
    machine = dense(4)
    relaxation = Relaxation(machine.layers, PolicyOptions())
    assert relaxation.visits.pass_ms(relaxation.frugal) is None
    untimed = [cut._replace(ms=None) for cut in machine.run(relaxation)[0]]
    relaxation.visits.add(relaxation.frugal, untimed, machine.movable(relaxation))
    assert relaxation.visits.pass_ms(relaxation.frugal) is None


@pytest.mark.parametrize(
    ("own_ms", "waited_ms", "expected_ms", "expected"),
    [
        (100.0, 60.0, 109.0, 1.09),
        (100.0, 60.0, 95.0, 1.0),
        (100.0, 1.0, 109.0, 1.0),
        (100.0, 60.0, 140.0, 1.0),
        (0.0, 60.0, 140.0, 1.0),
    ],
    ids=["waits", "slower than expected", "hardly waits", "another cause", "nothing computed"],
)
def test_computation_is_slower_without_waits(
    own_ms: float, waited_ms: float, expected_ms: float, expected: float
) -> None:
    assert pace(own_ms, waited_ms, expected_ms) == pytest.approx(expected)


def test_the_plan_by_count_keeps_what_host_memory_does_not_hold() -> None:
    machine = dense(8, movable_share=1.0)
    trace = machine.trace(Relaxation(machine.layers, PolicyOptions()))
    peaks = [
        assignments.Limits(0, host_bytes, PolicyOptions()).counted_bytes(IterationModel(trace))
        for host_bytes in (None, 0)
    ]
    nothing = build_plan(trace, PolicyOptions(activation_offload_fraction=0.0))
    assert peaks[0] < peaks[1] == max(nothing.device_bytes)


def test_a_choice_fits_too_while_everything_moves_by_count() -> None:
    """A plan would fit with everything kept. By count that does not, but fewer layers do."""
    machine = dense(6, movable_share=0.8)
    keeping = Relaxation(machine.layers, PolicyOptions())
    keeping.assignment, allowed = (NOTHING,) * 6, 2680
    assert machine.peak(keeping, allowed) > allowed
    keeping.stage = Stage.SETTLED
    assert machine.peak(keeping, allowed) <= allowed
    relaxation, needed = relax(machine, allowed)
    assert max([*needed, machine.peak(relaxation, allowed)]) <= allowed
    assert relaxation.assignment not in (relaxation.frugal, keeping.assignment)


@pytest.mark.parametrize("share", [0.2, 0.5, 0.9])
@pytest.mark.parametrize(("passes", "movable_share"), [("FB", 0.9), ("FFBFBB", 0.6)])
def test_no_assignment_that_fits_by_count_too_is_faster(
    passes: str, movable_share: float, share: float
) -> None:
    """``share``: of what the fastest assignment needs by count beyond the most frugal one."""
    settings = (WHOLE, PARTS[1], NOTHING)
    machine = dense(4, passes=passes, movable_share=movable_share)
    machine.layers = [RankLayer("dense", 0, settings)] * 4
    relaxation = Relaxation(machine.layers, PolicyOptions())
    for setting in settings:
        relaxation.assignment = (setting,) * 4
        boundaries, _ = machine.run(relaxation)
        relaxation.visits.add(relaxation.assignment, boundaries, machine.movable(relaxation))
    rank = relaxation.visits.templates(LINK, RESIDENT)
    traces = [rank.compose(settings) for settings in itertools.product(settings, repeat=4)]
    untimed = [replace(trace, step_ms=(), bandwidth=None) for trace in traces]
    by_count = [max(build_plan(trace, PolicyOptions()).device_bytes) for trace in untimed]
    allowed = int(by_count[0] + share * (by_count[-1] - by_count[0])) - RESIDENT
    target = relaxation.target_bytes(limits_of(allowed))
    best_ms = float("inf")
    for trace, peak_bytes in zip(traces, by_count, strict=True):
        if peak_bytes <= target:
            plan = build_plan(trace, PolicyOptions(target_memory_bytes=target))
            if max(plan.device_bytes) <= target:
                best_ms = min(best_ms, simulate(plan).total_ms)
    chosen = relaxation.choose(limits_of(allowed))
    assert chosen.peak_bytes <= target
    assert 0 < chosen.ms <= best_ms * 1.002


@pytest.mark.parametrize("allowed", [3340, 3400, 4180])
def test_plans_leave_room_for_what_no_trace_shows(allowed: int) -> None:
    """A plan for a target uses all of it, and the iteration needs more than its trace shows."""
    machine = dense(6, movable_share=0.8, unseen=150)
    relaxation, _ = relax(machine, allowed)
    assert relaxation.stage is Stage.SETTLED
    assert machine.peak(relaxation, allowed) <= allowed
    trace = machine.trace(relaxation)
    plan = build_plan(trace, PolicyOptions(target_memory_bytes=RESIDENT + allowed))
    assert max(plan.device_bytes) - RESIDENT + machine.unseen > allowed
