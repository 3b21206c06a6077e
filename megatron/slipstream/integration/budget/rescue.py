# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Repeats a forward pass that ran out of device memory, with the most frugal settings.

[Note: Where a pass is repeated]
Only where the rank runs it alone: other ranks of a pipeline, or of tensor, context and expert
parallelism, wait inside its collectives. All that it changed is restored (:mod:`forward_state`);
where that cannot be, the pass is not repeated.
"""

from __future__ import annotations

import gc
import re
import traceback
import weakref
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, Optional, Protocol

import torch
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput

from megatron.slipstream.integration.budget.forward_state import ForwardState
from megatron.slipstream.integration.budget.stage_ranks import waits_for_others
from megatron.slipstream.patches.marks import forget_recomputation
from megatron.slipstream.patches.model_calls import tensors_in

if TYPE_CHECKING:
    from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine

_STATEFUL = {
    "fp8": "scaling factors are updated in forward",
    "fp4": "scaling factors are updated in forward",
    "moe_paged_stash": "its pages are taken in forward",
    "moe_enable_routing_replay": "its records advance in forward",
    "moe_shared_expert_overlap": "shared experts stop half-way",
}
"""Options with state that a failed forward leaves behind, and cannot be restored."""


class Budget(Protocol):
    """What decides on the settings of a chunk whose forward runs out of memory."""

    def rescue(
        self, chunk: torch.nn.Module, tensors: Sequence[torch.Tensor], tried_bytes: int
    ) -> None:
        """Make the layers of a chunk frugal before its forward is repeated."""

    def out_of_memory(
        self,
        chunk: torch.nn.Module,
        tensors: Sequence[torch.Tensor],
        tried_bytes: int,
        because: str,
    ) -> torch.OutOfMemoryError:
        """Return the error for a forward that is not repeated."""


def call(
    engine: OffloadEngine,
    budget: Budget,
    chunk: torch.nn.Module,
    inputs: Any,
    attempt: Callable[[], Any],
) -> Any:
    """Run a forward pass, and once more if device memory runs out.

    Args:
        engine: The engine of the model.
        budget: Its budget.
        chunk: The chunk that runs.
        inputs: Its arguments.
        attempt: Runs the pass.

    Raises:
        torch.OutOfMemoryError: The pass cannot be repeated, or ran out of memory again.
    """
    reason = _refusal(chunk)
    state = ForwardState(chunk, inputs) if reason is None else None
    try:
        return attempt()
    except torch.OutOfMemoryError as error:
        failure = error
    try:
        tensors = tensors_in(inputs)
        if not engine.now.has_begun:
            raise failure  # The pass had not begun.
        if state is not None:
            reason = state.what_else_changed()
        if reason is None and engine.has_earlier_passes:
            reason = "earlier passes of the iteration wait for their backward"
        if state is None or reason is not None:
            because = f"the forward cannot be repeated: {reason}"
            raise budget.out_of_memory(chunk, tensors, _tried_bytes(failure), because) from failure
        _forget_recomputations(chunk)
        _forget_frames(failure)
        engine.discard_pass()
        state.restore()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        budget.rescue(chunk, tensors, _tried_bytes(failure))
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            because = "every layer was recomputed in a second attempt"
            raise budget.out_of_memory(chunk, tensors, _tried_bytes(error), because) from failure
    finally:
        del failure  # Its traceback refers to this frame.


_refusals: weakref.WeakKeyDictionary[torch.nn.Module, Optional[str]] = weakref.WeakKeyDictionary()


def _refusal(chunk: torch.nn.Module) -> Optional[str]:
    """Return :func:`why_not` of a chunk, found once: it looks at every module."""
    if chunk not in _refusals:
        _refusals[chunk] = why_not(chunk)
    return _refusals[chunk]


def why_not(chunk: Any) -> Optional[str]:
    """Say why a forward of this chunk cannot be repeated; None if it can."""
    for option, state in _STATEFUL.items():
        if getattr(chunk.config, option, None):
            return f"with {option} {state}"
    return waits_for_others(chunk)


def _tried_bytes(error: BaseException) -> int:
    """Return the bytes of the allocation that failed, as torch's message says; 0 if it does not."""
    found = re.search(r"Tried to allocate ([0-9.]+) (bytes|KiB|MiB|GiB)", str(error))
    if found is None:
        return 0
    units = ("bytes", "KiB", "MiB", "GiB")
    return int(float(found[1]) * 1024 ** units.index(found[2]))


def _forget_recomputations(chunk: torch.nn.Module) -> None:
    """Free what modules keep of the failed pass to recompute it: its backward will not come."""
    for module in chunk.modules():
        for value in vars(module).values():
            if isinstance(value, CheckpointWithoutOutput):
                forget_recomputation(value)


def _forget_frames(failure: BaseException) -> None:
    """Free what the functions of the failed pass refer to; keep where it failed as a note.

    Frames that are only cleared still refer to the variables of their closures.
    """
    failed_at = "".join(traceback.format_tb(failure.__traceback__))
    failure.add_note(f"The first attempt failed at:\n{failed_at}")
    error: Optional[BaseException] = failure
    while error is not None:
        error.__traceback__ = None
        error = error.__cause__ or error.__context__
    gc.collect()
