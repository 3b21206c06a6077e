# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ways to train a model in less memory, what an iteration takes with each, and what fits.

A way is a setting for each layer, what moves, and what is computed by tiles. Its memory and time
are those of the planned trace that is composed from the layers' templates (:mod:`synthetic`).
:class:`Finder` searches the longest sequence, or the largest micro-batch, that fits a device.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Optional

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.layers import marked_modules, recomputable_parts
from megatron.slipstream.estimate.model_shapes import MAX_SIZE, ModelShape, has_feed_forward
from megatron.slipstream.estimate.schedules import Pass, idle_ms
from megatron.slipstream.estimate.synthetic import Workplan
from megatron.slipstream.estimate.training_setup import Configured, usable_modules
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.assignments import Judge, Limits, Score, shortest, uniform
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.choose import choose
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.settings import NOTHING, WHOLE, Assignment, LayerSetting
from megatron.slipstream.plan.templates import ChunkPass, RankTemplates
from megatron.slipstream.plan.trace import StepKind
from megatron.slipstream.plan.walk import simulate

WAYS = ("off", "selective", "full", "built-in", "budget")
OFF, SELECTIVE, FULL, BUILT_IN, BUDGET = WAYS
"""The ways that are compared: nothing recomputed or offloaded; selective recomputation; full
recomputation of each layer; megatron-core's offload engine with all its modules and selective
recomputation; and what the planner chooses from all of them for a budget of memory."""

HOST = "host"


class Parts(NamedTuple):
    """Device memory at its peak by what holds it, in bytes."""

    state: int = 0
    """Weights, gradients and optimizer."""
    layers: int = 0
    """Saved by the layers of all passes in flight."""
    backward: int = 0
    """Beside these in a layer: what it recomputes, and gradients."""
    logits: int = 0
    """Beside these in the output layer and the loss."""

    @property
    def total(self) -> int:
        return sum(self)

    @property
    def largest(self) -> str:
        """The name of the largest part that depends on the number of tokens."""
        return max(self._fields[1:], key=lambda name: int(getattr(self, name)))


class Usage(NamedTuple):
    """Memory of the pipeline rank that takes the most, in one iteration."""

    parts: Parts
    host_bytes: int
    moved_bytes: int

    def exceeded(self, limits: Limits) -> str:
        """Return what exceeds a limit; empty if it fits."""
        if self.parts.state > limits.device_bytes:
            return "state"
        if self.parts.total > limits.device_bytes:
            return self.parts.largest
        return HOST if self.excess_bytes(limits) > 0 else ""

    def excess_bytes(self, limits: Limits) -> int:
        """Return by how much it is above the limits; 0 or less if it fits."""
        above = self.parts.total - limits.device_bytes
        if limits.host_bytes is not None:
            above = max(above, self.host_bytes - limits.host_bytes)
        return above


class Tiles(NamedTuple):
    """What all micro-batches compute by tiles of the sequence."""

    mlp: bool = False
    loss: bool = False

    @property
    def flags(self) -> tuple[str, ...]:
        flags = ("--mlp-sequence-tiles auto", "--loss-sequence-tiles auto")
        return tuple(itertools.compress(flags, self))


TILES = (Tiles(), Tiles(loss=True), Tiles(mlp=True), Tiles(True, True))


_IN_HEAD = (StepKind.OUTPUT_END, StepKind.BACKWARD_START, StepKind.OUTPUT_BACKWARD_START)


