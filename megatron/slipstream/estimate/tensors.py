# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tensors that a layer saves for backward, and the sizes of those that any kind of layer has."""

from __future__ import annotations

from typing import NamedTuple

from megatron.slipstream.estimate.model_parts import LayerKind
from megatron.slipstream.estimate.model_shapes import ModelShape


class SavedTensor(NamedTuple):
    """A storage that a layer saves for backward. Parts that save the same one use the same name."""

    name: str
    numel: int
    nbytes: int
    kept_by: str = ""
    """Why offloading it frees no memory; empty if it does."""


Saved = dict[str, tuple[SavedTensor, ...]]
"""The saved tensors of each part."""


def is_input_norm_fused(shape: ModelShape, kind: LayerKind) -> bool:
    """Return whether a layer's first projection contains the norm before it.

    See [Note: Transformer Engine's fused norms] in ``saved_tensors``.
    """
    has_latent_attention = "*" in kind and shape.latent_attention is not None
    return shape.uses_transformer_engine and not has_latent_attention


class TensorMaker:
    """Makes the tensors of one layer.

    Args:
        shape: The model, with the layer's setting.
        kind: The layer's kind.
    """

    def __init__(self, shape: ModelShape, kind: LayerKind) -> None:
        self._shape = shape
        self._kind: LayerKind = kind
        self._hidden = shape.region_tokens * shape.hidden_size

    def _input_norm(self) -> tuple[tuple[SavedTensor, ...], bool]:
        """Return what the norm of a layer's input saves, and whether its output is recomputed."""
        shape = self._shape
        is_recomputed = shape.recomputes("layernorm") and not is_input_norm_fused(shape, self._kind)
        size = shape.region_tokens, shape.hidden_size
        return self._norm("layer_input", *size, is_recomputed), is_recomputed

    def _norm(
        self, name: str, rows: int, width: int, is_recomputed: bool = False
    ) -> tuple[SavedTensor, ...]:
        """Return the tensors that a norm of ``[rows, width]`` saves, its input first."""
        shape = self._shape
        if is_recomputed:
            return (self._tensor(name, rows * width),)
        taken = self._tensor(name, rows * width)
        if shape.uses_transformer_engine:
            statistics = [self._float32(f"{name}_deviation", rows)]
            if shape.normalization == "LayerNorm":
                statistics.append(self._float32(f"{name}_mean", rows))
            return (taken, *statistics)
        if shape.normalization == "LayerNorm":
            names = (f"{name}_mean", f"{name}_deviation")
            return (taken, *(self._tensor(each, rows) for each in names))
        # Plain PyTorch computes an RMS norm step by step, in float32.
        return (
            self._float32(name if shape.precision == "fp32" else f"{name}_fp32", rows * width),
            self._float32(f"{name}_deviation", rows),
            self._float32(f"{name}_scaled", rows * width),
        )

    def _rotary_tables(self, width: int | None) -> tuple[SavedTensor, ...]:
        """Return the cosine and sine tables for queries and keys."""
        if width is None:
            return ()
        names = ("query_cosines", "query_sines", "key_cosines", "key_sines")
        return tuple(self._tensor(name, self._shape.sequence * width) for name in names)

    def _hidden_dropout(self, name: str) -> tuple[SavedTensor, ...]:
        has_dropout = self._shape.hidden_dropout > 0
        return (self._dropout_mask(name, self._hidden),) if has_dropout else ()

    def _dropout_mask(self, name: str, numel: int) -> SavedTensor:
        # Masks are boolean on a GPU; without one, they have the dtype of activations.
        if self._shape.uses_transformer_engine:
            return SavedTensor(name, numel, numel)
        return self._tensor(name, numel)

    def _tensor(self, name: str, numel: int, kept_by: str = "") -> SavedTensor:
        return SavedTensor(name, numel, numel * self._shape.element_bytes, kept_by)

    def _input(self, name: str, numel: int) -> SavedTensor:
        """Return a linear layer's input, see [Note: Inputs of linear layers in fp8]."""
        return SavedTensor(name, numel, int(numel * self._shape.linear_input_bytes))

    def _float32(self, name: str, numel: int) -> SavedTensor:
        return SavedTensor(name, numel, 4 * numel)
