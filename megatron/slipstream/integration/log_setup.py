# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Logging of the library to stderr."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Show our messages from INFO on; the root logger and its level are unchanged."""
    package = logging.getLogger("megatron.slipstream")
    if not any(isinstance(handler, logging.StreamHandler) for handler in package.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s slipstream: %(message)s"))
        package.addHandler(handler)
        package.propagate = False
    package.setLevel(logging.INFO)
