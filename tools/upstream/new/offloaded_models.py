# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small models, trained by Megatron's schedule on a GPU or, with shims, on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any

import torch

from megatron.slipstream.integration.cpu.cpu_only import install_cpu_shims
from megatron.slipstream.patches.patching import undo

KINDS = ("dense", "moe", "hybrid")
_DENSE = ("attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm")
_MOE = (*_DENSE, "expert_fc1", "moe_act")
MODULES = {"dense": _DENSE, "moe": _MOE, "hybrid": _MOE}
SEQ_LENGTH, VOCAB_SIZE, NUM_MICRO_BATCHES, NUM_STEPS = 16, 64, 2, 3


def build(kind: str, offload_modules: Sequence[str] = (), **options: Any) -> Any:
    """Build a model; its weights do not depend on offloading."""
    has_gpu = torch.cuda.is_available()
    initialize()
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.models.hybrid.hybrid_model import HybridModel
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from megatron.slipstream.integration.cpu.cpu_modules import local_hybrid_stack_spec

    config = _config(kind, offload_modules, has_gpu, options)
    torch.manual_seed(7)
    model_parallel_cuda_manual_seed(7, force_reset_rng=True)
    common: dict[str, Any] = {
        "config": config,
        "vocab_size": VOCAB_SIZE,
        "max_sequence_length": SEQ_LENGTH,
        "position_embedding_type": "rope",
    }
    if kind != "hybrid":
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=has_gpu)
        model = GPTModel(transformer_layer_spec=spec, **common)
    else:
        if has_gpu:
            from megatron.core.models.hybrid.hybrid_layer_specs import hybrid_stack_spec as spec
        else:
            spec = local_hybrid_stack_spec(config)
        model = HybridModel(hybrid_stack_spec=spec, hybrid_layer_pattern="*-*E", **common)
    model.model_type = 1
    return model.cuda() if has_gpu else model


