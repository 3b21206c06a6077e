# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Where the ranks of one host meet, so that they measure their links at the same moment.

GPUs of a host copy to and from the same host memory. What a link reaches alone is therefore no
measure of what it reaches in training, where all of them copy at once.

[Note: Why no collective]
A rank may never come: nothing may be marked in its pipeline stage, or its iteration may have gone
another way. In a collective the others would hang. So ranks leave a note in the
store that the process group was made with, and wait for the others' notes for a limited time. That
is done before the first measurement only, between iterations, and is no part of any step.
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
"""How long to wait for the other ranks. They come to the end of the same iteration, which stages of
a pipeline reach at different times."""

POLL_S = 1e-4
"""Copies that are measured take a millisecond."""

_numbers = itertools.count(1)
"""Of the process: each of its engines measures once, and ranks have their engines in one order."""


class RankBarrier:
    """Lets the ranks of this host go on together, as often as all of them come."""

    def __init__(self) -> None:
        self._store = _store()
        self._num_ranks = num_local_ranks()
        host = f"{socket.gethostname()}/{os.environ.get('GROUP_RANK', '')}"
        self._name = f"slipstream/measure/{next(_numbers)}/{host}"
        self._num_met = 0
        self.is_alone = self._store is None or self._num_ranks < 2
        """Whether no rank is waited for: there are no others, or not all of them came."""

    def meet(self) -> None:
        """Until every rank of the host has come here as often as this one, or is given up."""
        if self.is_alone:
            return
        self._num_met += 1
        try:
            self.is_alone = not self._meet(f"{self._name}/{self._num_met}")
        except RuntimeError as error:  # of the store: the process that keeps it has gone
            logger.debug("links are measured alone: %s", error)
            self.is_alone = True

    def attend(self, num_times: int) -> None:
        """Come as often as the others do, with nothing to measure in between."""
        for _ in range(num_times):
            self.meet()

    def _meet(self, key: str) -> bool:
        """Whether all came."""
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
    """The store of the default process group; None if there is no group."""
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return None
    return torch.distributed.distributed_c10d._get_default_store()
