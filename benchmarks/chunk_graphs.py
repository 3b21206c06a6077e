# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares steps that launch kernels one by one, by a graph per layer, or by one graph for all.

Each way has its own weights and gradients. Without a GPU graphs are imitated.

- ``eager``: one by one.
- ``stock``: likewise, with megatron-core's experts, if the model has sync-free ones.
- ``layer``: a CUDA graph for each layer, or for its captured parts (Transformer Engine's graphs;
  with packed sequences, Slipstream makes megatron-core capture them).
- ``chunk``: one CUDA graph for all layers (Slipstream's chunk graphs).
- ``chunk+offload``: likewise, with the variant's modules offloaded inside the graph.
"""

from __future__ import annotations

import dataclasses
import functools
import gc
import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from captured_layers import capture_layers, with_graphs
from megatron_models import build_chunks, make_config, micro_batches, run_schedule, use_gpu, wrap

from benchmarks.case import Case, Variant
from benchmarks.engines import NUM_DATA, SIZE_LIMIT, behind_the_seam, make_slipstream
from benchmarks.measure import HeldMemory
from benchmarks.ways import Way

NUM_EAGER_ITERATIONS = 3


class ChunkWay(Way):
    """A model that is trained in one of the ways.

    Args:
        label: See above.
        case: The model.
        data: Micro-batches of each iteration.
        modules: Modules to offload, if any.
        options: Options of ``OffloadConfig``.
    """

    num_eager_iterations = NUM_EAGER_ITERATIONS
    ends_process = True

    def __init__(
        self,
        label: str,
        case: Case,
        data: Sequence[Sequence[Any]],
        modules: Sequence[str],
        options: Mapping[str, Any],
    ) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        model_parallel_cuda_manual_seed(1, te_rng_tracker=use_gpu(), force_reset_rng=True)
        self.label = label
        self._before = HeldMemory.now()
        self._held: dict[str, int] = {}
        self._data, self._num_micro_batches = data, case.num_micro_batches
        self._model = case.model
        if label == "stock":
            self._model = dataclasses.replace(self._model, sync_free_experts=False)
        if label == "layer":
            assert case.captured is not None
            self._model = with_graphs(self._model, case.captured, NUM_EAGER_ITERATIONS)
        moves = label == "chunk+offload"
        self.manager = make_slipstream(options) if moves else None
        offload = {**SIZE_LIMIT, **case.offload}
        self._config = make_config(self._model, modules if moves else (), **offload)
        self._chunks: list[Any] = wrap(self._config, build_chunks(self._model, self._config))
        self._graphs: Any = None
        self._layer_graphs: Any = None
        if label.startswith("chunk"):
            from megatron.slipstream.integration.graphs.chunks import replay_chunks

            with behind_the_seam(self.manager):
                (self._graphs,) = replay_chunks(self._chunks, NUM_EAGER_ITERATIONS)
        self._forward_us: list[float] = []
        """Host time of each forward pass through the layers."""
        self._time_forward()

    def _time_forward(self) -> None:
        from megatron.core.utils import get_attr_wrapped_model

        block: Any = get_attr_wrapped_model(self._chunks[0], "decoder")
        forward = block.forward

        @functools.wraps(forward)
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            output = forward(*arguments, **options)
            self._forward_us.append(1e6 * (time.perf_counter() - begin))
            return output

        block.forward = timed

    def run(self, iteration: int) -> list[torch.Tensor]:
        """See :meth:`Way.run`."""
        for chunk in self._chunks:
            chunk.zero_grad_buffer()
        data = self._data[iteration % NUM_DATA]
        with behind_the_seam(self.manager):
            return run_schedule(self._model, self._chunks, data)

    def capture(self) -> None:
        """Capture layers, as ``megatron.training`` does after the eager iterations."""
        if self.label == "layer":
            self._layer_graphs = capture_layers(
                self._model, self._config, self._chunks, self._num_micro_batches
            )

    def on_ready(self) -> None:
        """See :meth:`Way.on_ready`."""
        self._held = HeldMemory.now().fields_since(self._before)
        self._forward_us.clear()

    def fields(self) -> dict[str, Any]:
        """Return memory, host time of a forward pass through all layers, and a slot's figures."""
        row: dict[str, Any] = {**self._held, "forward_us": statistics.median(self._forward_us)}
        if self._graphs is not None:
            (graphs,) = self._graphs.of_size.values()
            row["slot"] = dataclasses.asdict(graphs.figures)
            row["notes"] = [graphs.figures.render()]
            offloading = graphs.chunk.offloading
            if offloading is not None:
                row["moved_bytes"] = offloading.moved_bytes * len(self._data[0])
        return row

    def close(self) -> None:
        """Delete the graphs."""
        if self._layer_graphs is not None:
            self._layer_graphs.delete_cuda_graphs()
        if self._graphs is not None:
            self._graphs.delete()
        if self.manager is not None:
            self.manager.close()
        self._chunks.clear()
        gc.collect()


class Comparison:
    """The ways above, on the same data.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        count = case.num_micro_batches
        self._data = [list(micro_batches(case.model, step, count)) for step in range(NUM_DATA)]

    def build(self, variant: Variant, label: str, options: Mapping[str, Any]) -> ChunkWay:
        """See :class:`benchmarks.ways.Comparison`."""
        return ChunkWay(label, self._case, self._data, variant.modules, options)
