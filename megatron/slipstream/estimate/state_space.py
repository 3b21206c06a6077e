# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Sizes and saved tensors of the layers of hybrid models without attention: Mamba, gated delta net.

Their groups are those of ``options.modules``. Mamba's kernels are those of mamba-ssm (its
memory-efficient path), a gated delta net's those of flash-linear-attention; what they save is
derived from their code, not measured.

[Note: What kernels of state-space layers save]
Mamba's convolution, scan and gate are one operation. It saves its input, which is the input
projection's output, and the scan's output before the gate; backward computes the rest again. The
norm after it saves its input.

A gated delta net's convolution saves its input, a view of the input projection's output, so that
all of this is kept. Queries and keys are normalized together, then copied apart, and repeated for
each value head. The rule saves these, values, decays, gates, and for each chunk of tokens a
triangular matrix. The output's norm saves the rule's output, the product with the output's gate
both factors. The functions around the kernels are compiled: then they save no float32 copies. For
layers of plain PyTorch they are taken as they are if they are not.
"""

from __future__ import annotations

from typing import NamedTuple

from megatron.slipstream.estimate.model_parts import GatedDeltaNet, Mamba
from megatron.slipstream.estimate.model_shapes import ModelShape
from megatron.slipstream.estimate.tensors import (
    Saved,
    SavedTensor,
    TensorMaker,
    is_input_norm_fused,
)

GDN_MODULES = ("gdn_in_proj", "gdn_rule", "gdn_out_proj")
MAMBA_MODULES = ("mamba_in_proj", "mamba_scan", "mamba_out_proj")

MAMBA_CHUNK = 128
"""Tokens of a chunk of Mamba's scan (``MambaMixer``'s default)."""
_MAMBA_CONV_WIDTH = 4
RULE_CHUNK = 64
"""Tokens of a chunk of the gated delta rule."""


class MambaSizes(NamedTuple):
    """Sizes of a Mamba layer on a rank."""

    heads: int
    inner: int
    """All its heads together."""
    groups: int
    state: int
    cp: int

    @classmethod
    def of(cls, shape: ModelShape) -> MambaSizes:
        """Return the sizes for a model with Mamba layers."""
        mamba, par = _mamba(shape), shape.parallelism
        heads = mamba.num_heads // par.tp
        groups = mamba.num_groups // par.tp
        return cls(heads, heads * mamba.head_dim, groups, mamba.state_dim, par.cp)

    @property
    def convolved(self) -> int:
        """Channels of the convolution: the heads' inputs, and what a group shares."""
        return self.inner + 2 * self.groups * self.state

    @property
    def projected(self) -> int:
        """Width of the input projection's output: also a gate, and a step size per head."""
        return self.inner + self.convolved + self.heads

    @property
    def scanned(self) -> int:
        """The width that the scan takes, per token of this rank.

        Context-parallel ranks divide heads, but each of them has one group at least.
        """
        repeated = max(self.groups, self.cp) - self.groups
        return self.projected + 2 * repeated * self.state

    @property
    def num_convolution_weights(self) -> int:
        """Parameters of the convolution."""
        return self.convolved * _MAMBA_CONV_WIDTH


class DeltaSizes(NamedTuple):
    """Sizes of a gated delta net on a rank."""

    key_heads: int
    value_heads: int
    key_width: int
    """Width of a head."""
    value_width: int
    conv_width: int

    @classmethod
    def of(cls, shape: ModelShape) -> DeltaSizes:
        """Return the sizes for a model with gated delta nets."""
        net, tp = _gated_delta_net(shape), shape.parallelism.tp
        return cls(
            net.num_key_heads // tp,
            net.num_value_heads // tp,
            net.key_head_dim,
            net.value_head_dim,
            net.conv_kernel_dim,
        )

    @property
    def keys(self) -> int:
        """Queries, or keys, of all their heads."""
        return self.key_heads * self.key_width

    @property
    def values(self) -> int:
        """Values of all their heads."""
        return self.value_heads * self.value_width

    @property
    def projected(self) -> int:
        """Width of the input projection's output: also a gate, and two numbers per value head."""
        return 2 * (self.keys + self.values + self.value_heads)

    @property
    def num_convolution_weights(self) -> int:
        """Parameters of the convolution."""
        return (2 * self.keys + self.values) * self.conv_width


