# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Attached models under DistributedDataParallel and ``fully_shard``, on two processes."""

from __future__ import annotations

import multiprocessing
import os
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


def _rank_main(rank: int, folder: str, cases: list[dict[str, Any]], sender: Any) -> None:
    os.environ.update(RANK=str(rank), WORLD_SIZE="2", LOCAL_RANK=str(rank))
    torch.distributed.init_process_group(
        "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
    )
    for case in cases:
        try:
            sender.send(_check(rank, case, _whole_bytes(**case)))
        except BaseException:
            sender.send(traceback.format_exc())
            break
    sender.close()
    os._exit(0)  # The other rank's threads may still be running.


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[str]]:
    """Results of each rank for each case. The processes start once, which takes longest."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    context: Any = multiprocessing.get_context("fork")
    folder = str(tmp_path_factory.mktemp("store"))
    pipes, processes = [], []
    for rank in range(2):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(rank, folder, list(CASES.values()), sender)
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    said: dict[str, list[str]] = {name: [] for name in CASES}
    try:
        for name in CASES:
            for pipe in pipes:
                try:
                    said[name].append(pipe.recv() if pipe.poll(60) else "nothing in 60 s")
                except EOFError:
                    said[name].append("the rank has gone")
    finally:
        for process in processes:
            process.terminate()
            process.join()
    return said


@pytest.mark.parametrize("name", CASES)
def test_distributed_models(name: str, results: dict[str, list[str]]) -> None:
    assert results[name] == ["", ""]
