# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Log the library's messages to stderr."""

from __future__ import annotations

import logging


def log_to_stderr() -> None:
    """Show our messages at INFO and above; leave the root logger and its level unchanged."""
    package = logging.getLogger("megatron.slipstream")
    if not any(isinstance(handler, logging.StreamHandler) for handler in package.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s slipstream: %(message)s"))
        package.addHandler(handler)
        package.propagate = False
    package.setLevel(logging.INFO)
