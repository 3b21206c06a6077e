# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Forward and backward of a model chunk, part by part: what each adds to memory, and its peak.

[Note: Memory of a pass]
A tensor takes memory from the first part that saves it (or runs it again) until that part's
backward. Beside these, a part's forward holds its input and output. Its backward holds the
gradients of its input and output and of the residual stream, which is also the gradient of the
projections that are added to it. A checkpoint holds its second output until its backward ends,
since it starts that backward from it. Not counted: gradients of weights before they are
accumulated, workspaces of kernels, communication buffers, uneven routing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from functools import lru_cache
from typing import NamedTuple

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.layers import (
    TILED_PARTS,
    Cost,
    Part,
    Phase,
    SavedTensor,
    head_costs,
    input_name,
    parts_of_kind,
    setting_with_tiles,
)
from megatron.slipstream.estimate.model_shapes import Chunk, LayerKind, ModelShape
from megatron.slipstream.options.model import CHECKPOINTED_MODULES
from megatron.slipstream.plan.settings import NOTHING, WHOLE, LayerSetting
from megatron.slipstream.plan.tiles import Tiling, logits_bytes_per_token, mlp_bytes_per_token
from megatron.slipstream.plan.trace import OUTPUT_LAYER

HEAD = -1
"""The layer of a stretch after the last layer."""


class Stretch(NamedTuple):
    """One part's forward, its rerun in backward, or its backward."""

    part: str
    phase: Phase
    cost: Cost
    live_bytes: int
    """What it adds to the memory in use; negative if it frees."""
    peak_bytes: int
    """The most that it uses above what was in use before it."""
    layer: int = HEAD

    def ms(self, speed: Speed) -> float:
        return self.cost.ms(speed, self.phase)


def forward_pass(shape: ModelShape, chunk: Chunk) -> Iterator[Stretch]:
    """Yield the forward of one micro-batch through a model chunk."""
    for layer in chunk.layers:
        yield from _at(layer, _layer(shape, layer).forward(layer in shape.checkpoint_starts))
    if chunk.is_last:
        yield from _head_passes(shape)[0]


def backward_pass(shape: ModelShape, chunk: Chunk) -> Iterator[Stretch]:
    """Yield its backward, recomputation included."""
    if chunk.is_last:
        yield from _head_passes(shape)[1]
    first = chunk.layers[-1] + 1 if chunk.layers else 0
    for layer in reversed(chunk.layers):
        if layer < first and shape.setting_of(layer) == WHOLE:
            first = max(start for start in shape.checkpoint_starts if start <= layer)
            for each in range(first, layer + 1):
                rerun = _layer(shape, each).whole_rerun(each == first, each == layer)
                yield from _at(each, rerun)
        yield from _at(layer, _layer(shape, layer).backward(layer == first))


def _at(layer: int, stretches: Iterable[Stretch]) -> Iterator[Stretch]:
    return (stretch._replace(layer=layer) for stretch in stretches)


def _layer(shape: ModelShape, layer: int) -> _Layer:
    return _layer_of_kind(shape.plain, *shape.kind_and_setting(layer))


class _Section(NamedTuple):
    before: str
    parts: tuple[str, ...]
    missing: frozenset[str]
    output_bytes: int = 0
    """The second output of a checkpoint."""


