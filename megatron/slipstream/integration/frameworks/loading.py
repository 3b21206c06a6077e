# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Loads the engine in processes that a framework's script starts.

Each framework has a place that names code to run, such as :mod:`on_import`, :mod:`spec` or
:mod:`slime`. That code may run in processes without a model (drivers, samplers, data loaders) and
before a process knows its GPU. So the engine is installed when a model that is to offload is first
called.
"""

from __future__ import annotations

import dataclasses
import logging
from typing import Any, Optional

from megatron.slipstream import preflight
from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.integration import install
from megatron.slipstream.integration.config_file import config_from_environment
from megatron.slipstream.integration.log_setup import log_to_stderr
from megatron.slipstream.rules import require

logger = logging.getLogger(__name__)


def load(config: Optional[OffloadConfig] = None) -> None:
    """Prepare the engine: it is installed when a model with offloading is first called.

    Args:
        config: Slipstream's own settings; None for those of the file that the environment variable
            ``SLIPSTREAM_CONFIG`` names, or the defaults.

    Raises:
        ValueError: That file cannot be used.
    """
    log_to_stderr()
    effective = config or config_from_environment()  # Raises now if it is invalid.
    if effective.offload_engine == "megatron":
        logger.info("offload_engine='megatron': the engine of megatron-core stays")
        return
    install.install_at_first_call(config, _check_process)
    logger.debug("ready for models with fine_grained_activation_offloading=True")


def config_from_arguments(args: Any) -> Optional[OffloadConfig]:
    """Slipstream's settings in megatron's arguments; None without ``add_offload_arguments``."""
    has_all = all(hasattr(args, field.name) for field in dataclasses.fields(OffloadConfig))
    return OffloadConfig.of(args) if has_all else None


def _check_process() -> None:
    """Refuse, before the first model runs, a Transformer Engine that would move weights, too."""
    require(preflight.check_process(preflight.collect(), offloading=True))
