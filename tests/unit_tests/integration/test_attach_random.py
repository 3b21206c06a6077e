# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Random models in random programs compute the same with and without ``attach()``.

Seeds are fixed, or new (``SLIPSTREAM_RANDOM_MODELS``), or a given one (``SLIPSTREAM_RANDOM_SEED``):
see CONTRIBUTING.md.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterable

import pytest
from random_programs import compare

from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage

NUM_NEW = int(os.environ.get("SLIPSTREAM_RANDOM_MODELS", "0"))
AGAIN = os.environ.get("SLIPSTREAM_RANDOM_SEED")
SEEDS_PER_TEST = 10


def failures_of(seeds: Iterable[int]) -> list[str]:
    """Faults by seed. Something must be compared, and something must move."""
    found, num_values, moved_bytes = [], 0, 0
    for seed in seeds:
        try:
            outcome = compare(seed)
        except AssertionError as error:
            found.append(str(error))
        else:
            num_values += outcome.num_values
            moved_bytes += outcome.moved_bytes
    if not found:
        assert num_values > 0
        assert moved_bytes > 0
    return found


@pytest.mark.parametrize("first", range(0, 40, SEEDS_PER_TEST))
def test_known_seeds(first: int) -> None:
    assert failures_of(range(first, first + SEEDS_PER_TEST)) == []


@pytest.mark.timeout(6 * 3600)
@pytest.mark.skipif(NUM_NEW == 0, reason="SLIPSTREAM_RANDOM_MODELS=N draws N new seeds")
def test_new_seeds() -> None:
    first = random.SystemRandom().randrange(2**40)
    print(f"seeds {first} to {first + NUM_NEW - 1}")
    assert failures_of(range(first, first + NUM_NEW)) == []


@pytest.mark.skipif(AGAIN is None, reason="SLIPSTREAM_RANDOM_SEED=N runs that seed")
def test_a_seed_again() -> None:
    compare(int(AGAIN or ""))


# --- the comparison finds faults ------------------------------------------------------------------


def test_a_missing_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(CopyStreams, "before_use", lambda *_: None)
    assert any(" differs, step " in failure for failure in failures_of(range(SEEDS_PER_TEST)))


def test_a_false_error_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """A whole storage is refused if one of its saved tensors was changed."""
    is_overwritten = SavedStorage.is_overwritten

    def is_any_overwritten(storage: SavedStorage, _: int) -> bool:
        return any(is_overwritten(storage, index) for index in range(len(storage.aliases)))

    monkeypatch.setattr(SavedStorage, "is_overwritten", is_any_overwritten)
    failures = failures_of(range(SEEDS_PER_TEST))
    assert any("without None, with RuntimeError" in failure for failure in failures)
