# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Notify the engine of events that megatron-core's marks do not cover.

- Backward leaving a group. megatron-core passes the engine the name of a group that starts, but
  marks the start in autograd only with a node from the engine, which would change how gradients
  round: [Note: One mark per group]. ``fine_grained_offloading_group_start`` also has the input.
- The end of a group. megatron-core's node there is a Python function, and in models of 0.18
  it does not know the name of its group in backward.
- Discarded outputs. Selective recomputation of norms and activation functions frees their storage
  once forward no longer needs it, while a copy to the host may still read it. The engine then keeps
  the storage on the device: the recomputation fills it. Without gradients nothing is recomputed,
  but megatron-core keeps the inputs.
- Checkpoints, which have no marks. All of them call ``apply`` of their autograd function, so that
  call runs inside a group. ``CheckpointWithoutOutput`` needs none: it is inside megatron-core's
  marks.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, Optional

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload

from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.markers import run_checkpoint


def marking_engine() -> Optional[OffloadEngine]:
    """Return the installed engine, which supports [Note: Marks of no group], if it is ours."""
    manager = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
    return getattr(manager, "engine", None)


def tell_group_input(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``fine_grained_offloading_group_start``."""

    @functools.wraps(original)
    def start(tensor: torch.Tensor, name: str | None = None) -> Any:
        engine = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
        if not hasattr(engine, "start_on"):  # megatron-core's own
            return original(tensor, name)
        engine.start_on(tensor, name)
        return tensor

    return start


def end_by_engine(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``fine_grained_offloading_group_offload`` (``..._group_commit`` before 0.19)."""

    @functools.wraps(original)
    def end(
        tensor: Any,
        name: str,
        forced_released_tensors: Sequence[torch.Tensor] | None = None,
        delay_offload: bool = False,
    ) -> Any:
        engine = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
        # For several outputs megatron-core calls this once more, with the first one.
        if not hasattr(engine, "end_on") or not isinstance(tensor, torch.Tensor):
            return original(tensor, name, forced_released_tensors, delay_offload)
        return engine.end_on(tensor, name, forced_released_tensors or (), delay_offload)

    return end


def tell_discarded_outputs(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace the method of ``CheckpointWithoutOutput`` that discards its outputs."""

    @functools.wraps(original)
    def discard(checkpoint: Any, *arguments: Any, **options: Any) -> Any:
        tell_discard(checkpoint)
        return original(checkpoint, *arguments, **options)

    return discard


def tell_discard(checkpoint: Any) -> None:
    """Tell the engine that a ``CheckpointWithoutOutput`` is about to discard its outputs."""
    engine = marking_engine()
    if engine is not None:
        for output in checkpoint.outputs or ():
            engine.store.before_discard(output)


def end_checkpoint(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``CheckpointWithoutOutput.discard_output_and_register_recompute``."""
    discard = tell_discarded_outputs(original)

    @functools.wraps(original)
    def end(checkpoint: Any, hook_tensor: torch.Tensor) -> None:
        discard(checkpoint, hook_tensor)
        # Not by the hook's tensor: a captured layer ends it on each of its outputs, some of which
        # get no gradient.
        if any(output.requires_grad for output in checkpoint.outputs or ()):
            return
        if getattr(checkpoint, "ckpt_manager", None) is None:
            forget_recomputation(checkpoint)

    return end


def forget_recomputation(checkpoint: Any) -> None:
    """Free what a ``CheckpointWithoutOutput`` keeps for a backward that will not come.

    Its module refers to it until the next forward, so the inputs of an evaluation would lie beside
    the activations of training.
    """
    checkpoint.ctx = checkpoint.outputs = checkpoint.run_function = None


def run_in_a_group(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``apply`` of a checkpoint's autograd function."""

    def apply(*arguments: Any, **options: Any) -> Any:
        run = functools.partial(original, *arguments, **options)
        engine = marking_engine()
        return run() if engine is None else run_checkpoint(engine, run)

    return apply