def wrap(model: Any) -> Any:  # since chunks
    """Wrap a model for data parallelism, with gradients in memory that stays."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig

    options = DistributedDataParallelConfig(grad_reduce_in_fp32=True)
    return DistributedDataParallel(model.config, options, model)


def capture_layers(model: Any) -> Any:  # since graphs
    """Capture the graphs of layers, between two iterations; return what deletes them."""
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    calculator.unset_num_microbatches_calculator()
    calculator.init_num_microbatches_calculator(0, None, 2 * NUM_MICRO_BATCHES, 2, 1)
    model.zero_grad_buffer = model.zero_grad
    helper = TECudaGraphHelper([model], model.config, SEQ_LENGTH, 2)
    helper.create_cudagraphs()
    return helper


def initialize() -> None:
    """Install the shims and create the process groups, unless they are there."""
    install_cpu_shims()
    from megatron.core import parallel_state
    from megatron.core.transformer.moe.moe_logging import destroy_moe_metrics_tracker

    if not torch.distributed.is_initialized():
        name = "nccl" if torch.cuda.is_available() else "gloo"
        store = torch.distributed.HashStore()
        torch.distributed.init_process_group(name, store=store, rank=0, world_size=1)
    if not parallel_state.is_initialized():
        parallel_state.initialize_model_parallel()
    destroy_moe_metrics_tracker()


def finish() -> None:
    """Undo the shims, which would change later tests, and close the process groups."""
    from megatron.core import parallel_state

    parallel_state.destroy_model_parallel()
    torch.distributed.destroy_process_group()
    undo("a machine without a GPU")


def _config(kind: str, modules: Sequence[str], has_gpu: bool, options: dict[str, Any]) -> Any:
    from megatron.core.transformer.transformer_config import TransformerConfig

    given: dict[str, Any] = {
        "num_layers": 4,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "num_query_groups": 2,
        "gated_linear_unit": True,
        "activation_func": torch.nn.functional.silu,
        "normalization": "RMSNorm",
        "add_bias_linear": False,
        "use_cpu_initialization": not has_gpu,
        "bias_activation_fusion": False,
        "bias_dropout_fusion": False,
        "masked_softmax_fusion": False,
        "persist_layer_norm": False,
        "gradient_accumulation_fusion": False,
        "apply_rope_fusion": False,
        "attention_dropout": 0.0,
        "hidden_dropout": 0.0,
        "pipeline_dtype": torch.float32,
    }
    if kind != "dense":
        given |= {
            "num_moe_experts": 4,
            "moe_router_topk": 2,
            "moe_ffn_hidden_size": 32,
            "moe_grouped_gemm": True,
            "moe_token_dispatcher_type": "alltoall",
            "moe_aux_loss_coeff": 0.01,
            "moe_router_load_balancing_type": "aux_loss",
        }
    if modules:
        given |= {
            "fine_grained_activation_offloading": True,
            "offload_modules": list(modules),
            "min_offloaded_tensor_size": 1,
        }
    return TransformerConfig(**(given | options))


class Arguments(SimpleNamespace):  # since packed
    """Arguments of a training: those that are given; others are None."""

    def __getattr__(self, name: str) -> None:
        return None


Batches = Callable[[int], Iterator[dict[str, Any]]]
"""Makes the micro-batches of an iteration, each when the model takes it: arguments of the model by
name, and ``loss_mask`` where some labels do not count."""


def rows(step: int) -> Iterator[dict[str, Any]]:
    """Make micro-batches of two rows of random tokens."""
    draw = torch.Generator().manual_seed(step)
    for _ in range(NUM_MICRO_BATCHES):
        tokens = torch.randint(VOCAB_SIZE, (2, SEQ_LENGTH), generator=draw)
        mask = torch.ones((1, 1, SEQ_LENGTH, SEQ_LENGTH), dtype=torch.bool).triu(1)
        yield {
            "input_ids": tokens,
            "position_ids": torch.arange(SEQ_LENGTH).expand_as(tokens),
            "attention_mask": mask,
            "labels": tokens.roll(-1, dims=1),
        }


def packs(step: int) -> Iterator[dict[str, Any]]:  # since packed
    """Make micro-batches of random documents, the second with padding behind each."""
    import numpy as np

    from megatron.slipstream.packed_sequences.packing import PackLimits

    draw = np.random.RandomState(step)
    for number in range(NUM_MICRO_BATCHES):
        lengths = draw.randint(1, SEQ_LENGTH, 3)
        texts = [draw.randint(1, VOCAB_SIZE, length + 1) for length in lengths]
        yield pack(texts, PackLimits(3 * SEQ_LENGTH, 4, alignment=1 + 3 * number))


def pack(texts: Sequence[Any], limits: Any, padding: int = 0) -> dict[str, Any]:  # since packed
    """Return a micro-batch of these documents, and what token its padding is."""
    from megatron.slipstream.integration.packed.packed_sequences import packed_seq_params
    from megatron.slipstream.packed_sequences.batch import packed_sample

    sample = {name: part.unsqueeze(0) for name, part in packed_sample(texts, limits).items()}
    for name in ("tokens", "labels"):
        sample[name][sample["padding_mask"]] = padding
    offsets = (sample["cu_seqlens"][0], sample["cu_seqlens_padded"][0])
    return {
        "input_ids": sample["tokens"],
        "position_ids": sample["position_ids"],
        "attention_mask": None,
        "labels": sample["labels"],
        "loss_mask": sample["loss_mask"],
        "padding_mask": sample["padding_mask"],
        "packed_seq_params": packed_seq_params(*offsets, limits.max_tokens),
    }


def train(
    model: Any,
    num_steps: int = NUM_STEPS,
    before: Callable[[int], None] = lambda step: None,
    batches: Batches = rows,
) -> list[torch.Tensor]:
    """Return the losses and gradients of some iterations; weights do not change.

    They are float32 in numpy's memory, which does not count where a CPU's does as a device's.

    Args:
        model: The model.
        num_steps: Number of iterations.
        before: Called before each iteration with its number.
        batches: Returns the micro-batches of an iteration.
    """
    results = []
    for step in range(num_steps):
        before(step)
        if hasattr(model, "zero_grad_buffer"):
            model.zero_grad_buffer()  # A wrapped model; chunk graphs are captured here.
        model.zero_grad(set_to_none=True)
        found = _run(model, batches(step))
        gradients = (getattr(one, "main_grad", one.grad) for one in model.parameters())
        found += [gradient for gradient in gradients if gradient is not None]
        results += [torch.from_numpy(tensor.float().cpu().numpy().copy()) for tensor in found]
    return results


def same(expected: Sequence[torch.Tensor], found: Sequence[torch.Tensor]) -> bool:
    """Whether tensors are equal bit by bit."""
    return all(torch.equal(a, b) for a, b in zip(expected, found, strict=True))


def _run(model: Any, batches: Iterator[dict[str, Any]]) -> list[torch.Tensor]:
    from megatron.core.pipeline_parallel import get_forward_backward_func

    device = next(model.parameters()).device

    def forward_step(data: Iterator[dict[str, Any]], chunk: Any) -> Any:
        batch = next(data)
        batch = {n: v.to(device) if torch.is_tensor(v) else v for n, v in batch.items()}
        counts = batch.pop("loss_mask", None)
        output = chunk(**batch)

        def loss(losses: torch.Tensor) -> Any:
            losses = losses.float()
            total = losses.mean() if counts is None else (losses * counts).sum() / counts.sum()
            return total, {"loss": total.detach().clone()}

        return output, loss

    found = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches,
        model=model,
        num_microbatches=NUM_MICRO_BATCHES,
        seq_length=SEQ_LENGTH,
        micro_batch_size=2,
        forward_only=False,
    )
    return [result["loss"] for result in found]
