# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Train a GPT model with megatron-core and Slipstream; ``--help`` explains the flags."""

import os
import sys

# Transformer Engine reads this once, when it is imported; later is too late.
os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")

from megatron.slipstream.integration.entry.flag_names import refuse_misspelt_flags
from megatron.slipstream.launcher import INTERRUPTED, refuse

if __name__ == "__main__":
    try:
        refuse_misspelt_flags(sys.argv[1:])
    except ValueError as error:
        sys.exit(refuse(error))

    # After that, since this import takes seconds.
    try:
        from megatron.slipstream.integration.entry.training import main
    except KeyboardInterrupt:
        sys.exit(INTERRUPTED)
    sys.exit(main())
