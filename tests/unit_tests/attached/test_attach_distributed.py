# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Attached models under DistributedDataParallel and ``fully_shard``, on two processes."""

from __future__ import annotations

import traceback
from functools import partial
from typing import Any, Optional

import pytest
import torch
from attached_models import (
    BACKENDS,
    Decoder,
    attach_to,
    counters,
    equal,
    make,
    make_attached,
    one_backward_each,
    train,
)
from ranks import run_ranks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

CASES = {
    "data parallel": {"wrapper": "ddp"},
    "sharded": {"wrapper": "fsdp"},
    "sharded, bf16": {"wrapper": "fsdp", "bf16": True},
    "sharded, checkpoint": {"wrapper": "fsdp", "checkpointing": False},
    "sharded, reentrant": {"wrapper": "fsdp", "checkpointing": True},
    "checkpointed, compiled, sharded": {"wrapper": "all"},
}


def _wrap(model: Any, wrapper: str, bf16: bool) -> Any:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    for index, layer in enumerate(model.layers):
        if wrapper == "all":
            layer = model.layers[index] = checkpoint_wrapper(layer.eval())
            layer.compile(backend="aot_eager")
        fully_shard(layer, mp_policy=precision)
    return fully_shard(model, mp_policy=precision)


def _run(
    rank: int,
    backend: Optional[str],
    attach_first: bool,
    wrapper: str,
    bf16: bool = False,
    checkpointing: Optional[bool] = None,
) -> tuple[list[torch.Tensor], Any]:
    model, attached = make(partial(Decoder, 3, checkpointing)), None
    if backend and attach_first:
        attached = attach_to(model, "layers.*", backend)
    model = _wrap(model, wrapper, bf16)
    if backend and not attach_first:
        attached = attach_to(model, "layers.*", backend)
    return train(model, one_backward_each, 3, seed=100 * rank), attached


def _check(rank: int, case: dict[str, Any], whole_bytes: int) -> str:
    """The faults found; empty if none.

    Args:
        rank: This rank.
        case: One of :data:`CASES`.
        whole_bytes: Bytes that move without a wrapper.
    """
    expected, _ = _run(rank, None, False, **case)
    for backend, attach_first in zip(BACKENDS, (False, True), strict=True):
        results, attached = _run(rank, backend, attach_first, **case)
        report = attached.report().ranks[0]
        (moved,) = counters(attached).values()
        facts = {
            "equal": equal(results, expected),
            "rank": report.rank == rank,
            "one plan": report.num_plans == 1,
            "none late": moved.num_late == 0,
            "two of three move": moved.num_groups_moved == 2,
            "no parameter moves": moved.d2h_bytes <= whole_bytes,
            "all that moves is freed": moved.freed_bytes == moved.d2h_bytes > 0,
        }
        wrong = [name for name, holds in facts.items() if not holds]
        if wrong:
            return f"rank {rank}, {backend}: not {wrong}, {moved}"
    return ""


def _whole_bytes(checkpointing: Optional[bool] = None, **_: Any) -> int:
    model, attached = make_attached(partial(Decoder, 3, checkpointing), "layers.*")
    train(model, one_backward_each, 2)
    return attached.report().ranks[0].d2h_bytes


def _check_all(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The faults of each case until one raises."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    said = dict.fromkeys(CASES, "not run")
    for name, case in CASES.items():
        try:
            said[name] = _check(rank, case, _whole_bytes(**case))
        except BaseException:
            said[name] = traceback.format_exc()
            break
    return said


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    """What each rank says of each case. The processes start once, which takes longest."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    return run_ranks(2, _check_all)


@pytest.mark.parametrize("name", CASES)
def test_distributed_models(name: str, results: list[dict[str, str]]) -> None:
    assert [said[name] for said in results] == ["", ""]
