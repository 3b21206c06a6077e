# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Loads the engine in processes that a framework's script starts.

Each framework has an option that names code to run: :mod:`on_import`, :mod:`spec` or :mod:`slime`.
That code may run in processes without a model (drivers, samplers, data loaders) and before a
process has selected its GPU. So the engine is installed at the first call of a model with
offloading.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Optional

from megatron.slipstream.integration import install
from megatron.slipstream.launcher import log_to_stderr
from megatron.slipstream.options import preflight
from megatron.slipstream.options.config_file import config_from_environment
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.options.rules import require

logger = logging.getLogger(__name__)


def load(config: Optional[OffloadConfig] = None) -> None:
    """Prepare the engine: it is installed when a model with offloading is first called.

    ``config`` is as for :func:`install`; a settings file that cannot be used is a ``ValueError``.
    """
    log_to_stderr()
    effective = config or config_from_environment()  # Raises now if it is invalid.
    if effective.offload_engine == "megatron":
        logger.info("offload_engine='megatron': the engine of megatron-core stays")
        return

    def check_process() -> None:
        # Transformer Engine may be about to offload weights, too.
        require(preflight.check_process(preflight.collect(), offloading=True))

    install.install_at_first_call(config, check_process)
    logger.debug("ready for models with fine_grained_activation_offloading=True")


def config_from_arguments(args: Any) -> Optional[OffloadConfig]:
    """Return Slipstream's settings from megatron's arguments; None if they are not among them."""
    has_all = all(hasattr(args, field.name) for field in dataclasses.fields(OffloadConfig))
    return OffloadConfig.of(args) if has_all else None
