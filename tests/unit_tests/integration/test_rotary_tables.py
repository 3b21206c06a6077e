# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Rotary tables of captured chunks outlive megatron-core's cache."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import YarnRotaryEmbedding

from megatron.slipstream.integration.graphs.rotary_tables import RotaryTables


class _Group:
    """Replaces a context-parallel group of one rank."""

    def size(self) -> int:
        return 1


GROUP: Any = _Group()


def rope(**options: Any) -> RotaryEmbedding:
    return RotaryEmbedding(8, 1.0, use_cpu_initialization=True, cp_group=GROUP, **options)


def yarn() -> YarnRotaryEmbedding:
    return YarnRotaryEmbedding(
        8, original_max_position_embeddings=16, use_cpu_initialization=True, cp_group=GROUP
    )


@pytest.fixture(autouse=True)
def _on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(torch.cuda, "current_device", lambda: torch.device("cpu"))
    yield
    RotaryEmbedding.forward.cache_clear()
    YarnRotaryEmbedding.forward.cache_clear()


def forget(*kinds: type) -> None:
    for kind in kinds:
        kind.forward.cache_clear()
    gc.collect()


def test_a_table_lives_as_long_as_it_is_held() -> None:
    layer = rope()
    tables = RotaryTables(layer)
    with tables.in_place():
        table = layer(32, packed_seq=True)
    alive = weakref.ref(table)
    expected = table.clone()
    del table
    forget(RotaryEmbedding)
    held = alive()
    assert held is not None
    assert torch.equal(held, expected)
    with tables.in_place():
        assert layer(32, packed_seq=True) is held
    assert layer(32, packed_seq=True) is not held  # outside nothing is changed
    assert "forward" not in vars(layer)
    del held, tables
    gc.collect()
    assert alive() is None


def test_what_is_held_is_not_made_again(monkeypatch: pytest.MonkeyPatch) -> None:
    layers = torch.nn.ModuleList([rope() for _ in range(40)])  # more than the cache has room for
    tables = RotaryTables(layers)
    with tables.in_place():
        first = [layer(16, packed_seq=True) for layer in layers]
        forget(RotaryEmbedding)
        monkeypatch.setattr(RotaryEmbedding, "get_emb", None)
        assert all(
            layer(16, packed_seq=True) is table for layer, table in zip(layers, first, strict=True)
        )


def test_layers_with_equal_tables_have_one() -> None:
    layers = torch.nn.ModuleList([rope(), rope(), rope(rotary_base=500)])
    with RotaryTables(layers).in_place():
        first, second, other = (layer(16, packed_seq=True) for layer in layers)
        longer = layers[0](32, packed_seq=True)
    assert first is second
    assert other is not first
    assert not torch.equal(other, first)
    assert len(longer) == 32
    assert len(first) == 16


def test_tables_in_buffers_are_held_when_a_longer_one_replaces_them() -> None:
    layer = yarn()
    tables = RotaryTables(layer)
    asked = {"dtype": torch.float32, "packed_seq": True}
    with tables.in_place():
        short = layer.get_cached_cos_sin(24, **asked)
    addresses = [table.data_ptr() for table in short]
    expected = [table.clone() for table in short]
    del short
    layer.get_cached_cos_sin(64, **asked)
    forget(YarnRotaryEmbedding)
    with tables.in_place():
        again = layer.get_cached_cos_sin(24, **asked)
        table, scale = layer(24, packed_seq=True)
    assert [table.data_ptr() for table in again] == addresses
    assert all(torch.equal(a, b) for a, b in zip(again, expected, strict=True))
    assert torch.is_tensor(table)
    assert isinstance(scale, float)


def test_a_table_is_not_made_while_a_graph_is_captured(monkeypatch: pytest.MonkeyPatch) -> None:
    layer = rope()
    tables = RotaryTables(layer)
    with tables.in_place():
        known = layer(16, packed_seq=True)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
        assert layer(16, packed_seq=True) is known
        with pytest.raises(RuntimeError, match="did not ask for before it was captured"):
            layer(32, packed_seq=True)
