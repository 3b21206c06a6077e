# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Process groups of every context-parallel size, and whether their ranks agree."""

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
    """This rank's groups: one of each size, which divide the same ranks again and again."""

    everyone: Group
    """All data- and context-parallel ranks. A rank's samples go by its number among them."""
    of_size: Mapping[int, Group]
    """The consecutive ranks of ``everyone`` that a micro-batch of this size is shared with. That of
    size 1 is a group too, because rotary embeddings ask it for size and rank."""


_groups: Optional[ContextParallelGroups] = None


def context_parallel_groups(limits: RankLimits) -> ContextParallelGroups:
    """The groups, made by the first call: a collective of all ranks of the job.

    Raises:
        ValueError: Megatron's process groups are not those that the sizes were chosen for.
    """
    global _groups
    everyone = parallel_state.get_data_parallel_group(with_context_parallel=True)
    if _groups is None or _groups.everyone is not everyone:
        _groups = _make_groups(everyone, limits)
    return _groups


def _make_groups(everyone: Group, limits: RankLimits) -> ContextParallelGroups:
    _check_order(everyone, limits)
    lists: list[Any] = [None] * torch.distributed.get_world_size()
    mine = torch.distributed.get_process_group_ranks(everyone)
    torch.distributed.all_gather_object(lists, mine)
    # Of all pipeline stages and tensor-parallel ranks. Every rank makes every group, in one order.
    distinct = sorted(set(map(tuple, lists)))
    of_size = {size: _of_size(size, everyone, distinct) for size in limits.sizes}
    for group in of_size.values():
        _open_connections(group)
    return ContextParallelGroups(everyone, of_size)


def _check_order(everyone: Group, limits: RankLimits) -> None:
    """Samples and groups go by ``data-parallel rank * context-parallel size + its rank``."""
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
    """This rank's group of a size: megatron's own where it has one, else a new one."""
    existing = _existing(size, everyone)
    if existing is not None:
        return existing
    blocks = [ranks[i : i + size] for ranks in lists for i in range(0, len(ranks), size)]
    name = f"DYNAMIC_CONTEXT_PARALLEL_GROUP_{size}"
    mine, _ = torch.distributed.new_subgroups_by_enumeration(blocks, group_desc=name)
    assert mine is not None
    return mine


def _existing(size: int, everyone: Group) -> Optional[Group]:
    """All ranks find one or none does: megatron makes these for all at once."""
    if size == everyone.size():
        return everyone
    if size == parallel_state.get_context_parallel_world_size():
        return parallel_state.get_context_parallel_group()
    # There if megatron was initialised with hybrid_context_parallel.
    hybrid: Mapping[int, Group] = parallel_state._HYBRID_DP_CP_GROUPS
    return hybrid.get(size)


def _open_connections(group: Group) -> None:
    """One exchange of each kind that attention uses, so that none has to connect in training.

    NCCL connects at the first use, apart for collectives and for sends to a neighbour, which must
    not happen while a CUDA graph is captured.
    """
    size, rank = group.size(), group.rank()
    if size == 1:
        return
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    ones = torch.ones(1, device=device)
    torch.distributed.all_reduce(ones, group=group)
    ranks = torch.distributed.get_process_group_ranks(group)
    received = torch.empty(1, device=device)
    exchanges: list[tuple[Any, torch.Tensor, int]] = [
        (torch.distributed.isend, ones, ranks[(rank + 1) % size]),
        (torch.distributed.irecv, received, ranks[rank - 1]),
    ]
    # In the order in which Transformer Engine's ring has them: the first of a pair sends first.
    if rank % 2:
        exchanges.reverse()
    for work in [exchange(tensor, peer, group) for exchange, tensor, peer in exchanges]:
        work.wait()
    received.item()  # The host waits until the connections are there.


# Agreement


def check_agreement(groups: ContextParallelGroups, size: int, fingerprint: int) -> None:
    """Compare size and documents of the micro-batches of all ranks; a collective of ``everyone``.

    Ranks that disagree about the size would wait for each other without end, and those that
    disagree about the documents would mix them.

    Raises:
        RuntimeError: Some disagree; on all ranks, and with the same text.
    """
    device = torch.device("cuda") if torch.cuda.is_available() else torch.device("cpu")
    mine = torch.tensor([size, fingerprint], dtype=torch.int64, device=device)
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
