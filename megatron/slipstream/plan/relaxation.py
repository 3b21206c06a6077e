# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Finds the assignment for a limit on the device peak while iterations run, never above the limit.

The first iteration has every layer at its most frugal setting. Single layers then try other
settings, as far as what is known so far says that they fit. From the measurements of each setting
the assignment is chosen, and once more when its times are known.

[Note: Why it stays below the limit]
An iteration with untried settings is bounded by what is composed with a bound for each layer that
tries: it holds no more than its forward leaves when the frugal setting's backward runs it again,
and its own backward needs no more memory than that one. So what it holds counts in backward of
later layers only. If its setting recomputes the MLP or the experts, what these have left in that
forward does not count. A chosen assignment is predicted twice, as it is planned and as the first
iteration with it runs, in which everything moves by count; both must be below the limit by a
margin. If an iteration needs more than was composed or predicted, later predictions are raised by
the difference.
"""

from __future__ import annotations

import enum
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import NamedTuple, Optional

from megatron.slipstream.plan import assignments
from megatron.slipstream.plan.assignments import NEAR
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.choose import choose, planned
from megatron.slipstream.plan.layer_visits import Boundary, LayerVisits, RankLayer
from megatron.slipstream.plan.settings import FEED_FORWARD, Assignment, LayerSetting
from megatron.slipstream.plan.templates import RankTemplates
from megatron.slipstream.plan.trace import Bandwidth

MARGIN = 0.01
"""Share of the activations that predictions leave."""
_ASSUMED = Bandwidth(50.0, 50.0, 40.0, 40.0)
"""The bandwidth of copies where it cannot be measured."""
MAX_CHOICES = 2
"""The most chosen assignments that are measured."""
MAX_TRIALS = 2
"""The most assignments in which single layers try settings; each has two iterations."""


class Stage(enum.Enum):
    """What the coming iteration is for."""

    FRUGAL = "every layer at its most frugal setting; memory is recorded"
    RECORDED = "an assignment runs for the first time; memory is recorded"
    TIMED = "the assignment runs again, and is timed"
    SETTLED = "nothing more is measured"


class Limits(NamedTuple):
    """What an iteration may use."""

    device_bytes: int
    """The limit on the device peak."""
    resident_bytes: int
    """Device bytes of weights, gradients and optimizer state."""
    base_bytes: int
    """Those, and what earlier iterations have left: some modules keep their last tensors."""
    bandwidth: Optional[Bandwidth] = None
    """Bandwidth of copies; None if it is not known."""
    host_bytes: Optional[int] = None
    """The limit on host memory; None for none."""

    @property
    def allowed_bytes(self) -> int:
        """Device bytes that activations may use."""
        return self.device_bytes - self.resident_bytes


class Prediction(NamedTuple):
    """What is predicted for an assignment."""

    assignment: Assignment
    peak_bytes: int
    """The device peak of iterations that follow a plan, and of the first one."""
    ms: float
    excess_bytes: int = 0
    """The part of the peak that is not composed, but was needed beyond earlier predictions."""


class NothingFitsError(RuntimeError):
    """Not even the most frugal assignment is within the limit.

    Args:
        needed_bytes: The device bytes that it needs beside the resident ones.
        allowed_bytes: The device bytes that it may use beside the resident ones.
    """

    def __init__(self, needed_bytes: int, allowed_bytes: int) -> None:
        super().__init__(f"{needed_bytes} bytes are needed, {allowed_bytes} allowed")
        self.needed_bytes = needed_bytes
        self.allowed_bytes = allowed_bytes


class Relaxation:
    """Chooses the assignment of each coming iteration.

    Args:
        layers: The layers of the rank, in forward order, model chunk by model chunk.
        options: The options of plans.
    """

    def __init__(self, layers: Sequence[RankLayer], options: PolicyOptions) -> None:
        self.visits = LayerVisits(layers)
        self.options = options
        self.stage = Stage.FRUGAL
        self.assignment = self.frugal
        """The assignment of the coming iteration."""
        self.predicted: Optional[Prediction] = None
        """What is predicted for it; None until one is chosen."""
        self._frugal_bytes = 0
        """The measured peak of the frugal iteration, without what is resident."""
        self._is_scaled = False
        """Whether that is an estimate, which is no reason to refuse."""
        self._excess_bytes = 0
        """The most by which an iteration needed more than predicted."""
        self._activation_bytes = 0
        """That of the last iteration."""
        self._waits_ms = -1.0
        """For how long it waits for copies by the plan made from its times; -1 without one."""
        self._followed: dict[Assignment, tuple[Prediction, float]] = {}
        """Choices that were measured and fit, with what was predicted, and those waits."""
        self._num_trials = 0
        self._num_choices = 0

    @property
    def frugal(self) -> Assignment:
        """The most frugal assignment."""
        return tuple(layer.settings[0] for layer in self.visits.layers)

    @property
    def frugal_bytes(self) -> int:
        """What activations need with the most frugal assignment; 0 if that is not known."""
        return self._frugal_bytes

    @property
    def is_settled(self) -> bool:
        """Whether nothing more is measured."""
        return self.stage is Stage.SETTLED

    @property
    def followed(self) -> list[Assignment]:
        """Choices that were measured and fit; of these, once it is settled, the chosen one."""
        return [one for one in self._followed if not self.is_settled or one == self.assignment]

    def note(
        self,
        boundaries: Sequence[Boundary],
        movable_bytes: Sequence[int],
        activation_bytes: int,
        scale: float = 1.0,
        waits_ms: Optional[float] = None,
    ) -> None:
        """Add an iteration that ran with :attr:`assignment`.

        Args:
            boundaries: See :meth:`LayerVisits.add`.
            movable_bytes: See :meth:`LayerVisits.add`.
            activation_bytes: Its device peak without what is resident, or that by the plan which it
                was recorded for if it is higher.
            scale: See :meth:`LayerVisits.add`.
            waits_ms: For how long computation waits for copies by the plan that was made from its
                times; None if there is none.
        """
        self._waits_ms = -1.0 if waits_ms is None else waits_ms
        activation_bytes = int(activation_bytes * scale)
        self.visits.add(self.assignment, boundaries, movable_bytes, scale)
        if self.stage is Stage.FRUGAL:
            self._frugal_bytes = activation_bytes
        elif self.stage is Stage.RECORDED and movable_bytes:
            self.visits.note_extra(self.assignment, boundaries, scale)
        self._activation_bytes = activation_bytes

    @property
    def activation_bytes(self) -> int:
        """The most that :attr:`assignment` is known to need."""
        return self._activation_bytes

    def note_larger(self, factor: float, activation_bytes: int) -> None:
        """Note that a micro-batch is larger than all so far; scale what was measured to it.

        Args:
            factor: By how much it is larger.
            activation_bytes: What the iteration needed in which it ran with frugal settings.
        """
        self.visits.scale(factor)
        self._frugal_bytes = min(int(self._frugal_bytes * factor), activation_bytes)
        self._activation_bytes = int(self._activation_bytes * factor)
        self._excess_bytes = int(self._excess_bytes * factor)
        self._is_scaled, self.predicted = True, None
        self._followed.clear()

    def numbers(self) -> list[float]:
        """Return all measurements as numbers of which the largest of several ranks is safe."""
        own = (self._frugal_bytes, self._activation_bytes, self._excess_bytes)
        return [*own, self._waits_ms, *self.visits.numbers()]

    def take(self, numbers: Sequence[float]) -> None:
        """Replace all measurements by numbers in the order of :meth:`numbers`."""
        own = map(int, numbers[:3])
        self._frugal_bytes, self._activation_bytes, self._excess_bytes = own
        self._waits_ms = numbers[3]
        self.visits.take(numbers[4:])

    def advance(self, limits: Limits) -> Assignment:
        """Return the assignment of the next iteration, after :meth:`note`.

        Raises:
            NothingFitsError: Not even the most frugal assignment is within the limit.
        """
        self._check(limits)
        self._note_excess(limits)
        is_over = self.predicted is not None and self._activation_bytes > limits.allowed_bytes
        if self.stage is Stage.RECORDED and not is_over:
            self.stage = Stage.TIMED
            return self.assignment
        return self._try_or_choose(limits)

    def note_needed(self, activation_bytes: int, limits: Limits) -> bool:
        """Note what an iteration has needed after all was settled.

        Args:
            activation_bytes: Its device peak without what is resident.
            limits: Those that hold now.

        Returns:
            Whether it is more than predictions include, so that settings have to be chosen again.
        """
        before_bytes, self._activation_bytes = self._excess_bytes, activation_bytes
        self._note_excess(limits)
        return self._excess_bytes > before_bytes

    def _note_excess(self, limits: Limits) -> None:
        """Note by how much the last iteration needed more than was composed for it."""
        if self.predicted is not None:
            composed_bytes = self.predicted.peak_bytes - self.predicted.excess_bytes
            beyond_bytes = self._activation_bytes - (composed_bytes - limits.resident_bytes)
            self._excess_bytes = max(self._excess_bytes, beyond_bytes)

    def choose_again(self, limits: Limits) -> Assignment:
        """Return the assignment of the next iteration if other limits hold than before.

        Raises:
            NothingFitsError: Not even the most frugal assignment is within the limit.
        """
        self._check(limits)
        self.predicted, self._num_choices = None, 0
        self._followed.clear()
        if self.stage is Stage.FRUGAL:
            return self.assignment  # Nothing is measured yet.
        return self._try_or_choose(limits)

    def _check(self, limits: Limits) -> None:
        if self._frugal_bytes > limits.allowed_bytes and not self._is_scaled:
            raise NothingFitsError(self._frugal_bytes, limits.allowed_bytes)

    def _try_or_choose(self, limits: Limits) -> Assignment:
        trial = self._next_trial(limits) if self._num_choices == 0 else None
        if trial is not None:
            self._num_trials += 1
            self.assignment, self.stage = trial, Stage.RECORDED
            return trial
        return self._settle_or_choose(limits)

    def _settle_or_choose(self, limits: Limits) -> Assignment:
        chosen = self.choose(limits)
        self._num_choices += 1
        is_last = self._num_choices > MAX_CHOICES
        if self.predicted is not None and self._activation_bytes <= limits.allowed_bytes:
            self._followed[self.assignment] = self.predicted, self._waits_ms
        if self._followed:
            ms, best = min(self._timed(limits), key=lambda item: item[0])
            was_followed = chosen.assignment in self._followed
            if is_last or was_followed or (1 - NEAR) * ms <= chosen.ms:
                self.predicted, self.assignment, self.stage = best, best.assignment, Stage.SETTLED
                return self.assignment
        is_same = chosen.assignment == self.assignment
        self.predicted, self.assignment = chosen, chosen.assignment
        self.stage = Stage.SETTLED if is_same or is_last else Stage.RECORDED
        return self.assignment

    def _timed(self, limits: Limits) -> Iterator[tuple[float, Prediction]]:
        """Yield the choices that were followed, each with the time that it takes.

        Templates have the most of all layers, so that by them, one that has fitted may not fit, or
        may have to wait longer than it does. Where nothing is timed, only the last one is compared.
        """
        rank, last = self._templates(limits), self.assignment
        if last in self._followed and self._waits_ms < 0:
            total_ms = planned(rank, last, self._search_limits(limits)).total_ms
            yield total_ms, self._followed[last][0]
            return
        for assignment, (predicted, waits_ms) in self._followed.items():
            yield rank.compute_ms(assignment) + max(0.0, waits_ms), predicted

    # Trials.

    def _next_trial(self, limits: Limits) -> Optional[Assignment]:
        """Return an assignment in which layers try settings; None if there is no other to try."""
        if self._num_trials == MAX_TRIALS:
            return None
        visits, trial = self.visits, self.frugal
        left_by_earlier = limits.base_bytes - limits.resident_bytes - visits.left_bytes
        # What the frugal iteration needed beyond what is composed for it, any other may need, too.
        beside = max(left_by_earlier, self._frugal_bytes - visits.most_bytes(trial))
        allowed = (1 - MARGIN) * limits.allowed_bytes - beside
        tried: set[int] = set()
        for places, setting in self._untried():
            left = [index for index in places if index not in tried]
            # Between the first and the last layer, one place needs as much as another.
            for index in dict.fromkeys([*left[:1], *left[-2:]]):
                other = (*trial[:index], setting, *trial[index + 1 :])
                if visits.most_bytes(other) <= allowed:
                    trial = other
                    tried.add(index)
                    break
        return trial if tried else None

    def _untried(self) -> Iterator[tuple[Sequence[int], LayerSetting]]:
        """Yield each setting that a kind has not tried, and layers that may try it, the best first.

        Each kind has one setting before any has two, and kinds that have tried least come first.
        """
        layers, of_kinds = self.visits.layers, []
        for kind in dict.fromkeys(layer.kind for layer in layers):
            indices = [index for index, layer in enumerate(layers) if layer.kind == kind]
            worth = _worth_trying(layers[indices[0]].settings)
            untried = [one for one in worth if not self.visits.is_measured(kind, one)]
            # The last layer of a pass may not move, but needs the least: what it holds is gone when
            # backward of others runs them again. The first one's input lingers.
            places = list(dict.fromkeys([*reversed(indices[1:-1]), *indices[-1:], *indices[:1]]))
            of_kinds.append((len(worth) - len(untried), [(places, one) for one in untried]))
        of_kinds.sort(key=lambda item: item[0])
        for found in itertools.zip_longest(*(pairs for _, pairs in of_kinds)):
            yield from filter(None, found)

    # The choice.

    def target_bytes(self, limits: Limits) -> int:
        """Return the limit for what is predicted: iterations need more than their traces show."""
        margin = int(MARGIN * limits.allowed_bytes)
        return limits.device_bytes - margin - self._excess_bytes

    def choose(self, limits: Limits) -> Prediction:
        """Return the fastest assignment that is predicted to stay within the limit."""
        choice = choose(self._templates(limits), *self._search_limits(limits))
        if choice.fits:
            peak_bytes = choice.peak_bytes + self._excess_bytes
            return Prediction(choice.assignment, peak_bytes, choice.total_ms, self._excess_bytes)
        return Prediction(self.frugal, limits.resident_bytes + self._frugal_bytes, math.inf)

    def _templates(self, limits: Limits) -> RankTemplates:
        return self.visits.templates(limits.bandwidth or _ASSUMED, limits.base_bytes)

    def _search_limits(self, limits: Limits) -> assignments.Limits:
        target = self.target_bytes(limits)
        return assignments.Limits(target, limits.host_bytes, self.options)


def _worth_trying(settings: Sequence[LayerSetting]) -> list[LayerSetting]:
    """Return the settings to try: nothing, all parts at once, and single ones.

    Of these, the MLP or the experts are the first: where room is left for few trials, no other part
    frees enough.
    """
    least, most = settings[-1], settings[min(1, len(settings) - 1)]
    single = [setting for setting in reversed(settings) if len(setting - least) == 1]
    single.sort(key=lambda setting: not (setting - least) & FEED_FORWARD)
    chosen = dict.fromkeys([least, most, *single])
    return [setting for setting in chosen if setting != settings[0]]
