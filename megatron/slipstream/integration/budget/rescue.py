# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Repeats a forward pass that ran out of device memory, with the most frugal settings.

[Note: Where a pass is repeated]
Only where the rank runs it alone: other ranks of a pipeline, or of tensor, context and expert
parallelism, wait inside its collectives. What it changed outside of autograd is restored: the
states of random generators, counters of routers, losses and counts that are kept for logs, and
Transformer Engine's notes of the first micro-batch. Any other buffer, or an argument, that it has
changed in place is found by its version counter, and the pass is not repeated.
"""

from __future__ import annotations

import gc
import sys
import traceback
import weakref
from collections.abc import Callable, Iterator
from dataclasses import is_dataclass, replace
from typing import TYPE_CHECKING, Any, Optional

import torch
from megatron.core.tensor_parallel import random as mcore_random
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from torch.utils._pytree import tree_leaves

from megatron.slipstream.integration.budget.stage_ranks import waits_for_others
from megatron.slipstream.patches.marks import forget_recomputation

if TYPE_CHECKING:
    from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
    from megatron.slipstream.integration.seam.model_router import Budget

_STATEFUL = {
    "fp8": "scaling factors are updated in forward",
    "fp4": "scaling factors are updated in forward",
    "moe_paged_stash": "its pages are taken in forward",
    "moe_enable_routing_replay": "its records advance in forward",
    "moe_shared_expert_overlap": "shared experts stop half-way",
}
"""Options with state that a failed forward leaves behind, and cannot be restored."""


def call(
    engine: OffloadEngine,
    budget: Budget,
    chunk: torch.nn.Module,
    inputs: Any,
    attempt: Callable[[], Any],
) -> Any:
    """Run ``attempt``, a forward pass of a chunk, and once more if device memory runs out.

    Raises:
        torch.OutOfMemoryError: The pass cannot be repeated, or ran out of memory again.
    """
    if chunk not in _refusals:
        _refusals[chunk] = why_not(chunk)
    reason = _refusals[chunk]
    state = ForwardState(chunk, inputs) if reason is None else None
    try:
        return attempt()
    except torch.OutOfMemoryError as error:
        failure = error
    try:
        if not engine.now.has_begun:
            raise failure  # The pass had not begun.
        if state is not None:
            reason = state.what_else_changed()
        if reason is None and engine.has_earlier_passes:
            reason = "earlier passes of the iteration wait for their backward"
        if state is None or reason is not None:
            because = f"the forward cannot be repeated: {reason}"
            raise budget.out_of_memory(failure, because) from failure
        for module in chunk.modules():
            for value in vars(module).values():
                if isinstance(value, CheckpointWithoutOutput):
                    forget_recomputation(value)  # Its backward will not come.
        _forget_frames(failure)
        engine.discard_pass()
        state.restore()
        if torch.cuda.is_initialized():
            torch.cuda.empty_cache()
        budget.rescue(chunk, failure)
        try:
            return attempt()
        except torch.OutOfMemoryError as error:
            because = "every layer was recomputed in a second attempt"
            raise budget.out_of_memory(error, because) from failure
    finally:
        del failure  # Its traceback refers to this frame.


_refusals: weakref.WeakKeyDictionary[torch.nn.Module, Optional[str]] = weakref.WeakKeyDictionary()
"""Answers of :func:`why_not`, which looks at every module."""


def why_not(chunk: Any) -> Optional[str]:
    """Say why a forward of this chunk cannot be repeated; None if it can."""
    for option, state in _STATEFUL.items():
        if getattr(chunk.config, option, None):
            return f"with {option} {state}"
    return waits_for_others(chunk)


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


# What a forward pass changes.


_COUNTERS = (
    *("local_tokens_per_expert", "global_tokens_per_expert", "ga_steps"),
    *("qb_beta_accum", "qb_beta_count"),
)
"""Buffers to which the forward of megatron-core's routers adds."""
_FIRST = "is_first_microbatch"
_LOGS = (
    ("megatron.core.transformer.multi_token_prediction", "MTPLossLoggingHelper"),
    ("megatron.core.transformer.experimental_attention_variant.dsa", "DSAIndexerLossLoggingHelper"),
)
"""Classes whose ``tracker`` collects losses for logs."""


_Watched = tuple[list[tuple[str, torch.nn.Module]], list[torch.nn.Module]]
"""Modules below a chunk with buffers, and with :data:`_FIRST`."""
_watched: weakref.WeakKeyDictionary[torch.nn.Module, _Watched] = weakref.WeakKeyDictionary()