@dataclass(frozen=True)
class PlannedRank:
    """The layers of a pipeline rank, and the plan of a few micro-batches after which it repeats.

    ``timed`` returns the plan with times, if it is another.
    """

    rank: RankTemplates
    assignment: Assignment
    plan: Plan
    timed: Optional[Callable[[], Plan]] = None

    @cached_property
    def passes(self) -> tuple[ChunkPass, ...]:
        return self.rank.passes(self.assignment)

    @cached_property
    def _num_passes(self) -> int:
        return 2 * len({step.key.chunk_pass for step in self.plan.trace.steps})

    @cached_property
    def stall_ms(self) -> float:
        """For which a pass waits for copies, on average."""
        if not self.plan.groups:
            return 0.0
        plan = self.timed() if self.timed else self.plan
        stalls_ms = simulate(plan).total_ms - sum(plan.trace.step_ms)
        return max(0.0, stalls_ms) / self._num_passes

    @cached_property
    def usage(self) -> Usage:
        device, trace, state_bytes = self.plan.device_bytes, self.plan.trace, self.rank.state_bytes
        step = begin = device.index(max(device))
        while begin and trace.steps[begin].kind in _IN_HEAD:
            begin -= 1
        is_head = trace.steps[begin].kind is StepKind.OUTPUT_START
        begin = begin if is_head else step
        inside = trace.memory[step].peak_bytes - trace.memory[begin].allocated_bytes
        parts = Parts(state_bytes, device[step] - inside - state_bytes)
        parts = parts._replace(**{"logits" if is_head else "backward": inside})
        moved_bytes = self.plan.moved_nbytes * len(self.rank.schedule) / self._num_passes
        return Usage(parts, self.plan.peak_host_bytes, round(moved_bytes))


@dataclass(frozen=True)
class Iteration:
    """One iteration of a model with a way.

    ``ranks`` has the pipeline ranks that differ, by the first rank that is like each rank.
    ``modules`` are those that move; empty if nothing does, or a planner decides.
    """

    work: Workplan
    ranks: Mapping[int, PlannedRank]
    tiles: Tiles
    modules: tuple[str, ...] = ()

    @cached_property
    def usage(self) -> Usage:
        usages = (planned.usage for planned in self.ranks.values())
        parts, host_bytes, moved_bytes = zip(*usages, strict=True)
        return Usage(max(parts, key=lambda each: each.total), max(host_bytes), max(moved_bytes))

    @cached_property
    def step_ms(self) -> float:
        schedules = self.work.schedules

        def duration_ms(rank: int, item: Pass) -> float:
            planned = self.ranks[max(first for first in self.ranks if first <= rank)]
            chunk = planned.passes[item.vp_stage]
            ms = chunk.forward_ms if item.direction == "F" else chunk.backward_ms
            return ms + planned.stall_ms

        waits = idle_ms(schedules, duration_ms)
        return max(
            sum(waits[rank]) + sum(duration_ms(rank, item) for item in schedule)
            for rank, schedule in enumerate(schedules)
        )

    @property
    def tokens_per_s(self) -> float:
        """Tokens per second and GPU."""
        shape, count = self.work.shape, self.work.num_micro_batches
        tokens = shape.seq_length * shape.micro_batch_size * count * shape.parallelism.dp
        return 1e3 * tokens / self.step_ms / shape.parallelism.num_gpus

    def describe(self) -> str:
        """Return what it recomputes, moves and tiles, as text."""
        highest = max(self.ranks.values(), key=lambda item: max(item.plan.device_bytes))
        counts = Counter(highest.assignment)
        texts = [
            f"{_text(setting)} ({count})" if len(counts) > 1 else _text(setting)
            for setting, count in counts.items()
            if setting or len(counts) > 1
        ]
        if moved := self.usage.moved_bytes:
            what = ", ".join(sorted(self.modules)) or format_bytes(moved)
            texts.append(f"{what} offloaded")
        texts += itertools.compress(("MLPs in tiles", "logits in tiles"), self.tiles)
        return ", ".join(texts) or "everything kept on the device"


def _text(setting: LayerSetting) -> str:
    if setting == WHOLE:
        return "whole layers recomputed"
    return f"{' and '.join(sorted(setting)) or 'nothing'} recomputed"


