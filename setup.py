# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compiles the engine's C++ module where it can be; all else is declared in pyproject.toml.

A wheel also has a file that starts the engine in processes with SLIPSTREAM_START, see
``integration/frameworks/start.py``.

Compilation needs the torch that will run it, which pip hides from a build unless it is told
``--no-build-isolation``, and a compiler. Without them the module is compiled at its first use.
"""

from __future__ import annotations

import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Optional

from setuptools import Distribution, setup
from setuptools.command.build_py import build_py

NATIVE = Path("megatron", "slipstream", "fine_grained_activation_offload", "native")
START = (
    'import os; os.environ.get("SLIPSTREAM_START") and '
    '__import__("megatron.slipstream.integration.frameworks.start")\n'
)
"""Python runs this line of ``megatron_slipstream.pth`` at each start, so it imports nothing new."""


def load_build_module() -> Optional[ModuleType]:
    """``native/build.py``; None without torch or a compiler."""
    spec = importlib.util.spec_from_file_location("slipstream_build", NATIVE / "build.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
    except Exception:  # A broken torch can fail in many ways.
        return None
    try:
        module.compiler()
    except module.BuildError:
        return None
    return module


class BuildWithNative(build_py):
    """Adds the compiled module to the package, and the file that starts the engine beside it."""

    def run(self) -> None:
        super().run()
        if not self.editable_mode:
            Path(self.build_lib, "megatron_slipstream.pth").write_text(START)
        build = None if self.editable_mode else load_build_module()
        if build is None:
            return
        try:
            build.compile_into(Path(self.build_lib, NATIVE))
        except build.BuildError as error:
            sys.stderr.write(f"{error}; the engine's C++ module is compiled at its first use\n")


class PlatformDistribution(Distribution):
    """Its wheel is of one platform if there is a compiled module in it."""

    def has_ext_modules(self) -> bool:
        return load_build_module() is not None


setup(cmdclass={"build_py": BuildWithNative}, distclass=PlatformDistribution)
