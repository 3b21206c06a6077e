# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Gated delta net attention of megatron-core 0.19 in small models, without its kernels' package.

In ``deterministic_mode`` megatron-core computes the delta rule and the convolution with torch, on
any device. It then uses the package (flash-linear-attention) for one function, which normalizes
queries and keys, and checks that the package is installed.
"""

from __future__ import annotations

import functools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import torch
from megatron_models import use_gpu

OPTIONS = {
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 1,
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "deterministic_mode": True,
}
"""Options of a ``TransformerConfig``."""


@contextmanager
def gated_delta_net() -> Iterator[None]:
    """Context in which GPT models are built with this attention in every layer."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm.gated_delta_net import common, gdn

    # Without a GPU in short chunks: each token of a chunk takes some operations.
    rule = gdn.torch_chunk_gated_delta_rule
    rule = rule if use_gpu() else functools.partial(rule, chunk_size=8)
    build = gpt_layer_specs.get_gpt_decoder_block_spec

    def build_spec(config: Any, *arguments: Any, **options: Any) -> Any:
        # megatron-core's own builder of such layers needs Transformer Engine.
        with patch.object(config, "experimental_attention_variant", None):
            block = build(config, *arguments, **options)
        for layer in block.layer_specs:
            layer.submodules.self_attention = _attention()
            layer.submodules.input_layernorm = _provider().layer_norm(rms_norm=True)
        return block

    with (
        patch.object(gpt_layer_specs, "get_gpt_decoder_block_spec", build_spec),
        patch.object(common, "HAVE_FLA", True),
        patch.object(gdn, "torch_chunk_gated_delta_rule", rule),
        patch.object(common, "l2norm", _l2norm),
        torch.backends.cudnn.flags(deterministic=True),
    ):
        yield


def _attention() -> Any:
    from megatron.core.ssm.gated_delta_net import GatedDeltaNet, GatedDeltaNetSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec

    provider = _provider()
    return ModuleSpec(
        module=GatedDeltaNet,
        submodules=GatedDeltaNetSubmodules(
            in_proj=provider.column_parallel_linear(),
            out_norm=provider.layer_norm(rms_norm=True),
            out_proj=provider.row_parallel_linear(),
        ),
    )


def _provider() -> Any:
    if use_gpu():
        from megatron.core.extensions.transformer_engine_spec_provider import TESpecProvider

        return TESpecProvider()
    from megatron.core.models.backends import LocalSpecProvider

    return LocalSpecProvider()


def _l2norm(x: torch.Tensor, eps: float = 1e-6, **_: Any) -> torch.Tensor:
    return x * torch.rsqrt(x.square().sum(-1, keepdim=True) + eps)
