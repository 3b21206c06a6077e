# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The engine is notified before megatron-core discards an output."""

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


def test_the_engine_hears_of_each_output_while_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[int] = []
    manager = make_manager("cpu")
    monkeypatch.setattr(
        manager.store,
        "before_discard",
        lambda tensor: heard.append(tensor.untyped_storage().nbytes()),
    )
    table.apply(Feature.ENGINE_ON_GPU)
    try:
        outputs = (torch.ones(3), torch.ones(5))
        checkpoint = SimpleNamespace(outputs=outputs, _recompute=None)
        discard = CheckpointWithoutOutput.discard_output_and_register_recompute
        with patch.object(mcore_offload.PipelineOffloadManager, "OFFLOAD_MGR", manager):
            discard(checkpoint, torch.ones(1))
    finally:
        table.undo(Feature.ENGINE_ON_GPU)
    assert heard == [12, 20]
    assert [output.untyped_storage().nbytes() for output in outputs] == [0, 0]
