# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Settings of a transformer layer: which of its parts backward recomputes."""

from __future__ import annotations

WHOLE_LAYER = "layer"
"""The part that stands for the whole layer: only its input is saved, and that may be offloaded."""

LayerSetting = frozenset[str]
"""The parts of one layer that backward recomputes: names of megatron-core's ``recompute_modules``,
or :data:`WHOLE_LAYER` alone. Empty if nothing is recomputed."""

FEED_FORWARD = frozenset(("mlp", "moe"))
"""The parts that are all of a layer's MLP or experts."""
NOTHING = LayerSetting()
"""Nothing is recomputed: the layer keeps, or offloads, all that it saves."""
WHOLE = LayerSetting((WHOLE_LAYER,))
"""The whole layer is recomputed, the setting with the least device memory."""

Assignment = tuple[LayerSetting, ...]
"""The setting of each transformer layer of a rank, in forward order, model chunk by model chunk."""


def describe_setting(setting: LayerSetting) -> str:
    """Return the setting as text: ``"keep"``, ``"layer"``, or the parts joined by ``+``."""
    return "+".join(sorted(setting)) or "keep"
