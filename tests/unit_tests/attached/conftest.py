# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Fixtures of all tests of ``attach()``."""

from __future__ import annotations

import logging
import sys
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


@pytest.fixture(scope="module", autouse=True)
def _compilations_are_not_traced() -> Iterator[None]:
    """Spare what torch does to log a compilation, more than a third of its time here.

    It writes a record of each step if its logger has a handler, and pytest adds some. To tell how
    long guards take it empties the processor's cache, which takes 45 ms each time.
    """
    logging.getLogger("torch.__trace").handlers.clear()
    with pytest.MonkeyPatch.context() as patch:
        if "torch._dynamo.guards" in sys.modules:
            patch.setattr("torch._dynamo.guards.profile_guard_manager", lambda *_: 0.0)
            patch.setattr("torch._dynamo.utils.record_compilation_metrics", lambda *_: None)
        yield
