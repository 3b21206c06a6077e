# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Train a GPT or hybrid model with megatron-core and Slipstream; ``--help`` explains the flags."""

import os
import sys

# Transformer Engine reads this once, when it is imported; later is too late.
os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")

from megatron.slipstream.launcher import INTERRUPTED

if __name__ == "__main__":
    # This import takes seconds, in which a user may press Ctrl-C.
    try:
        from megatron.slipstream.integration.entry.training import main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(main())
