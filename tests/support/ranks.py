# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs a function on several ranks, each a separate process, and collects the results.

The ranks are forked from a process that has imported megatron-core but has run nothing of it, which
takes a quarter of a second; so the shims that the models need stay out of the tests' own process.
With a GPU that process is a fork server, since the tests' own one may have initialized CUDA, which
does not survive a fork.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from multiprocessing import connection, forkserver
from typing import Any
from unittest.mock import patch

import new_process
import torch
from garbage import freeze

from megatron.slipstream.launcher import free_port
from tools.shared_gpus import take_place

TIMEOUT_S = 300


def run_ranks(num_ranks: int, function: Callable[..., Any], *arguments: Any) -> list[Any]:
    """Call ``function(rank, num_ranks, port, *arguments)`` on each rank.

    Args:
        num_ranks: Number of processes.
        function: A function at the top level of a module. Its result is pickled.
        arguments: Arguments of the function, pickled with a GPU.

    Returns:
        The results in rank order.

    Raises:
        AssertionError: A rank raised, died or took too long; the message has its traceback.
    """
    context = _context()
    port = free_port()
    pipes, processes = [], []
    for rank in range(num_ranks):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(
            target=_rank_main,
            args=(sender, function, rank, num_ranks, port, arguments, dict(os.environ)),
        )
        process.start()
        sender.close()
        pipes.append(receiver)
        processes.append(process)
    try:
        return _receive(pipes)
    finally:
        for process in processes:
            process.terminate()
            process.join()


def _context() -> Any:
    if not torch.cuda.is_available():
        import_megatron()
        new_process.check_can_fork()
        return multiprocessing.get_context("fork")
    if find_spec("megatron.core.ssm.ops.gdp") is not None:
        # megatron-core 0.20's kernels there ask for the GPU's name when they are imported, which
        # initializes CUDA: each rank imports for itself.
        return multiprocessing.get_context("spawn")
    forkserver.set_forkserver_preload(["gpu_imports"])
    # Not every Python 3.12 gives the server this path.
    with patch.dict(os.environ, PYTHONPATH=os.pathsep.join(sys.path)):
        forkserver.ensure_running()
    return multiprocessing.get_context("forkserver")


def import_megatron() -> None:
    """Import once what nearly all forked processes need."""
    import megatron.core.datasets.gpt_dataset
    import megatron.core.models.gpt
    import megatron.core.models.gpt.gpt_layer_specs
    import megatron.core.pipeline_parallel
    import state_space_layers  # noqa: F401
    from compile_extensions import load_shared_storage
    from torch._dynamo import trace_rules

    import megatron.slipstream.integration.cpu.cpu_modules
    import megatron.slipstream.integration.cpu.cpu_only
    import megatron.slipstream.integration.graphs.chunks
    import megatron.slipstream.integration.install
    import megatron.slipstream.integration.packed.packed_sequences
    import megatron.slipstream.patches.module_names
    import megatron.slipstream.patches.multihot_map  # noqa: F401
    from megatron.slipstream.fine_grained_activation_offload.native import native_module

    native_module()
    # Cached: otherwise each process creates it at its first call of a compiled function.
    trace_rules.get_torch_obj_rule_map()
    load_shared_storage()


def import_training() -> None:
    """Import once what forked trainings need, such as transformers with Megatron's tokenizers."""
    import_megatron()
    import megatron.core.datasets.helpers
    import megatron.core.models.mimo
    import megatron.core.tokenizers.text

    import megatron.slipstream.integration.entry.providers
    import megatron.slipstream.integration.entry.training
    import megatron.slipstream.patches.marks
    import megatron.slipstream.patches.model_calls
    import megatron.slipstream.plan.files  # noqa: F401

    _remember_descriptions_of_flags()


