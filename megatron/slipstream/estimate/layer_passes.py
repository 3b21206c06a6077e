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

from collections.abc import Iterable, Iterator, Mapping
from functools import cached_property, lru_cache
from typing import NamedTuple

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.layer_costs import (
    TILED_PARTS,
    Cost,
    Phase,
    head_costs,
    layer_costs,
)
from megatron.slipstream.estimate.model_parts import LayerKind
from megatron.slipstream.estimate.model_shapes import Chunk, ModelShape
from megatron.slipstream.estimate.saved_tensors import (
    input_name,
    saved_tensors,
    setting_with_tiles,
)
from megatron.slipstream.estimate.state_space import MAMBA_CHUNK, MambaSizes
from megatron.slipstream.estimate.tensors import SavedTensor
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
    """Index of its layer in the model."""

    def ms(self, speed: Speed) -> float:
        """Return its compute time."""
        return self.cost.ms(speed, self.phase)


def forward_pass(shape: ModelShape, chunk: Chunk) -> Iterator[Stretch]:
    """Yield the forward of one micro-batch through a model chunk."""
    for layer in chunk.layers:
        saves_input = layer in shape.checkpoint_starts
        yield from _at(layer, _layer(shape, layer).forward(saves_input))
    if chunk.is_last:
        yield from _Head(shape).forward()


def backward_pass(shape: ModelShape, chunk: Chunk) -> Iterator[Stretch]:
    """Yield its backward, recomputation included."""
    if chunk.is_last:
        yield from _Head(shape).backward()
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
    """Return the passes through a layer, which are those of all layers of its kind."""
    plain = shape.with_setting(NOTHING)
    return _layer_of_kind(plain, shape.kind_of(layer), shape.setting_of(layer))


@lru_cache(maxsize=256)
def _layer_of_kind(shape: ModelShape, kind: LayerKind, setting: LayerSetting) -> _Layer:
    return _Layer(shape, shape.kinds[kind], setting)


class Flow(NamedTuple):
    """What goes through a part, in bytes by name."""

    stream: str
    """The tensor to which its half of the layer is added."""
    taken: Mapping[str, int]
    given: Mapping[str, int]
    """Empty if it is added to the residual stream."""
    inside: int = 0
    """The largest gradients between its operations."""


class _Section(NamedTuple):
    """Parts that backward runs again together."""

    before: str
    """The part before whose backward they run."""
    parts: tuple[str, ...]
    missing: frozenset[str]
    """What they save again."""
    output_bytes: int = 0
    """The second output of a checkpoint."""


