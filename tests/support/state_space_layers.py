# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Gated delta nets and Mamba mixers of megatron-core in small models, without their kernels.

The modules are megatron-core's own; what their packages compute is replaced by functions of torch
that save what the kernels save: see [Note: What kernels of state-space layers save] in
``estimate.layers``. Backward computes a function again from that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Optional
from unittest.mock import patch

import torch
from megatron_models import use_gpu
from model_case import ModelCase
from torch.nn.functional import conv1d, silu, softplus

from megatron.slipstream.estimate.layers import (
    RULE_CHUNK,
)

GATED_DELTA_NET = {
    "linear_key_head_dim": 32,
    "linear_value_head_dim": 32,
    "linear_num_key_heads": 4,
    "linear_num_value_heads": 4,
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
    rule = functools.partial(_gated_delta_rule, gated_delta_net.torch_chunk_gated_delta_rule)
    for module in (common, gdn):
        module.causal_conv1d, module.chunk_gated_delta_rule = _convolved, rule
    common.HAVE_FLA, common.l2norm = True, _L2Norm.apply
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


class _L2Norm(torch.autograd.Function):
    """A norm of vectors, which saves its output."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        deviation = torch.rsqrt(x.float().square().sum(-1, keepdim=True) + 1e-6)
        normed = (x * deviation).to(x.dtype)
        ctx.save_for_backward(normed, deviation)
        return normed

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> torch.Tensor:
        normed, deviation = ctx.saved_tensors
        along = (gradients[0] * normed).float().sum(-1, keepdim=True)
        return ((gradients[0] - normed * along) * deviation).to(normed.dtype)


class _Kernel(torch.autograd.Function):
    """A function of tensors that saves them and what else it gives; backward runs it again."""

    @staticmethod
    def forward(
        ctx: Any, function: Callable[..., tuple[torch.Tensor, ...]], *tensors: torch.Tensor
    ) -> torch.Tensor:
        output, *more = function(*tensors)
        ctx.function = function
        ctx.num_tensors = len(tensors)
        ctx.save_for_backward(*tensors, *more)
        return output

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        tensors = ctx.saved_tensors[: ctx.num_tensors]
        leaves = [item.detach().requires_grad_() for item in tensors]
        # A kernel would save nothing in backward, so no hooks may see what this does.
        unseen = torch.autograd.graph.saved_tensors_hooks(_unchanged, _unchanged)
        with unseen, torch.enable_grad():
            output = ctx.function(*leaves)[0]
        return None, *torch.autograd.grad(output, leaves, gradients)


def _unchanged(tensor: torch.Tensor) -> torch.Tensor:
    return tensor


def _convolved(
    x: torch.Tensor, weight: torch.Tensor, bias: None, **_: Any
) -> tuple[torch.Tensor, None]:
    """A causal convolution and SiLU of ``[b, s, channels]``."""

    def run(x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return (silu(_causal(x, weight)),)

    output: torch.Tensor = _Kernel.apply(run, x, weight)
    return output, None


def _causal(
    x: torch.Tensor, weight: torch.Tensor, bias: Optional[torch.Tensor] = None
) -> torch.Tensor:
    padding, channels = weight.shape[-1] - 1, len(weight)
    output = conv1d(x.mT, weight.unsqueeze(1), bias, padding=padding, groups=channels)
    return output[..., : x.shape[1]].mT.contiguous()


def _gated_delta_rule(
    torch_rule: Callable[..., Any], *tensors: torch.Tensor, **options: Any
) -> tuple[torch.Tensor, None]:
    """The rule for queries, keys and values of ``[b, s, heads, size]``.

    Without a GPU in short chunks: each token of a chunk takes some operations.
    """
    tensors = tensors or tuple(options[name] for name in "qkv")  # from 0.20 on
    chunk_size = RULE_CHUNK if use_gpu() else 8

    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        *vectors, decay, beta = tensors
        # By default megatron-core makes the state on the CPU, which a capture cannot copy.
        batch_size, _, num_heads, value_size = vectors[2].shape
        state = vectors[2].new_zeros(batch_size, num_heads, vectors[1].shape[-1], value_size)
        options = {"chunk_size": chunk_size, "initial_state": state}
        output = torch_rule(*vectors, g=decay, beta=beta, **options)[0]
        triangles = vectors[1].new_zeros(*beta.shape, RULE_CHUNK)
        return output, triangles

    output: torch.Tensor = _Kernel.apply(run, *tensors, options["g"], options["beta"])
    return output, None


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
        output: torch.Tensor = _Kernel.apply(self._run, x, self.weight)
        return output

    def _run(self, x: torch.Tensor, weight: torch.Tensor) -> tuple[torch.Tensor, ...]:
        groups = x.float().unflatten(-1, (-1, self.group_size))
        deviation = torch.rsqrt(groups.square().mean(-1, keepdim=True) + self.eps)
        return ((groups * deviation).flatten(-2) * weight).to(x.dtype), deviation


def _split_conv1d_scan(
    projected: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor,
    dt_bias: torch.Tensor,
    decay: torch.Tensor,
    **options: Any,
) -> torch.Tensor:
    def run(*tensors: torch.Tensor) -> tuple[torch.Tensor, ...]:
        gate, scanned = _scan(options["ngroups"], *tensors)
        return scanned * silu(gate), scanned

    tensors = (projected, weight, bias, dt_bias, decay, options["D"])
    output: torch.Tensor = _Kernel.apply(run, *tensors)
    return output


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
    mixed = silu(_causal(mixed, weight, bias))
    x, *b_and_c = mixed.split((inner, *2 * ((len(weight) - inner) // 2,)), dim=-1)
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
