# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Messages of torch and megatron-core that a user can do nothing about.

``./run`` silences these, and the Python warnings in its own list, so that what concerns the user is
seen. It says so by ``SLIPSTREAM_SHOW_WARNINGS=0``, which a user may set to 1. Without ``./run`` the
variable is not set and nothing is silenced.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Mapping

VARIABLE = "SLIPSTREAM_SHOW_WARNINGS"

NOTICES: Mapping[str, str] = {
    "torch.utils.cpp_extension": "No CUDA runtime is found",
    "megatron.core.models.gpt.gpt_model": "GPTModel IS DEPRECATED",
    "megatron.core.rerun_state_machine": "RerunStateMachine initialized in mode",
}
"""How each message begins, by the logger that it comes from."""


class _Silences:
    """Keeps one message from being logged. A logger's filter."""

    def __init__(self, beginning: str) -> None:
        self._beginning = beginning

    def filter(self, record: logging.LogRecord) -> bool:
        return not record.getMessage().startswith(self._beginning)


def silence_if_asked() -> None:
    """Silence :data:`NOTICES` where ``./run`` asks for it. They may come as early as torch does."""
    if os.environ.get(VARIABLE) == "0":
        for name, beginning in NOTICES.items():
            logging.getLogger(name).addFilter(_Silences(beginning))
