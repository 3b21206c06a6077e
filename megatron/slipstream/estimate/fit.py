# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The longest sequence, or the largest micro-batch, that fits a device, for each way to train.

A rank's memory is followed through its schedule: what is always in use, what the layers of passes
in flight hold, and, at its peak, one layer's backward or the logits. Times are those of compute, or
of the copies where these take longer.
"""

from __future__ import annotations

import bisect
import itertools
import operator
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, NamedTuple, Optional

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.model_shapes import MAX_SIZE, Chunk, ModelShape
from megatron.slipstream.estimate.schedules import Pass, Schedule, idle_ms, rank_schedule
from megatron.slipstream.estimate.training_setup import Configured
from megatron.slipstream.estimate.ways import (
    HeadUse,
    LayerUse,
    Mix,
    Way,
    head_use,
    layer_use,
    mixes_of,
)

STEP_TOKENS = 1024
"""Sequences are searched in multiples of this many tokens per context-parallel rank."""

HOST = "host"
"""The wall that host memory is."""


class Parts(NamedTuple):
    """Device memory by what holds it, in bytes."""

    state: int = 0
    """Weights, gradients and optimizer."""
    layers: int = 0
    """Saved by the layers of all passes in flight."""
    backward: int = 0
    """Live in the backward of one layer: its saved and recomputed tensors, and gradients."""
    logits: int = 0
    """The output layer and the loss."""

    @property
    def total(self) -> int:
        """All of it."""
        return sum(self)

    @property
    def largest(self) -> str:
        """The name of the largest part that depends on the number of tokens."""
        return max(self._fields[1:], key=lambda name: int(getattr(self, name)))


@dataclass(frozen=True)
class Limits:
    """What a rank may use."""

    device_bytes: int
    host_bytes: Optional[int] = None
    """None for no limit."""
    state_bytes: Callable[[ModelShape, int], int] = lambda shape, rank: 0
    """State of a pipeline rank."""


class Usage(NamedTuple):
    """Memory of the pipeline rank that takes the most, in one iteration."""

    parts: Parts
    """On the device at its peak."""
    host_bytes: int
    """The most that is on the host at once."""
    moved_bytes: int
    """Offloaded in an iteration, and reloaded."""

    def exceeded(self, limits: Limits) -> str:
        """Return what exceeds a limit; empty if it fits."""
        if self.parts.state > limits.device_bytes:
            return "state"
        if self.parts.total > limits.device_bytes:
            return self.parts.largest
        is_over = limits.host_bytes is not None and self.host_bytes > limits.host_bytes
        return HOST if is_over else ""


class Row(NamedTuple):
    """What a way takes at a size that fits."""

    text: str
    """What it recomputes, moves and tiles."""
    label: str
    """The same in short."""
    tile_flags: tuple[str, ...]
    """Flags that turn its tiles on."""
    usage: Usage
    step_ms: float
    tokens_per_s: float
    """Tokens per second and GPU."""


@dataclass(frozen=True)
class Fit:
    """The largest size that fits with one way."""

    way: str
    size: int
    """Tokens of a sequence, or sequences of a micro-batch; 0 if none fits."""
    row: Optional[Row]
    """What it takes at that size; None if none fits."""
    beyond: Optional[Usage]
    """What the next size would take; None if the search ended at the largest planned size."""
    wall: str
    """What exceeds a limit there: a field of :class:`Parts`, :data:`HOST`, or empty."""


class ChunkUse(NamedTuple):
    """What one pass through a model chunk takes; parts are beside those of other passes."""

    held_bytes: int
    moved_bytes: int
    forward: Parts
    backward: Parts
    forward_ms: float
    """Of compute, or of the copies if they take longer."""
    backward_ms: float
    compute_ms: float
    """Of both, without waits for copies."""


@dataclass(frozen=True)
class Estimate:
    """What one iteration of a model takes with a mix of ways.

    Args:
        configured: The model and its schedule.
        speed: Speed of the GPU.
        state_bytes: The state of each pipeline rank.
    """

    configured: Configured
    speed: Speed
    state_bytes: tuple[int, ...]

    @cached_property
    def _usages(self) -> dict[Mix, Usage]:
        return {}

    @cached_property
    def _steps_ms(self) -> dict[Mix, float]:
        return {}

    def usage(self, mix: Mix) -> Usage:
        """Return the memory that an iteration takes."""
        if mix not in self._usages:
            self._usages[mix] = self._usage(mix)
        return self._usages[mix]

    def step_ms(self, mix: Mix) -> float:
        """Return the time of an iteration."""
        if mix not in self._steps_ms:
            self._steps_ms[mix] = self._step_ms(mix)
        return self._steps_ms[mix]

    def _usage(self, mix: Mix) -> Usage:
        chunks = self._chunks(mix)
        ranks = [self._on_rank(rank, chunks) for rank in range(len(self._schedules))]
        parts, host_bytes, moved_bytes = zip(*ranks, strict=True)
        highest = max(parts, key=lambda parts: parts.total)
        return Usage(highest, max(host_bytes), max(moved_bytes))

    def _step_ms(self, mix: Mix) -> float:
        chunks = self._chunks(mix)

        def duration_ms(rank: int, item: Pass) -> float:
            chunk = chunks[rank, item.vp_stage]
            return chunk.forward_ms if item.direction == "F" else chunk.backward_ms

        schedules = self._schedules
        waits = idle_ms(schedules, duration_ms)
        return max(
            sum(waits[rank]) + sum(duration_ms(rank, item) for item in schedule)
            for rank, schedule in enumerate(schedules)
        )

    def costs(self, mix: Mix) -> tuple[float, ...]:
        """Return what a mix takes whatever the link: device and host memory, and compute time."""
        usage = self.usage(mix)
        compute_ms = sum(chunk.compute_ms for chunk in self._chunks(mix).values())
        return usage.parts.total, usage.host_bytes, compute_ms

    def row(self, mix: Mix) -> Row:
        """Return what a mix does and takes."""
        step_ms = self.step_ms(mix)
        num_gpus = self._shape.parallelism.num_gpus
        layers = max(len(chunk.layers) for chunk in self._shape.chunks)
        speed = 1e3 * self._tokens_of_step / step_ms / num_gpus
        return Row(
            mix.describe(layers), mix.label(layers), mix.tile_flags, self.usage(mix), step_ms, speed
        )

    @property
    def _tokens_of_step(self) -> int:
        """Tokens of an iteration over all ranks."""
        shape, count = self._shape, self.configured.num_micro_batches
        return shape.seq_length * shape.micro_batch_size * count * shape.parallelism.dp

    @property
    def _shape(self) -> ModelShape:
        return self.configured.shape

    @cached_property
    def _schedules(self) -> list[Schedule]:
        par, count = self._shape.parallelism, self.configured.num_micro_batches
        return [
            rank_schedule(par.pp, rank, count, par.vpp, par.group_size) for rank in range(par.pp)
        ]

    @cached_property
    def _uses(self) -> dict[tuple[bool, Way], LayerUse]:
        return {}

    @cached_property
    def _heads(self) -> dict[bool, HeadUse]:
        return {}

    def _layer(self, layer: int, way: Way) -> LayerUse:
        key = self._shape.is_moe(layer), way
        if key not in self._uses:
            self._uses[key] = layer_use(
                self._shape, layer, way, self.speed, self.configured.min_numel
            )
        return self._uses[key]

    def _chunks(self, mix: Mix) -> dict[tuple[int, int], ChunkUse]:
        found: dict[tuple[Any, ...], ChunkUse] = {}
        chunks = {}
        for item in self._shape.chunks:
            kind = tuple(map(self._shape.is_moe, item.layers)), item.is_first, item.is_last
            if kind not in found:
                found[kind] = self._chunk(item, mix)
            chunks[item.pp_rank, item.vp_stage] = found[kind]
        return chunks

    def _chunk(self, chunk: Chunk, mix: Mix) -> ChunkUse:
        shape = self._shape
        hidden = shape.region_tokens * shape.hidden_size * shape.element_bytes
        ways = mix.ways(len(chunk.layers))
        uses = [self._layer(layer, way) for layer, way in zip(chunk.layers, ways, strict=True)]
        # The pipeline's schedule holds a stage's input.
        held = min(hidden, uses[0].moved_bytes) if uses and not chunk.is_first else 0
        backward = Parts()
        for use in uses:
            here = Parts(layers=held, backward=use.backward_bytes)
            backward = max(backward, here, key=lambda parts: parts.total)
            held += use.held_bytes
        moved = sum(use.moved_bytes for use in uses)
        # The copies of the layer that backward runs first would not hide, so it stays.
        staying = uses[-1].moved_bytes if uses and chunk.is_last else 0
        forward = Parts(layers=held + staying)
        forward_ms = sum(use.forward_ms for use in uses)
        backward_ms = sum(use.backward_ms for use in uses)
        if chunk.is_last:
            head = self._head(mix.tiles_logits)
            forward = forward._replace(logits=head.peak_bytes)
            forward_ms += head.forward_ms
            backward_ms += head.backward_ms
        out_ms, in_ms = self._copies_ms(moved - staying)
        times_ms = max(forward_ms, out_ms), max(backward_ms, in_ms), forward_ms + backward_ms
        return ChunkUse(held, moved - staying, forward, backward, *times_ms)

    def _head(self, is_tiled: bool) -> HeadUse:
        if is_tiled not in self._heads:
            self._heads[is_tiled] = head_use(self._shape, is_tiled, self.speed)
        return self._heads[is_tiled]

    def _copies_ms(self, nbytes: int) -> tuple[float, float]:
        """Return the time of the copies out and back, at once if passes overlap in a pipeline."""
        link = self.speed.bandwidth
        rates = link.d2h_gb_per_s, link.h2d_gb_per_s
        if self._shape.parallelism.pp > 1:
            rates = link.d2h_both_gb_per_s, link.h2d_both_gb_per_s
        return nbytes / (1e6 * rates[0]), nbytes / (1e6 * rates[1])

    def _on_rank(self, rank: int, chunks: dict[tuple[int, int], ChunkUse]) -> Usage:
        held = moved = most_moved = all_moved = 0
        peak = Parts(state=self.state_bytes[rank])
        for item in self._schedules[rank]:
            chunk = chunks[rank, item.vp_stage]
            sign = 1 if item.direction == "F" else -1
            held -= chunk.held_bytes if sign < 0 else 0
            here = chunk.forward if sign > 0 else chunk.backward
            here = here._replace(state=self.state_bytes[rank], layers=here.layers + held)
            peak = max(peak, here, key=lambda parts: parts.total)
            held += chunk.held_bytes if sign > 0 else 0
            moved += sign * chunk.moved_bytes
            most_moved = max(most_moved, moved)
            all_moved += chunk.moved_bytes if sign > 0 else 0
        return Usage(peak, most_moved, all_moved)


@dataclass(frozen=True)
class Finder:
    """Searches the largest size that fits.

    Args:
        configured: The model and its schedule.
        speed: Speed of the GPU.
        limits: What a rank may use.
        searched: The field of :class:`ModelShape` that is searched: ``seq_length`` or
            ``micro_batch_size``.
        step: Sizes are multiples of this.
    """

    configured: Configured
    speed: Speed
    limits: Limits
    searched: str
    step: int
    estimates: dict[int, Estimate] = field(default_factory=dict, compare=False)
    """Those made so far, by size; they hold for other limits with the same state."""

    def fit(self, name: str) -> Fit:
        """Return the largest size that fits with a way."""
        most = MAX_SIZE // self.step
        size = self.step * _largest(lambda count: self._fits(name, count * self.step), most)
        next_size = size + self.step
        beyond, wall = (None, "") if next_size > MAX_SIZE else self._beyond(name, next_size)
        return Fit(name, size, self.at(name, size) if size else None, beyond, wall)

    def _fits(self, name: str, size: int) -> bool:
        estimate = self.estimate(size)
        mixes = _undominated(estimate, self._mixes(name))
        return any(True for _ in self.fitting(estimate, mixes))

    def at(self, name: str, size: int) -> Optional[Row]:
        """Return what a way takes at a size with its fastest mix; None if it does not fit."""
        estimate = self.estimate(size)
        mixes = _undominated(estimate, self._mixes(name))
        fastest = min(self.fitting(estimate, mixes), key=estimate.step_ms, default=None)
        return None if fastest is None else estimate.row(fastest)

    def fitting(self, estimate: Estimate, mixes: Sequence[Mix]) -> Iterator[Mix]:
        """Yield the mixes that fit: of one way, and the fastest of each two."""
        usages = {mix: estimate.usage(mix) for mix in mixes}
        yield from (mix for mix, usage in usages.items() if not usage.exceeded(self.limits))
        device = self.limits.device_bytes
        for less, more in itertools.permutations(mixes, 2):
            if less.tiles_logits == more.tiles_logits and usages[less].parts.total <= device:
                mixed = self._mixed(estimate, less, more)
                if not estimate.usage(mixed).exceeded(self.limits):
                    yield self._hastened(estimate, mixed)

    def _hastened(self, estimate: Estimate, mix: Mix) -> Mix:
        """Return the mix with more layers of its first way, if copies then hide better."""
        low, high = mix.num_first, self._num_layers
        while low < high:  # The time is convex: compute and copies are linear, the longer counts.
            middle = (low + high) // 2
            pair = [replace(mix, num_first=count) for count in (middle, middle + 1)]
            is_over = bool(estimate.usage(pair[1]).exceeded(self.limits))
            if is_over or estimate.step_ms(pair[0]) <= estimate.step_ms(pair[1]):
                high = middle
            else:
                low = middle + 1
        return replace(mix, num_first=low)

    @cached_property
    def _num_layers(self) -> int:
        return max(len(chunk.layers) for chunk in self.configured.shape.chunks)

    def estimate(self, size: int) -> Estimate:
        """Return the estimate of the model at a size."""
        if size not in self.estimates:
            self.estimates[size] = self._estimate(size)
        return self.estimates[size]

    def _estimate(self, size: int) -> Estimate:
        sized: dict[str, Any] = {self.searched: size}
        configured = replace(self.configured, shape=replace(self.configured.shape, **sized))
        ranks = range(configured.shape.parallelism.pp)
        state = tuple(self.limits.state_bytes(configured.shape, rank) for rank in ranks)
        return Estimate(configured, self.speed, state)

    def _mixes(self, name: str) -> list[Mix]:
        return mixes_of(name, self.configured.shape, self.configured.modules)

    def _mixed(self, estimate: Estimate, less: Mix, more: Mix) -> Mix:
        """Return the mix with the fewest layers of ``less`` that fits the device.

        It fits the host, too, if ``less`` is what takes less of that.
        """
        mix = replace(more, first=less.first)
        with_host = estimate.usage(less).host_bytes <= estimate.usage(more).host_bytes

        def fits(count: int) -> bool:
            usage = estimate.usage(replace(mix, num_first=count))
            wall = usage.exceeded(self.limits)
            return not wall or (wall == HOST and not with_host)

        counts = range(self._num_layers + 1)
        found = bisect.bisect_left(counts, True, key=fits)
        return replace(mix, num_first=min(found, self._num_layers))

    def usages(self, name: str, size: int) -> list[Usage]:
        """Return what each mix of a way with one way for all layers takes."""
        estimate = self.estimate(size)
        return [estimate.usage(mix) for mix in self._mixes(name)]

    def _beyond(self, name: str, size: int) -> tuple[Usage, str]:
        """Return the least that a way takes at a size that does not fit, and the wall."""
        usage = min(self.usages(name, size), key=lambda usage: usage.parts.total)
        return usage, usage.exceeded(self.limits) or HOST


def _undominated(estimate: Estimate, mixes: Sequence[Mix]) -> list[Mix]:
    """Return the mixes that no other equals or beats in everything."""
    found: dict[tuple[float, ...], Mix] = {}
    for mix in mixes:
        found.setdefault(estimate.costs(mix), mix)

    def is_beaten(costs: tuple[float, ...]) -> bool:
        return any(other != costs and all(map(operator.le, other, costs)) for other in found)

    return [mix for costs, mix in found.items() if not is_beaten(costs)]


def _largest(fits: Callable[[int], bool], most: int) -> int:
    """Return the largest count up to ``most`` that fits, where all smaller ones do; 0 if none."""
    high = 1
    while high <= most and fits(high):
        high *= 2
    counts = range(high // 2, min(high, most + 1))
    return counts[bisect.bisect_left(counts, True, lo=1, key=lambda count: not fits(count)) - 1]
