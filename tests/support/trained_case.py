# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trains on one rank of CPUs with a ``pretrain_gpt.py``: ours, or that of a patched Megatron-LM.

    python trained_case.py SCRIPT FILE FLAG ...

``FILE`` gets the losses and gradients of each iteration, the weights, the plan and the bytes that
moved. With Megatron's script the shims are found as ``cpu_only``.
"""

from __future__ import annotations

import hashlib
import json
import runpy
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch


def main(script: str, file: str, *flags: str) -> None:
    """Train, and write what was computed."""
    try:
        import cpu_only
    except ImportError:
        from megatron.slipstream.integration.cpu.cpu_only import install_training_shims

        install_training_shims()
    else:
        sys.modules["megatron.slipstream"] = None  # type: ignore[assignment]
        cpu_only.install_training_shims()
        cpu_only.skip_helper_compilation()
        _allow_offloading()
        if "--dynamic-context-parallel" in flags:
            _share_sequences()
    result: dict[str, Any] = {"iterations": []}
    _keep_results(result)
    sys.argv = [script, *flags]
    sys.path.insert(0, str(Path(script).parent))
    try:
        runpy.run_path(script, run_name="__main__")
    except SystemExit as end:
        if end.code:
            raise
    Path(file).write_text(json.dumps(result))


def _share_sequences() -> None:
    """Core attention of the shims knows no context-parallel groups."""
    import cpu_modules
    from gathering_attention import GatheringCoreAttention

    cpu_modules.LatentCoreAttention = GatheringCoreAttention


def _allow_offloading() -> None:
    """Megatron validates that modules are Transformer Engine's, which only a GPU needs."""
    from megatron.training import arguments

    validate = arguments.validate_args

    def without_offloading(args: Any, *others: Any, **named: Any) -> Any:
        given = args.fine_grained_activation_offloading
        args.fine_grained_activation_offloading = False
        try:
            return validate(args, *others, **named)
        finally:
            args.fine_grained_activation_offloading = given

    arguments.validate_args = without_offloading


def _keep_results(result: dict[str, Any]) -> None:
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as facade
    from megatron.training import training

    train_step = training.train_step

    def step(forward: Any, data: Any, model: Any, *others: Any, **named: Any) -> Any:
        done = train_step(forward, data, model, *others, **named)
        losses = {name: value.double().tolist() for name, value in done[0].items()}
        parameters = [p for chunk in model for p in chunk.parameters()]
        gradients = _digest(getattr(p, "main_grad", p.grad) for p in parameters)
        result["iterations"].append({"losses": losses, "gradients": gradients})
        result["weights"] = _digest(parameters)
        manager = facade.PipelineOffloadManager.OFFLOAD_MGR.router.default
        result["plan"] = repr(manager.plan)
        graphs = manager.report.graphs.values()
        result["moved_bytes"] = manager.report.d2h_bytes + sum(one.d2h_bytes for one in graphs)
        return done

    training.train_step = step


def _digest(tensors: Iterable[torch.Tensor]) -> str:
    digest = hashlib.sha256()
    for tensor in tensors:
        digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


if __name__ == "__main__":
    main(*sys.argv[1:])
