# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compiles the extensions that tests use; otherwise the first tests that do wait for the compiler.

python tests/support/compile_extensions.py
"""

from __future__ import annotations

import sys

from megatron.slipstream.fine_grained_activation_offload.native import build
from megatron.slipstream.integration.cpu import cpu_only


def main() -> int:
    cpu_only.install_cpu_shims()
    from megatron.core.tensor_parallel import random

    random._get_share_storage()
    build.load()
    return 0


if __name__ == "__main__":
    sys.exit(main())
