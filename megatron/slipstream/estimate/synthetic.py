# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Builds a trace for the planner from a model's shape, without running an iteration.

Its marks are those of megatron-core's layers and its storages are the tensors that they save, in
the order of a pipeline rank's schedule; its times are estimates. Device memory counts the state,
the saved tensors of passes in flight, what the running part takes beside them (layer_passes), but
not the fragmentation of the allocator.
"""

from __future__ import annotations

import itertools
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.layer_passes import Stretch, backward_pass, forward_pass
from megatron.slipstream.estimate.layers import (
    CHECKPOINT_INPUTS,
    input_name,
    layer_parts,
    marked_modules,
    recomputable_parts,
    saved_tensors,
    savers_of,
)
from megatron.slipstream.estimate.model_shapes import Chunk, ModelShape
from megatron.slipstream.estimate.schedules import Pass, Schedule, idle_ms, rank_schedule
from megatron.slipstream.plan.assignments import fastest
from megatron.slipstream.plan.settings import LayerSetting
from megatron.slipstream.plan.staying import Staying
from megatron.slipstream.plan.templates import (
    ChunkLayers,
    ChunkPass,
    Event,
    Mark,
    RankTemplates,
    ScheduledPass,
    Template,
    TemplateGroup,
    TemplateStorage,
    Work,
)
from megatron.slipstream.plan.trace import OUTPUT_LAYER, StepKind, Trace

DEFAULT_MIN_NUMEL = 1 << 20
"""megatron-core's ``min_offloaded_tensor_size``, in elements."""


