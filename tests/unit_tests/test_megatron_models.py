# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models trained in sequence in one process leave nothing behind; and their training data."""

from __future__ import annotations

import os

import pytest
import torch
from megatron_models import micro_batches
from ranks import run_ranks
from tiny_gpt import ModelCase, initialize


def _threads_and_groups(rank: int, num_ranks: int, port: int) -> list[tuple[int, int]]:
    found = []
    for num_layers in (3, 2, 3):
        case = ModelCase(pp=2, num_layers=num_layers)
        initialize(case, rank, num_ranks, port)
        groups = torch.distributed.distributed_c10d._world.pg_map
        found.append((len(os.listdir("/proc/self/task")), len(groups)))
    return found


@pytest.mark.skipif(torch.cuda.is_available(), reason="NCCL's groups stay: graphs may hold them")
def test_the_process_groups_of_the_case_before_are_closed() -> None:
    for (num_threads, num_groups), *others in run_ranks(2, _threads_and_groups):
        assert [groups for _, groups in others] == [num_groups] * 2
        assert max(threads for threads, _ in others) < 1.5 * num_threads


def test_packs_hold_documents_of_varying_length() -> None:
    case = ModelCase(is_packed=True, seq_length=4096, micro_batch_size=1)
    lengths = []
    for batch in micro_batches(case, step=0, count=8):
        of_pack = [int(length) for length in batch["cu_seqlens"][0].diff() if length > 0]
        assert sum(of_pack) <= 4096
        assert int((~batch["padding_mask"]).sum()) == sum(of_pack)
        lengths += of_pack
    assert sum(lengths) > 8 * 2048
    assert len(set(lengths)) > len(lengths) / 2
    assert 150 < sorted(lengths)[len(lengths) // 2] < 400


def test_every_pack_counts_some_label() -> None:
    """A pack without documents has no mean loss."""
    case = ModelCase(is_packed=True, seq_length=1024, micro_batch_size=1)
    counted = [batch["loss_mask"].sum() for batch in micro_batches(case, step=0, count=2000)]
    assert min(counted) > 0
