# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Lets the host run ahead of what pipeline stages exchange.

In the schedule without interleaving, megatron-core's stages block the host after every exchange
until the whole device is idle (``batch_p2p_sync``), a precaution against old versions of PyTorch.
That includes the copies of the engine: twice in every micro-batch the host waits for them before it
launches more, and then it is no longer ahead of the device. The current stream waits for the
exchange, which is all that today's PyTorch needs, so the host goes on at once, as in the
interleaved schedule.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any


def let_host_run_ahead(config: Any) -> Callable[[], None]:
    """Set ``batch_p2p_sync=False``, which stages read at every exchange.

    Args:
        config: A model's ``TransformerConfig``. Unchanged with ``use_ring_exchange_p2p``, whose
            streams are not PyTorch's.

    Returns:
        A function that undoes it.
    """
    if not config.batch_p2p_sync or config.use_ring_exchange_p2p:
        return lambda: None
    config.batch_p2p_sync = False
    return partial(setattr, config, "batch_p2p_sync", True)