@dataclass(frozen=True)
class Workplan:
    """A model to plan: its shape, the GPU's speed, and the modules that may be offloaded.

    Tensors with fewer elements than ``min_numel`` stay. Raises ``ValueError`` if the schedule does
    not support this number of micro-batches.
    """

    shape: ModelShape
    speed: Speed
    modules: tuple[str, ...]
    num_micro_batches: int
    min_numel: int = DEFAULT_MIN_NUMEL
    _templates: dict[Hashable, Template] = field(
        default_factory=dict, init=False, compare=False, repr=False
    )

    @cached_property
    def _movable(self) -> Workplan:
        """The same, with inputs of recomputed layers among what moves."""
        return replace(self, modules=(*self.modules, CHECKPOINT_INPUTS))

    @cached_property
    def schedules(self) -> tuple[Schedule, ...]:
        par = self.shape.parallelism
        return tuple(
            rank_schedule(par.pp, rank, self.num_micro_batches, par.vpp, par.group_size)
            for rank in range(par.pp)
        )

    @cached_property
    def chunks(self) -> dict[tuple[int, int], ChunkPass]:
        """One pass through each chunk, by pipeline rank and virtual stage."""
        own = map(self.own_templates, range(self.shape.parallelism.pp))
        return {
            (rank.pp_rank, chunk.vp_stage): chunk
            for rank in own
            for chunk in rank.passes(fastest(rank))
        }

    @cached_property
    def idle_ms(self) -> list[list[float]]:
        """How long each rank waits for other ranks before each pass."""

        def duration_ms(rank: int, item: Pass) -> float:
            chunk = self.chunks[rank, item.vp_stage]
            return chunk.forward_ms if item.direction == "F" else chunk.backward_ms

        return idle_ms(self.schedules, duration_ms)

    def rank_templates(
        self, pp_rank: int, state_bytes: int, settings: Iterable[LayerSetting]
    ) -> RankTemplates:
        """Return the templates of a pipeline rank's layers in those settings whose parts they have.

        The rank waits for others as if all layers recomputed what the shape says.
        """
        settings = tuple(dict.fromkeys(settings))
        single = replace(self.shape, layers_per_checkpoint=1)
        templates: dict[str, dict[LayerSetting, Template]] = {}
        chunks = []
        for chunk in self.shape.chunks_of(pp_rank):
            kinds = tuple(map(self.shape.kind_of, chunk.layers))
            for kind, layer in zip(kinds, chunk.layers, strict=True):
                if kind not in templates:
                    parts = recomputable_parts(self.shape, kind)
                    alone = chunk._replace(layers=(layer,), is_last=False)
                    templates[kind] = {
                        setting: self._movable._template(single.with_setting(setting), alone)
                        for setting in settings
                        if setting <= parts
                    }
            chunks.append(self._chunk_layers(chunk, kinds))
        rank = RankTemplates(templates, tuple(chunks), (), self.speed.bandwidth, 0, pp_rank)
        return self.with_schedule(rank, state_bytes)

    def own_templates(self, pp_rank: int) -> RankTemplates:
        """Return a rank that recomputes what the shape says, without a schedule.

        A checkpoint of several layers counts as one layer.
        """
        shape, step = self.shape, self.shape.layers_per_checkpoint
        templates: dict[str, dict[LayerSetting, Template]] = {}
        chunks = []
        for chunk in shape.chunks_of(pp_rank):
            kinds = []
            for layers in itertools.batched(chunk.layers, step):
                run = chunk._replace(layers=layers, is_last=False)
                kinds.append(str([*map(shape.kind_and_setting, layers)]))
                templates[kinds[-1]] = {shape.setting_of(layers[0]): self._template(shape, run)}
            chunks.append(self._chunk_layers(chunk, tuple(kinds)))
        return RankTemplates(templates, tuple(chunks), (), self.speed.bandwidth, 0, pp_rank)

    def _chunk_layers(self, chunk: Chunk, kinds: tuple[str, ...]) -> ChunkLayers:
        head = self._template(self.shape, chunk._replace(layers=()))
        return ChunkLayers(kinds, chunk.is_first, (), (head,) if chunk.is_last else ())

    def _template(self, shape: ModelShape, chunk: Chunk) -> Template:
        """Return the template of some layers, or (``is_last``) of what follows the last one."""
        layers = tuple(map(shape.kind_and_setting, chunk.layers))
        key = shape.layers_per_checkpoint, layers, chunk.is_last
        if key not in self._templates:  # Ranks have layers of the same kinds.
            marker = _Marker(self, shape, chunk)
            backward = tuple(backward_pass(shape, chunk))
            rerun = [stretch for stretch in backward if stretch.phase == "rerun"]
            self._templates[key] = Template(
                tuple(marker.forward(forward_pass(shape, chunk))),
                tuple(marker.backward(backward)),
                tuple(marker.groups),
                tuple(marker.storages),
                sum(_round(stretch.ms(self.speed)) for stretch in rerun),
                sum(max(0, stretch.live_bytes) for stretch in rerun),
            )
        return self._templates[key]

    def with_schedule(self, rank: RankTemplates, state_bytes: int) -> RankTemplates:
        passes = zip(self.schedules[rank.pp_rank], self.idle_ms[rank.pp_rank], strict=True)
        schedule = tuple(ScheduledPass(*item, wait_ms) for item, wait_ms in passes)
        return replace(rank, schedule=schedule, state_bytes=state_bytes)


def synthetic_trace(work: Workplan, pp_rank: int, state_bytes: int = 0) -> Trace:
    """Build a pipeline rank's trace of one iteration; it has no steps without modules."""
    rank = work.with_schedule(work.own_templates(pp_rank), state_bytes)
    return replace(rank.compose(fastest(rank)), assignment=())


_Span = tuple[int, str, Sequence[str]]
"""A group's index and name, and the parts of its layer between its marks."""


