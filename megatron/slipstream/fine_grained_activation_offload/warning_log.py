# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Slipstream's warnings in this process, for the report of a run."""

from __future__ import annotations

import logging

MAX_WARNINGS = 100
"""Maximum number of different texts."""


class WarningLog(logging.Handler):
    """Keeps the texts of warnings and errors, with the count of each.

    It does not affect whether and where a warning is shown: without logging set up, it goes to
    stderr as in Python without any handler.
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
    """Whether a record of the logger ``name`` reaches another handler."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if any(not isinstance(handler, WarningLog) for handler in logger.handlers):
            return True
        logger = logger.parent if logger.propagate else None
    return False


_LOG = WarningLog()


def keep_warnings() -> dict[str, int]:
    """Keep Slipstream's warnings from now on. Returns all so far, with their counts."""
    logging.getLogger("megatron.slipstream").addHandler(_LOG)  # Adding it again does nothing.
    return dict(_LOG.counts)
