# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tells the engine of outputs that megatron-core discards, to recompute them in backward.

Selective recomputation of norms and activation functions empties the storage of their output once
forward needs it no more. If a group has saved that output, a copy to the host may still read it.
The engine then leaves the storage where it is: the recomputation fills it, as it would without
offloading.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload

from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager


def tell_engine_first(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``CheckpointWithoutOutput.discard_output_and_register_recompute``."""

    @functools.wraps(original)
    def discard(checkpoint: Any, *arguments: Any, **options: Any) -> Any:
        engine = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
        if isinstance(engine, PipelineOffloadManager):
            for output in checkpoint.outputs:
                if isinstance(output, torch.Tensor):
                    engine.before_discard(output)
        return original(checkpoint, *arguments, **options)

    return discard
