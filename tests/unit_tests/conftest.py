# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Fixtures of all unit tests."""

from __future__ import annotations

import sys
from collections.abc import Iterator

import pytest

from tools.shared_gpus import num_places

MEASURED_NBYTES = 4 << 20


@pytest.fixture(scope="module", autouse=True)
def _links_are_measured_with_little_memory() -> Iterator[None]:
    """A CPU copies what a GPU needs for it eighteen times in 0.1 s, in each engine with times."""
    name = "megatron.slipstream.fine_grained_activation_offload.copy_rates"
    with pytest.MonkeyPatch.context() as patch:
        if name in sys.modules and not num_places():
            patch.setattr(f"{name}.BANDWIDTH_NBYTES", MEASURED_NBYTES)
        yield
