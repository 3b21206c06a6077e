# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The engine is notified before megatron-core discards an output; evaluations keep nothing."""

from __future__ import annotations

from functools import partial
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload
from megatron.core.tensor_parallel import random
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
    ones = partial(torch.ones, requires_grad=is_trained)
    outputs, ctx = (ones(3) * 2, ones(5) * 2), object()
    checkpoint: Any = CheckpointWithoutOutput()
    checkpoint.outputs, checkpoint.ctx = outputs, ctx
    table.apply(Feature.ENGINE)
    try:
        with patch.object(mcore_offload.PipelineOffloadManager, "OFFLOAD_MGR", manager):
            if is_trained:  # A captured layer ends it on each output, with or without a gradient.
                checkpoint.discard_output_and_register_recompute(torch.ones(1))
            checkpoint.discard_output_and_register_recompute(ones(1) * 2)
    finally:
        table.undo(Feature.ENGINE)
    assert heard[:2] == [12, 20], "then, from 0.20 on, by the method that discards"
    assert [output.untyped_storage().nbytes() for output in outputs] == [0, 0]
    assert checkpoint.ctx is (ctx if is_trained else None)
    assert checkpoint.outputs is (outputs if is_trained else None)


def test_the_engine_hears_of_outputs_that_a_manager_discards(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    manages = next(row for row in table.DISCARDED if row.target.endswith("._discard_outputs"))
    if not manages.is_needed():
        pytest.skip("this release discards the outputs of each checkpoint alone")
    heard: list[torch.Tensor] = []
    manager = make_manager("cpu")
    monkeypatch.setattr(manager.store, "before_discard", heard.append)
    together = random.CheckpointWithoutOutputManager()
    checkpoint: Any = CheckpointWithoutOutput(ckpt_manager=together)
    checkpoint.outputs = (torch.ones(3),)
    together.add_checkpoint(checkpoint)
    table.apply(Feature.ENGINE)
    try:
        with patch.object(mcore_offload.PipelineOffloadManager, "OFFLOAD_MGR", manager):
            hook_tensor = torch.ones(1)
            checkpoint.discard_output_and_register_recompute(hook_tensor)
            heard.clear()  # Told early: it is recomputed in any case.
            together.discard_all_outputs_and_register_unified_recompute(hook_tensor)
    finally:
        table.undo(Feature.ENGINE)
    assert heard == [checkpoint.outputs[0]]