class _Layer:
    """The passes through one layer. See [Note: Memory of a pass]."""

    def __init__(self, shape: ModelShape, layer: int, setting: LayerSetting) -> None:
        self._shape = shape
        self._layer = layer
        self._input = input_name(shape.kind_of(layer))
        self._setting = setting_with_tiles(shape, layer, setting)
        self._costs = layer_costs(shape, layer, setting)
        self._parts = tuple(self._costs)
        self._full = saved_tensors(shape, layer, NOTHING)
        self._kept = saved_tensors(shape, layer, setting) if setting != WHOLE else {}
        self._hidden = shape.region_tokens * shape.hidden_size * shape.element_bytes
        self._flows = _flows(shape, self._full, self._parts)

    def forward(self, saves_input: bool) -> Iterator[Stretch]:
        """Yield its forward.

        Args:
            saves_input: Whether a checkpoint starts here, if the whole layer is recomputed.
        """
        live: set[str] = set()
        for place, part in enumerate(self._parts):
            added = self._enter(live, self._kept.get(part, ()))
            if place == 0 and saves_input and self._setting == WHOLE:
                added = self._hidden
                live.add(self._input)
            peak = added + self._beside(part, live)
            yield Stretch(part, "forward", self._costs[part], added, peak)

    def backward(self, ends_checkpoint: bool) -> Iterator[Stretch]:
        """Yield its backward, with the parts that run again, except for a whole layer.

        Args:
            ends_checkpoint: Whether no earlier layer is in its checkpoint, if the whole layer is
                recomputed.
        """
        saved = self._full if self._setting == WHOLE else self._kept
        live = {tensor.name for tensors in saved.values() for tensor in tensors}
        ends = {section.parts[0]: section.output_bytes for section in self._sections}
        if self._setting == WHOLE and ends_checkpoint:
            # Its output, and its input if no part saves that.
            ends = {self._parts[0]: self._hidden * (1 + (self._input not in self._bytes))}
        for part in reversed(self._parts):
            for section in self._sections:
                if section.before == part:
                    yield from self._rerun(section, live)
            freed = sum(self._bytes[name] for name in self._owned.get(part, ()) if name in live)
            freed += ends.get(part, 0)
            flow = self._flows[part]
            gradients = sum(flow.taken.values()) + sum(flow.given.values()) + flow.inside
            peak = self._hidden + self._tile_bytes(part, gradients)
            yield Stretch(part, "backward", self._costs[part], -freed, peak)

    def whole_rerun(self, has_input: bool, is_last: bool) -> Iterator[Stretch]:
        """Yield the rerun of the whole layer.

        Args:
            has_input: Whether forward saved its input.
            is_last: Whether it is the last layer of its checkpoint.
        """
        output = self._hidden if is_last else 0
        missing = frozenset(self._bytes)
        section = _Section(self._parts[-1], self._parts, missing, output)
        yield from self._rerun(section, {self._input} if has_input else set())

    def _rerun(self, section: _Section, live: set[str]) -> Iterator[Stretch]:
        for part in section.parts:
            is_last = part == section.parts[-1]
            of_part = self._full.get(part, ())
            tensors = [tensor for tensor in of_part if tensor.name in section.missing]
            added = self._enter(live, tensors)
            if is_last:  # Some are saved by parts after those that run again.
                left = section.missing - live
                added += sum(self._bytes[name] for name in left) + section.output_bytes
                live |= left
            peak = added + self._beside(part, live) + self._hidden
            yield Stretch(part, "rerun", self._costs[part], added, peak)

    def _enter(self, live: set[str], tensors: Iterable[SavedTensor]) -> int:
        """Add tensors to those that are live, and return the bytes of the new ones."""
        fresh = {tensor.name: tensor.nbytes for tensor in tensors if tensor.name not in live}
        live.update(fresh)
        return sum(fresh.values())

    def _beside(self, part: str, live: set[str]) -> int:
        """Return the bytes that a part's forward takes beside saved tensors."""
        flow = self._flows[part]
        names = {flow.stream: self._hidden, **flow.taken, **flow.given}
        added = 0 if flow.given else self._hidden
        added += sum(size for name, size in names.items() if name not in live)
        return self._tile_bytes(part, added)

    def _tile_bytes(self, part: str, whole_bytes: int) -> int:
        """Return what a part takes beside saved tensors, given what it takes without tiles."""
        return self._largest_tile_bytes if part in self._tiled else whole_bytes

    @cached_property
    def _tiled(self) -> frozenset[str]:
        return TILED_PARTS if self._shape.mlp_sequence_tiles else frozenset()

    @cached_property
    def _largest_tile_bytes(self) -> int:
        """A tile of an MLP or of experts, and all rows that go in and come out."""
        shape, par = self._shape, self._shape.parallelism
        rows, width = shape.tokens, shape.ffn_hidden_size // par.tp
        if shape.experts is not None and "E" in shape.kind_of(self._layer):
            rows, width = shape.expert_tokens, shape.experts.ffn_hidden_size // par.etp
        size, gated = shape.element_bytes, shape.gated_linear_unit
        each = mlp_bytes_per_token(
            shape.hidden_size, width, size, gated, shape.bias_activation_fusion
        )
        return _tile_bytes(rows, each) + 2 * rows * shape.hidden_size * size

    @cached_property
    def _bytes(self) -> dict[str, int]:
        found: dict[str, int] = {}
        for saved in (self._full, self._kept):
            for tensors in saved.values():
                found |= {tensor.name: tensor.nbytes for tensor in tensors}
        return found

    @cached_property
    def _owned(self) -> dict[str, list[str]]:
        """The tensors that each part is the first to save."""
        owner: dict[str, str] = {}
        for part in self._parts:
            for tensor in (*self._kept.get(part, ()), *self._full.get(part, ())):
                owner.setdefault(tensor.name, part)
        found: dict[str, list[str]] = {}
        for name, part in owner.items():
            found.setdefault(part, []).append(name)
        return found

    @cached_property
    def _sections(self) -> list[_Section]:
        """The parts that run again for each module of the setting, the outermost first."""
        if self._setting == WHOLE:
            return []
        found: list[_Section] = []
        kept = {tensor.name for tensors in self._kept.values() for tensor in tensors}
        done: set[str] = set()
        for module in _OUTERMOST_FIRST:
            if module not in self._setting:
                continue
            alone = saved_tensors(self._shape, self._layer, frozenset({module}))
            left = {tensor.name for tensors in alone.values() for tensor in tensors}
            costs = layer_costs(self._shape, self._layer, frozenset({module}))
            parts = [
                part
                for part in costs
                if costs[part].rerun_share
                and part not in done
                and (part not in self._tiled or module in _WITH_TILES)
            ]
            done.update(parts)
            missing = frozenset(self._bytes) - left - kept
            # The two norms are one module, but run again at different times.
            for each in [[part] for part in parts] if module == "layernorm" else [parts]:
                if each:
                    found.append(self._section(module, tuple(each), missing))
        return found

    def _section(self, module: str, parts: tuple[str, ...], missing: frozenset[str]) -> _Section:
        before, output = _BEFORE.get(module, parts[-1]), 0
        if module in _CHECKPOINTS and not self._tiled.issuperset(parts[-1:]):
            output = sum(self._flows[parts[-1]].given.values()) or self._hidden
        if module == "layernorm":
            name = {"attn_norm": "normed_input", "mlp_norm": "normed_attended"}[parts[0]]
            is_first = parts[0] == "attn_norm"
            before = (
                self._parts[self._parts.index("attn_residual") - 1]
                if is_first
                else (self._parts[-2])
            )
            missing &= {name}
        return _Section(before, parts, missing, output)


