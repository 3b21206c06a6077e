# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The engine is notified before megatron-core discards an output; evaluations keep nothing."""

from __future__ import annotations

from types import SimpleNamespace
from unittest.mock import patch

import pytest
import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload
from megatron.core.tensor_parallel.random import CheckpointWithoutOutput
from toy_model import make_manager

from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

pytestmark = pytest.mark.releases


@pytest.mark.parametrize("is_trained", [True, False])
def test_the_engine_hears_of_each_output_and_evaluations_keep_no_inputs(
    monkeypatch: pytest.MonkeyPatch, is_trained: bool
) -> None:
    heard: list[int] = []
    manager = make_manager("cpu")
    monkeypatch.setattr(
        manager.store,
        "before_discard",
        lambda tensor: heard.append(tensor.untyped_storage().nbytes()),
    )
    outputs, ctx = (torch.ones(3), torch.ones(5)), object()
    checkpoint = SimpleNamespace(outputs=outputs, ctx=ctx, run_function=None, _recompute=None)
    table.apply(Feature.ENGINE)
    try:
        discard = CheckpointWithoutOutput.discard_output_and_register_recompute
        with patch.object(mcore_offload.PipelineOffloadManager, "OFFLOAD_MGR", manager):
            discard(checkpoint, torch.ones(1, requires_grad=is_trained) * 2)
    finally:
        table.undo(Feature.ENGINE)
    assert heard == [12, 20]
    assert [output.untyped_storage().nbytes() for output in outputs] == [0, 0]
    assert checkpoint.ctx is (ctx if is_trained else None)
    assert checkpoint.outputs is (outputs if is_trained else None)
