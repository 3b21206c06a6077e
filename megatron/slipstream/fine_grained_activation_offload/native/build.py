# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compiles the native module when the package is installed, or on first use.

``setup.py`` compiles it into the package if torch and a compiler are available. Otherwise the file
is cached under ``$XDG_CACHE_HOME/slipstream`` (``~/.cache/slipstream``), keyed by the source, the
flags, and the versions of Python and torch, so a machine without a compiler can use a file compiled
on another one. If several processes need it at once, one compiles and the others wait for a lock.
"""

from __future__ import annotations

import fcntl
import hashlib
import importlib.machinery
import importlib.util
import logging
import os
import shlex
import shutil
import subprocess
import sysconfig
import tempfile
from pathlib import Path
from types import ModuleType
from typing import Optional

import torch

logger = logging.getLogger(__name__)

SOURCE = Path(__file__).with_name("module.cpp")
NAME = "slipstream_native"
FLAGS = ("-O2", "-g0", "-shared", "-fPIC", "-std=c++20", "-fvisibility=hidden")


class BuildError(RuntimeError):
    """The native module could not be compiled."""


def problem() -> Optional[str]:
    """Return why the module cannot be loaded, as far as known without compiling, or None."""
    if _path().exists():
        return None
    try:
        _compiler()
    except BuildError as error:
        return str(error)
    return None


def is_compiled() -> bool:
    """Return whether the module is already compiled."""
    return _path().exists()


def load() -> ModuleType:
    """Load the native module, compiling it if needed.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    path = _path()
    if not path.exists():
        _compile(_compiler(), path)
    spec = importlib.util.spec_from_file_location(NAME, path)
    if spec is None or spec.loader is None:
        raise BuildError(f"{path} is no module")
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except ImportError as error:
        raise BuildError(f"{path} does not load: {error}") from error
    return module


def compile_into(folder: Path) -> None:
    """Compile the module for this Python and torch into a copy of this package.

    Raises:
        BuildError: There is no compiler, or it failed.
    """
    path = _path_in(folder)
    if not path.exists():
        _compile(_compiler(), path)
        path.with_suffix(".lock").unlink()


def _path() -> Path:
    installed = _path_in(SOURCE.parent)
    return installed if installed.exists() else _path_in(_cache_folder())


def _path_in(folder: Path) -> Path:
    return folder / _key() / f"{NAME}{importlib.machinery.EXTENSION_SUFFIXES[0]}"


def _compiler() -> str:
    found = shutil.which(shlex.split(os.environ.get("CXX", "c++"))[0])
    if found is None:
        raise BuildError("there is no C++ compiler; install g++, or set CXX")
    return found


def _cache_folder() -> Path:
    return Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "slipstream"


def _key() -> str:
    python = sysconfig.get_config_var("SOABI")
    sources = sorted([SOURCE, *SOURCE.parent.glob("*.h")])
    parts = (*(source.read_text() for source in sources), *FLAGS, str(python), torch.__version__)
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _compile(compiler: str, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if path.exists():  # compiled by the previous owner of the lock
            return
        logger.info("compiling the native hot path into %s: once, in under a minute", path.parent)
        with tempfile.TemporaryDirectory(dir=path.parent) as folder:
            made = Path(folder) / path.name
            command = [compiler, *FLAGS, *_options(), str(SOURCE), "-o", str(made), *_libraries()]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            if done.returncode != 0:
                first = next((x for x in done.stderr.splitlines() if "error" in x), done.stderr)
                raise BuildError(f"{compiler} failed: {first}")
            made.replace(path)  # atomically, so that no process loads a partial file


def _options() -> list[str]:
    include = Path(torch.__file__).parent / "include"
    folders = (include, include / "torch/csrc/api/include", sysconfig.get_path("include"))
    abi = int(torch._C._GLIBCXX_USE_CXX11_ABI)
    return [
        f"-DTORCH_EXTENSION_NAME={NAME}",
        f"-D_GLIBCXX_USE_CXX11_ABI={abi}",
        *(part for folder in folders for part in ("-isystem", str(folder))),
    ]


def _libraries() -> list[str]:
    folder = Path(torch.__file__).parent / "lib"
    return [f"-L{folder}", "-ltorch_python", "-ltorch_cpu", "-lc10"]
