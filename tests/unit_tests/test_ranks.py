# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Guarantees for tests with several ranks."""

from __future__ import annotations

import time
from datetime import timedelta

from ranks import run_ranks
from torch.distributed import TCPStore

_kept: list[TCPStore] = []
"""Keeps the store like torch's process group."""


def _last_one_asks_late(rank: int, num_ranks: int, port: int) -> bytes:
    limit = timedelta(seconds=30)
    store = TCPStore("127.0.0.1", port, num_ranks, is_master=rank == 0, timeout=limit)
    _kept.append(store)
    if rank == 0:
        store.set("word", "late")
        return b""
    store.wait(["word"])
    time.sleep(0.5)
    return bytes(store.get("word"))


def test_the_store_of_the_first_rank_outlives_all_others() -> None:
    assert run_ranks(2, _last_one_asks_late) == [b"", b"late"]
