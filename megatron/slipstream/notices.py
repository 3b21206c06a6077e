# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Messages and warnings of torch and megatron-core that a user can do nothing about.

``./run`` silences these, so that relevant messages stand out. It sets
``SLIPSTREAM_SHOW_WARNINGS=0``; a user may set it to 1. Without ``./run`` the variable is not set
and nothing is silenced.
"""

from __future__ import annotations

import logging
import os
import re
import warnings
from collections.abc import Mapping

VARIABLE = "SLIPSTREAM_SHOW_WARNINGS"

NOTICES: Mapping[str, str] = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "megatron.core.rerun_state_machine": "RerunStateMachine initialized in mode",
}
"""Prefix of each message, by its logger."""

WARNINGS = (
    "Apex is not installed",
    "Transformer Engine and Apex are not installed",
    "Only transformer-engine>=1.7.0 supports MoE experts",
    "absl.logging is not installed",
    "MimoModelConfig is experimental",
)
"""Prefix of each warning: optional packages that are not installed, and notices to developers."""


class _Silences:
    """Logger filter that drops one message."""

    def __init__(self, beginning: str) -> None:
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)


def silence_if_asked() -> None:
    """Silence these messages if ``./run`` asks for it; call before torch is imported."""
    if os.environ.get(VARIABLE) != "0":
        return
    for name, beginning in NOTICES.items():
        logging.getLogger(name).addFilter(_Silences(beginning))
    for beginning in WARNINGS:
        # Appended last, so that a user's filter wins.
        warnings.filterwarnings("ignore", re.escape(beginning), UserWarning, append=True)
