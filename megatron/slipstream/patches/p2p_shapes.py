# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Exchanges the shapes of what pipeline stages send without the copy engine.

Where the lengths of sequences vary, stages tell each other the shapes first, and the host has to
wait for these. megatron-core brings them to the device and back by copies, each of which queues up
behind those of the engine. Kernels bring them instead, as in :mod:`d2h_by_kernel`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any, Optional

import torch

from megatron.slipstream.patches.d2h_by_kernel import D2HByKernel

_NUM_DIMS = 3
"""Of what stages send: sequence, micro-batch, hidden."""

_to_host = D2HByKernel(lambda tensor, **_: tensor.cpu())


def exchange_by_kernels(original: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``P2PCommunicator._communicate_shapes``."""

    @functools.wraps(original)
    def communicate_shapes(
        self: Any, tensor_send_next: Any, tensor_send_prev: Any, recv_prev: bool, recv_next: bool
    ) -> Any:
        # A ring exchange is not PyTorch's own: its streams wait in another way.
        is_ring = self.config.use_ring_exchange_p2p
        exchange = original if is_ring else _communicate_shapes
        return exchange(self, tensor_send_next, tensor_send_prev, recv_prev, recv_next)

    return communicate_shapes


def _communicate_shapes(
    communicator: Any,
    tensor_send_next: Optional[torch.Tensor],
    tensor_send_prev: Optional[torch.Tensor],
    recv_prev: bool,
    recv_next: bool,
) -> tuple[list[int], list[int]]:
    """Tell the neighbours the shapes of what comes, and learn theirs.

    Args:
        communicator: Of this stage.
        tensor_send_next: What the next stage is going to get, or None.
        tensor_send_prev: What the previous stage is going to get, or None.
        recv_prev: Whether the previous stage is going to send something.
        recv_next: Whether the next stage is.

    Returns:
        The shapes of what the previous and the next stage are going to send; zeros for nothing.
    """
    previous, from_previous = _exchange(
        communicator, communicator.prev_rank, tensor_send_prev, recv_prev
    )
    following, from_next = _exchange(
        communicator, communicator.next_rank, tensor_send_next, recv_next
    )
    operations = [*previous, *following]
    if operations:
        for request in torch.distributed.batch_isend_irecv(operations):
            request.wait()
    on_host = [None if shape is None else _to_host(shape) for shape in (from_previous, from_next)]
    torch.cuda.current_stream().synchronize()
    prev_shape, next_shape = ([0] * _NUM_DIMS if s is None else s.tolist() for s in on_host)
    return prev_shape, next_shape


def _exchange(
    communicator: Any, peer: int, sent: Optional[torch.Tensor], receives: bool
) -> tuple[list[torch.distributed.P2POp], Optional[torch.Tensor]]:
    """The operations with one neighbour, and the tensor ``[3]`` that they receive, if any."""
    operations, received = [], None
    group = communicator.pp_group
    if sent is not None:
        shape = _empty_shape()
        for place, size in enumerate(sent.shape):
            shape[place] = size  # A kernel that has the number as an argument.
        operations.append(torch.distributed.P2POp(torch.distributed.isend, shape, peer, group))
    if receives:
        received = _empty_shape()
        operations.append(torch.distributed.P2POp(torch.distributed.irecv, received, peer, group))
    return operations, received


def _empty_shape() -> torch.Tensor:
    return torch.empty(_NUM_DIMS, dtype=torch.int64, device=torch.cuda.current_device())
