# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ways to train a model in less memory, and what a layer takes with each.

A way says what backward recomputes, what moves to the host, and whether feed-forward and logits are
computed tile by tile. A layer's memory follows from its saved tensors: those that stay, those that
move, and the most that is live while its backward runs.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.layer_costs import Cost, head_costs, layer_costs
from megatron.slipstream.estimate.layer_passes import Stretch, backward_pass, forward_pass
from megatron.slipstream.estimate.model_shapes import Chunk, ModelShape
from megatron.slipstream.estimate.saved_tensors import (
    CHECKPOINT_INPUTS,
    MEGATRON_MODULES,
    Saved,
    marked_modules,
    saved_tensors,
)
from megatron.slipstream.estimate.training_setup import usable_modules
from megatron.slipstream.plan.settings import NOTHING, WHOLE, LayerSetting, describe_setting
from megatron.slipstream.plan.tiles import Tiling, logits_bytes_per_token, mlp_bytes_per_token

_TILED_PARTS = frozenset({"mlp_fc1", "mlp_act", "mlp_fc2", "expert_fc1", "moe_act", "expert_fc2"})
"""The parts of a layer that ``mlp_sequence_tiles`` computes tile by tile."""

_PROJECTED = "expert_projected"
"""What experts save for the activation function to run again, and do not with tiles."""


@dataclass(frozen=True)
class Way:
    """What every layer of a kind recomputes, moves and tiles."""

    setting: LayerSetting = NOTHING
    modules: frozenset[str] = frozenset()
    """The modules that move, with :data:`CHECKPOINT_INPUTS` the inputs of recomputed layers."""
    is_tiled: bool = False
    """Whether MLPs and experts are computed by tiles (``mlp_sequence_tiles='auto'``)."""

    @property
    def label(self) -> str:
        """What it does in short, such as ``"mlp, offload all, tiles"``.

        All modules are those of megatron-core and Slipstream's own.
        """
        has_own = self.modules - {CHECKPOINT_INPUTS, *MEGATRON_MODULES}
        offload = [f"offload{' all' if has_own else ''}"] * bool(self.modules)
        return ", ".join([describe_setting(self.setting), *offload, *["tiles"] * self.is_tiled])

    def describe(self) -> str:
        """Return what it does, as text."""
        texts = []
        if self.setting == WHOLE:
            texts.append("whole layers recomputed")
        elif self.setting:
            texts.append(f"{' and '.join(sorted(self.setting))} recomputed")
        if modules := self.modules - {CHECKPOINT_INPUTS}:
            texts.append(f"{', '.join(sorted(modules))} offloaded")
        if CHECKPOINT_INPUTS in self.modules:
            texts.append("layers' inputs offloaded")
        if self.is_tiled:
            texts.append("MLPs in tiles")
        return "; ".join(texts) or "everything kept on the device"


@dataclass(frozen=True)
class Mix:
    """The ways of a rank's layers: some from the beginning of each chunk, and the others."""

    first: Way
    rest: Way
    num_first: int = 0
    """Layers of each chunk with ``first``."""
    tiles_logits: bool = False

    def ways(self, num_layers: int) -> list[Way]:
        """Return the way of each layer of a chunk."""
        num_first = min(self.num_first, num_layers)
        return [self.first] * num_first + [self.rest] * (num_layers - num_first)

    def describe(self, num_layers: int) -> str:
        """Return what it does, as text, for chunks of this many layers."""
        counts = self._counts(num_layers)
        texts = [
            way.describe()
            if len(counts) == 1
            else f"{count} layer{'s' if count > 1 else ''}: {way.describe()}"
            for way, count in counts.items()
        ]
        return "; ".join(texts + ["logits in tiles"] * self.tiles_logits)

    def label(self, num_layers: int) -> str:
        """Return the same in short, such as ``"20 x (mlp, offload), 12 x (keep)"``."""
        texts = [f"{count} x ({way.label})" for way, count in self._counts(num_layers).items()]
        return ", ".join(texts + ["logits in tiles"] * self.tiles_logits)

    @property
    def tile_flags(self) -> tuple[str, ...]:
        """Flags of a training that compute the same in tiles."""
        is_tiled = self.first.is_tiled or self.rest.is_tiled
        flags = {"--mlp-sequence-tiles": is_tiled, "--loss-sequence-tiles": self.tiles_logits}
        return tuple(f"{flag} auto" for flag, is_set in flags.items() if is_set)

    def _counts(self, num_layers: int) -> dict[Way, int]:
        ways = self.ways(num_layers)
        return {way: ways.count(way) for way in dict.fromkeys(ways)}


