# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tiles cover the rows once, and take the memory that they are chosen for."""

from __future__ import annotations

import pytest

from megatron.slipstream.plan.tiles import (
    MIN_TILE_TOKENS,
    TILE_BYTES,
    Tiling,
    gradient_bytes,
    logits_bytes_per_token,
    mlp_bytes_per_token,
)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 8, 1023, 4097])
@pytest.mark.parametrize(
    "tiling", [Tiling(num_tiles=4), Tiling(num_tiles=5), Tiling(max_tokens=100)], ids=str
)
@pytest.mark.parametrize("tokens_per_row", [1, 3, 200])
def test_tiles_cover_the_rows_and_are_alike(
    num_rows: int, tiling: Tiling, tokens_per_row: int
) -> None:
    bounds = tiling.bounds(num_rows, tokens_per_row)
    assert [row for first, end in bounds for row in range(first, end)] == [*range(num_rows)]
    lengths = {end - first for first, end in bounds}
    assert min(lengths) >= 1
    assert max(lengths) - min(lengths) <= 1
    if tiling.num_tiles is not None:
        assert len(bounds) == min(tiling.num_tiles, num_rows)
    else:
        # A row is the least that there is.
        assert max(lengths) * tokens_per_row <= max(tiling.max_tokens or 0, tokens_per_row)
        shorter = -(-num_rows // (len(bounds) - 1)) if len(bounds) > 1 else None
        assert shorter is None or shorter * tokens_per_row > (tiling.max_tokens or 0), "fewest"


def test_one_tile_is_no_division() -> None:
    assert Tiling.of(1, 1000) is None
    assert Tiling.of(3, 1000) == Tiling(num_tiles=3)


def test_auto_takes_the_bytes_that_it_says_or_enough_tokens() -> None:
    assert Tiling.of("auto", TILE_BYTES / 5000) == Tiling(max_tokens=5000)
    assert Tiling.of("auto", TILE_BYTES) == Tiling(max_tokens=MIN_TILE_TOKENS)


def test_an_8_billion_parameter_model() -> None:
    """Llama-3-8B's shapes: by hand."""
    assert logits_bytes_per_token(128256, 2, "te") == 128256 * 4
    assert logits_bytes_per_token(128256, 2, "native") == 128256 * 10
    assert logits_bytes_per_token(128256, 2, "unfused") == 128256 * 6
    assert logits_bytes_per_token(128256, 4, "native") == 128256 * 8
    assert logits_bytes_per_token(128256, 4, "unfused") == 128256 * 4
    assert mlp_bytes_per_token(4096, 14336, 2, is_gated=True) == 2 * (5 * 14336 + 3 * 4096)
    assert mlp_bytes_per_token(4096, 14336, 2, is_gated=False) == 2 * (3 * 14336 + 3 * 4096)
    assert gradient_bytes(1000, 2, has_main_grad=True) == 2000
    assert gradient_bytes(1000, 2, has_main_grad=False) == 4000
