# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Random models in random programs compute the same with and without ``attach()``.

``SLIPSTREAM_RANDOM_MODELS`` is the number of models, one per seed.
"""

from __future__ import annotations

import os
from collections.abc import Iterable

import pytest
from random_programs import compare
from random_seeds import first_seed

from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage

NUM_SEEDS = int(os.environ.get("SLIPSTREAM_RANDOM_MODELS", "40"))
SEEDS_PER_TEST = 10
FIRST_SEED = first_seed()


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


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_results_are_equal(first: int) -> None:
    seeds = range(FIRST_SEED + first, FIRST_SEED + min(first + SEEDS_PER_TEST, NUM_SEEDS))
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    assert failures_of(seeds) == []


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
