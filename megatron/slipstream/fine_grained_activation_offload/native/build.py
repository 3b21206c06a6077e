# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compiles the native module when the package is installed, or on first use.

``setup.py`` compiles it into the package if torch and a compiler are available. Otherwise the file
is cached under ``$XDG_CACHE_HOME/slipstream`` (``~/.cache/slipstream``), keyed by the source, the
flags, and the versions of Python and torch, so a machine without a compiler can use a file compiled
on another one. If several processes need it at once, one compiles and the others wait for a lock;
where it fails, its error is theirs.

A file ends with the digest of its contents, since loading one that is cut short kills the process.
Whatever goes wrong is a :class:`BuildError`. ``setup.py`` loads this file by its path, so it
imports nothing of this package.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shlex
import shutil
import signal
import struct
import subprocess
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Optional

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("module.cpp")
NAME = "slipstream_native"
FLAGS = ("-O2", "-g0", "-shared", "-fPIC", "-std=c++20", "-fvisibility=hidden")
MAX_COMPILE_S = 600.0
"""Time limit of the compiler: ten times what it takes on a slow machine."""
MAX_WAIT_S = MAX_COMPILE_S + 60
"""Time limit of waiting for another process that compiles."""
_POLL_S = 0.1
_DIGEST_BYTES = hashlib.sha256().digest_size
_COMPILER = "install g++, or set CXX to a C++20 compiler"
_FOLDER = "set XDG_CACHE_HOME to a folder that this user can write"


class BuildError(RuntimeError):
    """The native module cannot be compiled or loaded."""

    def __init__(self, cause: str, cure: str) -> None:
        super().__init__(f"{cause}; {cure}")
        self.cause = cause
        self.cure = cure


def load(prepare: Callable[[Any], None] = lambda module: None) -> ModuleType:
    """Load the native module, compiled if needed, and ``prepare`` it, or raise ``BuildError``."""
    with _only_build_errors():
        path = _find()
        if path is None:
            path = _path_in(_cache_folder())
            _compile(path)
        return _import(path, prepare)


def compile_into(folder: Path) -> None:
    """Compile the module into a copy of this package; ``BuildError`` if that fails."""
    with _only_build_errors():
        path = _path_in(folder)
        try:
            _compile(path)
        finally:
            path.with_suffix(".lock").unlink(missing_ok=True)


def compiler() -> list[str]:
    """Return the compiler and its first arguments, such as ``ccache g++``, or ``BuildError``."""
    given = os.environ.get("CXX", "").strip() or "c++"
    try:
        program, *arguments = shlex.split(given)
    except ValueError as error:
        raise BuildError(f"CXX={given!r} is no command ({error})", _COMPILER) from error
    found = shutil.which(program)
    if found is None:
        raise BuildError(f"there is no C++ compiler ({program} is not found)", _COMPILER)
    return [found, *arguments]


@contextlib.contextmanager
def _only_build_errors() -> Iterator[None]:
    try:
        yield
    except BuildError:
        raise
    except OSError as error:
        raise BuildError(f"the compiled module cannot be kept ({error})", _FOLDER) from error
    except Exception as error:
        cause = f"{type(error).__name__}: {error}"
        raise BuildError(cause, "set offload_native='off' until it is repaired") from error


# Files


def _find() -> Optional[Path]:
    """Return the compiled module of the package or of the cache; None if neither is intact."""
    if _is_intact(_path_in(SOURCE.parent)):
        return _path_in(SOURCE.parent)
    cached = _path_in(_cache_folder())
    return cached if _is_intact(cached) else None


def _path_in(folder: Path) -> Path:
    return folder / _key() / f"{NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def _cache_folder() -> Path:
    caches = os.environ.get("XDG_CACHE_HOME")
    if caches:
        return Path(caches, "slipstream")
    try:
        return Path.home() / ".cache" / "slipstream"
    except RuntimeError as error:  # HOME is not set, and the user is not in the password database.
        raise BuildError(
            "this user has no home directory for the compiled module", _FOLDER
        ) from error


def _key() -> str:
    python = sysconfig.get_config_var("SOABI")
    sources = sorted([SOURCE, *SOURCE.parent.glob("*.h")])
    # Builds from source may share a version.
    versions = (str(python), torch.__version__, str(torch.version.git_version), *_macros())
    digest = hashlib.sha256("\0".join((*FLAGS, *versions)).encode())
    for source in sources:
        digest.update(b"\0" + source.read_bytes())
    return digest.hexdigest()[:16]


def _is_intact(path: Path) -> bool:
    """Return whether the file is there, and as it was compiled."""
    try:
        contents = path.read_bytes()
    except OSError:
        return False
    return contents[-_DIGEST_BYTES:] == hashlib.sha256(contents[:-_DIGEST_BYTES]).digest()


