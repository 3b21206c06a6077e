# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Process groups of every context-parallel size, and a check that their ranks agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core import parallel_state

from megatron.slipstream.context_parallel.limits import RankLimits

Group = torch.distributed.ProcessGroup


@dataclass(frozen=True)
class ContextParallelGroups:
    """This rank's groups: one of each size, each a subset of the next larger."""

    everyone: Group
    """All data- and context-parallel ranks. A rank's index among them selects its samples."""
    of_size: Mapping[int, Group]
    """By size, the consecutive ranks of ``everyone`` that share a micro-batch. Size 1 has a group,
    too, because rotary embeddings read its size and rank."""


_groups: Optional[ContextParallelGroups] = None


def device_of_ranks() -> torch.device:
    """Return the device whose tensors this process computes with and exchanges."""
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def context_parallel_groups(limits: RankLimits) -> ContextParallelGroups:
    """Return the groups; the first call creates them, a collective over all ranks of the job.

    Raises ``ValueError`` if megatron's process groups do not match the sizes.
    """
    global _groups
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if _groups is not None and _groups.everyone is everyone:
        return _groups
    _check_order(everyone, limits)
    lists: list[Any] = [None] * torch.distributed.get_world_size()
    mine = torch.distributed.get_process_group_ranks(everyone)
    torch.distributed.all_gather_object(lists, mine)
    # Every rank, of any pipeline stage or tensor-parallel rank, creates all groups in one order.
    distinct = sorted(set(map(tuple, lists)))
    of_size = {size: _of_size(size, everyone, distinct) for size in limits.sizes}
    for group in of_size.values():
        _open_connections(group)
    _groups = ContextParallelGroups(everyone, of_size)
    return _groups


def _check_order(everyone: Group, limits: RankLimits) -> None:
    """Check that ranks are ordered by ``data-parallel rank * context-parallel size + CP rank``."""
    if everyone.size() != limits.num_ranks:
        raise ValueError(
            f"dynamic_context_parallel is not supported with {everyone.size()} data- and "
            f"context-parallel ranks because documents are shared out among {limits.num_ranks}; "
            "set data_parallel_size and context_parallel_size to what megatron was initialised with"
        )
    static_size = parallel_state.get_context_parallel_world_size()
    number = parallel_state.get_data_parallel_rank() * static_size
    number += parallel_state.get_context_parallel_rank()
    if everyone.rank() != number:
        raise ValueError(
            "order is not supported with dynamic_context_parallel because ranks of a static "
            "context-parallel group do not follow one another; set an order in which cp comes "
            "before dp"
        )


def _of_size(size: int, everyone: Group, lists: Sequence[Sequence[int]]) -> Group:
    """Return this rank's group of a size: megatron's if it has one, as all ranks do, else a new."""
    if size == everyone.size():
        return everyone
    if size == parallel_state.get_context_parallel_world_size():
        return parallel_state.get_context_parallel_group()
    # Set if megatron was initialised with hybrid_context_parallel.
    hybrid: Mapping[int, Group] = parallel_state._HYBRID_DP_CP_GROUPS
    if (existing := hybrid.get(size)) is not None:
        return existing
    blocks = [ranks[i : i + size] for ranks in lists for i in range(0, len(ranks), size)]
    name = f"DYNAMIC_CONTEXT_PARALLEL_GROUP_{size}"
    mine, _ = torch.distributed.new_subgroups_by_enumeration(blocks, group_desc=name)
    assert mine is not None
    return mine


def _open_connections(group: Group) -> None:
    """Run one exchange of each kind that attention uses, to open its connections.

    NCCL connects on first use, separately for collectives and for sends to a neighbour. That must
    not happen during CUDA graph capture.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        return
    device = device_of_ranks()
    ones = torch.ones(1, device=device)
    torch.distributed.all_reduce(ones, group=group)
    ranks = torch.distributed.get_process_group_ranks(group)
    received = torch.empty(1, device=device)
    exchanges: list[tuple[Any, torch.Tensor, int]] = [
        (torch.distributed.isend, ones, ranks[(rank + 1) % size]),
        (torch.distributed.irecv, received, ranks[rank - 1]),
    ]
    # In the order of Transformer Engine's ring: the first of a pair sends first.
    if rank % 2:
        exchanges.reverse()
    for work in [exchange(tensor, peer, group) for exchange, tensor, peer in exchanges]:
        work.wait()  # H3
    received.item()  # The host waits for the connections.


# Agreement


def check_agreement(groups: ContextParallelGroups, size: int, fingerprint: int) -> None:
    """Compare size and documents of all ranks' micro-batches; a collective over ``everyone``.

    Ranks with different sizes would deadlock, and ranks with different documents would mix them.
    All ranks raise the same ``RuntimeError``.
    """
    mine = torch.tensor([size, fingerprint], dtype=torch.int64, device=device_of_ranks())
    gathered = [torch.empty_like(mine) for _ in range(groups.everyone.size())]
    torch.distributed.all_gather(gathered, mine, group=groups.everyone)
    said = [tuple(tensor.tolist()) for tensor in gathered]
    for rank, answer in enumerate(said):
        first = rank - rank % answer[0]
        for other in range(first, min(first + answer[0], len(said))):
            if said[other] == answer:
                continue
            what = "sizes" if said[other][0] != answer[0] else "documents"
            raise RuntimeError(
                f"data-parallel ranks {rank} and {other} were to share a micro-batch with "
                f"context_parallel_size={answer[0]}, but have different {what} ({answer[0]} and "
                f"{said[other][0]} ranks); make sure that all ranks have the same options, and "
                "read the same corpus and the same cached index"
            )