class ForwardState:
    """What a pass through a chunk may change, as it is before the pass."""

    def __init__(self, chunk: torch.nn.Module, inputs: Any) -> None:
        if chunk not in _watched:
            modules = [pair for pair in chunk.named_modules() if pair[1] is not chunk]
            with_buffers = [pair for pair in modules if pair[1]._buffers]
            _watched[chunk] = with_buffers, [one for _, one in modules if _FIRST in vars(one)]
        of_buffers, firsts = _watched[chunk]
        self._inputs = [(tensor, _version(tensor)) for tensor in _tensors(inputs)]
        self._firsts = [(module, vars(module)[_FIRST]) for module in firsts]
        self._counters: list[tuple[torch.nn.Module, str, torch.Tensor]] = []
        self._buffers: list[tuple[str, torch.nn.Module, str, torch.Tensor, Optional[int]]] = []
        for path, module in of_buffers:
            for name, buffer in module._buffers.items():
                if buffer is not None and name in _COUNTERS:
                    self._counters.append((module, name, buffer))
                elif buffer is not None:
                    self._buffers.append((path, module, name, buffer, _version(buffer)))
        counters = [buffer for *_, buffer in self._counters]
        self._counts = [torch.empty_like(buffer) for buffer in counters]
        if counters:
            with torch.no_grad():
                torch._foreach_copy_(self._counts, counters)
        self._logs = [(log, _copy(log)) for log in _logs()]
        self._is_checkpointing = mcore_random.IS_CHECKPOINTING
        self._cpu = torch.get_rng_state()
        self._cuda = torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None
        states = mcore_random.get_cuda_rng_tracker().get_states()
        self._states = [(name, state, _read(state)) for name, state in states.items()]

    def what_else_changed(self) -> Optional[str]:
        """Say which argument or buffer the pass has changed that :meth:`restore` does not know."""
        for tensor, version in self._inputs:
            if version is None or _version(tensor) != version:
                return f"it may have changed an argument of shape {list(tensor.shape)} in place"
        for path, module, name, buffer, version in self._buffers:
            is_same = module._buffers.get(name) is buffer
            if version is None or not is_same or _version(buffer) != version:
                return f"it may have changed buffer {path}.{name}"
        return None

    def restore(self) -> None:
        """Undo what the pass has changed."""
        for module, value in self._firsts:
            setattr(module, _FIRST, value)
        for (module, name, buffer), count in zip(self._counters, self._counts, strict=True):
            with torch.no_grad():
                buffer.copy_(count)
            module._buffers[name] = buffer
        known = [log for log, _ in self._logs]
        for log in _logs():
            if not any(log is one for one in known):
                log.clear()
        for log, before in self._logs:
            log.clear()
            log.update(before)
        mcore_random.IS_CHECKPOINTING = self._is_checkpointing
        torch.set_rng_state(self._cpu)
        if self._cuda is not None:
            torch.cuda.set_rng_state(self._cuda)
        for _, state, value in self._states:
            if isinstance(state, torch.Generator):
                state.set_state(value)
        if self._states:
            states = {
                name: state if isinstance(state, torch.Generator) else value
                for name, state, value in self._states
            }
            mcore_random.get_cuda_rng_tracker().set_states(states)


def _logs() -> Iterator[dict[str, Any]]:
    """Yield the dictionaries in which forward collects what is logged."""
    logging = sys.modules.get("megatron.core.transformer.moe.moe_logging")
    if logging is not None:
        yield logging.get_moe_metrics_tracker()._metrics
    for module, name in _LOGS:
        helper = getattr(sys.modules.get(module), name, None)
        if helper is not None:
            yield helper.tracker


def _copy(value: Any) -> Any:
    """Return a copy of a log with the tensors in it."""
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {name: _copy(entry) for name, entry in value.items()}
    if is_dataclass(value) and not isinstance(value, type):
        fields = {name: _copy(entry) for name, entry in vars(value).items()}
        return replace(value, **fields)
    return value


def _tensors(inputs: Any) -> Iterator[torch.Tensor]:
    """Yield the tensors in arguments, also those in data classes (packed sequences)."""
    for leaf in tree_leaves(inputs):
        if isinstance(leaf, torch.Tensor):
            yield leaf
        elif is_dataclass(leaf):
            yield from (value for value in vars(leaf).values() if isinstance(value, torch.Tensor))


def _version(tensor: torch.Tensor) -> Optional[int]:
    """Return the number of changes in place; None if it is not counted."""
    return None if tensor.is_inference() else tensor._version


def _read(state: Any) -> Any:
    """Return the value of a generator's state, which forward replaces unless it is a generator."""
    return state.get_state() if isinstance(state, torch.Generator) else state
