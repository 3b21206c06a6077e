# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tells the engine the input of each group, so that it knows where backward leaves the group.

megatron-core tells an engine the name of a group that starts, and marks its start in the graph only
by a node of the engine's, which would change how gradients round: [Note: One mark per group]. Its
function ``fine_grained_offloading_group_start`` has both the name and the input.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload


def tell_engine_the_input(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``fine_grained_offloading_group_start``."""

    @functools.wraps(original)
    def start(tensor: torch.Tensor, name: str | None = None) -> torch.Tensor:
        engine = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
        if not hasattr(engine, "mark_backward_end"):  # megatron-core's own
            result: torch.Tensor = original(tensor, name)
            return result
        engine.pop_forward_chunk(name=name)
        engine.mark_backward_end(tensor)
        return tensor

    return start
