# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How progress is shown without rich."""

import logging
import time
from collections.abc import Iterator
from typing import Optional

from megatron.slipstream.packed_sequences.packing import Pack

logger = logging.getLogger(__name__)

_LINE_EVERY_S = 10.0


def watched(packs: Iterator[Pack], total: Optional[int], what: str) -> Iterator[Pack]:
    """Yield the packs, and log every ten seconds how many there are."""
    shown_s = time.monotonic()
    for count, pack in enumerate(packs, 1):
        yield pack
        now_s = time.monotonic()
        if now_s - shown_s > _LINE_EVERY_S:
            shown_s = now_s
            of_total = "" if total is None else f" of {total}"
            logger.info("%s: %d%s samples", what, count, of_total)
