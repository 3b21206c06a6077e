# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Plain PyTorch versions of modules that megatron-core has only on top of Transformer Engine.

megatron-core marks the experts' groups (``expert_fc1``, ``moe_act``) only in its grouped
implementation, whose linear layers come from Transformer Engine. Its own core attention has no
support for multi-latent attention's head sizes, packed sequences or context parallelism.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Optional

import torch
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, TEGroupedMLP

from megatron.slipstream.patches.releases import is_since


class PlainGroupedLinear(torch.nn.Module):
    """One linear layer per local expert, applied to consecutive runs of tokens.

    Weights are named ``weight0``, ``weight1``, ... as Transformer Engine names them, each
    ``[out_features, in_features]``. It is a ``ValueError`` to shard them among ranks.
    """

    def __init__(
        self,
        num_local_experts: int,
        in_features: int,
        out_features: int,
        /,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        bias: bool,
        skip_bias_add: bool,
        pg_collection: Optional[Any] = None,
        **_: Any,
    ) -> None:
        super().__init__()
        if pg_collection is not None and pg_collection.expt_tp.size() > 1:
            raise ValueError(
                f"expert_tensor_parallel_size={pg_collection.expt_tp.size()} is not supported with "
                "grouped experts on a CPU because they are not divided; set "
                "expert_tensor_parallel_size=1"
            )
        self.num_local_experts = num_local_experts
        self.skip_bias_add = skip_bias_add
        self.save_original_input = True  # Required by megatron-core to offload expert_fc1.
        for index in range(num_local_experts):
            weight = torch.empty(out_features, in_features, dtype=config.params_dtype)
            init_method(weight)
            self._add(f"weight{index}", weight)
            if bias:
                self._add(f"bias{index}", torch.zeros(out_features, dtype=config.params_dtype))
        self.use_bias = bias

    def _add(self, name: str, value: torch.Tensor) -> None:
        parameter = torch.nn.Parameter(value)
        # Reduce expert gradients over the expert-data-parallel group, not the data-parallel one.
        parameter.allreduce = False  # type: ignore[attr-defined]
        self.register_parameter(name, parameter)

    def forward(
        self, tokens: torch.Tensor, tokens_per_expert: Sequence[int], /
    ) -> tuple[torch.Tensor, Optional[list[torch.Tensor]]]:
        """Apply each expert to its tokens.

        ``tokens`` ``[num_tokens, in_features]`` are sorted by expert. Returns ``[num_tokens,
        out_features]``, and the biases if the caller adds them.
        """
        runs = tokens.split(list(tokens_per_expert))
        outputs = [
            torch.nn.functional.linear(
                run,
                getattr(self, f"weight{index}"),
                getattr(self, f"bias{index}") if self.use_bias and not self.skip_bias_add else None,
            )
            for index, run in enumerate(runs)
        ]
        biases = None
        if self.use_bias and self.skip_bias_add:
            biases = [getattr(self, f"bias{index}") for index in range(self.num_local_experts)]
        return torch.cat(outputs), biases

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed here."""


def grouped_experts_without_transformer_engine(original: Any) -> Any:
    """Make ``LocalSpecProvider.grouped_mlp_modules`` honour ``moe_grouped_gemm``."""

    def grouped_mlp_modules(self: Any, moe_use_grouped_gemm: bool) -> Any:
        if not moe_use_grouped_gemm:
            return original(self, moe_use_grouped_gemm)
        submodules = GroupedMLPSubmodules(PlainGroupedLinear, PlainGroupedLinear)
        return partial(TEGroupedMLP, submodules=submodules)

    return grouped_mlp_modules


class LatentCoreAttention(DotProductAttention):
    """Core attention for packed sequences, and for values with another head size than the keys."""

    def __init__(
        self, *arguments: Any, k_channels: Any = None, v_channels: Any = None, **options: Any
    ) -> None:
        """Ignore the head sizes of multi-latent attention: the tensors have them."""
        super().__init__(*arguments, **options)

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: Optional[torch.Tensor],
        *arguments: Any,
        packed_seq_params: Optional[Any] = None,
        **options: Any,
    ) -> torch.Tensor:
        """Compute causal attention within each packed sequence; megatron-core's without packing.

        ``query``, ``key`` and ``value`` are ``[s, b, heads, head size]``, packed ``[t, heads, head
        size]``, the last two with query groups in place of heads. Returns ``[s, b, hidden size]``;
        packed ``[t, hidden size]``, 0 for tokens in no sequence.
        """
        # From the values: multi-latent attention gives those of packed sequences more channels.
        hidden_size = self.num_attention_heads_per_partition * value.shape[-1]
        self.hidden_size_per_partition = hidden_size
        if packed_seq_params is None:
            return super().forward(query, key, value, attention_mask, *arguments, **options)
        output = query.new_zeros(query.shape[0], hidden_size)
        for begin, length in sequence_places(packed_seq_params):
            here = slice(begin, begin + length)
            mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
            one = (tensor[here].unsqueeze(1) for tensor in (query, key, value))
            output[here] = super().forward(*one, mask, *arguments, **options).squeeze(1)
        return output


def sequence_places(packed_seq_params: Any) -> list[tuple[int, int]]:
    """Return the first token and length of each non-empty sequence of a ``PackedSeqParams``."""
    lengths = packed_seq_params.cu_seqlens_q.diff()
    begins = packed_seq_params.cu_seqlens_q_padded[:-1]
    places = zip(begins.tolist(), lengths.tolist(), strict=True)
    return [(begin, length) for begin, length in places if length]


def core_attention_with_head_sizes(_: Any) -> Any:
    """Make ``LocalSpecProvider.core_attention`` support multi-latent attention, too."""
    return lambda self: LatentCoreAttention


def local_hybrid_stack_spec(config: Any) -> Any:
    """Return a ``HybridModel``'s layers in plain PyTorch.

    They are ``*`` attention, ``+`` multi-latent attention, ``-`` MLP and ``E`` MoE, and what
    predicts further tokens with such layers (after ``/``). State-space layers (``M`` and ``G``)
    are left out: their kernels exist for GPUs only.
    """
    from megatron.core.models.backends import LocalSpecProvider
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_submodules
    from megatron.core.models.hybrid.hybrid_block import HybridStack, HybridStackSubmodules
    from megatron.core.ssm.mlp_layer import MLPLayer
    from megatron.core.transformer.identity_op import IdentityFuncOp, IdentityOp
    from megatron.core.transformer.multi_token_prediction import (
        MultiTokenPredictionBlock,
        MultiTokenPredictionBlockSubmodules,
        get_mtp_layer_spec_for_backend,
    )
    from megatron.core.transformer.spec_utils import ModuleSpec
    from megatron.core.transformer.transformer_layer import MoETransformerLayer, TransformerLayer

    def submodules(num_experts: Optional[int] = None, is_latent: bool = False) -> Any:
        return get_gpt_layer_local_submodules(
            num_experts=num_experts,
            multi_latent_attention=is_latent,
            moe_grouped_gemm=config.moe_grouped_gemm,
            normalization=config.normalization,
        )

    def without_attention(layer: Any) -> Any:
        norm = LocalSpecProvider().layer_norm(rms_norm=config.normalization == "RMSNorm")
        return replace(
            layer,
            input_layernorm=IdentityOp,
            self_attention=IdentityOp,
            self_attn_bda=IdentityFuncOp,
            pre_mlp_layernorm=norm,
        )

    def attention(is_latent: bool) -> Any:
        layer = submodules(is_latent=is_latent)
        layer = replace(layer, pre_mlp_layernorm=IdentityOp, mlp=IdentityOp, mlp_bda=IdentityFuncOp)
        return ModuleSpec(module=TransformerLayer, submodules=layer)

    more: dict[str, Any] = {}
    if config.num_moe_experts:
        layer = without_attention(submodules(config.num_moe_experts))
        more["moe_layer"] = ModuleSpec(module=MoETransformerLayer, submodules=layer)
    if is_since("0.19"):
        more["mla_layer"] = attention(is_latent=True)
    return ModuleSpec(
        module=HybridStack,
        params={"post_layer_norm": True},
        submodules=HybridStackSubmodules(
            attention_layer=attention(is_latent=False),
            mlp_layer=ModuleSpec(module=MLPLayer, submodules=without_attention(submodules())),
            # Norms and projections; megatron-core builds the layers between from the others here.
            mtp_block_spec=ModuleSpec(
                module=MultiTokenPredictionBlock,
                submodules=MultiTokenPredictionBlockSubmodules(
                    layer_specs=[get_mtp_layer_spec_for_backend(None, LocalSpecProvider())]
                ),
            ),
            **more,
        ),
    )