class _Layer:
    """The passes through one layer. See [Note: Memory of a pass]."""

    def __init__(self, shape: ModelShape, kind: LayerKind, setting: LayerSetting) -> None:
        self._shape, self._kind, self._input = shape, kind, input_name(kind)
        self._setting = setting_with_tiles(shape, kind, setting)
        self._parts = {part.name: part for part in parts_of_kind(shape, kind, setting)}
        self._hidden = shape.hidden_bytes
        self._tiled = TILED_PARTS if shape.mlp_sequence_tiles else frozenset()
        plain = parts_of_kind(shape, kind, NOTHING)
        self._full = {part.name: part.saved for part in plain}
        self._kept = _bytes_of(self._parts.values())
        self._bytes = _bytes_of(plain) | self._kept
        # The part that is the first to save each tensor.
        self._owner: dict[str, str] = {}
        for part in self._parts.values():
            for tensor in (*part.saved, *self._full[part.name]):
                self._owner.setdefault(tensor.name, part.name)
        self._sections = list(self._find_sections())

    def forward(self, saves_input: bool) -> Iterator[Stretch]:
        """Yield its forward; ``saves_input`` if a checkpoint of whole layers starts here."""
        live: set[str] = set()
        for place, part in enumerate(self._parts.values()):
            added = self._enter(live, part.saved)
            if place == 0 and saves_input and self._setting == WHOLE:
                added = self._hidden
                live.add(self._input)
            yield Stretch(part.name, "forward", part.cost, added, added + self._beside(part, live))

    def backward(self, ends_checkpoint: bool) -> Iterator[Stretch]:
        """Yield its backward; ``ends_checkpoint`` if it is the first layer of a checkpoint."""
        live = {*(self._bytes if self._setting == WHOLE else self._kept)}
        ends = {section.parts[0]: section.output_bytes for section in self._sections}
        if self._setting == WHOLE and ends_checkpoint:
            # Its output, and its input if no part saves that.
            ends = {next(iter(self._parts)): self._hidden * (1 + (self._input not in self._bytes))}
        for name, part in reversed(self._parts.items()):
            for section in self._sections:
                if section.before == name:
                    yield from self._rerun(section, live)
            freed = sum(self._bytes[each] for each in live if self._owner[each] == name)
            freed += ends.get(name, 0)
            gradients = _nbytes(part.taken) + _nbytes(part.given) + part.inside
            peak = self._hidden + self._tile_bytes(name, gradients)
            yield Stretch(name, "backward", part.cost, -freed, peak)

    def whole_rerun(self, has_input: bool, is_last: bool) -> Iterator[Stretch]:
        """Yield the rerun of the layer, whose input forward may have saved."""
        output = self._hidden if is_last else 0
        section = _Section("", tuple(self._parts), frozenset(self._bytes), output)
        yield from self._rerun(section, {self._input} if has_input else set())

    def _rerun(self, section: _Section, live: set[str]) -> Iterator[Stretch]:
        for name in section.parts:
            part = self._parts[name]
            again = [tensor for tensor in self._full[name] if tensor.name in section.missing]
            added = self._enter(live, again)
            if name == section.parts[-1]:  # Some are saved by parts after those that run again.
                left = section.missing - live
                added += sum(self._bytes[each] for each in left) + section.output_bytes
                live |= left
            peak = added + self._beside(part, live) + self._hidden
            yield Stretch(name, "rerun", part.cost, added, peak)

    def _enter(self, live: set[str], tensors: Iterable[SavedTensor]) -> int:
        fresh = {tensor.name: tensor.nbytes for tensor in tensors if tensor.name not in live}
        live.update(fresh)
        return sum(fresh.values())

    def _beside(self, part: Part, live: set[str]) -> int:
        """Return the bytes that a part's forward takes beside saved tensors."""
        read = (*part.taken, *part.given)
        sizes = {part.stream: self._hidden, **{tensor.name: tensor.nbytes for tensor in read}}
        added = 0 if part.given else self._hidden
        added += sum(size for name, size in sizes.items() if name not in live)
        return self._tile_bytes(part.name, added)

    def _tile_bytes(self, part: str, whole_bytes: int) -> int:
        """Return what a part takes beside saved tensors, given what it takes without tiles.

        With tiles: one of an MLP or of experts, and all rows that go in and come out.
        """
        if part not in self._tiled:
            return whole_bytes
        shape, size = self._shape, self._shape.element_bytes
        rows, width = shape.feed_forward_sizes(self._kind)
        each = mlp_bytes_per_token(
            shape.hidden_size, width, size, shape.gated_linear_unit, shape.bias_activation_fusion
        )
        return _tile_bytes(rows, each) + 2 * rows * shape.hidden_size * size

    def _find_sections(self) -> Iterator[_Section]:
        """Yield the parts that run again for each module of the setting, the outermost first."""
        done: set[str] = set()
        for module in (name for name in _RERUN_BEFORE if name in self._setting):
            alone = parts_of_kind(self._shape, self._kind, frozenset({module}))
            with_tiles = self._tiled if module == "moe_act" else frozenset()
            again = (p.name for p in alone if module in p.rerun_by or p.name in with_tiles)
            parts = [name for name in again if name not in done]
            done.update(parts)
            missing = frozenset(self._bytes) - _bytes_of(alone).keys() - self._kept.keys()
            if module == "layernorm":  # The two norms run again at different times.
                names = list(self._parts)
                for norm in parts:
                    end = "mlp_residual" if norm == "mlp_norm" else "attn_residual"
                    given = {tensor.name for tensor in self._parts[norm].given}
                    yield _Section(names[names.index(end) - 1], (norm,), missing & given)
            elif parts:
                output, last = 0, parts[-1]
                if module in CHECKPOINTED_MODULES and last not in self._tiled:
                    output = _nbytes(self._parts[last].given) or self._hidden
                yield _Section(_RERUN_BEFORE[module] or last, tuple(parts), missing, output)


