# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A toy chunk that is offloaded inside its graphs: its marks go to the engine of the pass."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from functools import partial
from typing import Optional

import torch
from toy_model import make_chunks

from megatron.slipstream.fine_grained_activation_offload.counted_modules import ReplayedPass
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.pass_policy import PassPolicy
from megatron.slipstream.graphs.offload import ChunkOffloading
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager


class OffloadedChunk:
    """Layers, and the engines that offload what they save.

    Args:
        make_engine: Makes a new engine.
    """

    def __init__(self, make_engine: Callable[[], OffloadEngine]) -> None:
        (self.module,) = make_chunks()
        self.engines: list[OffloadEngine] = []
        """All that were made."""
        self.make_engine = make_engine
        self.replayed: Optional[ReplayedPass] = None
        """What its graphs replay; None without graphs."""
        self.offloading = ChunkOffloading(
            self._new_engine, self.begin_pass, self.marks_go_to, self._note_replayed
        )
        self._manager: Optional[PipelineOffloadManager] = None

    def _new_engine(self, num_verified: int) -> OffloadEngine:
        assert num_verified == 0
        self.engines.append(self.make_engine())
        return self.engines[-1]

    def _note_replayed(self, replayed: ReplayedPass) -> Callable[[], None]:
        self.replayed = replayed
        return partial(setattr, self, "replayed", None)

    @staticmethod
    def begin_pass(engine: OffloadEngine) -> None:
        """A micro-batch enters the chunk."""
        engine.begin_pass(0, PassPolicy(1, 1.0, 0, None))

    @contextlib.contextmanager
    def marks_go_to(self, engine: OffloadEngine) -> Iterator[None]:
        """Send the marks of layers to an engine."""
        self._manager = PipelineOffloadManager(engine)
        try:
            yield
        finally:
            self._manager = None

    def forward(self, x: torch.Tensor, num_layers: int = 3) -> torch.Tensor:
        """The first layers, with marks where an engine is entered."""
        for layer in self.module.layers[:num_layers]:
            x = layer(x, self._manager)
        return x
