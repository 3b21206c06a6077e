# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""For slime: ``--custom-megatron-init-path megatron.slipstream.integration.frameworks.slime.init``.

slime calls it in each training process, after it creates the process groups and before it builds
the model.
"""

from __future__ import annotations

import logging
from typing import Any

from megatron.slipstream.integration.frameworks import loading

logger = logging.getLogger(__name__)


def init(args: Any) -> None:
    """Prepare the engine, and warn if megatron's own options leave it nothing to do.

    Raises ``ValueError`` if the settings file cannot be used.
    """
    loading.load(loading.config_from_arguments(args))
    if not getattr(args, "fine_grained_activation_offloading", False):
        logger.warning(
            "fine_grained_activation_offloading is off, so nothing moves. slime silently drops "
            "unknown flags: if --fine-grained-activation-offloading is among yours, check its "
            "spelling; if not, add it with --offload-modules, or remove "
            "--custom-megatron-init-path"
        )
        return
    modules = getattr(args, "offload_modules", None)
    logger.info("fine_grained_activation_offloading=True offload_modules=%s", modules)
