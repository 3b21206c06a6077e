# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models that are trained with Transformer Engine's CUDA graphs of layers, as megatron does it."""

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
        modules: The parts; the whole layer if there are none.
        num_eager_steps: Steps before the capture.
        overrides: Further options of the ``TransformerConfig``.
    """
    graphs = {
        "cuda_graph_impl": GRAPHS,
        _graph_modules_option(): list(modules),
        "cuda_graph_warmup_steps": num_eager_steps,
    }
    return dataclasses.replace(case, overrides={**case.overrides, **graphs, **overrides})


def capture_layers(
    case: ModelCase, config: Any, chunks: Sequence[Any], num_micro_batches: int
) -> Any:
    """Capture graphs as ``megatron.training`` does after ``cuda_graph_warmup_steps`` steps.

    Args:
        case: Of :func:`with_graphs`.
        config: The chunks' ``TransformerConfig``.
        chunks: With ``zero_grad_buffer``, as distributed data parallelism has it.
        num_micro_batches: Of each step.

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
    """Give chunks without a wrapper for data parallelism what a capture needs of one.

    Returns:
        What accumulates the gradients, to be kept for as long as the chunks are trained.
    """
    for chunk in chunks:
        chunk.zero_grad_buffer = chunk.zero_grad
    with accumulators_on_side_stream():
        return [_accumulator(item) for chunk in chunks for item in chunk.parameters()]


def _accumulator(parameter: torch.nn.Parameter) -> Any:
    """The accumulator of the parameter's gradient, the same one for as long as it is kept."""
    view: Any = parameter.expand_as(parameter)
    return view.grad_fn.next_functions[0][0]


def _graph_modules_option() -> str:
    """The name of the option that says which parts of a layer are captured, up to 0.17 another."""
    from megatron.core.transformer.transformer_config import TransformerConfig

    names = {field.name for field in dataclasses.fields(TransformerConfig)}
    return "cuda_graph_modules" if "cuda_graph_modules" in names else "cuda_graph_scope"
