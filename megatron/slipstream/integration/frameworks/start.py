# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Prepares the engine in each process that imports megatron-core, without a change to its script.

A wheel installs ``megatron_slipstream.pth`` (see ``setup.py``), which imports this module when
Python starts with ``SLIPSTREAM_START`` set. Nothing else is imported then: a process that never
imports megatron-core is not slower.
"""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, Optional

VARIABLE = "SLIPSTREAM_START"

_CORE = "megatron.core"


class _Finder:
    """Finds megatron-core as the other finders do, and prepares the engine once it is imported.

    :mod:`on_import` imports modules of megatron-core. None of them is half imported then: each
    import of one imports the package first.
    """

    def find_spec(
        self, name: str, path: Optional[Sequence[str]] = None, target: Optional[ModuleType] = None
    ) -> Optional[ModuleSpec]:
        if name != _CORE:
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(name)
        if spec is None or spec.loader is None:
            sys.meta_path.insert(0, self)  # It may be found when the path has changed.
            return None
        # The loader stays the same object, since others ask it for the source or for data.
        loader: Any = spec.loader

        def execute(module: ModuleType) -> None:
            del loader.exec_module
            loader.exec_module(module)
            importlib.import_module("megatron.slipstream.integration.frameworks.on_import")

        loader.exec_module = execute
        return spec


def start(value: str) -> None:
    """Prepare the engine when megatron-core is imported, if ``value`` is '1' rather than '0'.

    Anything else is a ``ValueError``. Python prints it for a ``.pth`` file, and goes on.
    """
    if value not in ("0", "1"):
        raise ValueError(f"{VARIABLE}={value} is neither 1 nor 0; set 1, or leave it out")
    if value == "1" and _CORE not in sys.modules:
        sys.meta_path.insert(0, _Finder())


start(os.environ.get(VARIABLE, "0"))
