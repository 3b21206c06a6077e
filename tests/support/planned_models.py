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
    select, deselect, config = _engine()
    results: dict[str, Any] = {}
    batches = dict.fromkeys(models.KINDS, models.rows) | {"packed": models.packs}
    for name, batches_of in batches.items():
        kind = "moe" if name == "packed" else name
        manager = select(config(**SETTINGS))
        tensors = models.train(models.build(kind, models.MODULES[kind]), batches=batches_of)
        results[name] = tensors, repr(manager.plan).encode(), manager.report.d2h_bytes
        deselect()
    torch.save(results, file)


def _engine() -> Any:
    """Functions that choose the engine and give it up, and its settings."""
    try:
        from megatron.core.pipeline_parallel.offload_engine import options, select
    except ImportError:
        from megatron.slipstream.integration.install import install, uninstall
        from megatron.slipstream.options.fields import OffloadConfig

        return install, uninstall, OffloadConfig
    return select.select, select.deselect, options.OffloadConfig


if __name__ == "__main__":
    main(*sys.argv[1:])
