# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Lets the host run ahead of what pipeline stages exchange.

In the schedule without interleaving, megatron-core's stages block the host after every exchange
until the whole device is idle (``batch_p2p_sync``), a precaution against old versions of PyTorch.
So twice in every micro-batch the host waits for the engine's copies before it launches more. The
current stream waits for the exchange, which is all that PyTorch needs, as in the interleaved
schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def disable_p2p_host_sync(chunk: Any) -> Callable[[], None]:
    """Set ``batch_p2p_sync=False``, which stages read at every exchange.

    Not with ``use_ring_exchange_p2p``, whose streams are not PyTorch's.

    Returns:
        A function that undoes it. It does not keep the chunk alive.
    """
    if not chunk.config.batch_p2p_sync or chunk.config.use_ring_exchange_p2p:
        return lambda: None
    chunk.config.batch_p2p_sync = False
    # Weakly, and not the configuration: schedules put methods of the chunks into that.
    reference = weakref.ref(chunk)

    def restore() -> None:
        chunk = reference()
        if chunk is not None:
            chunk.config.batch_p2p_sync = True

    return restore
