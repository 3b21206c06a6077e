# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Which parts of each layer backward recomputes, changed on a built model between iterations.

A setting of a layer (:mod:`~megatron.slipstream.plan.settings`) is what the flags
``recompute_granularity`` and ``recompute_modules`` are for all layers. The flags are the minimum:
no setting recomputes less. Results do not depend on settings.
"""

from __future__ import annotations

import contextlib
import itertools
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from megatron.core import tensor_parallel
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention
from torch.overrides import TorchFunctionMode

from megatron.slipstream.integration.graphs.chunks import graphs_of
from megatron.slipstream.integration.layers.layer_parts import (
    CONTAINED,
    DECISIONS,
    decisions_of,
    is_captured,
    why_not,
)
from megatron.slipstream.integration.seam import model_router
from megatron.slipstream.integration.seam.layer_classes import convert
from megatron.slipstream.plan.settings import (
    NOTHING,
    WHOLE,
    WHOLE_LAYER,
    Assignment,
    LayerSetting,
    describe_setting,
)

_PARTS = tuple(dict.fromkeys(decision.part for decision in DECISIONS))
_WITH_ROUTER = WHOLE | {"moe"}
"""Parts whose recomputation includes the router."""


@dataclass(frozen=True)
class LayerOptions:
    """A layer of a built model and the settings that it takes."""

    layer: torch.nn.Module
    kind: str
    """Layers of one kind have the same modules, shapes and options: ``"dense"``, ``"mla moe"``,
    with a number if there are several such kinds."""
    minimum: LayerSetting
    settings: tuple[LayerSetting, ...]
    """From the one that usually takes the least device memory to :attr:`minimum`."""
    refused: Mapping[str, str] = field(default_factory=dict)
    """Parts that the layer has and that settings cannot change, each with the reason."""
    chunk: int = 0


def layers_of(chunks: Sequence[torch.nn.Module]) -> list[LayerOptions]:
    """Return the layers of this rank, in forward order, model chunk by model chunk.

    These are the layers of each chunk's decoder, also of a hybrid model, then those of its
    multi-token prediction. Layers without parts (Mamba) are recomputed as a whole or not at all.
    Encoders and vision models stay as they are: their passes are not announced to the engine.

    Args:
        chunks: All chunks of the model on this rank, wrapped or not.

    Raises:
        ValueError: A chunk has no language model with a decoder.
    """
    kinds: dict[tuple[Any, ...], str] = {}
    found = []
    for index, chunk in enumerate(chunks):
        model = _language_model(chunk)
        has_chunk_graphs = graphs_of(model.decoder) is not None
        for layer, is_checkpointed in _layers(model):
            state = _states.get(layer)
            if state is None:
                state = _states[layer] = _State(layer, is_checkpointed)
            refused = {part: why_not(part, layer, has_chunk_graphs) for part in state.parts}
            refused = {part: reason for part, reason in refused.items() if reason}
            settings = tuple(_settings(state, state.parts - refused.keys()))
            kind = _kind_of(layer, kinds)
            found.append(LayerOptions(layer, kind, state.minimum, settings, refused, index))
    return found


def apply(assignment: Assignment, chunks: Sequence[torch.nn.Module]) -> None:
    """Give each layer its setting, from the next forward pass on.

    If the model offloads with Slipstream's engine, its iterations follow only plans that were made
    with the same assignment.

    Args:
        assignment: A setting for each layer of :func:`layers_of`.
        chunks: All chunks of the model on this rank, wrapped or not.

    Raises:
        ValueError: The assignment does not have one setting for each layer, or a layer does not
            take its setting.
        RuntimeError: A layer to change is in a CUDA graph, or the engine knows of an iteration that
            has begun and not ended. Without offloading, a change then holds from the next pass on.
    """
    options = layers_of(chunks)
    _check(assignment, options)
    changes = [
        (one, setting)
        for one, setting in zip(options, assignment, strict=True)
        if _states[one.layer].setting != setting
    ]
    of_chunks = (graphs_of(_language_model(chunk).decoder) for chunk in chunks if changes)
    if any(is_captured(one.layer) for one, _ in changes) or any(
        graphs and graphs.is_captured for graphs in of_chunks
    ):
        raise RuntimeError(
            "other settings of layers are not supported once CUDA graphs of them are captured "
            "because the graphs contain the old ones; delete the graphs first, or change the "
            "settings before the capture (cuda_graph_warmup_steps)"
        )
    _tell_engine(chunks, tuple(assignment))
    for one, setting in changes:
        _states[one.layer].take(one, setting)


def make_frugal(chunk: torch.nn.Module) -> None:
    """Give each layer of a chunk its most frugal setting before the chunk's first pass.

    The engine is not told: the chunk may have its first pass within an iteration.
    """
    for one in layers_of([chunk]):
        _states[one.layer].take(one, one.settings[0])


def give(assignment: Assignment, chunks: Sequence[torch.nn.Module], chunk: torch.nn.Module) -> None:
    """Give the layers of one of the chunks their settings after :func:`make_frugal`."""
    for one, setting in zip(layers_of(chunks), assignment, strict=True):
        if chunks[one.chunk] is chunk:
            _states[one.layer].take(one, setting)


def restore(chunks: Sequence[torch.nn.Module]) -> None:
    """Give each layer back the attributes and the class that it was built with.

    CUDA graphs that exist keep the settings that they contain. Raises ``RuntimeError`` if the
    engine knows of an iteration that has begun and not ended.
    """
    options = layers_of(chunks)
    _tell_engine(chunks, ())
    for one in options:
        _states.pop(one.layer).take(one, one.minimum)


def assignment_of(chunks: Sequence[torch.nn.Module]) -> Assignment:
    """Return the setting that each layer has."""
    return tuple(_states[one.layer].setting for one in layers_of(chunks))


class _State:
    def __init__(self, layer: torch.nn.Module, is_checkpointed: bool) -> None:
        self._built_with = {
            decision: bool(getattr(owner, decision.attribute))
            for decision, owner in decisions_of(layer)
        }
        self.parts = WHOLE | {decision.part for decision in self._built_with}
        """The parts that the layer has."""
        self.minimum = WHOLE
        """What the flags recompute."""
        if not is_checkpointed:
            recomputed = (decision.part for decision, is_set in self._built_with.items() if is_set)
            self.minimum = LayerSetting(recomputed)
        self.setting = self.minimum
        self._undo: list[Callable[[], None]] = []
        """Restore the class of the layer and the hooks of its router."""

    def take(self, options: LayerOptions, setting: LayerSetting) -> None:
        for decision, owner in decisions_of(options.layer):
            as_built = setting == self.minimum or decision.part in options.refused
            is_set = self._built_with[decision] if as_built else decision.part in setting
            setattr(owner, decision.attribute, is_set)
        while self._undo:
            self._undo.pop()()
        if setting == WHOLE != self.minimum:
            self._undo.append(convert(options.layer, RecomputedMixin))
        router = getattr(getattr(options.layer, "mlp", None), "router", None)
        if router is not None and setting & _WITH_ROUTER and not self.minimum & _WITH_ROUTER:
            self._undo += _sort_scores(router)
        self.setting = setting


_states: weakref.WeakKeyDictionary[torch.nn.Module, _State] = weakref.WeakKeyDictionary()


def _settings(state: _State, accepted: frozenset[str]) -> Iterator[LayerSetting]:
    """Yield the settings of a layer, the one that usually takes the least memory first."""
    if WHOLE_LAYER in accepted | state.minimum:
        yield WHOLE
    if state.minimum == WHOLE:
        return
    free = [part for part in _PARTS if part in accepted - state.minimum]
    for choice in itertools.product((True, False), repeat=len(free)):
        setting = state.minimum.union(itertools.compress(free, choice))
        inside = frozenset().union(*(CONTAINED.get(part, NOTHING) for part in setting))
        if not inside & setting - state.minimum:
            yield setting


def _check(assignment: Assignment, options: Sequence[LayerOptions]) -> None:
    if len(assignment) != len(options):
        raise ValueError(
            f"an assignment of {len(assignment)} settings is not supported because this rank has "
            f"{len(options)} layers; give one for each"
        )
    for number, (one, setting) in enumerate(zip(options, assignment, strict=True)):
        if setting not in one.settings:
            taken = ", ".join(map(describe_setting, one.settings))
            reasons = "; ".join(
                f"{part}: {one.refused[part]}" for part in sorted(setting) if part in one.refused
            )
            raise ValueError(
                f"setting={describe_setting(setting)} is not supported with layer {number} of kind "
                f"{one.kind!r} because "
                f"{reasons or 'it lacks such parts, or its flags recompute others'}; "
                f"set one of: {taken}"
            )


def _language_model(chunk: torch.nn.Module) -> Any:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    for module in chunk.modules():
        if isinstance(module, LanguageModule) and hasattr(module, "decoder"):
            return module
    raise ValueError(
        f"chunk={type(chunk).__name__} is not supported because it contains no language model of "
        "megatron-core with a decoder; give the chunks of a GPTModel or a HybridModel"
    )


def _layers(model: Any) -> Iterator[tuple[torch.nn.Module, bool]]:
    """Yield the layers of a model in forward order, and whether their block checkpoints them."""
    config = model.config
    is_full = config.recompute_granularity == "full"
    for number, layer in enumerate(model.decoder.layers):
        is_block = config.recompute_method == "block"
        yield layer, is_full and not (is_block and number >= config.recompute_num_layers)
    for predictor in getattr(getattr(model, "mtp", None), "layers", ()):
        inner = predictor.mtp_model_layer
        for layer in getattr(inner, "layers", [inner]):
            yield layer, is_full and config.recompute_method == "uniform"


def _tell_engine(chunks: Sequence[torch.nn.Module], assignment: Assignment) -> None:
    manager = model_router.installed()
    models = [_language_model(chunk) for chunk in chunks]
    if manager is None or not models[0].config.fine_grained_activation_offloading:
        return
    manager.router.bind(models)
    manager.router.manager_of(models[0]).engine.change_assignment(assignment)


def watch_reruns(layer: torch.nn.Module, note: Callable[[], None]) -> Callable[[], None]:
    """Call ``note`` when backward has rerun a layer by its setting; return how to undo it."""
    _notes[layer] = note

    def undo() -> None:
        _notes.pop(layer, None)

    return undo


_notes: weakref.WeakKeyDictionary[torch.nn.Module, Callable[[], None]] = weakref.WeakKeyDictionary()


# What is measured on one layer of a kind holds for all others.


def _kind_of(layer: Any, names: dict[tuple[Any, ...], str]) -> str:
    """Return the kind of a layer, such as ``"dense"`` or ``"mla moe"``, and add it to the names.

    Layers with the same name have modules of the same classes, parameters of the same shapes
    and dtypes, and the same options that differ between layers (dropout, window).
    """
    core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
    words = _words(layer)
    key = (
        words,
        *((name, type(module)) for name, module in layer.named_modules() if name),
        *((n, p.shape, p.dtype, p.requires_grad) for n, p in layer.named_parameters()),
        *(str(getattr(layer, "hidden_dropout", None)), str(getattr(core, "window_size", None))),
    )
    if key not in names:
        number = 1 + sum(other == words for other, *_ in names)
        names[key] = words if number == 1 else f"{words} {number}"
    return names[key]


def _words(layer: Any) -> str:
    parts = (getattr(layer, name, None) for name in ("self_attention", "mlp"))
    attention, mlp = (None if isinstance(part, IdentityOp) else part for part in parts)
    if attention is None and mlp is None:
        # megatron-core's class, from which the layer's own may be derived.
        names = (
            c.__name__ for c in type(layer).__mro__ if c.__module__.startswith("megatron.core")
        )
        return next(names, "layer").removesuffix("Layer").lower()
    words: list[str] = ["mla"] if isinstance(attention, MultiLatentAttention) else []
    if mlp is None:
        words.append("attention")
    else:
        words.append("moe" if isinstance(mlp, MoELayer) else "dense")
        words += ["mlp"] if attention is None else []
    words += ["mtp"] if getattr(layer, "is_mtp_layer", False) else []
    return " ".join(words)


class RecomputedMixin(torch.nn.Module):
    """Mixin for a layer: its forward keeps no more than its input for backward.

    megatron-core's blocks checkpoint layers of their own choice (``recompute_method``); this one
    is checked out layer by layer. It is megatron-core's checkpoint, which restores all random
    states and divides its input among tensor-parallel ranks with ``distribute_saved_activations``.
    The engine can move that input: ``OffloadConfig.offload_checkpoint_inputs``.
    """

    config: Any

    def forward(self, *arguments: Any, **options: Any) -> Any:
        """Run the layer, in training in a checkpoint.

        The checkpoint saves the tensors that have gradients, the hidden states first. Everything
        else (masks, rotary embeddings, packed sequence parameters) is shared by all layers and
        referred to. If the hidden states have no gradient, as after a frozen embedding, the layer
        runs as it is: a re-entrant checkpoint would give its parameters none.
        """
        run = super().forward
        values: dict[Any, Any] = {**dict(enumerate(arguments)), **options}
        first = "hidden_states" if "hidden_states" in values else 0
        is_trained = self.training and torch.is_grad_enabled()
        if not is_trained or not values[first].requires_grad:
            return run(*arguments, **options)
        with_gradients = [n for n, v in values.items() if torch.is_tensor(v) and v.requires_grad]
        names = sorted(with_gradients, key=lambda name: name != first)
        # What the checkpoint saves must have no other reference, or moving it would free nothing.
        inputs = [values.pop(name) for name in names]
        num_positional = len(arguments)

        def run_again(*tensors: torch.Tensor) -> Any:
            given = {**values, **dict(zip(names, tensors, strict=True))}
            output = run(*(given.pop(place) for place in range(num_positional)), **given)
            if torch.is_grad_enabled() and self in _notes:
                _notes[self]()
            return output

        is_divided = self.config.distribute_saved_activations
        return tensor_parallel.checkpoint(run_again, is_divided, *inputs)


def _sort_scores(router: torch.nn.Module) -> list[Callable[[], None]]:
    """Let a router that is recomputed by a setting round as without; return what undoes it.

    megatron-core's router sorts the scores of a token's experts only where gradients are enabled.
    In the forward of a checkpoint they are not, and a softmax over three or more scores rounds by
    their order. Routers that the flags recompute stay as they are.
    """
    stack = contextlib.ExitStack()

    def begin(router: torch.nn.Module, _: Any) -> None:
        if router.training and not torch.is_grad_enabled():
            stack.enter_context(_SortedScores())

    return [
        router.register_forward_pre_hook(begin).remove,
        router.register_forward_hook(lambda *_: stack.close(), always_call=True).remove,
    ]


class _SortedScores(TorchFunctionMode):
    def __torch_function__(
        self, function: Any, types: Any, arguments: Any = (), options: Any = None
    ) -> Any:
        options = dict(options or {})
        if function is torch.topk:
            options["sorted"] = True
        return function(*arguments, **options)
