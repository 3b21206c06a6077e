# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ways to train a model in less memory, and what a layer takes with each.

A way says what backward recomputes, what moves to the host, and whether feed-forward and logits are
computed tile by tile. A layer's memory follows from its saved tensors: those that stay, those that
move, and the most that is live while its backward runs.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.layer_costs import Cost, layer_costs
from megatron.slipstream.estimate.model_shapes import ModelShape
from megatron.slipstream.estimate.saved_tensors import (
    CHECKPOINT_INPUTS,
    Saved,
    marked_modules,
    saved_tensors,
)
from megatron.slipstream.plan.settings import NOTHING, WHOLE, LayerSetting

TILE_TOKENS = 4096
"""Tokens of a tile: matrix products of that many rows fill a GPU."""

FEED_FORWARD_FROM = "mlp_norm"
"""The part of a layer at which its feed-forward half begins."""


@dataclass(frozen=True)
class Way:
    """What every layer of a kind recomputes, moves and tiles."""

    setting: LayerSetting = NOTHING
    modules: frozenset[str] = frozenset()
    """The modules that move, with :data:`CHECKPOINT_INPUTS` the inputs of recomputed layers."""
    is_tiled: bool = False
    """Whether the feed-forward half is computed in recomputed tiles of :data:`TILE_TOKENS`."""

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
            texts.append("feed-forward in tiles")
        return "; ".join(texts) or "everything kept on the device"


def selective_setting(shape: ModelShape) -> LayerSetting:
    """Return the modules that selective recomputation should name for a model.

    These are the ones the user names, if any; core attention if its scores are saved; else the
    parts that are cheap for what they save: the MLP of dense layers, the activation function of
    experts, latent attention's up-projections, and the norms.
    """
    if shape.recompute_modules:
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
    saved = saved_tensors(shape, layer, way.setting)
    kept = _bytes_by_name(saved)
    marked = set(marked_modules(shape, layer, way.setting)) & way.modules
    moved = sum(_movable(saved, marked, min_numel).values())
    costs = layer_costs(shape, layer, way.setting)
    # A layer is recomputed before its backward, so the next one's input returns during this one's.
    returned = moved if way.setting == WHOLE else 0
    return LayerUse(
        sum(kept.values()) - moved,
        moved,
        _backward_bytes(shape, layer, way, kept) + returned,
        sum(cost.ms(speed, "forward") for cost in costs.values()),
        _backward_ms(costs, way, speed),
    )


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
    """Return the time of backward; a tiled feed-forward runs again in it, after its layer did."""
    total = 0.0
    is_feed_forward = False
    for part, cost in costs.items():
        is_feed_forward = is_feed_forward or part == FEED_FORWARD_FROM
        total += cost.backward_ms(speed)
        if is_feed_forward and way.is_tiled and (way.setting == WHOLE or not cost.rerun_share):
            total += cost.ms(speed, "forward")
    return total


def _backward_bytes(shape: ModelShape, layer: int, way: Way, kept: Mapping[str, int]) -> int:
    """Return the most that is live during a layer's backward.

    A part's backward needs what the parts up to it saved, what was recomputed of its half of the
    layer (of both if the whole layer is), and the gradients of its input and output, of the half's
    output and of the residual stream.
    """
    saved = saved_tensors(shape, layer, NOTHING)
    parts = list(layer_costs(shape, layer, NOTHING))
    middle = parts.index(FEED_FORWARD_FROM)
    hidden = shape.region_tokens * shape.hidden_size * shape.element_bytes
    tiles = -(-shape.tokens // TILE_TOKENS) if way.is_tiled else 1
    most = 0
    for place, part in enumerate(parts):
        half = 0 if way.setting == WHOLE or place < middle else middle
        live = dict[str, int]()
        for earlier, name in enumerate(parts[: place + 1]):
            for tensor in saved.get(name, ()):
                if tensor.name in kept:
                    live[tensor.name] = tensor.nbytes
                elif earlier >= half:
                    live[tensor.name] = tensor.nbytes // (tiles if earlier > middle else 1)
        following = parts[place + 1] if place + 1 < len(parts) else ""
        near = {name: saved[name] for name in (part, following) if name in saved}
        gradients = sum(_bytes_by_name(near).values()) // (tiles if place > middle else 1)
        most = max(most, sum(live.values()) + gradients)
    return most + 2 * hidden
