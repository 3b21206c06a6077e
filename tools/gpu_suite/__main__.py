# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``./run gpu-suite``."""

from __future__ import annotations

import sys

from tools.gpu_suite.command import main

if __name__ == "__main__":
    sys.exit(main())
