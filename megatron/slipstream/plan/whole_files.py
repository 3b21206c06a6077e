# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Writes regular output files atomically, and devices and pipes in place."""

from __future__ import annotations

import os
import stat
import sys
from pathlib import Path
from typing import BinaryIO


def write_whole(path: str | Path, data: bytes) -> None:
    """Write a file atomically; create its folder if needed.

    A symbolic link is kept: its target is written. A path for which :func:`is_stream` is true is
    written in place, since replacing it would remove the device or pipe.

    Raises:
        OSError: The file cannot be written; the error names ``path``, and an existing file is
            unchanged.
    """
    path = Path(path)
    if is_stream(path):
        with _open_stream(path) as stream:
            stream.write(data)
        return
    target = resolved(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    # Two processes that write the same file must not share a temporary file.
    temporary = target.with_name(f"{target.name}.{os.getpid()}.tmp")
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    except OSError as error:
        if error.filename != str(temporary):
            raise
        raise OSError(error.errno, error.strerror, str(path)) from error
    finally:
        temporary.unlink(missing_ok=True)


def is_stream(path: Path) -> bool:
    """Return whether the path leads to a device, a pipe, a socket, or this process's output.

    Raises:
        OSError: The path cannot be resolved, for example because of a symbolic link loop.
    """
    try:
        found = path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return False
    regular = stat.S_ISREG(found.st_mode) or stat.S_ISDIR(found.st_mode)
    return not regular or _printed_to(found) is not None


def resolved(path: Path) -> Path:
    """Return the file written for ``path``: the target of its links, which need not exist."""
    return Path(os.path.realpath(path))


def _open_stream(path: Path) -> BinaryIO:
    descriptor = _printed_to(path.stat())
    if descriptor is None:
        return path.open("wb")
    # Reopening /dev/stdout would start at the beginning of the file that the shell redirects to,
    # and fails if it is a socket.
    sys.stdout.flush()
    return os.fdopen(os.dup(descriptor), "wb")


def _printed_to(found: os.stat_result) -> int | None:
    """Return the descriptor (stdout or stderr) that refers to this file, or None."""
    for descriptor in (1, 2):
        try:
            if os.path.samestat(found, os.fstat(descriptor)):
                return descriptor
        except OSError:  # closed
            continue
    return None