def _import(path: Path, prepare: Callable[[Any], None]) -> ModuleType:
    spec = importlib.util.spec_from_file_location(NAME, path)
    try:
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)  # Here the file is loaded.
        spec.loader.exec_module(module)
        prepare(module)
    except Exception as error:  # Whatever the code in the file raises.
        raise BuildError(
            f"{path} does not load ({type(error).__name__}: {error})",
            f"delete {path.parent}, so that it is compiled again, and set CXX to a compiler of "
            "this environment",
        ) from error
    return module


# Compiling


def _compile(path: Path) -> None:
    command = compiler()
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w+") as lock, _locked(lock):
        if _is_intact(path):  # compiled by the previous owner of the lock
            return
        # Each process empties the file before it waits, so a text is by the one that it waited for.
        cause, _, cure = lock.read().partition("\n")
        if cure:
            raise BuildError(cause, cure)
        try:
            _compile_alone(command, path)
        except BuildError as error:
            with contextlib.suppress(OSError):  # Of the two errors, the first is of use.
                lock.write(f"{error.cause}\n{error.cure}")
                lock.flush()
            raise


def _compile_alone(command: list[str], path: Path) -> None:
    state = "is damaged, so it is compiled again" if path.exists() else "is compiled once"
    logger.info("the native hot path %s, in under a minute: %s", state, path)
    with tempfile.TemporaryDirectory(dir=path.parent) as folder:
        made = Path(folder) / path.name
        _run([*command, *FLAGS, *_options(), str(SOURCE), "-o", str(made), *_libraries()])
        _seal(made, command[0])
        made.replace(path)  # atomically, so that no process loads a partial file


@contextlib.contextmanager
def _locked(lock: IO[str]) -> Iterator[None]:
    """Context in which no other process compiles; ``BuildError`` after :data:`MAX_WAIT_S`."""
    _wait_for(lock)
    try:
        yield
    finally:
        # A process that another thread forks inherits the file, whose lock would last as long.
        fcntl.flock(lock, fcntl.LOCK_UN)


def _wait_for(lock: IO[str]) -> None:
    start_s = time.monotonic()
    is_said = False
    while True:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            return
        except BlockingIOError:
            pass
        if not is_said:
            logger.info("waiting for another process that compiles the hot path: %s", lock.name)
            is_said = True
        if time.monotonic() - start_s > MAX_WAIT_S:
            raise BuildError(
                f"another process has held {lock.name} for more than {MAX_WAIT_S:.0f} s",
                "end that process, or set XDG_CACHE_HOME to another folder",
            )
        time.sleep(_POLL_S)


def _run(command: list[str]) -> None:
    """Run the compiler; ``BuildError`` if it fails or takes longer than :data:`MAX_COMPILE_S`."""
    name = command[0]
    try:
        done = subprocess.run(
            command,
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            timeout=MAX_COMPILE_S,
        )
    except OSError as error:
        raise BuildError(f"{name} cannot be run ({error.strerror})", _COMPILER) from error
    except subprocess.TimeoutExpired as error:
        raise BuildError(f"{name} took longer than {MAX_COMPILE_S:.0f} s", _COMPILER) from error
    if done.returncode == 0:
        return
    lines = [line.strip() for line in f"{done.stderr}\n{done.stdout}".splitlines() if line.strip()]
    said = next((line for line in lines if "error" in line), lines[-1] if lines else "no output")
    if done.returncode < 0:
        raise BuildError(
            f"{name} was killed by {_signal_name(-done.returncode)}: {said}",
            "free host memory, or compile it on another machine with the same XDG_CACHE_HOME",
        )
    if not lines:
        said = f"exit status {done.returncode} without a message"
    raise BuildError(f"{name} failed: {said}", f"{_COMPILER}, with Python's headers")


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # a real-time signal
        return f"signal {number}"


def _seal(made: Path, name: str) -> None:
    """Append its digest to a file that the compiler has made, if it has made all of it."""
    contents = made.read_bytes() if made.exists() else b""
    if not _is_whole(contents):
        wrote = f"{len(contents)} bytes that are no shared library" if contents else "no file"
        raise BuildError(f"{name} reported success, but wrote {wrote}", _COMPILER)
    with made.open("ab") as file:
        file.write(hashlib.sha256(contents).digest())


def _is_whole(contents: bytes) -> bool:
    """Return whether all segments of a 64-bit ELF file lie inside it."""
    try:
        (table,) = struct.unpack_from("=Q", contents, 32)
        size, number = struct.unpack_from("=HH", contents, 54)
        segments = [
            struct.unpack_from("=Q16xQ", contents, table + index * size + 8)
            for index in range(number)
        ]
    except struct.error:
        return False
    is_elf = contents[:4] == b"\x7fELF" and bool(segments)
    return is_elf and all(start + length <= len(contents) for start, length in segments)


def _macros() -> list[str]:
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [f"-DTORCH_EXTENSION_NAME={NAME}", f"-D_GLIBCXX_USE_CXX11_ABI={abi}"]


def _options() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))
    return [*_macros(), *(part for folder in folders for part in ("-isystem", str(folder)))]


def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
