# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models of megatron-core under its own schedules, on CPU or GPU: for benchmarks and for tests.

On a GPU they are built of Transformer Engine's modules, on a CPU of megatron-core's local ones with
Slipstream's CPU shims.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any, Optional

import numpy as np
import torch
from model_case import ModelCase

from megatron.slipstream.context_parallel.documents import shared_sample
from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.context_parallel.scheduler import Share
from megatron.slipstream.options.fields import TileOptions
from megatron.slipstream.packed_sequences.batch import for_context_parallel_rank, packed_sample
from megatron.slipstream.packed_sequences.packing import PackLimits
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature
from tools.shared_gpus import take_place

MAX_SEQUENCES = 64
"""Maximum number of documents in a pack."""
MAX_DIVIDED_SEQUENCES = 6
"""The same where context-parallel ranks share it: for more, cuDNN finds no workspace for its
deterministic backward pass."""
SIGMA_LOG_LENGTH, SEQ_LENGTH_PER_MEDIAN = 1.0, 16.7
"""Lengths of packed documents: log-normal, with a median of 245 tokens in a pack of 4096."""


def use_gpu() -> bool:
    """Whether the models run on a GPU with Transformer Engine."""
    return torch.cuda.is_available()


def initialize(
    case: ModelCase,
    rank: int = 0,
    world_size: int = 1,
    port: int = 0,
    context_parallel_size: Optional[int] = None,
) -> None:
    """Process groups and random generators for ``case``; the CPU shims where there is no GPU.

    Args:
        case: The model.
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous; 0 for a single rank.
        context_parallel_size: Replaces the case's own.
    """
    import state_space_layers
    from megatron.core import parallel_state

    if not use_gpu():
        from megatron.slipstream.integration.cpu.cpu_only import install_cpu_shims

        install_cpu_shims()
        torch.set_num_threads(1)
    else:
        torch.cuda.set_device(take_place(rank, world_size))
    if not torch.distributed.is_initialized():
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        torch.distributed.init_process_group(
            "nccl" if use_gpu() else "gloo",
            init_method=f"tcp://127.0.0.1:{port}" if port else None,
            store=None if port else torch.distributed.HashStore(),
            rank=rank,
            world_size=world_size,
        )
    if state_space_layers.has_them(case):
        state_space_layers.stand_in()
    # Whichever engine, so that all have the right gradients and train at all.
    table.apply(Feature.FUSED_ROTATION, Feature.EXPERT_METRICS)
    if case.is_packed:
        table.apply(Feature.PADDED_ROUTING)
    parallel_state.destroy_model_parallel()
    _close_groups()
    forget_expert_metrics()
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=case.tp,
        pipeline_model_parallel_size=case.pp,
        virtual_pipeline_model_parallel_size=case.vpp,
        context_parallel_size=context_parallel_size or case.cp,
        expert_model_parallel_size=case.ep,
        expert_tensor_parallel_size=1,
    )
    _seed(case, 123)


def forget_expert_metrics() -> None:
    """Reset the statistics of experts and further tokens, for a model of another depth.

    megatron-core keeps them in one table per process, sized for the layers of the first model.
    """
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker
    from megatron.core.transformer.multi_token_prediction import MTPLossLoggingHelper

    destroy_moe_metrics_tracker()
    MTPLossLoggingHelper.tracker = {}


def _close_groups() -> None:
    """Destroy the process groups of an earlier case, which megatron-core drops but torch keeps.

    With gloo each has threads and sockets: after twenty cases a rank has two thousand of each, and
    every collective takes ten times as long. With NCCL each case's keep about 400 MiB of the GPU.
    """
    if use_gpu() and _has_cuda_graphs():
        return  # their collectives use the groups
    # torch has no public list of its groups.
    for group in list(torch.distributed.distributed_c10d._world.pg_map):
        if group is not torch.distributed.group.WORLD:
            torch.distributed.destroy_process_group(group)


def _has_cuda_graphs() -> bool:
    gc.unfreeze()  # Frozen objects, which an earlier file may have left, are not listed.
    gc.collect()
    return any(type(value) is torch.cuda.CUDAGraph for value in gc.get_objects())


def _seed(case: ModelCase, seed: int) -> None:
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    # Transformer Engine's modules keep the tracker that exists when they are built.
    is_graphed = case.overrides.get("cuda_graph_impl") == "transformer_engine"
    uses_te = use_gpu() and (case.te_rng_tracker or is_graphed)
    model_parallel_cuda_manual_seed(seed, te_rng_tracker=uses_te, force_reset_rng=True)


