# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Collects Slipstream's warnings in this process for the run's report."""

from __future__ import annotations

import logging

MAX_WARNINGS = 100
"""Maximum number of distinct messages."""


class WarningLog(logging.Handler):
    """Collects the messages of warnings and errors, with the count of each.

    It does not affect whether and where a warning is shown: if logging is not configured, the
    warning goes to stderr, as Python does without any handler.
    """

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.counts: dict[str, int] = {}

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text in self.counts or len(self.counts) < MAX_WARNINGS:
            self.counts[text] = self.counts.get(text, 0) + 1
        if logging.lastResort is not None and not _is_heard_elsewhere(record.name):
            logging.lastResort.handle(record)


def _is_heard_elsewhere(name: str) -> bool:
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, WarningLog) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


_LOG = WarningLog()


def keep_warnings() -> dict[str, int]:
    """Collect Slipstream's warnings from now on. Returns those so far, with their counts."""
    logging.getLogger("megatron.slipstream").addHandler(_LOG)  # Adding it again does nothing.
    return dict(_LOG.counts)
