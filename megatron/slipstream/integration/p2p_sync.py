# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Let the host run ahead of the exchanges of pipeline stages.

In the schedule without interleaving, megatron-core's stages block the host after every exchange
until the whole device is idle (``batch_p2p_sync``), a workaround for old versions of PyTorch. So
twice per micro-batch the host waits for the engine's copies before it launches more. The current
stream waits for the exchange, which is all that PyTorch needs, as in the interleaved schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def disable_p2p_host_sync(chunk: Any) -> Callable[[], None]:
    """Set ``batch_p2p_sync=False``, which stages read at every exchange.

    It stays with ``use_ring_exchange_p2p``, which uses streams outside of PyTorch.

    Returns:
        A function that undoes it. It does not keep the chunk alive.
    """
    if not chunk.config.batch_p2p_sync or chunk.config.use_ring_exchange_p2p:
        return lambda: None
    chunk.config.batch_p2p_sync = False
    # A weak reference, and not to the configuration: schedules store the chunks' methods in that.
    reference = weakref.ref(chunk)

    def restore() -> None:
        chunk = reference()
        if chunk is not None:
            chunk.config.batch_p2p_sync = True

    return restore
