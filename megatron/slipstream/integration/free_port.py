# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Ports at which ranks meet."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket

FIRST_PORT, NUM_PORTS = 10_000, 22_000
"""Below those that Linux gives to whoever asks for any."""

_places = itertools.count(997 * os.getpid())


def free_port() -> int:
    """A port that no other process takes before rank 0 does.

    Not one that the system chooses: from the same range gloo's listeners of other processes have
    theirs, dozens at a time. And not where other processes look at the same time.
    """
    while True:
        port = FIRST_PORT + next(_places) % NUM_PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
