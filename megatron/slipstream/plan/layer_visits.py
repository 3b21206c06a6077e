# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What layers hold and how long they take, measured where forward and backward pass them.

An iteration is cut at :class:`Boundary` objects: where forward enters a layer and where backward
has the gradient of its output. The work between two of them belongs to one layer under its setting,
or to what runs before or after a chunk's layers. :meth:`LayerVisits.templates` makes of it the
templates from which the trace of any assignment is composed.
"""

from __future__ import annotations

import enum
import itertools
import statistics
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, NamedTuple, Optional

from megatron.slipstream.plan.assignments import shortest
from megatron.slipstream.plan.pace import MAX_PACE, is_alike
from megatron.slipstream.plan.settings import (
    FEED_FORWARD,
    WHOLE,
    Assignment,
    LayerSetting,
    describe_setting,
)
from megatron.slipstream.plan.templates import (
    ONE_GROUP,
    ChunkLayers,
    Mark,
    RankTemplates,
    ScheduledPass,
    Template,
    TemplateGroup,
    TemplateStorage,
    Work,
)
from megatron.slipstream.plan.trace import Bandwidth, StepKind

MS_PER_BYTE = 1e-9
"""Time that recomputing a saved byte is assumed to take where nothing was timed."""


class Place(enum.Enum):
    """Where an iteration is cut."""

    CALL = "forward enters a model chunk"
    LAYER = "forward enters a layer"
    LAYERS_END = "forward leaves the chunk's last layer"
    RETURN = "the model chunk returns"
    GRADIENT = "backward has the gradient of a layer's output"
    INPUT_GRADIENT = "backward has the gradient of the first layer's input"
    END = "the iteration ends"


class Rerun(NamedTuple):
    """What a layer's forward has left when backward ran it again as a whole."""

    nbytes: int
    mlp_bytes: int = 0
    """Of these, what its MLP or experts have left beside their output."""
    output_bytes: int = 0
    """That output."""

    def or_worse(self, other: Rerun) -> Rerun:
        """Return what neither of two exceeds."""
        return Rerun(
            max(self.nbytes, other.nbytes),
            min(self.mlp_bytes, other.mlp_bytes),
            max(self.output_bytes, other.output_bytes),
        )

    def scaled(self, factor: float) -> Rerun:
        return Rerun(*(int(nbytes * factor) for nbytes in self))


class Boundary(NamedTuple):
    """A cut. Bytes are those with nothing offloaded, without gradients of parameters."""

    place: Place
    chunk: int = -1
    """Virtual stage; -1 at the end."""
    layer: int = -1
    """Index of the layer of LAYER and GRADIENT among those of the rank."""
    nbytes: int = 0
    """Device bytes allocated here."""
    peak_bytes: int = 0
    """The peak since the previous boundary."""
    ms: Optional[float] = None
    """Time of computation since the previous boundary; None if it was not measured."""
    waited_ms: float = 0.0
    """Time since the previous boundary in which computation waited for copies."""
    rerun: Optional[Rerun] = None
    """At GRADIENT, the layer's forward that runs again after it; None if it does not as a whole."""


class RankLayer(NamedTuple):
    """A layer of the rank."""

    kind: str
    chunk: int
    settings: tuple[LayerSetting, ...]
    """The settings that it takes, the most frugal first and the flags' own last."""


class _Timed(NamedTuple):
    """The median time of some work in an iteration."""

    waits: float
    """The share of the iteration in which computation waited for copies."""
    ms: float

    def or_better(self, other: _Timed) -> _Timed:
        """Return what two iterations say: [Note: A device that waits is faster] in ``pace``.

        The one that waited less counts. Of two that waited alike, it is the least: the host only
        adds to the time.
        """
        best, rest = sorted((self, other))
        most_ms = rest.ms if is_alike(best.waits, rest.waits) else rest.ms * MAX_PACE
        return best._replace(ms=min(best.ms, most_ms))


