# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A group that stays within one that moves."""

from __future__ import annotations

from functools import partial
from typing import Optional

import pytest
import torch
from hand_driven import LAZY_NATIVE
from marked_group import run_in_group
from toy_model import Chunk, Layer, all_equal, make_manager, run_schedule

from megatron.slipstream.integration.seam.manager import PipelineOffloadManager


class NestedChunk(Chunk):
    """In each layer, a group saves tensors before and after a group within it.

    What the inner one saves has another reference until forward ends, so that it stays.
    """

    def __init__(self) -> None:
        torch.manual_seed(5)
        super().__init__(num_layers=3)

    def forward(
        self, x: torch.Tensor, manager: Optional[PipelineOffloadManager] = None
    ) -> torch.Tensor:
        self.held = []
        if manager is not None:
            manager.init_model_chunk_offload_handler(0, None, self.vp_stage, 1)

        def inner(hidden: torch.Tensor) -> torch.Tensor:
            self.held.append(hidden.sigmoid())
            return self.held[-1] * 3

        def outer(x: torch.Tensor, layer: Layer) -> torch.Tensor:
            hidden = layer.first(layer.norm(x))
            return layer.second(run_in_group(manager, "inner", inner, hidden).tanh())

        x = x * 2  # The input of the first group is no leaf.
        for layer in self.layers:
            x = x + run_in_group(manager, "outer", partial(outer, layer=layer), x)
        return x


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_what_the_inner_group_saves_is_not_held_by_the_outer_one(backend: str) -> None:
    chunk, manager = NestedChunk(), make_manager(backend)
    expected = run_schedule([chunk], "F0.0 B0.0", None)
    for _ in range(4):
        assert all_equal(expected, run_schedule([chunk], "F0.0 B0.0", manager))
    plan, modules = manager.plan, manager.report.modules
    assert plan is not None
    moved = [group.name for group in plan.groups if group.moves]
    assert moved == ["outer", "outer"], "the last layer's group stays, and so do those within"
    assert modules["outer"].d2h_bytes == modules["outer"].freed_bytes == plan.moved_nbytes > 0
    assert modules["inner"].d2h_bytes == 0
