# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A checkpoint with the optimizer state of other experts is refused in words that are true."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from megatron.slipstream.patches.training_loop import CheckpointRefusedError, check_expert_layout


def load(saved: dict[str, Any], **options: Any) -> bool:
    """Whether megatron's own check is reached."""
    given = {"use_distributed_optimizer": True, "no_load_optim": False, "load": "folder"}
    args = SimpleNamespace(**{**given, "moe_sync_free_experts": False, **options})
    reached: list[Any] = []
    check_expert_layout(args, reached.append)(SimpleNamespace(**saved))
    return bool(reached)


@pytest.mark.parametrize(
    "saved, wanted, words",
    [
        ({"moe_sync_free_experts": True}, False, "was saved with moe_sync_free_experts=True"),
        ({"moe_sync_free_experts": False}, True, "was saved with moe_sync_free_experts=False"),
        # Another launcher's.
        ({}, True, "does not record moe_sync_free_experts, which counts as off"),
    ],
    ids=str,
)
def test_other_experts_are_refused_with_a_cure(
    saved: dict[str, Any], wanted: bool, words: str
) -> None:
    with pytest.raises(CheckpointRefusedError, match=words):
        load(saved, moe_sync_free_experts=wanted)
    assert load(saved, moe_sync_free_experts=wanted, no_load_optim=True)
    reshardable = {"dist_ckpt_optim_fully_reshardable": True}
    assert load({**saved, **reshardable}, moe_sync_free_experts=wanted)


@pytest.mark.parametrize(
    "saved, wanted",
    [
        ({"moe_sync_free_experts": True}, True),
        ({"moe_sync_free_experts": False}, False),
        ({}, False),
    ],
    ids=str,
)
def test_the_same_experts_load(saved: dict[str, Any], wanted: bool) -> None:
    assert load(saved, moe_sync_free_experts=wanted)
