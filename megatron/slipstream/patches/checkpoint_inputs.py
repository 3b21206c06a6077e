# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Makes a group of the inputs that a checkpoint keeps.

A checkpoint of megatron-core or Transformer Engine is an autograd function that runs its part of
the model without gradients and saves the arguments. No offloading marks lie around it. ``apply`` of
those functions is what every way to make a checkpoint ends in, so it runs inside a group of the
engine's. ``CheckpointWithoutOutput`` is not patched: it lies inside megatron-core's own marks.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload

from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager


def run_in_a_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``apply`` of a checkpoint's autograd function."""

    def apply(*arguments: Any) -> Any:
        run = partial(original, *arguments)
        engine = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
        return engine.run_checkpoint(run) if isinstance(engine, PipelineOffloadManager) else run()

    return apply
