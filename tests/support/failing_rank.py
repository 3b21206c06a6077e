# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``pretrain_gpt.py``, whose first rank fails in its third micro-batch."""

from __future__ import annotations

import os
import sys
from typing import Any

from megatron.slipstream.integration.entry import providers, training

WHAT = "this rank fails"
_forward_step = providers.forward_step
_num_calls = 0


def _fail_at_the_third(*arguments: Any, **options: Any) -> Any:
    global _num_calls
    _num_calls += 1
    if os.environ["RANK"] == "0" and _num_calls == 3:
        raise RuntimeError(WHAT)
    return _forward_step(*arguments, **options)


if __name__ == "__main__":
    providers.forward_step = _fail_at_the_third
    sys.exit(training.main())
