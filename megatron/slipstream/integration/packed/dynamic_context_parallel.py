# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Layer specs whose attention uses the context-parallel group of its micro-batch."""

from __future__ import annotations

import functools
from typing import Any

import torch
from megatron.core.transformer import multi_latent_attention
from megatron.core.transformer.attention import SelfAttention
from megatron.core.transformer.multi_latent_attention import MLASelfAttention

from megatron.slipstream.integration.cpu.cpu_modules import LatentCoreAttention
from megatron.slipstream.integration.cpu.gathering_attention import GatheringCoreAttention
from megatron.slipstream.integration.packed.batch_group import restores_group, uses_batch_group
from megatron.slipstream.integration.seam.specs import replace_classes
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature


class DynamicGroupMixin(torch.nn.Module):
    """Mixin of attention with a context-parallel group for each micro-batch."""


@functools.cache
def _replacements() -> dict[type, type]:
    """Return classes and their replacements; Transformer Engine's only if it is installed."""
    fused = multi_latent_attention.FusedMLASelfAttention
    classes: dict[type, type] = {
        kind: type(
            f"Dynamic{kind.__name__}",
            (DynamicGroupMixin, kind),
            {"forward": uses_batch_group(kind.forward)},
        )
        for kind in (SelfAttention, MLASelfAttention, fused)
    }
    classes[LatentCoreAttention] = GatheringCoreAttention
    from megatron.core.extensions import transformer_engine

    if transformer_engine.HAVE_TE:
        core = transformer_engine.TEDotProductAttention
        name, forward = "DynamicTEDotProductAttention", restores_group(core.forward)
        classes[core] = type(name, (core,), {"forward": forward})
    return classes


def with_dynamic_context_parallelism(spec: Any) -> Any:
    """Return a copy of a layer or block spec with this module's attention."""
    table.apply(Feature.FUSED_ROTATION)
    return replace_classes(spec, _replacements())
