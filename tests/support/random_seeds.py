# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The seeds of random tests: fixed, or drawn for a nightly run. See CONTRIBUTING.md."""

from __future__ import annotations

import os
import random


def first_seed() -> int:
    """0, or what ``SLIPSTREAM_RANDOM_SEED`` gives: a number, or ``new`` for a drawn one.

    A failing test prints its seed, so that it can be repeated with that number.
    """
    value = os.environ.get("SLIPSTREAM_RANDOM_SEED", "0")
    return random.SystemRandom().randrange(2**40) if value == "new" else int(value)
