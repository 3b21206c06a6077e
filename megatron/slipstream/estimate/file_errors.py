# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Error messages for unreadable or unwritable files: the option, the path and the fix."""

from __future__ import annotations

import errno
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from megatron.slipstream.plan.whole_files import is_stream, resolved


def wrong_with(error: OSError) -> str:
    """Describe an error, to follow the file's option and path in a message."""
    if error.errno == errno.ENOENT:
        return "does not exist"
    if error.errno == errno.EISDIR:
        return "is a folder"
    # mkdir raises EEXIST.
    if error.errno in (errno.ENOTDIR, errno.EEXIST):
        return "is not in a folder: a part of its path is a file"
    verb = "written" if error.errno in _FULL else "opened"
    return f"cannot be {verb}: {(error.strerror or str(error)).lower()}"


_FULL = (errno.ENOSPC, errno.EDQUOT)
_FIRST_BYTES = 1 << 16
"""Bytes written to find a full disk early; a plan or report has more."""


def cure_of(error: OSError) -> str:
    """Return what to do about an error from writing a file."""
    if error.errno in _FULL:
        return "free space there, or name a file on another disk"
    return "name a file in a folder that can be written"


@contextmanager
def reading(label: str, path: Path, writer: str) -> Iterator[None]:
    """Turn errors from reading a file that Slipstream wrote into ``ValueError``.

    Messages have ``label`` before the path, and name the option of a training that writes it.
    """
    try:
        yield
    except FileNotFoundError:
        cure = f"train with {writer} {path} to write it"
        raise ValueError(f"{path} does not exist; {cure}") from None
    except OSError as error:
        raise ValueError(
            f"{label}{path} {wrong_with(error)}; give a file that {writer} wrote"
        ) from error


@contextmanager
def writing(option: str, path: Path) -> Iterator[None]:
    """Turn errors from writing a file into ``ValueError`` with the option and the path as given."""
    try:
        yield
    except OSError as error:
        raise ValueError(f"{option}={path} {wrong_with(error)}; {cure_of(error)}") from error


def require_writable(option: str, path: Path) -> None:
    """Check before a long computation that a file can be written, and leave none behind.

    Raises ``ValueError`` as :func:`writing`.
    """
    with writing(option, path):
        if path.is_dir():
            raise _os_error(errno.EISDIR, path)
        if is_stream(path):
            if not os.access(path, os.W_OK):
                raise _os_error(errno.EACCES, path)
            return
        # Missing folders would be created in the nearest existing one.
        above = next(folder for folder in resolved(path).parents if folder.exists())
        if not above.is_dir():
            raise _os_error(errno.ENOTDIR, above)
        try:
            # Some file systems refuse new files although a folder's permissions allow them, and a
            # full one takes new files without contents.
            with tempfile.TemporaryFile(dir=above) as trial:
                trial.write(bytes(_FIRST_BYTES))
        except FileNotFoundError:
            raise _os_error(errno.EACCES, above) from None


def require_distinct(paths: Mapping[str, Path]) -> None:
    """Raise ``ValueError`` if two options name one file; devices may be shared."""
    first: dict[Path, str] = {}
    for option, path in paths.items():
        other = first.setdefault(resolved(path), option)
        if other != option and not is_stream(path):
            raise ValueError(
                f"{option}={path} is not supported with {other}={paths[other]} because each would "
                f"replace the other's file; set {option} to another file"
            )


def _os_error(number: int, path: Path) -> OSError:
    return OSError(number, os.strerror(number), str(path))