_OUTERMOST_FIRST = (
    *("moe", "mlp", "layernorm", "shared_experts", "moe_act", "mla_up_proj", "core_attn"),
)
"""Modules in an order in which what one runs again does not run again for a later one."""

_WITH_TILES = ("moe", "mlp", "moe_act")
"""The modules that run tiles again, for tiles of an MLP or experts."""

_BEFORE = {"moe_act": "expert_fc2", "mla_up_proj": "core_attn"}
"""The part before whose backward a module runs again, if it is not the module's last."""

_CHECKPOINTS = frozenset({"moe", "mlp", "shared_experts", "core_attn"})
"""Modules that run again in a checkpoint; others fill the output of their forward."""


_ATTENTION = "query key value"
_FLOWS: Mapping[str, tuple[str, str, str]] = {
    "attn_norm": ("layer_input", "layer_input", "normed_input"),
    "qkv_linear": ("layer_input", "normed_input", _ATTENTION),
    "rotary": ("layer_input", _ATTENTION, _ATTENTION),
    "core_attn": ("layer_input", _ATTENTION, "output"),
    "attn_proj": ("layer_input", "output", ""),
    "attn_residual": ("layer_input", "", "attended"),
    "mamba_norm": ("layer_input", "layer_input", "normed_input"),
    "mamba_in_proj": ("layer_input", "normed_input", "mamba_projected"),
    "mamba_scan": ("layer_input", "mamba_projected", "mamba_normed"),
    "mamba_out_proj": ("layer_input", "mamba_normed", ""),
    "mamba_residual": ("layer_input", "", "attended"),
    "gdn_in_proj": ("layer_input", "normed_input", "gdn_projected"),
    "gdn_rule": ("layer_input", "gdn_projected", "gdn_output"),
    "gdn_norm": ("layer_input", "gdn_output", "gdn_normed"),
    "gdn_out_proj": ("layer_input", "gdn_normed", ""),
    "further_norms": ("layer_input", "layer_input", "further_joined"),
    "further_proj": ("further_state", "further_joined", "attended"),
    "mlp_norm": ("attended", "attended", "normed_attended"),
    "mlp_fc1": ("attended", "normed_attended", "projected"),
    "mlp_act": ("attended", "projected", "activated"),
    "mlp_fc2": ("attended", "activated", ""),
    "router": ("attended", "normed_attended", "expert_input"),
    "shared_experts": ("attended", "normed_attended", ""),
    "expert_fc1": ("attended", "expert_input", "projected"),
    "moe_act": ("attended", "projected", "activated"),
    "expert_fc2": ("attended", "activated", "expert_output"),
    "combine": ("attended", "expert_output", ""),
    "mlp_residual": ("attended", "", "layer_output"),
}
"""The stream of each part, and the names of what it takes and gives."""


