# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The engine is told where backward leaves a group, without an additional graph node."""

from __future__ import annotations

from unittest.mock import patch

import pytest
import torch
from marked_group import offload_group
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload
from toy_model import make_manager

from megatron.slipstream.patches import table
from megatron.slipstream.patches.patching import applied

pytestmark = pytest.mark.releases


def test_backward_leaves_a_group_when_it_has_the_gradient_of_its_input() -> None:
    manager = make_manager("cpu")
    with (
        applied(table.GROUPS),
        patch.object(mcore_offload.PipelineOffloadManager, "OFFLOAD_MGR", manager),
    ):
        manager.init_model_chunk_offload_handler(0, None, 0, 1)
        x = torch.randn(4, 8, requires_grad=True) * 2
        group = mcore_offload.FineGrainedActivationOffloadingInterface(True, x, "first")
        with group as inside:
            assert inside is x
            y = inside.exp()
        y = offload_group(manager, "first").commit(y)
        y.sum().backward()
        manager.reset()
    steps = [str(step) for step in manager.plan.trace.steps]
    assert steps == [f"0.0.first:{kind}" for kind in ("FS", "FC", "BU", "BE")]
