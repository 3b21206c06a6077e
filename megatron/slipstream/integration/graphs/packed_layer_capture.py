# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Capture the graphs of layers with packed sequences; see ``packed_layer_graphs.py``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
from megatron.core.transformer import cuda_graphs

from megatron.slipstream import preflight
from megatron.slipstream.chunk_graphs.bank import CpSizes
from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.integration.graphs.graph_layers import open_graphs
from megatron.slipstream.integration.graphs.schedules import chunk_slots
from megatron.slipstream.rules import require

NUM_WARMUPS = 3
"""Warm-up passes before a size's first set is captured; each other set has one."""


class _Chunk(NamedTuple):
    packed: Any
    """Its ``PackedLayers``."""
    layers: Sequence[Any]
    num_sets: int

    @property
    def vp_stage(self) -> int:
        return getattr(self.packed.model, "vp_stage", None) or 0


def capture(helper: Any) -> None:
    """Capture the graphs of all layers that have run with packed sequences.

    Args:
        helper: megatron-core's ``TECudaGraphHelper``.

    Raises:
        RuntimeError: The capture failed on another rank.
        ValueError: Transformer Engine is too old.
    """
    require(preflight.check_packed_graphs(preflight.collect()))
    slots = chunk_slots(helper.config)
    chunks = [
        _Chunk(layers[0].packed, layers, num_sets)
        for layers, num_sets in zip(_of_chunks(helper), slots, strict=True)
        if layers
    ]
    start = helper._start_capturing()
    try:
        with _random_numbers_of(helper.config):
            _capture_sizes(helper.config, chunks, slots)
    except BaseException:
        helper._graphs_created = True
        helper.delete_cuda_graphs()
        cuda_graphs._set_capture_end()
        raise
    helper._graphs_created = True
    helper._finish_capturing(start)


def delete(helper: Any) -> None:
    """Assign the helper's layers all their graphs, of every size; the helper then deletes them."""
    for layers in _of_chunks(helper):
        if not layers:
            continue
        packed = layers[0].packed
        for layer, graphs in packed.all_graphs.items():
            layer.cuda_graphs = graphs
        packed.forget_graphs()


def _of_chunks(helper: Any) -> list[list[Any]]:
    """Return the layers of each model chunk that have run with packed sequences."""
    return [
        [layer for layer in layers if _is_packed(layer)] for layers in helper.callables_per_chunk
    ]


def _is_packed(layer: Any) -> bool:
    packed = getattr(layer, "packed", None)
    return packed is not None and packed.has_learned(layer)


def _capture_sizes(config: Any, chunks: Sequence[_Chunk], slots: Sequence[int]) -> None:
    """See [Note: A bank of layer graphs]."""
    engine = open_graphs(chunks[0].layers[0], slots) if chunks else None
    for chunk in chunks:
        chunk.packed.begin_capture(chunk.layers, [_new_pool() for _ in range(chunk.num_sets)])
    bank: Optional[CpSizes] = chunks[0].packed.sizes if chunks else None
    sizes = (ONE_SIZE,) if bank is None else sorted(bank.sizes, reverse=True)
    make_graphs = partial(cuda_graphs.make_graphed_callables, **_options(config))
    for size in sizes:
        with _together(bank, size):
            for chunk in chunks:
                begin_set = partial(_begin_set, chunk, engine, size)
                chunk.packed.capture_size(size, chunk.layers, begin_set, make_graphs)
    for chunk in chunks:
        chunk.packed.end_capture(chunk.layers)


def _begin_set(chunk: _Chunk, engine: Any, size: int, number: int) -> Mapping[str, Any]:
    if engine is not None:
        engine.graphs.begin_set(chunk.vp_stage, number, size)
    return {"num_warmup_iters": 1 if number else NUM_WARMUPS}


def _options(config: Any) -> dict[str, Any]:
    options: dict[str, Any] = {
        "allow_unused_input": True,
        "retain_graph_in_backward": config.cuda_graph_retain_backward_graph,
        "_reuse_graph_input_output_buffers": True,
    }
    if config.gradient_accumulation_fusion:
        # Graphs then return dummy gradients; real ones must not be shared.
        options["clone_param_grads_on_return"] = False
    return options


@contextlib.contextmanager
def _together(bank: Optional[CpSizes], size: int) -> Iterator[None]:
    """Raise on all ranks if one rank fails to capture a size."""
    if bank is None:
        yield
        return
    error: Optional[Exception] = None
    try:
        yield
    except Exception as raised:
        error = raised
    bank.agree(size, error)


def _random_numbers_of(config: Any) -> contextlib.AbstractContextManager[Any]:
    """Return the context of the capture's random state, as in megatron-core's capture."""
    return get_cuda_rng_tracker().fork() if config.sequence_parallel else contextlib.nullcontext()


def _new_pool() -> Any:
    return torch.cuda.graph_pool_handle() if torch.cuda.is_available() else None