@functools.cache
def _remember_descriptions_of_flags() -> None:
    """Read descriptions of flags once: to find them in source files takes most of each parse."""
    from megatron.training.argument_utils import ArgumentGroupFactory
    from megatron.training.arguments import add_megatron_arguments

    from megatron.slipstream.integration.entry.arguments import GROUPS

    read = ArgumentGroupFactory._get_field_docstrings
    known: dict[type, dict[str, str]] = {}

    def remembered(factory: Any, described: type) -> dict[str, str]:
        if described not in known:
            known[described] = read(factory, described)
        return dict(known[described])

    ArgumentGroupFactory._get_field_docstrings = remembered
    add_megatron_arguments(argparse.ArgumentParser())
    for options, _ in GROUPS:
        ArgumentGroupFactory(options)


def make_cheap() -> None:
    """Disable slow work in a forked process that does not change results.

    Imported objects are not garbage. Compiling megatron-core's small fused functions in each
    process takes a fourth of the tests' time; they are compiled with a GPU, and in commands that
    are started as from a shell. With each process group, torch would reset its compiler's caches
    and fill them again though nothing is compiled. For each operation that a memory meter sees,
    torch would look up a dispatch rule, and none is registered. Megatron-core's mock data has
    100,000 documents of 2,000 tokens, whose shuffling takes a fifth of a small training; 1,000 are
    enough here.
    """
    from megatron.core.datasets.gpt_dataset import MockGPTLowLevelDataset

    freeze()
    MockGPTLowLevelDataset.size = 1000
    torch._dynamo.config.disable = True
    torch._dynamo.trace_rules.clear_lru_cache = lambda: None
    torch._library.simple_registry.find_torch_dispatch_rule = lambda operation, mode: None
    seed_no_absent_device()


def seed_no_absent_device() -> None:
    """Let torch record no seeds for devices that are absent: it would keep a stack with each."""
    for device in (torch.xpu, torch.mtia):
        if not device.is_available():
            device._is_in_bad_fork = lambda: True
    if not torch.cuda.is_available():
        torch.cuda.manual_seed_all = lambda seed: None


def _receive(pipes: list[Any]) -> list[Any]:
    """The results in rank order. The first error ends all: others may wait for that rank."""
    results: dict[int, Any] = {}
    end = time.monotonic() + TIMEOUT_S
    while len(results) < len(pipes):
        left = {pipe: rank for rank, pipe in enumerate(pipes) if rank not in results}
        ready = connection.wait(left, max(0.0, end - time.monotonic()))
        if not ready:
            raise AssertionError(f"ranks {[*left.values()]} did not finish within {TIMEOUT_S} s")
        for pipe in ready:
            rank = left[pipe]
            try:
                error, results[rank] = pipe.recv()
            except EOFError:
                raise AssertionError(f"rank {rank} died") from None
            if error is not None:
                raise AssertionError(f"rank {rank} raised\n{error}")
    return [results[rank] for rank in range(len(pipes))]


def _rank_main(
    sender: Any,
    function: Callable[..., Any],
    rank: int,
    num_ranks: int,
    port: int,
    arguments: tuple[Any, ...],
    environment: dict[str, str],
) -> None:
    os.environ.clear()  # A fork server has that of its start.
    os.environ.update(environment)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank if not torch.cuda.is_available() else take_place(rank, num_ranks)),
        WORLD_SIZE=str(num_ranks),
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
    )
    new_process.begin()
    if not torch.cuda.is_available():
        make_cheap()
    try:
        answer = (None, function(rank, num_ranks, port, *arguments))
        if torch.cuda.is_initialized():
            # With MPS, a process that is terminated with work in flight ends those of other tests.
            torch.cuda.synchronize()
    except BaseException:
        answer = (traceback.format_exc(), None)
    # The shutdown that is skipped below would end them: megatron-core starts a process that manages
    # a queue when it saves a distributed checkpoint, which otherwise stays.
    for child in multiprocessing.active_children():
        child.terminate()
    sender.send(answer)
    sender.close()
    # Wait until all results are there and this process is terminated: other ranks may still be
    # connecting through the store in the first rank.
    parent = multiprocessing.parent_process()
    parent.join()
    # Skip the interpreter's shutdown: gloo and NCCL threads may still wait for ranks that have
    # already ended.
    os._exit(0)
