# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Makes a group of the inputs that a checkpoint keeps.

A checkpoint of megatron-core or Transformer Engine is an autograd function that runs its part of
the model without gradients and saves the arguments. No offloading marks lie around it. So this
patches ``apply`` of those functions, which every way to make a checkpoint ends in, to run inside a
group of the engine's. ``CheckpointWithoutOutput`` is not patched: it lies inside megatron-core's
own marks.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload
from megatron.core.tensor_parallel import random as mcore_random

from megatron.slipstream import preflight
from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager
from megatron.slipstream.integration import compat


def _targets() -> Iterator[Any]:
    """The autograd functions whose ``apply`` is patched.

    Raises:
        RuntimeError: An installed package has no such function any more.
    """
    yield _function(mcore_random, "CheckpointFunction")
    if preflight.is_installed("transformer_engine"):
        from transformer_engine.pytorch import distributed as te_distributed

        yield _function(te_distributed, "_CheckpointFunction")


def _function(module: Any, name: str) -> Any:
    if not hasattr(module, name):
        raise RuntimeError(
            f"{module.__name__}.{name}, which offload_checkpoint_inputs=True patches, does not "
            f"exist with {compat.release()}; leave offload_checkpoint_inputs out, or install a "
            "release that the compatibility page lists"
        )
    return getattr(module, name)


def install() -> None:
    """Patch all targets. A second call does nothing."""
    for function in list(_targets()):
        if "apply" not in vars(function):
            function.apply = partial(_apply, function.apply)


def uninstall() -> None:
    """Undo :func:`install`."""
    for function in _targets():
        # Functions inherit their own.
        if "apply" in vars(function):
            del function.apply


def _apply(original: Any, *arguments: Any) -> Any:
    run = partial(original, *arguments)
    engine = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
    return engine.run_checkpoint(run) if isinstance(engine, PipelineOffloadManager) else run()