def make_config(case: ModelCase, offload_modules: Sequence[str] = (), **offload: Any) -> Any:
    """The ``TransformerConfig`` of a case, offloading ``offload_modules``."""
    from megatron.core.transformer.transformer_config import (
        MLATransformerConfig,
        TransformerConfig,
    )

    options: dict[str, Any] = {
        "num_layers": case.num_layers,
        "hidden_size": case.hidden_size,
        "num_attention_heads": case.num_attention_heads,
        "ffn_hidden_size": 3 * case.hidden_size,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "use_cpu_initialization": not use_gpu(),
        "bias_activation_fusion": use_gpu(),
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "bf16": case.bf16,
        "params_dtype": torch.bfloat16 if case.bf16 else torch.float32,
        "pipeline_dtype": torch.bfloat16 if case.bf16 else torch.float32,
        "tensor_model_parallel_size": case.tp,
        "pipeline_model_parallel_size": case.pp,
        "virtual_pipeline_model_parallel_size": case.vpp,
        "expert_model_parallel_size": case.ep,
        "context_parallel_size": case.cp,
        "expert_tensor_parallel_size": 1,
        # Two sends between the same pair of ranks in one batch would be mixed up.
        "overlap_p2p_comm": case.vpp is not None,
        "batch_p2p_comm": case.vpp is None,
        "deallocate_pipeline_outputs": True,
    }
    if use_gpu():
        from megatron.core.transformer.enums import AttnBackend

        for name in ("FLASH", "FUSED", "UNFUSED"):
            os.environ.pop(f"NVTE_{name}_ATTN", None)  # left by a model with another backend

        options["attention_backend"] = AttnBackend.fused
    if case.has_experts:
        options |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": case.hidden_size,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 0.01,
            "moe_router_load_balancing_type": "aux_loss",
        }
    if case.kind == "hybrid":
        options["is_hybrid_model"] = True  # Weights are scaled by its layers, which are half.
        if case.has_experts:
            # megatron-core's check of the part "mlp" of graphs reads it, whatever the pattern.
            options["moe_layer_freq"] = 2
    if case.kind == "mixed":
        options["moe_layer_freq"] = [layer % 2 for layer in range(case.num_layers)]
    has_latent_attention = case.kind == "mla" or (case.kind == "hybrid" and "+" in case.pattern)
    if has_latent_attention:
        options |= {
            "multi_latent_attention": True,
            "q_lora_rank": case.hidden_size // 2,
            "kv_lora_rank": case.hidden_size // 4,
            "qk_head_dim": 16,
            "qk_pos_emb_head_dim": 8,
            "v_head_dim": 16,
            "rope_type": "rope",
        }
    else:
        options["num_query_groups"] = case.num_attention_heads // 2
    if offload_modules:
        options |= {
            "fine_grained_activation_offloading": True,
            "offload_modules": list(offload_modules),
            "min_offloaded_tensor_size": 1,
            **offload,
        }
    config_class: Any = MLATransformerConfig if has_latent_attention else TransformerConfig
    return config_class(**(options | case.overrides))


def build_chunks(case: ModelCase, config: Any, seed: int = 7) -> list[torch.nn.Module]:
    """This rank's model chunks; a case's weights do not depend on offloading."""
    torch.manual_seed(seed)
    _seed(case, seed)
    chunks: list[torch.nn.Module] = []
    for stage in range(case.vpp or 1):
        vp_stage = stage if case.vpp else None
        model = _build_model(case, config, vp_stage)
        if case.bf16:
            model = model.bfloat16()
        model.model_type = 1
        chunks.append(model.cuda() if use_gpu() else model)
    if case.is_packed and config.cuda_graph_impl == "transformer_engine":
        from megatron.slipstream.integration.graphs.layers import take_packed_sequences

        take_packed_sequences(chunks)
    tiles = TileOptions(case.loss_sequence_tiles, case.mlp_sequence_tiles)
    if tiles != TileOptions():
        from megatron.slipstream.integration.layers.tiled_model import with_tiles

        with_tiles(chunks, tiles)
    return chunks


