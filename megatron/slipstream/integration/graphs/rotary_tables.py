# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Rotary tables that stay alive for CUDA graphs.

Multi-latent attention looks up its table in every forward pass, inside the graph. megatron-core
may free a computed table: it caches 32 for all layers of all models, or (fused) keeps a buffer that
a longer one replaces. A graph would still read that memory; and a table computed during a capture
would be in the graph's memory, which the next graph would reuse.

So during the capture of a chunk its tables come from here: they are computed in the runs before the
capture and kept as long as the graphs. Layers with equal tables share one.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any

import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron.slipstream.patches.attributes import replace_on


def constant_arguments(model: torch.nn.Module) -> frozenset[str]:
    """Return the names of a model chunk's arguments whose tensors depend on their shape only.

    A table of ``RotaryEmbedding`` is a function of its length and of the context-parallel group,
    and graphs are of one length and one group. Other tables may depend on a micro-batch's
    positions.
    """
    is_table = isinstance(getattr(model, "rotary_pos_emb", None), RotaryEmbedding)
    return frozenset(("rotary_pos_emb",) if is_table else ())


_METHODS = ((RotaryEmbedding, "forward"), (YarnRotaryEmbedding, "get_cached_cos_sin"))
"""Methods that return a table, by class; the second is for fused multi-latent attention."""


class RotaryTables:
    """The tables that the layers of a chunk use."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._owners: list[Any] = [m for m in module.modules() if isinstance(m, RotaryEmbedding)]
        self._held: dict[tuple[Hashable, Any], Any] = {}
        """Tables, keyed by method with arguments, and owner."""
        self._is_inside = False

    @contextlib.contextmanager
    def in_place(self) -> Iterator[None]:
        """Make the layers use the kept tables inside this context, and keep new ones."""
        with contextlib.ExitStack() as undo:
            for owner in self._owners:
                for name in (name for kind, name in _METHODS if isinstance(owner, kind)):
                    undo.callback(replace_on(owner, name, self._holding(owner, name)))
            yield

    def _holding(self, owner: Any, name: str) -> Callable[..., Any]:
        make = getattr(owner, name)

        def holding(*arguments: Any, **options: Any) -> Any:
            if self._is_inside:  # One method calls the other; no layer uses the inner table.
                return make(*arguments, **options)
            asked = (name, arguments, tuple(sorted(options.items())))
            key = (asked, owner)
            if key not in self._held:
                self._held[key] = self._shared(asked, self._made(make, arguments, options))
            return self._held[key]

        return holding

    def _made(self, make: Callable[..., Any], arguments: Any, options: Any) -> Any:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            raise RuntimeError(
                "a layer asks for a rotary table that it did not ask for before it was captured; "
                "do its arguments differ in every run?"
            )
        self._is_inside = True
        try:
            return make(*arguments, **options)
        finally:
            self._is_inside = False

    def _shared(self, asked: Hashable, table: Any) -> Any:
        for (others_asked, _), held in self._held.items():
            if others_asked == asked and _are_equal(held, table):
                return held
        return table


def _are_equal(left: Any, right: Any) -> bool:
    """Whether two tensors, or tuples of tensors and numbers, are equal."""
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(_are_equal, left, right))
    if torch.is_tensor(left):
        return left.shape == right.shape and torch.equal(left, right)
    return bool(left == right)
