# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Let the host run ahead of point-to-point exchanges between pipeline stages.

In the non-interleaved schedule, megatron-core synchronises the host with the whole device after
every exchange (``batch_p2p_sync``), a workaround for old versions of PyTorch. So twice per
micro-batch the host waits for the engine's copies before it launches more work. PyTorch only needs
the current stream to wait for the exchange, as in the interleaved schedule.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any


def disable_p2p_host_sync(chunk: Any) -> Callable[[], None]:
    """Set ``batch_p2p_sync=False``, which stages read at every exchange; return how to undo it.

    It stays on with ``use_ring_exchange_p2p``, which uses streams outside of PyTorch.
    """
    if not chunk.config.batch_p2p_sync or chunk.config.use_ring_exchange_p2p:
        return lambda: None
    chunk.config.batch_p2p_sync = False
    # Weakly reference the chunk, not its configuration: schedules store chunks' methods in that.
    reference = weakref.ref(chunk)

    def restore() -> None:
        chunk = reference()
        if chunk is not None:
            chunk.config.batch_p2p_sync = True

    return restore