class _Marker:
    """Divides passes through layers by the marks of their groups."""

    def __init__(self, work: Workplan, shape: ModelShape, chunk: Chunk) -> None:
        self._plan, self._shape = work, shape
        self.groups: list[TemplateGroup] = []
        self.storages: list[TemplateStorage] = []
        self._spans = {
            layer: self._add_layer(layer, place == 0) for place, layer in enumerate(chunk.layers)
        }

    def _add_layer(self, layer: int, is_first: bool) -> list[_Span]:
        work, saved = self._plan, saved_tensors(self._shape, layer)
        marked = [name for name in marked_modules(self._shape, layer) if name in work.modules]
        group_of = {name: len(self.groups) + place for place, name in enumerate(marked)}
        with_small: set[int] = set()
        for name, (tensor, savers) in savers_of(saved).items():
            groups = tuple(group_of[part] for part in savers if part in group_of)
            if groups and tensor.numel < work.min_numel:
                with_small.update(groups)
            elif groups:
                held_outside = len(groups) < len(savers) or tensor.is_kept
                is_input = is_first and name == input_name(self._shape.kind_of(layer))
                self.storages.append(TemplateStorage(tensor.nbytes, groups, held_outside, is_input))
        for name, group in group_of.items():
            stays = (Staying.SMALL.text,) if group in with_small else ()
            self.groups.append(TemplateGroup(name, stays))
        parts = [part.name for part in layer_parts(self._shape, layer)]
        return [(group, name, _span(name, parts)) for name, group in group_of.items()]

    def forward(self, stretches: Iterable[Stretch]) -> Iterator[Event]:
        outputs = itertools.count(-2, -1)  # Counted, since further tokens have their own.
        for stretch in stretches:
            spans = self._spans.get(stretch.layer, [])
            for group, name, parts in spans:
                if stretch.part == parts[0]:
                    yield Mark(StepKind.FORWARD_START, group, name)
            yield from self._work(stretch, outputs, StepKind.OUTPUT_START, StepKind.OUTPUT_END)
            for group, name, parts in reversed(spans):  # Groups end inside of others.
                if stretch.part == parts[-1] and name != CHECKPOINT_INPUTS:
                    yield Mark(StepKind.FORWARD_COMMIT, group, name)
        for group, name, _ in itertools.chain(*self._spans.values()):
            if name == CHECKPOINT_INPUTS:  # A checkpoint ends with its last layer.
                yield Mark(StepKind.FORWARD_COMMIT, group, name)

    def backward(self, stretches: Iterable[Stretch]) -> Iterator[Event]:
        """Yield the work of backward, and a mark where a group is first read.

        A part that runs again reads what it saved: [Note: Recomputation reads first] in ``trace``.
        """
        used: set[int] = set()
        outputs = itertools.count(-2 - self._shape.num_further_tokens)
        kinds = StepKind.OUTPUT_BACKWARD_START, StepKind.OUTPUT_BACKWARD_END
        for stretch in stretches:
            for group, name, parts in self._spans.get(stretch.layer, []):
                if stretch.part in parts and group not in used:
                    used.add(group)
                    yield Mark(StepKind.BACKWARD_USE, group, name)
            yield from self._work(stretch, outputs, *kinds)

    def _work(
        self, stretch: Stretch, outputs: Iterator[int], start: StepKind, end: StepKind
    ) -> Iterator[Event]:
        """Yield the work of a stretch, between marks if it is the output layer's."""
        ms = _round(stretch.ms(self._plan.speed))
        work = Work(ms, stretch.live_bytes, stretch.peak_bytes)
        if stretch.part == OUTPUT_LAYER:
            output = next(outputs)  # [Note: Marks of no group]
            yield from (Mark(start, output, OUTPUT_LAYER), work, Mark(end, output, OUTPUT_LAYER))
        else:
            yield work


def _round(ms: float) -> float:
    """Round to a multiple of a power of two, so that sums are exact in any order."""
    return round(ms * 4096) / 4096


_LAST_PARTS: dict[str, str] = {
    # megatron-core ends a norm's group after reading the residual, which is the norm's input.
    "attn_norm": "attn_residual",
    "moe_act": "expert_fc2",
    "mlp_norm": "mlp_residual",
    "gdn_rule": "gdn_norm",
}
"""The part of a layer at whose end a module's group ends, if it is not the module's own."""


def _span(module: str, parts: list[str]) -> Sequence[str]:
    """Return the parts of a layer between the marks of a module's group."""
    if module == CHECKPOINT_INPUTS:
        return parts
    first, last = parts.index(module), parts.index(_LAST_PARTS.get(module, module))
    return parts[first : last + 1]