_layer_of_kind = lru_cache(maxsize=256)(_Layer)

_RERUN_BEFORE = {
    **dict.fromkeys(("moe", "mlp", "layernorm", "shared_experts"), ""),
    **{"moe_act": "expert_fc2", "mla_up_proj": "core_attn", "core_attn": ""},
}
"""The part before whose backward a module runs again; empty for the module's last. What one runs
again does not run again for a later one."""


def _bytes_of(parts: Iterable[Part]) -> dict[str, int]:
    return {tensor.name: tensor.nbytes for part in parts for tensor in part.saved}


def _nbytes(tensors: Iterable[SavedTensor]) -> int:
    return sum(tensor.nbytes for tensor in tensors)


def _tile_bytes(num_tokens: int, bytes_per_token: int) -> int:
    tiling = Tiling.of("auto", bytes_per_token)
    assert tiling is not None
    return min(num_tokens, tiling.max_tokens or num_tokens) * bytes_per_token


def _head_passes(shape: ModelShape) -> tuple[list[Stretch], list[Stretch]]:
    """Return forward and backward of the final norm, the output layer and the loss.

    With Transformer Engine's cross entropy, the loss saves a copy of the logits; megatron-core's
    own functions save probabilities in float32.
    """
    costs, size = head_costs(shape), shape.element_bytes
    hidden = shape.hidden_bytes
    num_losses = 1 + shape.num_further_tokens
    # The norm's input, and the output layer's inputs for all tokens.
    normed = (1 + num_losses) * hidden
    numel = shape.tokens * shape.vocab_size // shape.parallelism.tp
    is_te = shape.cross_entropy == "te"
    each = logits_bytes_per_token(1, size, shape.cross_entropy)
    logits, saved = numel * size, numel * (size if is_te else 4)
    loss_peak = numel * each - logits
    # Float32 logits are overwritten.
    gradient_peak = 0 if is_te or size == 4 else logits
    tile = 0
    if shape.loss_sequence_tiles:
        logits = saved = loss_peak = gradient_peak = 0
        # Beside a tile: the gradient of the output layer's input.
        width = shape.vocab_size // shape.parallelism.tp
        tile = _tile_bytes(shape.tokens, each * width) + hidden

    def stretches(phase: Phase, *found: tuple[str, int, int]) -> list[Stretch]:
        return [Stretch(part, phase, costs[part], *nbytes) for part, *nbytes in found]

    forward = ((OUTPUT_LAYER, logits, logits + tile), ("loss", saved - logits, loss_peak))
    backward = ("loss", logits - saved, gradient_peak), (OUTPUT_LAYER, -logits, hidden + tile)
    return (
        stretches("forward", ("final_norm", normed, normed), *num_losses * forward),
        stretches("backward", *num_losses * backward, ("final_norm", -normed, normed)),
    )
