# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trains models with Transformer Engine's CUDA graphs of layers, as megatron does."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from garbage import give_back_unused_memory
from megatron_models import accumulators_on_side_stream
from model_case import ModelCase

GRAPHS = "transformer_engine"


def with_graphs(
    case: ModelCase, modules: Sequence[str], num_eager_steps: int, **overrides: Any
) -> ModelCase:
    """The case with parts of each layer captured.

    Args:
        case: The model.
        modules: The parts; the whole layer if empty.
        num_eager_steps: Number of steps before the capture.
        overrides: Other options of the ``TransformerConfig``.
    """
    graphs = {
        "cuda_graph_impl": GRAPHS,
        "cuda_graph_modules": list(modules),
        "cuda_graph_warmup_steps": num_eager_steps,
    }
    return dataclasses.replace(case, overrides={**case.overrides, **graphs, **overrides})


def capture_layers(
    case: ModelCase, config: Any, chunks: Sequence[Any], num_micro_batches: int
) -> Any:
    """Capture graphs as ``megatron.training`` does after ``cuda_graph_warmup_steps`` steps.

    Args:
        case: A case from :func:`with_graphs`.
        config: The chunks' ``TransformerConfig``.
        chunks: Chunks with ``zero_grad_buffer``, as in distributed data parallelism.
        num_micro_batches: Number of micro-batches of each step.

    Returns:
        megatron-core's helper, which deletes the graphs again: ``delete_cuda_graphs()``.
    """
    from megatron.core import num_microbatches_calculator as calculator
    from megatron.core.transformer.cuda_graphs import TECudaGraphHelper

    calculator.unset_num_microbatches_calculator()
    samples = num_micro_batches * case.micro_batch_size
    rank = torch.distributed.get_rank()
    calculator.init_num_microbatches_calculator(rank, None, samples, case.micro_batch_size, 1)
    helper = TECudaGraphHelper(chunks, config, case.seq_length, case.micro_batch_size)
    helper.create_cudagraphs()
    give_back_unused_memory()
    return helper


def prepare_unwrapped(chunks: Sequence[Any]) -> list[Any]:
    """Give chunks without a wrapper for data parallelism the attributes that a capture needs.

    Returns:
        The gradient accumulators, which must be kept alive as long as the chunks are trained.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer = chunk.zero_grad
    with accumulators_on_side_stream():
        return [_accumulator(item) for chunk in chunks for item in chunk.parameters()]


def _accumulator(parameter: torch.nn.Parameter) -> Any:
    """The accumulator of the parameter's gradient; the same object as long as it is alive."""
    view: Any = parameter.expand_as(parameter)
    return view.grad_fn.next_functions[0][0]
