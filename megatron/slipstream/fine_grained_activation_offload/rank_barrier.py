# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A barrier across the ranks of one host, so that they measure their links simultaneously.

The GPUs of a host copy to and from the same host memory. The bandwidth of one link alone is
therefore higher than in training, where all of them copy at once.

[Note: Why no collective]
A rank may never reach the barrier: its pipeline stage may have no marks, or its iteration may have
taken another path. In a collective the other ranks would hang. So ranks count themselves in the
process group's store, and wait for the others with a timeout. That happens only for the first
measurement, between iterations.
"""

from __future__ import annotations

import itertools
import logging
import os
import socket
import time
from typing import Any, Optional

import torch

from megatron.slipstream.launcher import num_local_ranks

logger = logging.getLogger(__name__)

PATIENCE_S = 5.0
"""Timeout for the other ranks. They reach the end of the same iteration, at different times in
different pipeline stages."""

POLL_S = 1e-4
"""Polling interval; measured copies take a millisecond."""

_numbers = itertools.count(1)
"""Barrier numbers in this process: each engine measures once, in the same order on all ranks."""


class RankBarrier:
    """A barrier across this host's ranks, with a timeout."""

    def __init__(self) -> None:
        self._store = _store()
        self._num_ranks = num_local_ranks()
        host = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
        self._name = f"slipstream/measure/{next(_numbers)}/{host}"
        self._num_met = 0
        self.is_alone = self._store is None or self._num_ranks < 2
        """Whether this rank waits for no other: there is none, or the barrier failed."""

    def meet(self) -> None:
        """Wait until every rank of the host has reached this point, or until the timeout."""
        if self.is_alone:
            return
        self._num_met += 1
        try:
            self.is_alone = not self._meet(f"{self._name}/{self._num_met}")
        except RuntimeError as error:  # The store's process has ended.
            logger.debug("links are measured alone: %s", error)
            self.is_alone = True

    def attend(self, num_times: int) -> None:
        """Take part in ``num_times`` barriers without measuring."""
        for _ in range(num_times):
            self.meet()

    def _meet(self, key: str) -> bool:
        """Return whether all ranks reached the barrier."""
        store: Any = self._store
        given_up, all_here = f"{key}/given_up", f"{key}/all_here"
        if store.check([given_up]):
            return False
        if store.add(f"{key}/num_here", 1) >= self._num_ranks:
            store.set(all_here, "1")
        deadline_s = time.monotonic() + PATIENCE_S
        while not store.check([all_here]):
            if store.check([given_up]):
                return False
            if time.monotonic() > deadline_s:
                store.set(given_up, "1")
                logger.info(
                    "not all of the %d ranks of this host measured their links within %.0f s of "
                    "each other, so this one is measured alone",
                    self._num_ranks,
                    PATIENCE_S,
                )
                return False
            time.sleep(POLL_S)
        return True


def _store() -> Optional[Any]:
    """Return the store of the default process group; None if there is no group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.distributed_c10d._get_default_store()
