# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares steps with and without CUDA graphs of layers, with and without offloading inside.

All ways share weights, gradients and data.

- ``eager``, ``eager+offload``: without graphs; Slipstream moves activations.
- ``graph``: parts of each layer are replayed as CUDA graphs (Transformer Engine's, as megatron-core
  captures them); ``graph+offload``: Slipstream moves activations inside the graphs and around them.
- ``graph+offload+delayed``: with ``--delay-offload-until-cuda-graph``, if something moves outside
  of graphs.
- ``graph+megatron``: megatron-core's built-in engine, in its own layers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from captured_layers import capture_layers, prepare_unwrapped, with_graphs
from megatron_models import use_gpu

from benchmarks.case import Case, Variant
from benchmarks.engines import BaseModel, Engine, behind_the_seam, build_twin, make_engine
from benchmarks.measure import HeldMemory
from benchmarks.variant import report_fields
from benchmarks.ways import Way

NUM_EAGER_ITERATIONS = 3


class LayerWay(Way):
    """The model, trained in one of the ways.

    Args:
        label: See above.
        base: The model without graphs and offloading, whose parameters all ways share.
        modules: Modules to offload, if any.
        options: Options of ``OffloadConfig``.

    Raises:
        ValueError: megatron-core rejects the settings.
    """

    num_eager_iterations = NUM_EAGER_ITERATIONS
    ends_process = True

    def __init__(
        self, label: str, base: BaseModel, modules: Sequence[str], options: Mapping[str, Any]
    ) -> None:
        self.label = label
        self._case = base.case
        parts = label.split("+")
        self._is_graphed, is_megatrons = "graph" in parts, "megatron" in parts
        if self._is_graphed and not use_gpu():
            raise ValueError("CUDA graphs need a GPU, and torch sees none")
        _forget_gradients(base.chunks)  # shared by all ways, so not counted
        self._before = HeldMemory.now()
        self._held: dict[str, int] = {}
        self._planned_saved_bytes = 0
        self._graphs: Any = None
        self._model, self._chunks = self._case.model, list(base.chunks)
        if self._is_graphed:
            captured = self._case.captured or ()
            if is_megatrons:
                # The same kernels, captured as parts: megatron-core's engine never joins its copies
                # to the end of a whole layer's graph.
                captured = captured or ("attn", "mlp")
            self._model = with_graphs(self._model, captured, NUM_EAGER_ITERATIONS)
            self._model = dataclasses.replace(self._model, keeps_layers=is_megatrons)
        moves = is_megatrons or "offload" in parts
        if label != "eager":
            offload = {"delay_offload_until_cuda_graph": True} if "delayed" in parts else {}
            self._chunks, self._config = build_twin(
                base, self._model, modules if moves else (), **offload
            )
        self._accumulators = prepare_unwrapped(self._chunks)
        name = "megatron" if is_megatrons else "slipstream"
        self._engine = Engine(label, base, self._chunks)
        if moves:
            self._engine = make_engine(base, name, self._chunks, options)
        self.manager, self.is_ours = self._engine.manager, self._engine.is_ours

    def run(self, iteration: int) -> list[torch.Tensor]:
        """See :meth:`Way.run`."""
        return self._engine.run(iteration)

    def capture(self) -> None:
        """Capture the graphs, if any, once a plan has been made."""
        if self.is_ours:
            self._planned_saved_bytes = report_fields(self.manager)["planned_saved_bytes"]
        _forget_gradients(self._chunks)
        if self._is_graphed:
            with behind_the_seam(self.manager):
                self._graphs = capture_layers(
                    self._model, self._config, self._chunks, self._case.num_micro_batches
                )
        self._held = HeldMemory.now().fields_since(self._before)

    def fields(self) -> dict[str, Any]:
        """Return the memory held and the bytes moved, by the engine's own count."""
        row: dict[str, Any] = dict(self._held)
        if self._is_graphed:
            row["captured"] = self._case.captured
        if self.is_ours:
            row["planned_saved_bytes"] = self._planned_saved_bytes
            row["moved_bytes"] = self._moved_bytes()
        return row

    def _moved_bytes(self) -> int:
        in_graphs = sum(counters.d2h_bytes for counters in self.manager.graphs.modules.values())
        before = self.manager.report.num_iterations
        self.run(0)
        # If everything is replayed, the engine sees no iteration and reports an earlier one.
        is_seen = self.manager.report.num_iterations > before
        outside = report_fields(self.manager)["moved_bytes"] if is_seen else 0
        return int(in_graphs * self._case.num_micro_batches + outside)

    def close(self) -> None:
        """Delete the graphs and free the host memory."""
        if self._graphs is not None:
            self._graphs.delete_cuda_graphs()
            self._graphs = None
        self._engine.close()
        self._chunks.clear()
        self._accumulators.clear()


class Comparison:
    """The ways above, on the parameters of one model.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self._base = BaseModel(case)

    def build(self, variant: Variant, label: str, options: Mapping[str, Any]) -> LayerWay:
        """See :class:`benchmarks.ways.Comparison`."""
        return LayerWay(label, self._base, variant.modules, options)


def _forget_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    for chunk in chunks:
        chunk.zero_grad()
