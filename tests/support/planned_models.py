# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trains small models in a process of its own, with the plugin or in a patched Megatron-LM.

    python planned_models.py FOLDER FILE

``FOLDER`` has ``offloaded_models``; ``FILE`` gets losses, gradients, plan and moved bytes of each.
"""

from __future__ import annotations

import sys
from typing import Any

import torch

SETTINGS = {
    "offload_backend": "cpu-lazy",
    "offload_native": "off",
    # A plan has the limit, whose default is a part of what is free.
    "offload_host_memory_limit_bytes": 1 << 30,
}


def main(folder: str, file: str) -> None:
    """Train each model and save what it computes."""
    sys.path.insert(0, folder)
    import offloaded_models as models

    models.initialize()
    select, deselect, config, replay_chunks, close_graphs, pack_layers, options = _functions()
    results: dict[str, Any] = {}
    batches = dict.fromkeys(models.KINDS, models.rows) | {"packed": models.packs}
    for name, batches_of in batches.items():
        kind = "moe" if name == "packed" else name
        manager = select(config(**SETTINGS))
        tensors = models.train(models.build(kind, models.MODULES[kind]), batches=batches_of)
        results[name] = tensors, repr(manager.plan).encode(), manager.report.d2h_bytes
        deselect()
    manager = select(config(**SETTINGS))
    model = models.wrap(models.build("dense", models.MODULES["dense"], **options))
    (graphs,) = replay_chunks([model], 2)
    tensors = models.train(model, batches=models.packs)
    assert graphs.num_replays == 2
    (chunk,) = (one.chunk for one in graphs.of_size.values())
    results["chunk graphs"] = tensors, repr(manager.plan).encode(), chunk.offloading.moved_bytes
    close_graphs()
    deselect()
    results["layer graphs"] = _layer_graphs(models, select(config(**SETTINGS)), pack_layers)
    deselect()
    torch.save(results, file)


def _layer_graphs(models: Any, manager: Any, pack_layers: Any) -> Any:
    from imitated_layer_graphs import imitated_layer_graphs

    def capture(step: int) -> None:
        if step == 2:
            models.capture_layers(model)

    with imitated_layer_graphs():
        options = {"cuda_graph_impl": "transformer_engine", "cuda_graph_warmup_steps": 2}
        model = models.build("moe", models.MODULES["moe"], cuda_graph_modules=["attn"], **options)
        pack_layers([model], None)
        tensors = models.train(model, before=capture, batches=models.packs)
    moved = sum(module.d2h_bytes for module in manager.report.graphs.values())
    return tensors, repr(manager.plan).encode(), moved


def _functions() -> Any:
    """Functions that choose the engine and give it up, and its settings; those of graphs.

    The last item has the options of a model with both.
    """
    try:
        from megatron.core.pipeline_parallel.chunk_graphs import model_chunks, packed_layers
        from megatron.core.pipeline_parallel.offload_engine import options, select
    except ImportError:
        from megatron.slipstream.integration.graphs import chunks, layers
        from megatron.slipstream.integration.install import install, uninstall
        from megatron.slipstream.options.fields import OffloadConfig

        engine = install, uninstall, OffloadConfig
        graphs = chunks.replay_chunks, chunks.close_graphs, layers.take_packed_sequences
        return *engine, *graphs, {}
    fields = {**SETTINGS, "offload_engine": "slipstream", "cuda_graph_granularity": "chunk"}
    engine = select.select, select.deselect, options.OffloadConfig

    def pack_layers(chunks: Any, limits: None) -> None:
        for chunk in chunks:
            packed_layers.pack_layers(chunk, limits)

    return *engine, model_chunks.replay_chunks, model_chunks.close_graphs, pack_layers, fields


if __name__ == "__main__":
    main(*sys.argv[1:])
