# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Prepare the engine on import, for frameworks that import a module that the user names.

verl imports the modules in ``VERL_USE_EXTERNAL_MODULES``; ms-swift the files in
``--external_plugins``, one of which may import this. Both do so in every process they start. A
process that cannot import megatron-core has no model to train, and logs a warning.
"""

from __future__ import annotations

import logging

logger = logging.getLogger(__name__)


def get_ready() -> None:
    """Prepare the engine, for frameworks that call a function instead of importing a module.

    Raises ``ValueError`` if the settings file cannot be used.
    """
    try:
        from megatron.slipstream.integration.frameworks.loading import load
    # An incomplete Transformer Engine, which megatron-core imports, raises various exceptions.
    except Exception as error:
        from megatron.slipstream.launcher import log_to_stderr

        log_to_stderr()
        logger.warning(
            "megatron-core does not import in this process (%s: %s), so no activations move in it",
            type(error).__name__,
            str(error).partition("\n")[0],
        )
    else:
        load()


get_ready()
