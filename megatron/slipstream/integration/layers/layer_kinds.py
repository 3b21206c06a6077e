# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Kinds of layers: what is measured on one layer of a kind holds for all others."""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.multi_latent_attention import MultiLatentAttention


class Kinds:
    """Names the kinds of the layers of a rank, in the order in which they are given."""

    def __init__(self) -> None:
        self._names: dict[tuple[Any, ...], str] = {}

    def name_of(self, layer: torch.nn.Module) -> str:
        """Return the kind of a layer, such as ``"dense"`` or ``"mla moe"``.

        Layers with the same name have modules of the same classes, parameters of the same shapes
        and dtypes, and the same options that differ between layers (dropout, window).
        """
        words = _words(layer)
        key = (words, *_modules(layer), *_parameters(layer), *_own_options(layer))
        if key not in self._names:
            number = 1 + sum(other == words for other, *_ in self._names)
            self._names[key] = words if number == 1 else f"{words} {number}"
        return self._names[key]


def _words(layer: Any) -> str:
    attention, mlp = (_part(layer, name) for name in ("self_attention", "mlp"))
    if attention is None and mlp is None:
        return _without_mixins(layer).removesuffix("Layer").lower()
    words: list[str] = ["mla"] if isinstance(attention, MultiLatentAttention) else []
    if mlp is None:
        words.append("attention")
    else:
        words.append("moe" if isinstance(mlp, MoELayer) else "dense")
        words += ["mlp"] if attention is None else []
    words += ["mtp"] if getattr(layer, "is_mtp_layer", False) else []
    return " ".join(words)


def _part(layer: Any, name: str) -> Any:
    part = getattr(layer, name, None)
    return None if isinstance(part, IdentityOp) else part


def _without_mixins(layer: Any) -> str:
    """Return the name of megatron-core's class, from which the layer's own may be derived."""
    classes = type(layer).__mro__
    return next((c.__name__ for c in classes if c.__module__.startswith("megatron.core")), "layer")


def _modules(layer: torch.nn.Module) -> list[tuple[str, type]]:
    return [(name, type(module)) for name, module in layer.named_modules() if name]


def _parameters(layer: torch.nn.Module) -> list[tuple[Any, ...]]:
    return [(name, p.shape, p.dtype, p.requires_grad) for name, p in layer.named_parameters()]


def _own_options(layer: Any) -> tuple[str, ...]:
    core = getattr(getattr(layer, "self_attention", None), "core_attention", None)
    return (
        str(getattr(layer, "hidden_dropout", None)),
        str(getattr(core, "window_size", None)),
    )
