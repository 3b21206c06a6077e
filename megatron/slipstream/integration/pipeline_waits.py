# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Lets the host run ahead of what pipeline stages send each other.

In the schedule without interleaving, megatron-core's stages block the host after every exchange
until the whole device is idle, a precaution against versions of PyTorch that are long past
(``batch_p2p_sync``). That includes the copies of the engine: twice in every micro-batch, what is on
its way out and back has to arrive before the host launches anything more, and compute has nothing
to do meanwhile. Then the host is no longer ahead of the device, and what it does for each group
delays the kernels after it. The current stream has been told to wait for the exchange, which is
all that today's PyTorch needs; so the host goes on at once, as in the interleaved schedule.

Where the lengths of sequences vary, stages tell each other the shapes first, and the host has to
wait for these. megatron-core brings them to the device and back by copies, each of which would
queue up behind those of the engine. Kernels bring them instead, as they do the token counts of
:mod:`small_copies`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Optional

import torch
from megatron.core.pipeline_parallel.p2p_communication import P2PCommunicator

from megatron.slipstream.integration.small_copies import SmallCopies

_NUM_DIMS = 3
"""Of what stages send: sequence, micro-batch, hidden."""

_originals: dict[str, Callable[..., Any]] = {}
"""megatron-core's own methods by name, while ours stand there."""

_to_host = SmallCopies(lambda tensor, **_: tensor.cpu())


def install() -> None:
    """Have the host wait for no exchange of activations and gradients. Again does nothing."""
    for method in (_communicate, _communicate_shapes):
        if method.__name__ not in _originals:
            _originals[method.__name__] = getattr(P2PCommunicator, method.__name__)
            setattr(P2PCommunicator, method.__name__, method)


def uninstall() -> None:
    """Give megatron-core its own methods back."""
    for name, original in _originals.items():
        setattr(P2PCommunicator, name, original)
    _originals.clear()


def _communicate(communicator: Any, *arguments: Any, **options: Any) -> Any:
    """Takes the place of the method through which all stages send and receive."""
    config, original = communicator.config, _originals["_communicate"]
    if config.use_ring_exchange_p2p:
        # Not PyTorch's own: nothing is known about what its streams wait for.
        return original(communicator, *arguments, **options)
    waits = config.batch_p2p_sync
    config.batch_p2p_sync = False
    try:
        return original(communicator, *arguments, **options)
    finally:
        config.batch_p2p_sync = waits


def _communicate_shapes(
    communicator: Any,
    tensor_send_next: Optional[torch.Tensor],
    tensor_send_prev: Optional[torch.Tensor],
    recv_prev: bool,
    recv_next: bool,
) -> tuple[list[int], list[int]]:
    """Takes the place of the method by which stages tell each other the shapes to come.

    Args:
        communicator: Of this stage.
        tensor_send_next: What the next stage is going to get, or None.
        tensor_send_prev: What the previous stage is going to get, or None.
        recv_prev: Whether the previous stage is going to send something.
        recv_next: Whether the next stage is.

    Returns:
        The shapes of what the previous and the next stage are going to send; zeros for nothing.
    """
    if communicator.config.use_ring_exchange_p2p:
        original = _originals["_communicate_shapes"]
        shapes: tuple[list[int], list[int]] = original(
            communicator, tensor_send_next, tensor_send_prev, recv_prev, recv_next
        )
        return shapes
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
