# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The callbacks of ``megatron.training.pretrain``: model, datasets, batch and loss.

Models come from megatron's own builders, so every model flag keeps its meaning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import TYPE_CHECKING, Any, Optional

import torch
from megatron.core import mpu
from megatron.core.datasets.blended_megatron_dataset_builder import BlendedMegatronDatasetBuilder
from megatron.core.datasets.gpt_dataset import GPTDataset, GPTDatasetConfig, MockGPTDataset
from megatron.core.rerun_state_machine import get_rerun_state_machine
from megatron.core.utils import get_attr_wrapped_model
from megatron.training import get_args, get_tokenizer
from megatron.training.utils import get_blend_and_blend_per_split

from megatron.slipstream.context_parallel.limits import rank_limits
from megatron.slipstream.integration.cpu.cpu_modules import local_hybrid_stack_spec
from megatron.slipstream.integration.packed import (
    dynamic_batches,
    dynamic_context_parallel,
    packed_sequences,
)
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.integration.seam.specs import change_model_spec
from megatron.slipstream.options.fields import TileOptions
from megatron.slipstream.options.model import moves_in_layer_graphs

if TYPE_CHECKING:
    from megatron.slipstream.integration.record.monitor import Monitor

_BATCH_KEYS = ("tokens", "labels", "loss_mask", "attention_mask", "position_ids")


def model_config(args: Any) -> Any:
    """Return the model configuration with its builder: hybrid with a layer pattern, else GPT."""
    if args.hybrid_layer_pattern is None:
        config = compat.gpt_config(args)
    else:
        from megatron.training.argument_utils import hybrid_config_from_args

        config = hybrid_config_from_args(args)
        if args.transformer_impl == "local":
            config.hybrid_stack_spec = local_hybrid_stack_spec(config.transformer)
    if args.dynamic_context_parallel:
        change_model_spec(config, dynamic_context_parallel.with_dynamic_context_parallelism)
    if args.moe_sync_free_experts:
        from megatron.slipstream.integration.experts.sync_free_experts import with_sync_free_experts

        factor = args.moe_sync_free_capacity_factor
        change_model_spec(config, partial(with_sync_free_experts, capacity_factor=factor))
    if args.offload_engine == "slipstream" and moves_in_layer_graphs(args):
        from megatron.slipstream.integration.graphs.layers import with_graph_offloading

        change_model_spec(config, with_graph_offloading)
    tiles = TileOptions(args.loss_sequence_tiles, args.mlp_sequence_tiles)
    if tiles != TileOptions():
        from megatron.slipstream.integration.layers.tiled_model import with_tiles

        config.pre_wrap_hooks.append(partial(with_tiles, options=tiles))
    limits = rank_limits(args) if args.dynamic_context_parallel else None
    if args.cuda_graph_granularity == "chunk":
        from megatron.slipstream.integration.graphs.chunks import change_model_config

        change_model_config(config, args.cuda_graph_warmup_steps, limits)
    if args.sequence_packing is not None and args.cuda_graph_impl == "transformer_engine":
        from megatron.slipstream.integration.graphs.layers import with_packed_layer_graphs

        config.post_wrap_hooks.append(partial(with_packed_layer_graphs, limits=limits))
    return config


# Datasets


def datasets(num_samples: tuple[int, Optional[int], int], vp_stage: Optional[int] = None) -> Any:
    """Return train, validation and test sets with at least ``num_samples`` each (None: all).

    With ``sequence_packing`` a sample is a buffer of documents, else a slice of their
    concatenation. All ranks call it, since the builder synchronises them; ranks that read no data
    get None.
    """
    args = get_args()
    config = _dataset_config(args)
    if args.eval_before_training and num_samples[1] is not None:
        # Megatron does not count the evaluation that Slipstream adds.
        one_evaluation = args.eval_iters * args.eval_global_batch_size
        num_samples = (num_samples[0], num_samples[1] + one_evaluation, num_samples[2])
    if args.dynamic_context_parallel:
        return dynamic_batches.datasets(num_samples, config)
    if args.sequence_packing is not None:
        return packed_sequences.datasets(num_samples, config)
    dataset_class = MockGPTDataset if args.mock_data else GPTDataset
    # One rank of each tensor-parallel group loads batches, on both end stages.
    reads = mpu.get_tensor_model_parallel_rank() == 0 and _at_an_end(vp_stage)
    return BlendedMegatronDatasetBuilder(dataset_class, num_samples, lambda: reads, config).build()


