# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Fixtures of all tests of ``attach()``."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from attached_models import BACKENDS, has_own_hooks


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(autouse=True)
def _no_hooks_are_left() -> Iterator[None]:
    yield
    assert not has_own_hooks()