def _mamba(shape: ModelShape) -> Mamba:
    if shape.mamba is None:
        raise ValueError("the model has no Mamba layers (hybrid_layer_pattern has no M)")
    return shape.mamba


def _gated_delta_net(shape: ModelShape) -> GatedDeltaNet:
    if shape.gated_delta_net is None:
        raise ValueError("the model has no gated delta nets (hybrid_layer_pattern has no G)")
    return shape.gated_delta_net


class StateSpaceLayer(TensorMaker):
    """Derives the saved tensors of one layer."""

    def saved(self) -> Saved:
        """Return the tensors of each part: [Note: What kernels of state-space layers save]."""
        return self._mamba() if self._kind == "M" else self._gated_delta_net()

    def _mamba(self) -> Saved:
        sizes, tokens = MambaSizes.of(self._shape), self._shape.tokens
        region = self._shape.region_tokens, self._shape.hidden_size
        return {
            "mamba_in_proj": (
                *self._norm("layer_input", *region),
                self._input("normed_input", self._hidden),
            ),
            "mamba_scan": (
                self._tensor("mamba_projected", tokens * sizes.scanned),
                self._tensor("mamba_scanned", tokens * sizes.inner),
                self._tensor("mamba_output", tokens * sizes.inner),
                self._float32("mamba_output_deviation", tokens * sizes.groups),
            ),
            "mamba_out_proj": (self._input("mamba_normed", tokens * sizes.inner),),
            "mamba_residual": self._hidden_dropout("mamba_dropout_mask"),
        }

    def _gated_delta_net(self) -> Saved:
        norm, recomputes_norm = self._input_norm()
        taken = () if recomputes_norm else (self._input("normed_input", self._hidden),)
        is_fused = is_input_norm_fused(self._shape, self._kind)
        saved: Saved = {} if is_fused else {"attn_norm": norm}
        saved["gdn_in_proj"] = (*norm, *taken) if is_fused else taken
        saved["gdn_rule"] = (*self._rule(), *self._gated_norm())
        values = self._shape.tokens * DeltaSizes.of(self._shape).values
        saved["gdn_out_proj"] = (self._input("gdn_normed", values),)
        saved["attn_residual"] = self._hidden_dropout("attn_dropout_mask")
        return saved

    def _rule(self) -> tuple[SavedTensor, ...]:
        sizes, tokens = DeltaSizes.of(self._shape), self._shape.tokens
        repeated = tokens * sizes.value_heads * sizes.key_width
        gates = tokens * sizes.value_heads
        steps = [self._tensor("gdn_decay_input", gates)]
        if not self._shape.uses_transformer_engine:
            names = ("gdn_decay_input", "gdn_decay_rate")
            steps = [self._float32(name, gates) for name in names]
        return (
            self._tensor("gdn_projected", tokens * sizes.projected),
            self._tensor("gdn_query_key", tokens * 2 * sizes.keys),
            self._float32("gdn_query_key_deviation", tokens * 2 * sizes.key_heads),
            self._tensor("gdn_query", repeated),
            self._tensor("gdn_key", repeated),
            self._tensor("gdn_value", tokens * sizes.values),
            *steps,
            self._float32("gdn_decay", gates),
            self._tensor("gdn_beta", gates),
            self._tensor("gdn_triangles", gates * RULE_CHUNK),
        )

    def _gated_norm(self) -> tuple[SavedTensor, ...]:
        shape, sizes = self._shape, DeltaSizes.of(self._shape)
        rows, numel = shape.tokens * sizes.value_heads, shape.tokens * sizes.values
        norm = self._norm("gdn_output", rows, sizes.value_width)
        factor = self._tensor("gdn_output_normed", numel)
        if shape.uses_transformer_engine:
            return *norm, factor, self._tensor("gdn_gate", numel)
        names = ("gdn_gate", "gdn_gate_activated")
        return *norm, factor, *(self._float32(name, numel) for name in names)
