# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tells the engine the input of each group, so that it knows where backward leaves the group.

megatron-core tells an engine of its own the name of a group that starts, and marks its start in the
graph only by a node of the engine's, which would change how gradients round: [Note: One mark per
group]. This patches the function of megatron-core that has both the name and the input.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload

NAME = "fine_grained_offloading_group_start"


def install() -> None:
    """Patch megatron-core. A second call does nothing."""
    original = getattr(mcore_offload, NAME)
    if not isinstance(original, partial):
        setattr(mcore_offload, NAME, partial(_start, original))


def uninstall() -> None:
    """Undo :func:`install`."""
    current = getattr(mcore_offload, NAME)
    if isinstance(current, partial):
        setattr(mcore_offload, NAME, current.args[0])


def _start(original: Any, tensor: torch.Tensor, name: str) -> torch.Tensor:
    engine = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
    if not hasattr(engine, "mark_backward_end"):  # megatron-core's own
        return original(tensor, name)
    engine.pop_forward_chunk(name=name)
    engine.mark_backward_end(tensor)
    return tensor
