# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Logging of the library to stderr."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Let our own messages through at INFO; the root logger and its level stay as they are."""
    package = logging.getLogger("megatron.slipstream")
    if not any(isinstance(handler, logging.StreamHandler) for handler in package.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s slipstream: %(message)s"))
        package.addHandler(handler)
        package.propagate = False
    package.setLevel(logging.INFO)
