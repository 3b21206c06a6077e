# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Python imports this file at its start, in trainings of functional cases on GPUs.

Triton measures the configurations of a kernel and takes the fastest. Which one that is differs from
process to process, and Transformer Engine's permutation of tokens rounds by it. Here Triton takes
the first one.
"""

from __future__ import annotations

from typing import Any

import triton

_autotune = triton.autotune


def _take_the_first(configs: list[Any], *arguments: Any, **options: Any) -> Any:
    return _autotune(configs[:1], *arguments, **options)


triton.autotune = _take_the_first