@dataclass(frozen=True)
class SizedModel:
    """A model at one size, in all the ways to train it."""

    configured: Configured
    speed: Speed
    _fixed: dict[str, Iteration] = field(default_factory=dict, compare=False)
    _variants: dict[Tiles, tuple[Workplan, dict[int, RankTemplates]]] = field(
        default_factory=dict, compare=False
    )

    def fixed(self, way: str) -> Iteration:
        """Return an iteration with any way but :data:`BUDGET`."""
        if way not in self._fixed:
            shape = self.configured.shape
            settings = {OFF: NOTHING, FULL: WHOLE}
            setting = settings.get(way, selective_setting(shape))
            modules = self._modules[0] if way == BUILT_IN else ()
            work = self._work(Tiles(), setting, modules)
            ranks = {
                number: _planned_as_built_in(rank, _uniform(rank, setting), len(modules))
                for number, rank in self._ranks(work, [setting]).items()
            }
            self._fixed[way] = Iteration(work, ranks, Tiles(), modules)
        return self._fixed[way]

    def has_budget(self, limits: Limits) -> bool:
        """Return whether anything but the other ways that a budget may choose is in the limits."""
        return any(
            all(_has_fit(rank, limits) for rank in self._variant(tiles)[1].values())
            for tiles in reversed(TILES)
        )

    def within(self, limits: Limits) -> Optional[Iteration]:
        """Return the fastest iteration that is found; None if none is within the limits.

        It may be that of another way. The planner chooses with the tiles that seem best, and with
        others if these seem better than what it found.
        """
        ways = (self.fixed(way) for way in WAYS if way != BUDGET)
        found = [item for item in ways if not item.usage.exceeded(limits)]
        if self.fixed(OFF) in found:  # Nothing is faster.
            return self.fixed(OFF)
        times = {
            tiles: [_estimated_ms(rank, limits) for rank in self._variant(tiles)[1].values()]
            for tiles in TILES
        }
        seem_ms = {tiles: max(each) for tiles, each in times.items() if all(each)}
        for place, tiles in enumerate(sorted(seem_ms, key=lambda tiles: seem_ms[tiles])):
            if place == 0 or seem_ms[tiles] < min(item.step_ms for item in found):
                work, ranks = self._variant(tiles)
                chosen = {number: _chosen(rank, limits) for number, rank in ranks.items()}
                iteration = Iteration(work, chosen, tiles)
                found += [] if iteration.usage.exceeded(limits) else [iteration]
        return min(found, key=lambda item: item.step_ms, default=None)

    def least(self) -> Iteration:
        """Return the iteration that takes the least device memory, whatever the host's."""
        found = {
            tiles: [_lowest_peak(rank) for rank in self._variant(tiles)[1].values()]
            for tiles in TILES
        }
        best = min(TILES, key=lambda tiles: max(peak for peak, _ in found[tiles]))
        work, ranks = self._variant(best)
        policy = PolicyOptions(target_memory_bytes=1)
        planned = {}
        for (number, rank), (_, assignment) in zip(ranks.items(), found[best], strict=True):
            trace = _short(rank).compose(assignment, marks_all=True)
            planned[number] = PlannedRank(rank, assignment, build_plan(trace, policy))
        return Iteration(work, planned, best)

    @cached_property
    def _modules(self) -> tuple[tuple[str, ...], tuple[str, ...]]:
        """The modules that megatron-core's engine moves, and those that a budget may move."""
        shape, given = self.configured.shape, self.configured.modules
        if set(given) != set(usable_modules(shape)):
            return given, given
        # By default megatron-core's engine moves the modules that it marks, a budget ours, too.
        marked = usable_modules(shape.with_setting(NOTHING))
        layers = range(shape.num_layers)
        more = itertools.chain(*(marked_modules(shape.plain, layer) for layer in layers))
        return marked, tuple(dict.fromkeys((*marked, *more)))

    def _variant(self, tiles: Tiles) -> tuple[Workplan, dict[int, RankTemplates]]:
        if tiles not in self._variants:
            work = self._work(tiles, NOTHING, self._modules[1])
            settings = (NOTHING, selective_setting(self.configured.shape), WHOLE)
            ranks = {number: _coarse(rank) for number, rank in self._ranks(work, settings).items()}
            self._variants[tiles] = work, ranks
        return self._variants[tiles]

    def _work(self, tiles: Tiles, setting: LayerSetting, modules: tuple[str, ...]) -> Workplan:
        shape = replace(
            self.configured.shape.with_setting(setting),
            layers_per_checkpoint=1,
            mlp_sequence_tiles=tiles.mlp,
            loss_sequence_tiles=tiles.loss,
        )
        count, min_numel = self.configured.num_micro_batches, self.configured.min_numel
        return Workplan(shape, self.speed, modules, count, min_numel)

    def _ranks(self, work: Workplan, asked: Iterable[LayerSetting]) -> dict[int, RankTemplates]:
        """Return the templates of the first of all ranks that are alike: it holds the most.

        Each kind of layers has the settings, without modules that are not in it.
        """
        shape = work.shape
        found: dict[int, RankTemplates] = {}
        last = None
        for number in range(shape.parallelism.pp):
            layers = [layer for chunk in shape.chunks_of(number) for layer in chunk.layers]
            kinds = dict.fromkeys(map(shape.kind_of, layers))
            parts = [recomputable_parts(shape, kind) for kind in kinds]
            settings = [setting & part for setting in asked for part in parts]
            state = self.configured.state_bytes(number)
            rank = work.rank_templates(number, state, settings)
            ends = [(chunk.kinds, chunk.is_first, bool(chunk.after)) for chunk in rank.chunks]
            if (ends, state) != last:
                found[number] = rank
            last = ends, state
        return found