OFF, SELECTIVE, FULL, BUILT_IN, BUDGET = WAYS = (
    *("off", "selective", "full", "built-in", "budget"),
)
"""The ways that are compared: nothing recomputed or offloaded; selective recomputation; full
recomputation of each layer; megatron-core's offload engine with all its modules and selective
recomputation; and what :mod:`plan` chooses from all of them for a budget of memory."""


def mixes_of(name: str, shape: ModelShape, modules: Sequence[str]) -> list[Mix]:
    """Return the mixes that a way may use, each with one way for all layers.

    Args:
        name: One of :data:`WAYS`.
        shape: The model.
        modules: The modules that may move.
    """
    selective, marked = selective_setting(shape), frozenset(modules)
    all_modules = marked
    if set(modules) == set(usable_modules(shape)):
        # By default megatron-core's engine moves the modules that it marks, a budget ours, too.
        marked = frozenset(usable_modules(shape.with_setting(NOTHING)))
        layers = range(shape.num_layers)
        all_modules = marked.union(*(marked_modules(shape, layer, NOTHING) for layer in layers))
    inputs = frozenset({CHECKPOINT_INPUTS})
    one_way = {
        OFF: Way(),
        SELECTIVE: Way(selective),
        FULL: Way(WHOLE),
        BUILT_IN: Way(selective, marked),
    }
    if name in one_way:
        return [Mix(one_way[name], one_way[name])]
    ways = [Way(), *(Way(NOTHING, moved) for moved in dict.fromkeys((marked, all_modules)))]
    for is_tiled in (False, True):
        ways += [
            Way(setting, moving, is_tiled)
            for setting, moved in ((selective, all_modules), (WHOLE, inputs))
            for moving in (frozenset[str](), moved)
        ]
    return [Mix(way, way, tiles_logits=tiled) for way in ways for tiled in (False, True)]


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
    kinds = {shape.is_moe(layer) for layer in range(shape.num_layers)}
    names = {"moe_act" if is_moe else "mlp" for is_moe in kinds}
    names |= {"mla_up_proj"} if shape.latent_attention else set()
    return LayerSetting(names | {"layernorm"})


class LayerUse(NamedTuple):
    """What one layer takes for one micro-batch on one rank."""

    held_bytes: int
    """On the device from its forward until its backward."""
    moved_bytes: int
    """On the host instead."""
    backward_bytes: int
    """The most on the device during its backward: what it saved, what it recomputes, gradients."""
    forward_ms: float
    backward_ms: float


def layer_use(
    shape: ModelShape, layer: int, way: Way, speed: Speed, min_numel: int = 0
) -> LayerUse:
    """Return what a layer takes.

    Args:
        shape: The model; what it recomputes itself does not count.
        layer: Index of the layer, from 0.
        way: What is recomputed, moved and tiled.
        speed: Speed of the GPU.
        min_numel: Tensors with fewer elements do not move.
    """
    setting = _tiled_setting(shape, layer, way.setting) if way.is_tiled else way.setting
    kept_setting = WHOLE if way.setting == WHOLE else setting
    saved = saved_tensors(shape, layer, kept_setting)
    kept = _bytes_by_name(saved)
    if way.is_tiled:
        kept.pop(_PROJECTED, None)
    marked = set(marked_modules(shape, layer, kept_setting)) & way.modules
    marked -= _TILED_PARTS if way.is_tiled else set()
    moved = sum(_movable(saved, marked, min_numel).values())
    # A layer is recomputed before its backward, so the next one's input returns during this one's.
    returned = moved if way.setting == WHOLE else 0
    costs = layer_costs(shape, layer, way.setting)
    return LayerUse(
        sum(kept.values()) - moved,
        moved,
        _backward_bytes(shape, layer, way, setting) + returned,
        sum(cost.ms(speed, "forward") for cost in costs.values()),
        _backward_ms(costs, way, speed),
    )


class HeadUse(NamedTuple):
    """What the final norm, the output layer and the loss take."""

    peak_bytes: int
    forward_ms: float
    backward_ms: float


def head_use(shape: ModelShape, is_tiled: bool, speed: Speed) -> HeadUse:
    """Return what the parts after the last layer take for one micro-batch.

    Args:
        shape: The model.
        is_tiled: Whether they are computed by tiles (``loss_sequence_tiles='auto'``), and again in
            backward.
        speed: Speed of the GPU.
    """
    costs = head_costs(shape).values()
    forward_ms = sum(cost.ms(speed, "forward") for cost in costs)
    backward_ms = sum(cost.backward_ms(speed) for cost in costs)
    if not is_tiled:
        chunk = Chunk(0, 0, (), False, True)
        stretches = [*forward_pass(shape, chunk), *backward_pass(shape, chunk)]
        return HeadUse(_peak_bytes(stretches), forward_ms, backward_ms)
    vocabulary = shape.vocab_size // shape.parallelism.tp
    each = logits_bytes_per_token(vocabulary, shape.element_bytes, shape.cross_entropy)
    # The input of the norm and of the output layer, and their gradients.
    tile = _tile_bytes(shape.tokens, each) + 4 * _hidden_bytes(shape)
    return HeadUse(tile, forward_ms, backward_ms + forward_ms)


