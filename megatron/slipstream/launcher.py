# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The variables of this process's launcher, such as torchrun, and what stands in for one."""

from __future__ import annotations

import contextlib
import itertools
import os
import socket
import sys
import time

LOCAL_RANKS_VARIABLE = "LOCAL_WORLD_SIZE"
"""Set by torchrun."""

_LAUNCHER = {
    "RANK": "number of a process",
    "LOCAL_RANK": "number of a process on its node",
    "WORLD_SIZE": "number of processes",
    LOCAL_RANKS_VARIABLE: "number of processes on a node",
}
"""Variables that launchers set, and what they hold."""


def rank() -> int:
    """Of this process: that of ``torch.distributed`` if it is initialised, else the launcher's.

    Raises:
        ValueError: The launcher's variable is no number.
    """
    torch = sys.modules.get("torch")  # Not loaded, it has no process group either.
    distributed = torch and torch.distributed
    if distributed and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return launcher_number("RANK", 0)


def num_local_ranks() -> int:
    """The number of processes that the launcher started on this node; 1 without a launcher.

    Raises:
        ValueError: The launcher's variable is not a positive number.
    """
    return launcher_number(LOCAL_RANKS_VARIABLE, 1, at_least=1)


def launcher_number(variable: str, default: int, at_least: int = 0) -> int:
    """A number that the launcher tells by a variable of the environment.

    Args:
        variable: Its name, such as ``RANK``.
        default: Where it is not set.
        at_least: Less makes no sense.

    Raises:
        ValueError: It is no whole number, or less.
    """
    text = os.environ.get(variable, str(default))
    if not text.strip().isdecimal() or int(text) < at_least:
        raise ValueError(
            f"{variable}={text!r} is not supported because it is no {_LAUNCHER[variable]}; set it "
            "to one, as torchrun does, or leave it unset"
        )
    return int(text)


def check_launcher() -> None:
    """Refuse variables of a launcher that are no numbers.

    Raises:
        ValueError: One is no number.
    """
    for variable in _LAUNCHER:
        launcher_number(variable, 1, at_least=int("SIZE" in variable))
    number, size = launcher_number("RANK", 0), os.environ.get("WORLD_SIZE")
    if size is not None and number >= int(size):
        raise ValueError(
            f"RANK={number} is not supported with WORLD_SIZE={size} because ranks count from 0; "
            "set both as torchrun does, or leave them unset"
        )


def refuse(error: ValueError) -> int:
    """Say what the user got wrong, once per machine; returns the exit code."""
    if os.environ.get("LOCAL_RANK", "0") == "0":
        sys.stderr.write("error: " + " ".join(str(error).split()) + "\n")
    else:
        # torchrun ends all ranks when one exits; let the first one speak.
        time.sleep(2)
    return 2


FIRST_PORT, NUM_PORTS = 10_000, 22_000
"""Below those that Linux gives to whoever asks for any."""

_places = itertools.count(997 * os.getpid())


def free_port() -> int:
    """A port for ranks to meet at, which no other process takes before rank 0 does.

    Not one that the system chooses: gloo's listeners have theirs from the same range, dozens at a
    time. And not where other processes look at the same time.
    """
    while True:
        port = FIRST_PORT + next(_places) % NUM_PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
