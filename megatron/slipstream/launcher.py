# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A process's place among those of its launcher, such as torchrun, and its words on stderr."""

from __future__ import annotations

import contextlib
import itertools
import logging
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
"""Variables that launchers set, and what each holds, for error messages."""


def rank() -> int:
    """Return this process's rank: of ``torch.distributed`` if initialised, else the launcher's.

    Raises ``ValueError`` if the launcher's variable is not a number.
    """
    torch = sys.modules.get("torch")  # If torch is not loaded, there is no process group.
    distributed = torch and torch.distributed
    if distributed and distributed.is_available() and distributed.is_initialized():
        return int(distributed.get_rank())
    return launcher_number("RANK", 0)


def num_local_ranks() -> int:
    """Return the number of ranks that the launcher started on this node; 1 without a launcher.

    Raises ``ValueError`` if the launcher's variable is not a positive number.
    """
    return launcher_number(LOCAL_RANKS_VARIABLE, 1, at_least=1)


def launcher_number(variable: str, default: int, at_least: int = 0) -> int:
    """Return an integer that the launcher sets, such as ``RANK``; ``ValueError`` if it is none."""
    text = os.environ.get(variable, str(default))
    if not text.strip().isdecimal() or int(text) < at_least:
        raise ValueError(
            f"{variable}={text!r} is not supported because it is no {_LAUNCHER[variable]}; set it "
            "to one, as torchrun does, or leave it unset"
        )
    return int(text)


def check_launcher() -> None:
    """Raise ``ValueError`` unless the launcher's variables are numbers, and fit together."""
    for variable in _LAUNCHER:
        launcher_number(variable, 1, at_least=int("SIZE" in variable))
    number, size = launcher_number("RANK", 0), os.environ.get("WORLD_SIZE")
    if size is not None and number >= int(size):
        raise ValueError(
            f"RANK={number} is not supported with WORLD_SIZE={size} because ranks count from 0; "
            "set both as torchrun does, or leave them unset"
        )


def log_to_stderr() -> None:
    """Show our messages at INFO and above; leave the root logger and its level unchanged."""
    package = logging.getLogger("megatron.slipstream")
    if not any(isinstance(handler, logging.StreamHandler) for handler in package.handlers):
        handler = logging.StreamHandler()
        handler.setFormatter(logging.Formatter("%(levelname)s slipstream: %(message)s"))
        package.addHandler(handler)
        package.propagate = False
    package.setLevel(logging.INFO)


INTERRUPTED = 130
"""Exit code after Ctrl-C, as shells give it."""


def refuse(error: ValueError, is_on_every_rank: bool = True) -> int:
    """Print the user's error on stderr, on one rank per node; return the exit code.

    If local rank 0 may not have the error, too, other ranks print it, unless their launcher ends
    them because that rank has exited.
    """
    if os.environ.get("LOCAL_RANK", "0") == "0":
        _print_error(str(error))
    else:
        # torchrun ends all ranks when one exits, so wait for local rank 0 to print.
        time.sleep(2)
        if not is_on_every_rank:
            _print_error(f"rank {os.environ.get('RANK')}: {error}")
    return 2


def _print_error(message: str) -> None:
    sys.stderr.write("error: " + " ".join(message.split()) + "\n")


FIRST_PORT, NUM_PORTS = 10_000, 22_000
"""Below Linux's range of ephemeral ports."""

_places = itertools.count(997 * os.getpid())


def free_port() -> int:
    """Return a free rendezvous port that other processes are unlikely to take before rank 0 binds.

    It is outside the ephemeral range, from which gloo takes dozens of ports at a time, and each
    process starts its search at a different port.
    """
    while True:
        port = FIRST_PORT + next(_places) % NUM_PORTS
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port


def set_launcher_defaults() -> None:
    """Set torchrun's variables for one process, or raise ``ValueError`` if only some are set."""
    needed = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    if "RANK" in os.environ or "WORLD_SIZE" in os.environ:
        missing = [name for name in needed if name not in os.environ]
        if missing:
            given = next(name for name in needed if name in os.environ)
            raise ValueError(
                f"{given} is set without {', '.join(missing)}; start with torchrun, which sets "
                f"all of them, or unset {given}"
            )
        return
    defaults = {"RANK": 0, "LOCAL_RANK": 0, "WORLD_SIZE": 1, "MASTER_ADDR": "localhost"}
    for name, value in {**defaults, "MASTER_PORT": free_port()}.items():
        os.environ.setdefault(name, str(value))