def selective_setting(shape: ModelShape) -> LayerSetting:
    """Return the modules that selective recomputation should name for a model.

    These are the ones the training names, if any; core attention if its scores are saved; else the
    parts that are cheap for what they save: the MLP of dense layers, the activation function of
    experts, latent attention's up-projections, and the norms.
    """
    if shape.recompute_modules and shape.recompute_modules != WHOLE:
        return shape.recompute_modules
    if shape.attention_backend in ("unfused", "local"):
        return LayerSetting({"core_attn"})
    kinds = map(shape.kind_of, range(shape.num_layers))
    names = {"moe_act" if "E" in kind else "mlp" for kind in kinds if has_feed_forward(kind)}
    names |= {"mla_up_proj"} if shape.latent_attention else set()
    return LayerSetting(names | {"layernorm"})


def _uniform(rank: RankTemplates, setting: LayerSetting) -> Assignment:
    """Return the assignment in which each layer has what it knows of a setting."""
    known = {
        kind: max((each for each in of_kind if each <= setting), key=len)
        for kind, of_kind in rank.templates.items()
    }
    return tuple(known[kind] for kind in rank.kinds)


def _has_fit(rank: RankTemplates, limits: Limits) -> bool:
    judge = Judge(rank, limits, refines=False)
    # The most frugal one first.
    assignments = reversed(uniform(rank.templates, rank.kinds))
    return any(judge.improves(Score(0.0, math.inf), each) for each in assignments)


def _scores(rank: RankTemplates, limits: Limits) -> dict[Assignment, Score]:
    """Return the scores of the assignments with one setting for each kind of layers."""
    judge = Judge(rank, limits, refines=False)
    return {each: judge.score(each) for each in uniform(rank.templates, rank.kinds)}


def _estimated_ms(rank: RankTemplates, limits: Limits) -> float:
    """Return the time with the best setting for each kind of layers; 0 if none fits."""
    scores = _scores(rank, limits).values()
    return min((score.total_ms for score in scores if score.excess_bytes <= 0), default=0.0)


def _lowest_peak(rank: RankTemplates) -> tuple[float, Assignment]:
    peaks = {each: score.excess_bytes for each, score in _scores(rank, Limits(0)).items()}
    lowest = min(peaks, key=lambda each: peaks[each])
    return peaks[lowest], lowest


def _coarse(rank: RankTemplates) -> RankTemplates:
    """Make all that may move of a layer one group, as in a run with a budget."""
    templates = {
        kind: {setting: item.as_one_group() for setting, item in of_kind.items()}
        for kind, of_kind in rank.templates.items()
    }
    return replace(rank, templates=templates)


def _planned_as_built_in(
    rank: RankTemplates, assignment: Assignment, prefetch_depth: int
) -> PlannedRank:
    """Plan an assignment as megatron-core's engine moves groups, which counts marks.

    It reloads ``prefetch_depth`` groups ahead; 0 if nothing moves.
    """
    trace = _short(rank).compose(assignment, marks_all=True)
    if not prefetch_depth:
        return PlannedRank(rank, assignment, Plan(trace, PolicyOptions(), (), ()))
    policy = PolicyOptions(activation_offload_fraction=1.0, prefetch_depth=prefetch_depth)
    counted = replace(build_plan(replace(trace, step_ms=()), policy), trace=trace)
    return PlannedRank(rank, assignment, counted, lambda: build_plan(trace, policy))


def _chosen(rank: RankTemplates, limits: Limits) -> PlannedRank:
    choice = choose(_short(rank), limits.device_bytes, limits.host_bytes)
    return PlannedRank(rank, choice.assignment, choice.plan)


