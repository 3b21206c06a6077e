# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Let a model's configuration name modules that only Slipstream marks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from megatron.slipstream.options.modules import OWN_MODULE_RULES, own_modules
from megatron.slipstream.options.rules import check_rules, require
from megatron.slipstream.patches.patching import replacing

_STAND_IN = "core_attn"
"""A module that every model has, for a configuration that names none of megatron-core's."""


@replacing
def accept_own_modules(original: Callable[[Any], None], config: Any) -> None:
    """Replace ``TransformerConfig.__post_init__``.

    Its layers only look for their own names in ``offload_modules``.
    """
    own = own_modules(config) if config.fine_grained_activation_offloading else []
    if not own:
        original(config)
        return
    require(check_rules(OWN_MODULE_RULES, config))
    given = config.offload_modules
    config.offload_modules = [name for name in given if name not in own] or [_STAND_IN]
    try:
        original(config)
    finally:
        config.offload_modules = given
