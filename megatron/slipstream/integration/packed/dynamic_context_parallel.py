# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Attention that uses the context-parallel group of the micro-batch.

[Note: The group travels with the micro-batch]

``PackedSeqParams.cp_group`` holds the ranks that share a micro-batch. It is set for every
micro-batch and every size (size 1 is a group of one rank); ``local_cp_size``, which multi-latent
attention refuses, never is. There is no global current group: layers are recomputed in backward,
after other micro-batches, and megatron-core passes them the same ``PackedSeqParams`` again.

megatron-core uses the field in core attention only. Rotary embeddings use the group that the layer
was built with (0.18, 0.19), so positions are wrong if a micro-batch has another one; and core
attention keeps the last group that it was passed. The classes here correct both:

- Attention runs its forward pass as a *twin* of itself, with the same parameters, buffers and
  submodules, but another group (and its size in the configuration, which unfused rotary embeddings
  of multi-latent attention read). The layer is never changed, so nothing has to be restored, and
  recomputation keeps the twin and its group.
- Core attention restores its static group after every call, including one that raised.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any, Optional

import torch
from megatron.core.packed_seq_params import PackedSeqParams
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron.slipstream.integration.cpu.cpu_modules import (
    GatheringCoreAttention,
    LatentCoreAttention,
)
from megatron.slipstream.integration.seam.specs import replace_classes
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature


class DynamicGroupMixin(torch.nn.Module):
    """Mixin for megatron-core's attention: uses the micro-batch's group everywhere."""

    config: Any
    pg_collection: Any

    def forward(
        self,
        *arguments: Any,
        packed_seq_params: Optional[PackedSeqParams] = None,
        **options: Any,
    ) -> Any:
        """Run megatron-core's attention; its layers pass ``packed_seq_params`` by keyword."""
        group = None if packed_seq_params is None else packed_seq_params.cp_group
        layer = self if group is None else self._with(group)
        attention: Any = super(DynamicGroupMixin, layer)
        return attention.forward(*arguments, packed_seq_params=packed_seq_params, **options)

    def _with(self, group: torch.distributed.ProcessGroup) -> DynamicGroupMixin:
        """Return this layer's twin with another group; created for each pass in microseconds."""
        twin = object.__new__(type(self))
        twin.__dict__.update(self.__dict__)
        twin.pg_collection = copy.copy(self.pg_collection)
        twin.pg_collection.cp = group
        twin.config = copy.copy(self.config)
        twin.config.context_parallel_size = group.size()
        return twin


class DynamicSelfAttention(DynamicGroupMixin, SelfAttention):
    """A ``SelfAttention`` with a context-parallel group for each micro-batch."""


class DynamicMLASelfAttention(DynamicGroupMixin, MLASelfAttention):
    """The same for multi-latent attention."""


class RestoredGroupMixin(torch.nn.Module):
    """Mixin for Transformer Engine's core attention: restores the static group after each call."""

    cp_group: Any
    cp_global_ranks: Any
    cp_stream: Any
    cp_comm_type: str
    set_context_parallel_group: Callable[..., None]

    def forward(
        self,
        *arguments: Any,
        packed_seq_params: Optional[PackedSeqParams] = None,
        **options: Any,
    ) -> Any:
        """Run megatron-core's forward, which takes the group from ``packed_seq_params``."""
        if packed_seq_params is None or packed_seq_params.cp_group is None:
            return super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
        self._need_stream()
        static = (self.cp_group, self.cp_global_ranks, self.cp_stream, self.cp_comm_type)
        try:
            return super().forward(*arguments, packed_seq_params=packed_seq_params, **options)
        finally:
            self.set_context_parallel_group(*static)

    def _need_stream(self) -> None:
        """Create the stream for half of the exchange, as megatron-core does for static size > 1.

        The class keeps it for all layers.
        """
        owner: Any = next(base for base in type(self).__mro__ if "cp_stream" in vars(base))
        if owner.cp_stream is None:
            owner.cp_stream = torch.cuda.Stream()


@functools.cache
def _replacements() -> dict[type, type]:
    """Return classes and their replacements; Transformer Engine's only if it is installed."""
    classes: dict[type, type] = {
        SelfAttention: DynamicSelfAttention,
        MLASelfAttention: DynamicMLASelfAttention,
        LatentCoreAttention: GatheringCoreAttention,
    }
    fused = multi_latent_attention.FusedMLASelfAttention
    classes[fused] = type("DynamicFusedMLASelfAttention", (DynamicGroupMixin, fused), {})
    from megatron.core.extensions import transformer_engine

    if transformer_engine.HAVE_TE:
        core = transformer_engine.TEDotProductAttention
        classes[core] = type("DynamicTEDotProductAttention", (RestoredGroupMixin, core), {})
    return classes


def with_dynamic_context_parallelism(spec: Any) -> Any:
    """Return a copy of a layer or block spec with this module's attention."""
    table.apply(Feature.FUSED_ROTATION)
    return replace_classes(spec, _replacements())