def _flows(
    shape: ModelShape, full: Mapping[str, tuple[SavedTensor, ...]], parts: Iterable[str]
) -> dict[str, Flow]:
    """Return what goes through the parts of a layer."""
    par, each = shape.parallelism, shape.element_bytes
    factor = 2 if shape.gated_linear_unit else 1
    hidden = shape.region_tokens * shape.hidden_size * each
    streams = ("layer_input", "normed_input", "attended", "normed_attended", "layer_output")
    sizes = {name: (name, hidden) for name in streams}
    saved = {tensor.name: tensor.nbytes for tensors in full.values() for tensor in tensors}
    sizes |= {name: (name, size) for name, size in saved.items() if name not in sizes}
    inside = {}
    if "mamba_scan" in parts:
        inside["mamba_scan"] = _inside_scan(shape)
    if "gdn_rule" in parts:
        names = ("gdn_query", "gdn_key", "gdn_value", "gdn_query_key")
        inside["gdn_rule"] = sum(saved[name] for name in names)
        # Its norm may save a copy, and its projection nothing.
        values = saved["gdn_value"]
        sizes |= {name: (name, values) for name in ("gdn_output", "gdn_normed")}
    if "core_attn" in parts:
        attention = {tensor.name: tensor.nbytes for tensor in full["core_attn"]}
        sizes |= {name: (name, attention[name]) for name in _ATTENTION.split()}
        outputs = [item for item in full["core_attn"] if item.name.startswith("attention_output")]
        output = (outputs or full["attn_proj"])[0]
        sizes["output"] = output.name, output.nbytes
        if shape.attention_backend in ("unfused", "local"):
            inside["core_attn"] = sum(attention.values())
    prefix, rows, width = "mlp", shape.tokens, shape.ffn_hidden_size // par.tp
    if (experts := shape.experts) is not None and "router" in parts:
        prefix, rows, width = "expert", shape.expert_tokens, experts.ffn_hidden_size // par.etp
        sent = rows * shape.hidden_size * each
        sizes |= {name: (name, sent) for name in ("expert_input", "expert_output")}
        shared = shape.tokens * (experts.shared_ffn_hidden_size // par.tp) * each
        inside["shared_experts"] = shared * (factor + 1)
    sizes["projected"] = f"{prefix}_projected", rows * width * each * factor
    sizes["activated"] = f"{prefix}_activated", rows * width * each
    found = {}
    for part in parts:
        stream, taken, given = _FLOWS[part]
        taken_bytes, given_bytes = (
            dict(sizes[n] for n in names.split()) for names in (taken, given)
        )
        found[part] = Flow(stream, taken_bytes, given_bytes, inside.get(part, 0))
    return found


def _inside_scan(shape: ModelShape) -> int:
    """Return the bytes of what a scan's backward computes again, and of its gradient."""
    sizes, tokens = MambaSizes.of(shape), shape.tokens
    states = 4 * tokens * sizes.inner * sizes.state // MAMBA_CHUNK
    return 2 * (tokens * sizes.convolved * shape.element_bytes + states)


def _tile_bytes(num_tokens: int, bytes_per_token: int) -> int:
    tiling = Tiling.of("auto", bytes_per_token)
    assert tiling is not None
    return min(num_tokens, tiling.max_tokens or num_tokens) * bytes_per_token


class _Head:
    """The final norm, the output layer and the loss.

    With Transformer Engine's cross entropy, the loss saves a copy of the logits; megatron-core's
    own functions save probabilities in float32.
    """

    def __init__(self, shape: ModelShape) -> None:
        self._costs = head_costs(shape)
        self._hidden = shape.region_tokens * shape.hidden_size * shape.element_bytes
        self._num_losses = 1 + shape.num_further_tokens
        # The norm's input, and the output layer's inputs for all tokens.
        self._normed = (1 + self._num_losses) * self._hidden
        numel = shape.tokens * shape.vocab_size // shape.parallelism.tp
        self._logits = numel * shape.element_bytes
        is_te = shape.cross_entropy == "te"
        self._saved = self._logits if is_te else 4 * numel
        each = logits_bytes_per_token(1, shape.element_bytes, shape.cross_entropy)
        self._loss_peak = numel * each - self._logits
        # Float32 logits are overwritten.
        self._gradient_peak = 0 if is_te or shape.element_bytes == 4 else self._logits
        self._tile = 0
        if shape.loss_sequence_tiles:
            self._logits = self._saved = self._loss_peak = self._gradient_peak = 0
            each *= shape.vocab_size // shape.parallelism.tp
            # Beside a tile: the gradient of the output layer's input.
            self._tile = _tile_bytes(shape.tokens, each) + self._hidden

    def forward(self) -> Iterator[Stretch]:
        """Yield its forward."""
        yield self._stretch("final_norm", "forward", self._normed, self._normed)
        for _ in range(self._num_losses):
            yield self._stretch(OUTPUT_LAYER, "forward", self._logits, self._logits + self._tile)
            yield self._stretch("loss", "forward", self._saved - self._logits, self._loss_peak)

    def backward(self) -> Iterator[Stretch]:
        """Yield its backward."""
        to_gradient = self._logits - self._saved
        for _ in range(self._num_losses):
            yield self._stretch("loss", "backward", to_gradient, self._gradient_peak)
            yield self._stretch(OUTPUT_LAYER, "backward", -self._logits, self._hidden + self._tile)
        yield self._stretch("final_norm", "backward", -self._normed, self._normed)

    def _stretch(self, part: str, phase: Phase, live_bytes: int, peak_bytes: int) -> Stretch:
        return Stretch(part, phase, self._costs[part], live_bytes, peak_bytes)
