# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Comparisons of ways to run a model: ``python -m benchmarks.run --help``."""

import sys
from pathlib import Path

# The models are the tests' own, not part of the package. pytest has this path already.
_SUPPORT = str(Path(__file__).resolve().parents[1] / "tests" / "support")
if _SUPPORT not in sys.path:
    sys.path.append(_SUPPORT)
