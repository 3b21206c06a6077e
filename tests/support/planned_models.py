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
    select, deselect, config, replay_chunks, close_graphs, options = _functions()
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
    assert graphs.num_replays == 4
    (chunk,) = (one.chunk for one in graphs.of_size.values())
    results["chunk graphs"] = tensors, repr(manager.plan).encode(), chunk.offloading.moved_bytes
    close_graphs()
    deselect()
    torch.save(results, file)


def _functions() -> Any:
    """Functions that choose the engine and give it up, and its settings; the same of chunk graphs.

    The last item has the options of a model with both.
    """
    try:
        from megatron.core.pipeline_parallel.chunk_graphs import model_chunks
        from megatron.core.pipeline_parallel.offload_engine import options, select
    except ImportError:
        from megatron.slipstream.integration.graphs import chunks
        from megatron.slipstream.integration.install import install, uninstall
        from megatron.slipstream.options.fields import OffloadConfig

        engine = install, uninstall, OffloadConfig
        return *engine, chunks.replay_chunks, chunks.close_graphs, {}
    fields = {**SETTINGS, "offload_engine": "slipstream", "cuda_graph_granularity": "chunk"}
    engine = select.select, select.deselect, options.OffloadConfig
    return *engine, model_chunks.replay_chunks, model_chunks.close_graphs, fields


if __name__ == "__main__":
    main(*sys.argv[1:])