def _build_model(case: ModelCase, config: Any, vp_stage: Optional[int]) -> torch.nn.Module:
    from megatron.core import parallel_state as ps
    from megatron.core.models.gpt import GPTModel

    common: dict[str, Any] = {
        "config": config,
        "vocab_size": case.vocab_size,
        "max_sequence_length": case.seq_length,
        "pre_process": ps.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage),
        "post_process": ps.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage),
        "share_embeddings_and_output_weights": case.is_tied,
        "position_embedding_type": "rope",
        "vp_stage": vp_stage,
    }
    spec = layer_spec(case, config, vp_stage)
    if case.has_own_norms and use_gpu():
        _separate_norms(spec)
    if case.sync_free_experts:
        from megatron.slipstream.integration.experts.sync_free_experts import with_sync_free_experts

        spec = with_sync_free_experts(spec, case.sync_free_capacity_factor)
    if config.cuda_graph_impl == "transformer_engine" and not case.keeps_layers:
        from megatron.slipstream.integration.graphs.layers import with_graph_offloading

        spec = with_graph_offloading(spec)
    if case.kind == "hybrid":
        from megatron.core.models.hybrid.hybrid_model import HybridModel

        pattern = case.hybrid_layer_pattern
        return HybridModel(hybrid_stack_spec=spec, hybrid_layer_pattern=pattern, **common)
    if config.mtp_num_layers:
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_mtp_block_spec

        common["mtp_block_spec"] = get_gpt_mtp_block_spec(
            config, spec, use_transformer_engine=use_gpu(), vp_stage=vp_stage
        )
    return GPTModel(transformer_layer_spec=spec, **common)


def layer_spec(case: ModelCase, config: Any, vp_stage: Optional[int]) -> Any:
    """Megatron-core's spec of a case's decoder."""
    if case.kind != "hybrid":
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        return get_gpt_decoder_block_spec(
            config, use_transformer_engine=use_gpu(), vp_stage=vp_stage
        )
    if use_gpu():
        from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec

        return hybrid_stack_spec
    from megatron.slipstream.integration.cpu.cpu_modules import local_hybrid_stack_spec

    return local_hybrid_stack_spec(config)


def _separate_norms(block_spec: Any) -> None:
    """Give the dense layers of a spec for Transformer Engine separate norms."""
    from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TENorm

    for layer in block_spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = TENorm
        parts.self_attention.submodules.linear_qkv = TEColumnParallelLinear
        mlp = getattr(parts.mlp, "keywords", None) or vars(parts.mlp)  # a partial function in 0.19
        mlp["submodules"].linear_fc1 = TEColumnParallelLinear


def wrap(config: Any, chunks: Sequence[torch.nn.Module], **options: Any) -> list[torch.nn.Module]:
    """Wrap chunks for data parallelism as ``megatron.training`` does, with FP32 gradients.

    Args:
        config: The chunks' ``TransformerConfig``.
        chunks: Chunks from :func:`build_chunks`.
        options: Other options of ``DistributedDataParallelConfig``.
    """
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    ddp_config = DistributedDataParallelConfig(grad_reduce_in_fp32=True, **options)
    with accumulators_on_side_stream():
        return [DistributedDataParallel(config, ddp_config, chunk) for chunk in chunks]


@contextlib.contextmanager
def accumulators_on_side_stream() -> Iterator[None]:
    """Context in which gradient accumulation nodes that are kept alive belong to a side stream.

    Autograd runs such a node on the stream on which it was created. If it was created on the
    default stream, as by an eager step of a model that keeps its last output (megatron-core's token
    dispatcher does), it could not be part of a CUDA graph.
    """
    if not use_gpu():
        yield
        return
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        yield
    torch.cuda.current_stream().wait_stream(side)


def micro_batches(
    case: ModelCase, step: int, count: int, dp_rank: int = 0
) -> Iterator[dict[str, torch.Tensor]]:
    """``count`` micro-batches of ``step``: int64 ``[b, s]`` tokens, labels and positions.

    For a packed case ``[1, s]``, with the other tensors of :func:`packed_sample`.

    Args:
        case: The model.
        step: Number of the step; each step has its own data.
        count: Number of micro-batches.
        dp_rank: Data-parallel rank; each rank has its own data.
    """
    seed = 1000 * step + 17 + 1_000_000 * dp_rank
    device = "cuda" if use_gpu() else "cpu"
    if case.is_packed:
        limits = PackLimits(
            max_tokens=case.seq_length * case.cp,
            max_sequences=MAX_SEQUENCES if case.cp == 1 else MAX_DIVIDED_SEQUENCES,
            alignment=2 * case.cp if case.cp > 1 else 1,
        )
        draw = np.random.default_rng(seed)
        for _ in range(count):
            sample = packed_sample(_documents(draw, limits, case.vocab_size), limits)
            batch = {key: tensor.unsqueeze(0) for key, tensor in sample.items()}
            if case.cp > 1:
                from megatron.core import parallel_state

                rank = parallel_state.get_context_parallel_rank()
                batch = for_context_parallel_rank(batch, case.cp, rank)
            yield {key: tensor.to(device) for key, tensor in batch.items()}
        return
    generator = torch.Generator().manual_seed(seed)
    shape = (case.micro_batch_size, case.seq_length)
    for _ in range(count):
        tokens = torch.randint(case.vocab_size, shape, generator=generator)
        yield {
            "tokens": tokens.to(device),
            "labels": tokens.roll(-1, dims=1).to(device),
            "position_ids": torch.arange(case.seq_length).expand(shape).to(device),
        }


