# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Run a function on several ranks, each a process of its own, and collect what they return.

On a CPU the ranks are forked from a process that has imported megatron-core but run nothing of it,
which takes a quarter of a second; the shims that the models need then stay out of the tests' own
process. With a GPU they are spawned, as CUDA asks for.
"""

from __future__ import annotations

import gc
import multiprocessing
import os
import traceback
from collections.abc import Callable
from typing import Any

import torch

from megatron.slipstream.launcher import free_port
from tools.shared_gpus import take_place

TIMEOUT_S = 300


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(rank, num_ranks, port, *arguments)`` on each rank.

    Args:
        num_ranks: How many processes.
        function: A function at the top level of a module. Its result is pickled.
        arguments: Passed on, pickled if processes are spawned.

    Returns:
        The results in rank order.

    Raises:
        AssertionError: A rank raised, died or took too long; holds its traceback.
    """
    if not torch.cuda.is_available():
        import_megatron()
    context: Any = multiprocessing.get_context("spawn" if torch.cuda.is_available() else "fork")
    port = free_port()
    pipes, processes = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main, args=(sender, function, rank, num_ranks, port, arguments)
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return [_receive(rank, pipe) for rank, pipe in enumerate(pipes)]
    finally:
        for process in processes:
            process.terminate()
            process.join()


def import_megatron() -> None:
    """Imports of nearly all that is forked from this process, once for all."""
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.pipeline_parallel  # noqa: F401
    from torch._dynamo import trace_rules

    # Cached: each process would make it at its first call of what megatron-core compiles.
    trace_rules.get_torch_obj_rule_map()


def make_cheap() -> None:
    """Leave out, in a forked process, what takes long and changes nothing of what it computes.

    What was imported is no garbage. To compile megatron-core's small fused functions in each
    process takes a fourth of the tests' time: with a GPU they are compiled, and in what is started
    as from a shell. What torch knows for compiling it would forget with each process group, and
    find out again though nothing is compiled. Each seed it would note, with a formatted stack, for
    devices that it was not built for.
    """
    gc.freeze()
    torch._dynamo.config.disable = True
    torch._dynamo.trace_rules.clear_lru_cache = lambda: None
    for device in (torch.xpu, torch.mtia):
        if not device.is_available():
            device._is_in_bad_fork = lambda: True  # Then torch notes nothing for it.


def _receive(rank: int, pipe: Any) -> Any:
    if not pipe.poll(TIMEOUT_S):
        raise AssertionError(f"rank {rank} did not finish within {TIMEOUT_S} s")
    try:
        error, result = pipe.recv()
    except EOFError:
        raise AssertionError(f"rank {rank} died") from None
    if error is not None:
        raise AssertionError(f"rank {rank} raised\n{error}")
    return result


def _rank_main(
    sender: Any,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    port: int,
    arguments: tuple[Any, ...],
) -> None:
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank if not torch.cuda.is_available() else take_place(rank, num_ranks)),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    if not torch.cuda.is_available():
        make_cheap()
    try:
        result = function(rank, num_ranks, port, *arguments)
    except BaseException:
        sender.send((traceback.format_exc(), None))
    else:
        sender.send((None, result))
    sender.close()
    # Until all results are there, and this process is terminated: others may still be connecting
    # by the store that lives in the first rank.
    parent = multiprocessing.parent_process()
    parent.join()
    # Without running the interpreter's shutdown: gloo and NCCL threads may still be waiting for
    # ranks that have already gone.
    os._exit(0)
