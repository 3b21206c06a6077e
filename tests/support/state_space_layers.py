# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Gated delta nets and Mamba mixers of megatron-core in small models, without their kernels.

The modules are megatron-core's own; only what their packages compute is replaced:

- In ``deterministic_mode`` megatron-core computes the gated delta rule and its convolution with
  torch, on any device. It then uses flash-linear-attention for one function, which normalizes
  queries and keys, and checks that the package is installed.
- Mamba's kernel is replaced by a function of torch that saves what the kernel saves: the input
  projection's output, the output of the scan, and parameters.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import torch
from megatron_models import use_gpu
from model_case import ModelCase
from torch.nn.functional import conv1d, silu, softplus

GATED_DELTA_NET = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
    "deterministic_mode": True,
}
"""Options of a ``TransformerConfig`` for layers ``G``."""
OF_GPT = {
    **GATED_DELTA_NET,
    "experimental_attention_variant": "gated_delta_net",
    "linear_attention_freq": 1,
}
"""Options for this attention in every layer of a GPT model."""
MAMBA = {"mamba_state_dim": 8, "mamba_head_dim": 16, "mamba_num_groups": 2}
"""Options for layers ``M``."""
LARGE = {
    **GATED_DELTA_NET,
    **{"linear_key_head_dim": 128, "linear_value_head_dim": 128},
    **{"linear_num_key_heads": 8, "linear_num_value_heads": 8},
    **MAMBA,
    "mamba_head_dim": 128,
}
"""Options for both on a GPU."""


def has_them(case: ModelCase) -> bool:
    """Whether the model has such layers."""
    if case.kind == "hybrid":
        return bool({*"GM"} & {*case.pattern})
    return "experimental_attention_variant" in case.overrides


@functools.cache
def stand_in() -> None:
    """Make this process build and run such layers, in hybrid models and in GPT models."""
    from megatron.core.models.gpt import gpt_layer_specs
    from megatron.core.ssm import gated_delta_net, mamba_context_parallel, mamba_mixer

    from megatron.slipstream.integration.cpu import cpu_modules

    # Before 0.19 a single module.
    common, gdn = (getattr(gated_delta_net, name, gated_delta_net) for name in ("common", "gdn"))
    if not use_gpu():  # In short chunks: each token of a chunk takes some operations.
        rule = gdn.torch_chunk_gated_delta_rule
        gdn.torch_chunk_gated_delta_rule = functools.partial(rule, chunk_size=8)
    common.HAVE_FLA, common.l2norm = True, _l2norm
    mamba_mixer.HAVE_MAMBA_SSM = mamba_mixer.HAVE_EINOPS = mamba_context_parallel.HAVE_EINOPS = True
    mamba_mixer.ExtendedRMSNorm = _GroupedNorm
    mamba_mixer.mamba_split_conv1d_scan_combined = _split_conv1d_scan
    mamba_mixer.rearrange = _rearrange
    mamba_mixer.assert_causal_conv1d_deterministic = lambda _: None  # of a package, from 0.20 on
    torch.backends.cudnn.deterministic = True
    build_block = gpt_layer_specs.get_gpt_decoder_block_spec
    build_stack = cpu_modules.local_hybrid_stack_spec

    def build_block_with_them(config: Any, *arguments: Any, **options: Any) -> Any:
        # megatron-core's own builder of such layers needs Transformer Engine.
        with patch.object(config, "experimental_attention_variant", None):
            block = build_block(config, *arguments, **options)
        for layer in block.layer_specs if config.experimental_attention_variant else ():
            layer.submodules.self_attention = _gated_delta_net()
            layer.submodules.input_layernorm = _provider().layer_norm(rms_norm=True)
        return block

    def build_stack_with_them(config: Any) -> Any:
        stack = build_stack(config)
        return replace(stack, submodules=replace(stack.submodules, **_local_layers()))

    gpt_layer_specs.get_gpt_decoder_block_spec = build_block_with_them
    cpu_modules.local_hybrid_stack_spec = build_stack_with_them