def _short(rank: RankTemplates) -> RankTemplates:
    """Return the rank with a few micro-batches, after which it repeats."""
    return replace(rank, schedule=shortest(rank.schedule))


STEP_TOKENS = 1024
"""Sequences are searched in multiples of this many tokens per context-parallel rank."""


@dataclass(frozen=True)
class Fit:
    """The largest size that fits with one way."""

    size: int
    """Tokens of a sequence, or sequences of a micro-batch; 0 if none fits."""
    found: Optional[Iteration]
    """What it takes at that size; None if none fits."""
    beyond: Optional[Usage]
    """What the next size would take; None if the search ended at the largest planned size."""
    wall: str
    """What exceeds a limit there: a field of :class:`Parts`, :data:`HOST`, or empty."""


@dataclass(frozen=True)
class Finder:
    """Searches the largest size that fits: a ``seq_length`` or ``micro_batch_size``.

    Sizes are multiples of ``step``.
    """

    configured: Configured
    speed: Speed
    limits: Limits
    searched: str
    step: int
    _models: dict[int, SizedModel] = field(default_factory=dict, compare=False)
    _sizes: dict[str, int] = field(default_factory=dict, compare=False)

    def fit(self, way: str) -> Fit:
        size = self.largest(way)
        found = self.at(way, size) if size else None
        next_size = size + self.step
        if next_size > MAX_SIZE:
            return Fit(size, found, None, "")
        model = self.model(next_size)
        usage = (model.least() if way == BUDGET else model.fixed(way)).usage
        # A budget's least device memory may need more of the host than there is.
        short = usage.parts.largest if self.limits.host_bytes is None else HOST
        return Fit(size, found, usage, usage.exceeded(self.limits) or short)

    def largest(self, way: str) -> int:
        """Return the largest size that fits with a way; 0 if none does."""
        if way not in self._sizes:
            low = 0
            if way == BUDGET:  # It may choose what another way does.
                low = max(self.largest(other) for other in WAYS if other != BUDGET) // self.step
            most = MAX_SIZE // self.step
            found = _largest(lambda count: self._excess(way, count * self.step), low, most)
            self._sizes[way] = self.step * found
        return self._sizes[way]

    def at(self, way: str, size: int) -> Optional[Iteration]:
        """Return an iteration of a size; None if it does not fit."""
        model = self.model(size)
        if way == BUDGET:
            return model.within(self.limits)
        found = model.fixed(way)
        return None if found.usage.exceeded(self.limits) else found

    def _excess(self, way: str, size: int) -> float:
        """Return the bytes above the limits; of a budget only whether there are any, as -1 or 1."""
        model = self.model(size)
        if way == BUDGET:
            return -1.0 if model.has_budget(self.limits) else 1.0
        return model.fixed(way).usage.excess_bytes(self.limits)

    def model(self, size: int) -> SizedModel:
        if size not in self._models:
            sized: dict[str, Any] = {self.searched: size}
            shape = replace(self.configured.shape, **sized)
            self._models[size] = SizedModel(replace(self.configured, shape=shape), self.speed)
        return self._models[size]


def _largest(excess: Callable[[int], float], low: int, most: int) -> int:
    """Return the largest count up to ``most`` without excess, where no smaller one has any.

    Memory grows about linearly, so the line through two known counts leads to the next one.
    ``low`` fits, or is 0.
    """
    fits: tuple[int, float] = (low, math.nan)
    fails: tuple[int, float] = (most + 1, math.nan)
    before, turn = fits, 0
    while fails[0] - fits[0] > 1:
        low, high = fits[0], fails[0]
        if high > most:
            count = max(2 * low, min(16 * low, _crossing(before, fits)))
        elif turn % 3 == 2:
            count = low + (high - low) // 2
        else:
            count = _crossing(fits, fails)
        count = min(max(count, low + 1), high - 1)
        value = excess(count)
        if value > 0:
            fails = count, value
        else:
            before, fits = fits, (count, value)
        turn += 1
    return fits[0]


def _crossing(one: tuple[int, float], other: tuple[int, float]) -> int:
    """Return where the line through two points is 0; the middle if that is not known."""
    (x, at_x), (y, at_y) = one, other
    share = at_x / (at_x - at_y) if at_x != at_y else 0.5
    return x + math.floor((y - x) * (share if math.isfinite(share) else 0.5))
