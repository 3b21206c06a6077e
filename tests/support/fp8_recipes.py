# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""FP8 recipes as overrides of a model case, and where Transformer Engine supports them."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

RECIPES: Mapping[str, Mapping[str, Any]] = {
    "delayed": {"fp8": "hybrid", "fp8_recipe": "delayed"},
    "tensorwise": {"fp8": "hybrid", "fp8_recipe": "tensorwise"},
    "blockwise": {"fp8": "e4m3", "fp8_recipe": "blockwise"},
}


def skip_without_recipe(overrides: Mapping[str, Any]) -> None:
    """Skip the test if this machine does not support the recipe: blockwise needs CUDA 12.9."""
    if overrides.get("fp8_recipe") == "blockwise":
        from transformer_engine.pytorch.fp8 import FP8GlobalStateManager

        is_available, reason = FP8GlobalStateManager.is_fp8_block_scaling_available()
        if not is_available:
            pytest.skip(reason)