def _local_layers() -> dict[str, Any]:
    """Layers ``G`` and ``M`` of a hybrid model in plain PyTorch."""
    from megatron.core.fusions.fused_bias_dropout import get_bias_dropout_add
    from megatron.core.ssm.mamba_layer import MambaLayer, MambaLayerSubmodules
    from megatron.core.ssm.mamba_mixer import MambaMixer, MambaMixerSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import (
        TransformerLayer,
        TransformerLayerSubmodules,
    )

    provider = _provider()
    norm, bda = provider.layer_norm(rms_norm=True), get_bias_dropout_add
    linears = {
        "in_proj": provider.column_parallel_linear(),
        "out_proj": provider.row_parallel_linear(),
    }
    mixer = ModuleSpec(module=MambaMixer, submodules=MambaMixerSubmodules(**linears))
    attention = TransformerLayerSubmodules(
        input_layernorm=norm, self_attention=_gated_delta_net(), self_attn_bda=bda
    )
    mamba = MambaLayerSubmodules(norm=norm, mixer=mixer, mamba_bda=bda)
    return {
        "gdn_layer": ModuleSpec(module=TransformerLayer, submodules=attention),
        "mamba_layer": ModuleSpec(module=MambaLayer, submodules=mamba),
    }


def _gated_delta_net() -> Any:
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


def _rearrange(tensor: torch.Tensor, pattern: str) -> torch.Tensor:
    """Stand in for einops, for the patterns of Mamba's forward."""
    if pattern == "d 1 w -> d w":
        return tensor.squeeze(1)
    assert pattern in ("l b d -> b l d", "b l d -> l b d"), pattern
    return tensor.transpose(0, 1)


class _GroupedNorm(torch.nn.Module):
    """Norm of the scan's output, group by group."""

    def __init__(self, size: int, *, eps: float, group_size: int, **options: Any) -> None:
        super().__init__()
        where = {name: options[name] for name in ("device", "dtype")}
        self.weight = torch.nn.Parameter(torch.ones(size, **where))
        self.eps, self.group_size = eps, group_size

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        groups = x.unflatten(-1, (-1, self.group_size))
        normed = torch.nn.functional.rms_norm(groups, (self.group_size,), eps=self.eps)
        return normed.flatten(-2) * self.weight


def _split_conv1d_scan(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    parameters = (weight, bias, dt_bias, decay, options["D"])
    output: torch.Tensor = _ConvAndScan.apply(projected, *parameters, options["ngroups"])
    return output


class _ConvAndScan(torch.autograd.Function):
    """Mamba's convolution, scan and gate; backward computes the convolution and the scan again."""

    @staticmethod
    def forward(ctx: Any, projected: torch.Tensor, *parameters: Any) -> torch.Tensor:
        *parameters, ctx.num_groups = parameters
        gate, scanned = _scan(ctx.num_groups, projected, *parameters)
        ctx.save_for_backward(projected, scanned, *parameters)
        return scanned * silu(gate)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        projected, scanned, *parameters = ctx.saved_tensors
        leaves = [item.detach().requires_grad_() for item in (projected, *parameters)]
        # A kernel would save nothing in backward, so no hooks may see what this does.
        unseen = torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)
        with unseen, torch.enable_grad():
            gate, again = _scan(ctx.num_groups, *leaves)
            opened = silu(gate)
        given = (gradients[0] * opened.detach(), gradients[0] * scanned)
        return *torch.autograd.grad((again, opened), leaves, given), None


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _scan(
    num_groups: int,
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    skip: torch.Tensor,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the gate and the scan's output, each ``[b, l, heads * head size]``."""
    length, num_heads = projected.shape[1], len(decay)
    state_sizes = weight.shape[0]  # of x, and of B and C of each group
    inner = projected.shape[-1] - num_heads - state_sizes
    gate, mixed, dt = projected.split((inner, state_sizes, num_heads), dim=-1)
    padding, channels = weight.shape[-1] - 1, len(weight)
    mixed = conv1d(mixed.mT, weight.unsqueeze(1), bias, padding=padding, groups=channels)
    mixed = silu(mixed[..., :length]).mT
    x, *b_and_c = mixed.split((inner, *2 * ((channels - inner) // 2,)), dim=-1)
    x = x.unflatten(-1, (num_heads, -1))
    b, c = (
        part.unflatten(-1, (num_groups, -1)).repeat_interleave(num_heads // num_groups, dim=2)
        for part in b_and_c
    )
    dt = softplus(dt.float() + dt_bias)
    summed = (dt * decay).cumsum(1)  # [b, l, heads]
    past = torch.ones(length, length, dtype=torch.bool, device=x.device).tril()[..., None]
    between = (summed[:, :, None] - summed[:, None]).masked_fill(~past, float("-inf")).exp()
    scores = torch.einsum("blhn,bmhn->blmh", c.float(), b.float()) * between * dt[:, None]
    scanned = torch.einsum("blmh,bmhp->blhp", scores, x.float()) + skip[:, None] * x
    return gate, scanned.to(x.dtype).flatten(-2)
