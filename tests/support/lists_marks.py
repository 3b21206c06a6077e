# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A plugin of pytest: writes the marks of all collected tests to the file ``LISTS_MARKS_PATH``."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Write the marks when all tests are collected."""
    marks = {item.nodeid: [mark.name for mark in item.iter_markers()] for item in items}
    Path(os.environ["LISTS_MARKS_PATH"]).write_text(json.dumps(marks))