def _documents(draw: np.random.Generator, limits: PackLimits, vocab_size: int) -> list[Any]:
    """Documents for one pack, each with a last label: one or more, until one does not fit."""
    documents: list[Any] = []
    num_tokens = 0
    mean_log_length = math.log(limits.max_tokens / SEQ_LENGTH_PER_MEDIAN)
    while len(documents) < limits.max_sequences:
        length = min(int(draw.lognormal(mean_log_length, SIGMA_LOG_LENGTH)) + 1, limits.max_tokens)
        padded = -(-length // limits.alignment) * limits.alignment
        if num_tokens + padded > limits.max_tokens:
            break
        documents.append(draw.integers(vocab_size, size=length + 1))
        num_tokens += padded
    return documents


@functools.cache
def _causal_mask(seq_length: int) -> torch.Tensor:
    mask = torch.ones(1, 1, seq_length, seq_length, dtype=torch.bool).triu(1)
    return mask


def run_schedule(
    case: ModelCase,
    chunks: Sequence[torch.nn.Module],
    batches: Sequence[dict[str, torch.Tensor]],
    forward_only: bool = False,
) -> list[torch.Tensor]:
    """Call megatron-core's schedule once on these micro-batches.

    Returns:
        Their losses on the last pipeline stage; an empty list on the others.
    """
    from megatron.core.pipeline_parallel import get_forward_backward_func

    def forward_step(data: Iterator[dict[str, torch.Tensor]], model: Any) -> Any:
        batch = next(data)
        mask = None if use_gpu() or case.is_packed else _causal_mask(case.seq_length)
        output = model(
            batch["tokens"],
            batch["position_ids"],
            mask,
            labels=batch["labels"],
            **_packing_of(case, batch),
        )

        def loss(losses: torch.Tensor) -> Any:
            counts = batch.get("loss_mask")
            if counts is None:
                total = losses.float().mean()
            else:
                total = (losses.float() * counts).sum() / counts.sum()
            return total, {"loss": total.detach().clone()}

        return output, loss

    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=[iter(batches) for _ in chunks] if case.vpp else iter(batches),
        model=list(chunks) if case.vpp else chunks[0],
        num_microbatches=len(batches),
        seq_length=case.seq_length,
        micro_batch_size=case.micro_batch_size,
        forward_only=forward_only,
    )
    return [result["loss"] for result in results]


def _packing_of(case: ModelCase, batch: dict[str, torch.Tensor]) -> dict[str, Any]:
    """The arguments of a model for a packed micro-batch."""
    if not case.is_packed:
        return {}
    from megatron.slipstream.integration.packed.packed_sequences import packed_seq_params

    cu_seqlens, padded = batch["cu_seqlens"][0], batch["cu_seqlens_padded"][0]
    params = packed_seq_params(cu_seqlens, padded, case.seq_length * case.cp)
    more: dict[str, Any] = {"packed_seq_params": params}
    if case.has_experts:
        more["padding_mask"] = batch["padding_mask"]
    return more


def shared_inputs(
    texts: Sequence[Any], share: Share, limits: RankLimits, group: Optional[Any]
) -> tuple[dict[str, Any], torch.Tensor]:
    """The arguments of a rank's model for its part of a micro-batch, and the mask of its labels.

    Args:
        texts: The tokens of each document of the pack.
        share: The rank's part.
        limits: Limits of the ranks.
        group: Process group passed to the model; None for the static one.
    """
    from megatron.slipstream.integration.packed.packed_sequences import packed_seq_params

    held = limits.of(share.size)
    device = "cuda" if use_gpu() else "cpu"
    sample = {
        key: tensor.unsqueeze(0).to(device)
        for key, tensor in shared_sample(list(texts), share, held).items()
    }
    params = packed_seq_params(
        sample["cu_seqlens"][0], sample["cu_seqlens_padded"][0], held.max_tokens
    )
    params.cp_group = group
    inputs = {
        "input_ids": sample["tokens"],
        "position_ids": sample["position_ids"],
        "attention_mask": None,
        "labels": sample["labels"],
        "packed_seq_params": params,
    }
    return inputs, sample["loss_mask"]
