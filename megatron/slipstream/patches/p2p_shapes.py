# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Exchange tensor shapes between pipeline stages without the copy engine.

If sequence lengths vary, stages first exchange the shapes, and the host waits for them.
megatron-core moves them to the device and back with copies, which queue behind the engine's. Here
kernels move them, as in :mod:`d2h_by_kernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch

from megatron.slipstream.patches.d2h_by_kernel import D2HByKernel

_NUM_DIMS = 3
"""Number of dimensions that stages send: sequence, micro-batch, hidden."""

_to_host = D2HByKernel(lambda tensor, **_: tensor.cpu())


def exchange_by_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``P2PCommunicator._communicate_shapes``."""

    @functools.wraps(original)
    def communicate_shapes(
        self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> Any:
        # The ring exchange is not PyTorch's; its streams synchronise differently.
        if self.config.use_ring_exchange_p2p:
            return original(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)
        operations: list[torch.distributed.P2POp] = []
        neighbours = (
            (self.prev_rank, tensor_send_prev, recv_prev),
            (self.next_rank, tensor_send_next, recv_next),
        )
        received = [_exchange(operations, self.pp_group, *each) for each in neighbours]
        if operations:
            for request in torch.distributed.batch_isend_irecv(operations):
                request.wait()  # H3
        on_host = [None if shape is None else _to_host(shape) for shape in received]
        torch.cuda.current_stream().synchronize()  # H3
        return tuple([0] * _NUM_DIMS if shape is None else shape.tolist() for shape in on_host)

    return communicate_shapes


def _exchange(
    operations: list[torch.distributed.P2POp],
    group: torch.distributed.ProcessGroup,
    peer: int,
    sent: Optional[torch.Tensor],
    receives: bool,
) -> Optional[torch.Tensor]:
    """Append the operations with one neighbour; return the received tensor ``[3]``, if any."""
    if sent is not None:
        shape = _empty_shape()
        for place, size in enumerate(sent.shape):
            shape[place] = size  # A kernel with the number as an argument, not a copy.
        operations.append(torch.distributed.P2POp(torch.distributed.isend, shape, peer, group))
    if not receives:
        return None
    received = _empty_shape()
    operations.append(torch.distributed.P2POp(torch.distributed.irecv, received, peer, group))
    return received


def _empty_shape() -> torch.Tensor:
    return torch.empty(_NUM_DIMS, dtype=torch.int64, device=torch.cuda.current_device())