@dataclass
class _Measured:
    """Work of one kind at one setting, in one direction."""

    net_bytes: int
    peak_bytes: int
    timed: Optional[_Timed] = None
    """Its time; None if it was not measured."""

    @property
    def ms(self) -> Optional[float]:
        return None if self.timed is None else self.timed.ms

    def work(self, net_bytes: int, assumed_ms: float = 0.0) -> Work:
        ms = assumed_ms if self.timed is None else self.timed.ms
        return Work(ms, net_bytes, max(self.peak_bytes, net_bytes, 0))


_Key = tuple[Hashable, ...]


class LayerVisits:
    """Measurements of iterations, by kind of layers and setting.

    Args:
        layers: The layers of the rank, in the order of an assignment.
    """

    def __init__(self, layers: Sequence[RankLayer]) -> None:
        self.layers = tuple(layers)
        self.schedule: tuple[ScheduledPass, ...] = ()
        """The passes of the last iteration, with the most that each needed beside its templates."""
        self._measured: dict[_Key, _Measured] = {}
        self._movable: dict[tuple[str, LayerSetting], int] = {}
        self._rerun: dict[str, Rerun] = {}
        """By kind, the worst of its layers."""
        self._last: Assignment = ()
        """The settings with which layers ran last."""
        self._left: dict[tuple[str, LayerSetting], int] = {}
        """[Note: What layers keep]: bytes beyond those that a layer keeps at its first setting."""

    def is_measured(self, kind: str, setting: LayerSetting) -> bool:
        """Return whether layers of this kind have run with this setting."""
        return ("F", kind, setting) in self._measured and ("B", kind, setting) in self._measured

    def held_bytes(self, kind: str, setting: LayerSetting) -> int:
        """Return what one micro-batch holds of such a layer until its backward.

        It is negative if forward frees more than it saves: [Note: What layers keep].
        """
        return self._measured["F", kind, setting].net_bytes

    def most_bytes(self, assignment: Assignment) -> int:
        """Return the most that activations of an iteration need at once if nothing moves.

        Args:
            assignment: The settings of its layers; each kind has run with its most frugal one.
        """
        used: dict[str, set[LayerSetting]] = {}
        for layer, setting in zip(self.layers, assignment, strict=True):
            used.setdefault(layer.kind, set()).add(setting)
        templates = {
            kind: {one: self._template_or_bound(kind, one) for one in settings}
            for kind, settings in used.items()
        }
        schedule = shortest(self.schedule)
        rank = RankTemplates(templates, tuple(self._chunks()), schedule, None)
        return max(item.peak_bytes for item in rank.compose(assignment, marks_all=True).memory)

    def saved_bytes(
        self, layer: RankLayer, setting: LayerSetting, moved_bytes: int
    ) -> tuple[int, int, int]:
        """Return what such a layer saves, what of it moves, and what is recomputed instead.

        Args:
            layer: The layer.
            setting: Its setting.
            moved_bytes: The bytes of a micro-batch that move.
        """
        held = {one: max(0, self.held_bytes(layer.kind, one)) for one in self._settings(layer.kind)}
        own = held.get(setting, 0)
        most = held.get(layer.settings[-1], max(held.values(), default=0))
        return max(most, own), min(moved_bytes, own), max(0, most - own)

    def recomputed_ms(self, layer: RankLayer, setting: LayerSetting) -> Optional[float]:
        """Return by how much the setting lengthens backward of such a layer; None if unknown."""
        least = layer.settings[-1]
        if not (self.is_measured(layer.kind, setting) and self.is_measured(layer.kind, least)):
            return None
        ms, least_ms = (self._work_of(layer.kind, one)[1].ms for one in (setting, least))
        return None if ms is None or least_ms is None else ms - least_ms

    def pass_ms(self, assignment: Assignment) -> Optional[float]:
        """Return what a pass through a chunk computes, forward and backward, on average.

        None if the time of a layer with its setting is not known.
        """
        for layer, setting in zip(self.layers, assignment, strict=True):
            if not self.is_measured(layer.kind, setting):
                return None
            if any(work.ms is None for work in self._work_of(layer.kind, setting)):
                return None
        num_passes = sum(one.direction == "F" for one in self.schedule)
        ms = self.templates(None, 0).compute_ms(assignment)
        return ms / num_passes if num_passes else None

    # An iteration.

    def add(
        self,
        assignment: Assignment,
        boundaries: Sequence[Boundary],
        movable_bytes: Sequence[int] = (),
        scale: float = 1.0,
    ) -> None:
        """Add an iteration.

        [Note: What layers keep]
        Some modules, such as dispatchers of experts, keep their last tensors until they run again,
        and how many depends on the setting. So an iteration's first forward of a layer grows by
        what it saves, and by what it keeps now, less what it has kept so far. Later forwards grow
        by what it saves, and backward frees that; or forward frees what backward has left to keep.

        Args:
            assignment: The settings with which it ran.
            boundaries: Its cuts, in order.
            movable_bytes: For each layer, the bytes of a micro-batch that can be offloaded; empty
                if they were not recorded. Then only times count.
            scale: By how much more the largest micro-batch so far has held than those of this
                iteration.
        """
        found: dict[_Key, list[tuple[Work, Optional[float]]]] = {}
        waited_ms = sum(cut.waited_ms for cut in boundaries)
        total_ms = waited_ms + sum(cut.ms or 0.0 for cut in boundaries)
        waits = waited_ms / total_ms if total_ms else 0.0
        left = self._note_left(assignment, boundaries, scale) if movable_bytes else {}
        for begin, end in itertools.pairwise(boundaries):
            key = self._key(assignment, begin, end)
            if key is not None:
                more = left.pop(begin.layer, 0) if begin.place is Place.LAYER else 0
                net = int((end.nbytes - begin.nbytes) * scale) - more
                peak = int((end.peak_bytes - begin.nbytes) * scale) - more
                found.setdefault(key, []).append((Work(0.0, net, peak), end.ms))
            if begin.rerun is not None:
                kind, rerun = self.layers[begin.layer].kind, begin.rerun.scaled(scale)
                self._rerun[kind] = self._rerun.get(kind, rerun).or_worse(rerun)
        for key, works in found.items():
            self._note(key, works, waits, has_memory=bool(movable_bytes))
        self._last = assignment
        passes = list(_schedule(boundaries, self.layers))
        extra = [one.extra_bytes for one in self.schedule]
        if len(extra) != len(passes):
            extra = [max(extra, default=0)] * len(passes)
        self._set_schedule(passes, extra)
        for layer, setting, nbytes in zip(self.layers, assignment, movable_bytes, strict=False):
            known = self._movable.get((layer.kind, setting), nbytes)
            self._movable[layer.kind, setting] = min(known, nbytes)

    def _note_left(
        self, assignment: Assignment, boundaries: Sequence[Boundary], scale: float
    ) -> dict[int, int]:
        """Note what layers keep: [Note: What layers keep].

        Returns:
            For each layer, by how much that is more than before the iteration.
        """
        nets: dict[tuple[Place, int], list[int]] = {}
        for begin, end in itertools.pairwise(boundaries):
            net = int((end.nbytes - begin.nbytes) * scale)
            nets.setdefault((begin.place, begin.layer), []).append(net)
        more: dict[int, int] = {}
        found: dict[tuple[str, LayerSetting], int] = {}
        last = self._last or assignment
        for index, (layer, old, new) in enumerate(zip(self.layers, last, assignment, strict=True)):
            first, *later = nets.get((Place.LAYER, index), [0])
            freed = [-net for net in nets.get((Place.GRADIENT, index), [-first])]
            more[index] = first - max(later or freed)
            nbytes = self._left.get((layer.kind, old), 0) + more[index] * bool(self._last)
            found[layer.kind, new] = max(found.get((layer.kind, new), nbytes), nbytes)
        self._left = {**found, **self._left}
        return more

    @property
    def left_bytes(self) -> int:
        """What layers have kept since they ran last, beyond what they keep at their first ones."""
        pairs = zip(self.layers, self._last, strict=False)
        return sum(self._left.get((layer.kind, setting), 0) for layer, setting in pairs)

    def _set_schedule(self, passes: Iterable[ScheduledPass], extra: Iterable[int]) -> None:
        pairs = zip(passes, extra, strict=True)
        self.schedule = tuple(one._replace(extra_bytes=nbytes) for one, nbytes in pairs)

    def note_extra(
        self, assignment: Assignment, boundaries: Sequence[Boundary], scale: float = 1.0
    ) -> None:
        """Note what each pass of an iteration needed beside what its templates add up to.

        Each cut is compared with the same cut of what is composed: with other settings, the peak is
        at another one. The iteration is the last one that was added.
        """
        extra = [one.extra_bytes for one in self.schedule]
        number, live = -1, 0
        for begin, end in itertools.pairwise(boundaries):
            passes = [number]
            if begin.place is Place.CALL:
                passes = [number + 1]
            elif self._begins_backward(end):
                passes = [number + 1] if begin.place is Place.RETURN else [number, number + 1]
            number = passes[-1]
            composed = Work(0.0)
            for work in self._works(assignment, begin, end):
                composed = composed.then(work)
            real = int((end.peak_bytes - boundaries[0].nbytes) * scale)
            for one in passes:
                extra[one] = max(extra[one], real - live - composed.peak_bytes)
            live += composed.net_bytes
        self._set_schedule(self.schedule, extra)

    def _begins_backward(self, cut: Boundary) -> bool:
        """Return whether backward of a chunk's layers begins at this cut."""
        last = max((i for i, one in enumerate(self.layers) if one.chunk == cut.chunk), default=-1)
        return cut.place is Place.GRADIENT and cut.layer == last

    def _works(self, assignment: Assignment, begin: Boundary, end: Boundary) -> Iterator[Work]:
        """Yield what templates have between two cuts."""
        if begin.place in (Place.LAYER, Place.GRADIENT):
            template = self._template(self.layers[begin.layer].kind, assignment[begin.layer])
            is_forward = begin.place is Place.LAYER
            yield template.in_forward if is_forward else template.in_backward
        elif begin.place in (Place.CALL, Place.INPUT_GRADIENT):
            before = self._around(begin.chunk, Place.CALL, Place.INPUT_GRADIENT)
            yield before.in_forward if begin.place is Place.CALL else before.in_backward
        elif begin.place is Place.LAYERS_END:
            yield self._around(begin.chunk, Place.LAYERS_END, Place.RETURN).in_forward
        if self._begins_backward(end):
            yield self._around(end.chunk, Place.LAYERS_END, Place.RETURN).in_backward

    def _note(
        self,
        key: _Key,
        works: Sequence[tuple[Work, Optional[float]]],
        waits: float,
        has_memory: bool,
    ) -> None:
        times = [ms for _, ms in works if ms is not None]
        known = self._measured.get(key)
        timed = None if known is None else known.timed
        if times:
            new = _Timed(waits, statistics.median(times))
            timed = new if timed is None else timed.or_better(new)
        if has_memory:
            # The most of all layers and micro-batches: a prediction may not be too low.
            net = max(work.net_bytes for work, _ in works)
            peak = max(work.peak_bytes for work, _ in works)
            self._measured[key] = _Measured(net, peak, timed)
        elif known is not None:
            known.timed = timed

    def _key(self, assignment: Assignment, begin: Boundary, end: Boundary) -> Optional[_Key]:
        """Return whose work follows ``begin``; None if it is none of the model's."""
        if begin.place in (Place.LAYER, Place.GRADIENT):
            direction = "F" if begin.place is Place.LAYER else "B"
            return direction, self.layers[begin.layer].kind, assignment[begin.layer]
        if begin.place is Place.RETURN and end.place is not Place.GRADIENT:
            return None
        chunk = end.chunk if begin.place is Place.RETURN else begin.chunk
        return begin.place, chunk

    def scale(self, factor: float) -> None:
        """Scale all bytes to a larger micro-batch."""
        for one in self._measured.values():
            one.net_bytes = int(one.net_bytes * factor)
            one.peak_bytes = int(one.peak_bytes * factor)
        self._rerun = {kind: rerun.scaled(factor) for kind, rerun in self._rerun.items()}
        self._left = {key: int(nbytes * factor) for key, nbytes in self._left.items()}
        extra = [int(one.extra_bytes * factor) for one in self.schedule]
        self._set_schedule(self.schedule, extra)

    # What ranks agree on.

    def numbers(self) -> list[float]:
        """Return all measurements as numbers of which the largest of several ranks is safe."""
        values: list[float] = []
        for key in sorted(self._measured, key=_order):
            one = self._measured[key]
            values += [one.net_bytes, one.peak_bytes, *(one.timed or (0.0, -1.0))]
        values += [-self._movable[key] for key in sorted(self._movable, key=_order)]
        for kind in sorted(self._rerun):
            rerun = self._rerun[kind]
            values += [rerun.nbytes, -rerun.mlp_bytes, rerun.output_bytes]
        values += [self._left[key] for key in sorted(self._left, key=_order)]
        return values + [one.extra_bytes for one in self.schedule]

    def take(self, numbers: Iterable[float]) -> None:
        """Replace all measurements by numbers in the order of :meth:`numbers`."""
        left = iter(numbers)
        for key in sorted(self._measured, key=_order):
            net, peak, waits, ms = (next(left) for _ in range(4))
            timed = None if ms < 0 else _Timed(waits, ms)
            self._measured[key] = _Measured(int(net), int(peak), timed)
        for name in sorted(self._movable, key=_order):
            self._movable[name] = -int(next(left))
        for kind in sorted(self._rerun):
            nbytes, mlp_bytes, output_bytes = (int(next(left)) for _ in range(3))
            self._rerun[kind] = Rerun(nbytes, -mlp_bytes, output_bytes)
        for name in sorted(self._left, key=_order):
            self._left[name] = int(next(left))
        self._set_schedule(self.schedule, map(int, left))

    # Templates.

    def templates(self, bandwidth: Optional[Bandwidth], state_bytes: int) -> RankTemplates:
        """Return the templates of all kinds and settings that were measured.

        Args:
            bandwidth: Bandwidth of copies; None if it is not known.
            state_bytes: Device memory in use beside activations.
        """
        templates = {
            kind: {setting: self._template(kind, setting) for setting in self._settings(kind)}
            for kind in {layer.kind for layer in self.layers}
        }
        return RankTemplates(
            templates,
            tuple(self._chunks()),
            self.schedule,
            bandwidth,
            state_bytes - self.left_bytes,
        )

    def _template(self, kind: str, setting: LayerSetting) -> Template:
        forward, backward = self._work_of(kind, setting)
        held = self.held_bytes(kind, setting)
        most = max(self.held_bytes(kind, one) for one in self._settings(kind))
        recomputed_ms = (most - held) * MS_PER_BYTE
        movable = max(0, min(self._movable.get((kind, setting), 0), held))
        return Template(
            (forward.work(held), Mark(StepKind.FORWARD_COMMIT, 0, ONE_GROUP)),
            (
                Mark(StepKind.BACKWARD_USE, 0, ONE_GROUP),
                backward.work(-held, recomputed_ms),
            ),
            (TemplateGroup(ONE_GROUP),),
            (TemplateStorage(movable, (0,)),) if movable else (),
            left_bytes=self._left.get((kind, setting), 0),
        )

    def _template_or_bound(self, kind: str, setting: LayerSetting) -> Template:
        """Return a template that needs no less memory than such layers with a setting."""
        if self.is_measured(kind, setting):
            return self._template(kind, setting)
        frugal, *_, least = next(one.settings for one in self.layers if one.kind == kind)
        frugal_bytes = self.held_bytes(kind, frugal)
        again = self._measured["B", kind, frugal].peak_bytes
        kept = max(0, frugal_bytes)
        rerun = self._rerun.get(kind, Rerun(again))
        held, most = kept + min(again, rerun.nbytes), kept + again
        ahead = most
        if self.is_measured(kind, least):
            held, ahead = self.held_bytes(kind, least), self._measured["F", kind, least].peak_bytes
        if setting & FEED_FORWARD:
            held -= rerun.mlp_bytes
            # While its backward runs, there are the output and its gradient once more.
            most += 2 * rerun.output_bytes
        # A layer that runs again as a whole saves at least its input. If it holds less, backward
        # leaves more than forward, and so may backward with the setting.
        left_bytes = max(0, rerun.output_bytes - frugal_bytes)
        return Template(
            (Work(0.0, held, max(held, ahead)),),
            (Work(0.0, -held, most - held),),
            left_bytes=left_bytes,
        )

    def _work_of(self, kind: str, setting: LayerSetting) -> tuple[_Measured, _Measured]:
        """Return the work in forward, and in backward, with times as settings can differ.

        Forward computes the same at each setting, and to recompute more takes no less time: what
        was measured otherwise is noise.
        """
        forward, backward = (self._measured[way, kind, setting] for way in "FB")
        settings = self._settings(kind)
        less = [one for one in settings if one <= setting or setting == WHOLE]
        return (
            replace(forward, timed=self._timed("F", kind, settings, statistics.median)),
            replace(backward, timed=self._timed("B", kind, less, max)),
        )

    def _timed(
        self,
        direction: str,
        kind: str,
        settings: Iterable[LayerSetting],
        of_all: Callable[[list[float]], float],
    ) -> Optional[_Timed]:
        times = [self._measured[direction, kind, one].ms for one in settings]
        known = [ms for ms in times if ms is not None]
        return _Timed(0.0, of_all(known)) if known else None

    def _settings(self, kind: str) -> list[LayerSetting]:
        """Return the settings of layers of this kind that were measured."""
        layer = next(layer for layer in self.layers if layer.kind == kind)
        return [setting for setting in layer.settings if self.is_measured(kind, setting)]

    def _chunks(self) -> Iterable[ChunkLayers]:
        for chunk, layers in itertools.groupby(self.layers, key=lambda layer: layer.chunk):
            before = self._around(chunk, Place.CALL, Place.INPUT_GRADIENT)
            after = self._around(chunk, Place.LAYERS_END, Place.RETURN)
            kinds = tuple(layer.kind for layer in layers)
            yield ChunkLayers(kinds, before=(before,), after=(after,))

    def _around(self, chunk: int, forward: Place, backward: Place) -> Template:
        nothing = _Measured(0, 0, _Timed(0.0, 0.0))
        ahead = self._measured.get((forward, chunk), nothing)
        back = self._measured.get((backward, chunk), nothing)
        held = ahead.net_bytes
        return Template((ahead.work(held),), (back.work(-held),))


def _order(key: _Key) -> list[str]:
    """Return what sorts keys alike on all ranks: the order within a set differs by process."""
    return [describe_setting(part) if isinstance(part, frozenset) else str(part) for part in key]


def _schedule(
    boundaries: Sequence[Boundary], layers: Sequence[RankLayer]
) -> Iterable[ScheduledPass]:
    """Yield the passes of an iteration; a chunk's backward passes come in order of its forward."""
    last_of = {layer.chunk: index for index, layer in enumerate(layers)}
    numbers: dict[tuple[Literal["F", "B"], int], itertools.count[int]] = {}
    for place, chunk, layer, *_ in boundaries:
        direction: Literal["F", "B"] = "F" if place is Place.CALL else "B"
        if place is Place.CALL or (place is Place.GRADIENT and last_of[chunk] == layer):
            number = next(numbers.setdefault((direction, chunk), itertools.count()))
            yield ScheduledPass(direction, number, chunk)