# Megatron then calls the provider on every rank, not only on the first of a tensor-parallel group.
datasets.is_distributed = True  # type: ignore[attr-defined]


def _dataset_config(args: Any) -> GPTDatasetConfig:
    blend, blend_per_split = get_blend_and_blend_per_split(args)
    same = (
        *("split", "num_dataset_builder_threads", "mmap_bin_files"),
        *("reset_position_ids", "reset_attention_mask", "eod_mask_loss"),
    )
    return GPTDatasetConfig(
        random_seed=args.seed,
        sequence_length=args.seq_length,
        blend=blend,
        blend_per_split=blend_per_split,
        path_to_cache=args.data_cache_path,
        tokenizer=get_tokenizer(),
        create_attention_mask=args.create_attention_mask_in_dataloader,
        **{name: getattr(args, name) for name in same},
    )


def _at_an_end(vp_stage: Optional[int]) -> bool:
    first = mpu.is_pipeline_first_stage(ignore_virtual=False, vp_stage=vp_stage)
    return first or mpu.is_pipeline_last_stage(ignore_virtual=False, vp_stage=vp_stage)


# Batches


def _batch(data_iterator: Optional[Iterator[Any]], vp_stage: Optional[int]) -> dict[str, Any]:
    """Return this rank's micro-batch: int64 ``[b, s]`` tokens, labels, positions, float mask.

    Every value is None on a stage in the middle of the pipeline, which needs no data.
    """
    if not _at_an_end(vp_stage):
        return dict.fromkeys(_BATCH_KEYS)
    args = get_args()
    rows = args.micro_batch_size if torch.is_grad_enabled() else args.eval_micro_batch_size
    shape = (rows, args.seq_length)
    layout: dict[str, tuple[tuple[int, ...], torch.dtype]] = {
        "tokens": (shape, torch.int64),
        "labels": (shape, torch.int64),
        "loss_mask": (shape, torch.float32),
        "position_ids": (shape, torch.int64),
    }
    if args.create_attention_mask_in_dataloader:
        layout["attention_mask"] = ((rows, 1, args.seq_length, args.seq_length), torch.bool)
    batch = {
        **dict.fromkeys(_BATCH_KEYS),
        **packed_sequences.read_micro_batch(data_iterator, layout),
    }
    if args.context_parallel_size > 1:
        batch = compat.slice_for_context_parallel(batch, mpu.get_context_parallel_group())
    return batch


# Forward and loss


def forward_step(
    data_iterator: Optional[Iterator[Any]], model: torch.nn.Module, *, monitor: Monitor
) -> tuple[torch.Tensor, Callable[..., Any]]:
    """Run one micro-batch through one model chunk; return its output and loss function."""
    monitor.before_forward()
    args = get_args()
    forward = _forward
    if args.dynamic_context_parallel:
        forward = dynamic_batches.forward
    elif args.sequence_packing is not None:
        forward = packed_sequences.forward
    output, loss_mask = forward(data_iterator, model)
    return output, partial(_loss, loss_mask, monitor)


def _forward(
    data_iterator: Optional[Iterator[Any]], model: torch.nn.Module
) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
    batch = _batch(data_iterator, get_attr_wrapped_model(model, "vp_stage"))
    output = model(
        batch["tokens"], batch["position_ids"], batch["attention_mask"], labels=batch["labels"]
    )
    return output, batch["loss_mask"]


def _loss(
    loss_mask: Optional[torch.Tensor], monitor: Monitor, per_token_loss: torch.Tensor
) -> tuple[torch.Tensor, torch.Tensor, dict[str, torch.Tensor]]:
    """Return the loss sum over unmasked tokens, their number, and both for megatron's log."""
    assert loss_mask is not None, "only the last stage has a loss, and it has the mask"
    mask = loss_mask.reshape(-1).float()
    total = torch.sum(per_token_loss.reshape(-1).float() * mask)
    num_tokens = mask.sum().to(torch.int)
    if get_args().check_for_nan_in_loss_and_grad:
        get_rerun_state_machine().validate_result(
            result=total,
            rejection_func=torch.isnan,
            message="the loss of a micro-batch is not a number",
            tolerance=0.0,
            fatal=True,
        )
    reported = torch.stack([total.detach(), num_tokens.to(total.dtype)])
    monitor.after_loss(reported)
    return total, num_tokens, {"lm loss": reported}