def _hidden_bytes(shape: ModelShape) -> int:
    return shape.region_tokens * shape.hidden_size * shape.element_bytes


def _tile_bytes(num_tokens: int, bytes_per_token: int) -> int:
    tiling = Tiling.of("auto", bytes_per_token)
    assert tiling is not None
    return min(num_tokens, tiling.max_tokens or num_tokens) * bytes_per_token


def _tiled_setting(shape: ModelShape, layer: int, setting: LayerSetting) -> LayerSetting:
    """Return the setting that saves what a layer with tiles saves, of experts a little more."""
    others = NOTHING if setting == WHOLE else setting
    return others | {"moe_act" if shape.is_moe(layer) else "mlp"}


def _bytes_by_name(saved: Saved) -> dict[str, int]:
    return {tensor.name: tensor.nbytes for tensors in saved.values() for tensor in tensors}


def _movable(saved: Saved, marked: set[str], min_numel: int) -> dict[str, int]:
    """Return the storages that only marked parts save, unless small or held by others."""
    stays = {
        tensor.name
        for part, tensors in saved.items()
        for tensor in tensors
        if part not in marked or tensor.kept_by or tensor.numel < min_numel
    }
    return {name: size for name, size in _bytes_by_name(saved).items() if name not in stays}


def _backward_ms(costs: Mapping[str, Cost], way: Way, speed: Speed) -> float:
    """Return the time of backward; what is tiled runs again in it, after its whole layer did."""
    total = 0.0
    for part, cost in costs.items():
        total += cost.backward_ms(speed)
        if part in _TILED_PARTS and way.is_tiled and (way.setting == WHOLE or not cost.rerun_share):
            total += cost.ms(speed, "forward")
    return total


def _backward_bytes(shape: ModelShape, layer: int, way: Way, setting: LayerSetting) -> int:
    """Return the most that is live during a layer's backward, with what it saved.

    Args:
        shape: The model.
        layer: Index of the layer.
        way: What is recomputed and tiled.
        setting: What a layer with tiles recomputes beside them; else the way's setting.
    """
    alone = replace(shape.with_setting(setting), layers_per_checkpoint=1)
    chunk = Chunk(0, 0, (layer,), False, False)
    forward = list(forward_pass(alone, chunk))
    saved = sum(stretch.live_bytes for stretch in forward)
    backward = list(backward_pass(alone, chunk))
    if not way.is_tiled:
        return saved + _peak_bytes(backward)
    left_out = _bytes_by_name(saved_tensors(shape, layer, setting)).get(_PROJECTED, 0)
    peak = saved - left_out + _peak_bytes(_with_tiles(alone, layer, backward, left_out))
    # The whole layer's rerun leaves its output beside what a layer with tiles saves.
    return peak + (_hidden_bytes(shape) if way.setting == WHOLE else 0)


def _with_tiles(
    shape: ModelShape, layer: int, stretches: list[Stretch], left_out: int
) -> Iterator[Stretch]:
    """Yield a backward whose tiled parts are one stretch, at the place of the last of them."""
    size = shape.element_bytes
    if shape.is_moe(layer):
        assert shape.experts is not None
        rows, width = shape.expert_tokens, shape.experts.ffn_hidden_size // shape.parallelism.etp
    else:
        rows, width = shape.tokens, shape.ffn_hidden_size // shape.parallelism.tp
    each = mlp_bytes_per_token(
        shape.hidden_size, width, size, shape.gated_linear_unit, shape.bias_activation_fusion
    )
    # Beside a tile: the gradients of all its rows' inputs and outputs, and of the residual stream.
    beside = 2 * rows * shape.hidden_size * size + _hidden_bytes(shape)
    places = [place for place, item in enumerate(stretches) if item.part in _TILED_PARTS]
    freed = sum(stretches[place].live_bytes for place in places) + left_out
    for place, stretch in enumerate(stretches):
        if place == places[-1]:
            peak = _tile_bytes(rows, each) + beside
            yield stretch._replace(live_bytes=freed, peak_bytes=peak)
        elif place not in places:
            yield stretch


def _peak_bytes(stretches: Iterable[Stretch]) -> int:
    """Return the most that stretches use above what was in use before the first."""
    now = most = 0
    for stretch in stretches:
        most = max(most, now + stretch.peak_bytes)
        now += stretch.live_bytes
    return most
