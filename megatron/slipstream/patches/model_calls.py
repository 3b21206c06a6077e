# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Notify the engine of calls of model chunks.

Every GPT and hybrid model is entered through ``LanguageModule.__call__``, whatever its ``forward``,
and through ``build_schedule_plan`` if layers run in nodes.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload
from torch.utils._pytree import tree_leaves

from megatron.slipstream.patches.marks import marking_engine
from megatron.slipstream.plan.trace import StepKind

before_first_call: Optional[Callable[[], None]] = None
"""Called when a model with offloading is called, to create the engine; None if not needed."""


def set_before_first_call(function: Optional[Callable[[], None]]) -> None:
    """Set the function to call when a model with offloading is called, or None."""
    global before_first_call
    before_first_call = function


def call_through_router(_: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``LanguageModule.__call__``, which it inherits from ``Module``."""
    return _call


def build_through_router(build: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``GPTModel.build_schedule_plan``."""

    @functools.wraps(build)
    def build_schedule_plan(chunk: Any, *arguments: Any, **options: Any) -> Any:
        plain = partial(build, chunk, *arguments, **options)
        router = _router() if _offloads(chunk) else None
        return plain() if router is None else router.plan_nodes(chunk, plain)

    return build_schedule_plan


def name_what_fits(backward_step: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``schedules.backward_step``."""

    @functools.wraps(backward_step)
    def named(*arguments: Any, **options: Any) -> Any:
        try:
            return backward_step(*arguments, **options)
        except torch.OutOfMemoryError as failure:
            router = _known_router()
            error = failure if router is None else router.out_of_memory(failure)
            if error is failure:
                raise
            raise error from failure

    return named


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return the tensors in arguments or results, including nested ones."""
    return [leaf for leaf in tree_leaves(value) if isinstance(leaf, torch.Tensor)]


def _call(chunk: Any, *arguments: Any, **options: Any) -> Any:
    plain = torch.nn.Module.__call__
    if not _offloads(chunk):
        return plain(chunk, *arguments, **options)
    router = _router()

    def run() -> Any:
        output = plain(chunk, *arguments, **options)
        engine = marking_engine()
        if engine is not None:
            engine.mark_gradient(StepKind.BACKWARD_START, tensors_in(output))
        return output

    return run() if router is None else router.call(chunk, (arguments, options), run)


def _offloads(chunk: Any) -> bool:
    return bool(getattr(chunk.config, "fine_grained_activation_offloading", False))


def _router() -> Optional[Any]:
    """Return the router for a call of a model; None if the engine serves one model."""
    if before_first_call is not None:
        before_first_call()
    return _known_router()


def _known_router() -> Optional[Any]:
    engine = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
    return getattr(engine, "router", None)  # megatron-core's own has none.
