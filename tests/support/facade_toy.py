# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The toy model marked through megatron-core's own facade, so that it runs on either engine.

With it the same schedules, under the same injected stalls, run on Slipstream and on megatron-core's
built-in engine.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional
from unittest import mock

import torch
from toy_model import Chunk, Layer, all_equal, make_chunks, micro_batch

ROWS = 2048
STALL_CYCLES = 20_000_000
"""About 10 ms on an H200; a copy of one saved tensor takes 10 us."""


def select_engine(name: str) -> Any:
    """Make 'slipstream' or 'megatron' the engine of this process, and return it."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload as facade

    from megatron.slipstream.integration import install
    from megatron.slipstream.options.fields import OffloadConfig

    install.uninstall()
    facade.PipelineOffloadManager.OFFLOAD_MGR = None
    if name == "slipstream":
        return install.install(OffloadConfig(offload_backend="cuda"))
    if not torch.distributed.is_initialized():  # its table is gathered over all ranks
        os.environ.setdefault("MASTER_ADDR", "127.0.0.1")
        torch.distributed.init_process_group(
            "gloo", store=torch.distributed.HashStore(), rank=0, world_size=1
        )
    return facade.PipelineOffloadManager.get_instance()


class Stalls:
    """Inserts sleeps into a copy stream before a layer's work, and fills free memory with NaN."""

    def __init__(self, engine: Any, stream: Optional[str]) -> None:
        self._engine = engine
        self._stream = stream

    def __call__(self) -> None:
        """Stall the stream, and poison the memory that the compute stream would allocate next."""
        if self._stream is None:
            return
        with torch.cuda.stream(getattr(self._engine, self._stream)):
            torch.cuda._sleep(STALL_CYCLES)
        blocks = [torch.full((ROWS, 48 * n), torch.nan, device="cuda") for n in (1, 2) * 4]
        del blocks


def forward_chunk(
    chunk: Chunk, x: torch.Tensor, num_stages: int, stalls: Callable[[], None]
) -> torch.Tensor:
    """One pass of a chunk, marked as megatron-core's layers mark theirs."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Facade,
    )

    Facade.init_chunk_handler(0, num_stages, chunk.vp_stage, 1, 0, 1.0)
    for layer in chunk.layers:
        assert isinstance(layer, Layer)
        stalls()
        normed = layer.norm(x)
        first = Facade(True, normed, "first")
        with first as normed:
            hidden = layer.first(normed)
        hidden = first.group_offload(hidden, forced_released_tensors=[])
        second = Facade(True, hidden, "second")
        with second as hidden:
            out = layer.second(hidden)
        x = x + second.group_offload(out, forced_released_tensors=[])
        if x.requires_grad:
            x.register_hook(lambda grad: stalls())
    return x


def run_iteration(
    chunks: Sequence[Chunk], schedule: str, stalls: Callable[[], None]
) -> list[torch.Tensor]:
    """Like ``toy_model.run_schedule``, through the facade. ``E`` is a forward-only pass."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Facade,
    )

    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
    outputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    gradients = []
    for action in schedule.split():
        stage, index = (int(part) for part in action[1:].split("."))
        x = micro_batch(index, ROWS).detach().cuda()
        if action[0] == "E":
            with torch.no_grad():
                forward_chunk(chunks[stage], x, len(chunks), stalls)
        elif action[0] == "F":
            x.requires_grad_()
            y = forward_chunk(chunks[stage], x, len(chunks), stalls)
            outputs[action[1:]] = (x, y)
        else:
            x, y = outputs.pop(action[1:])
            y.square().sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
    Facade.reset()
    torch.cuda.synchronize()
    weights = (p.grad for chunk in chunks for p in chunk.parameters())
    return gradients + [grad.clone() for grad in weights if grad is not None]


def outcome(
    engine_name: str,
    iterations: Sequence[str],
    stream: Optional[str],
    num_chunks: int = 1,
    num_layers: int = 3,
) -> str:
    """Run iterations on one engine under stalls of one copy stream.

    Returns:
        'right'; 'wrong gradients in iteration N'; 'raises X in iteration N: message'; or 'moves
        nothing in iteration N', if gradients are right but nothing was offloaded.
    """
    chunks = [chunk.cuda() for chunk in make_chunks(num_chunks, num_layers)]
    expected = []
    for schedule in iterations:
        select_engine("slipstream").disable_offload()
        expected.append(run_iteration(chunks, schedule, lambda: None))
    engine = select_engine(engine_name)
    copies = _CountingCopies(engine_name, engine)
    with copies.counting():
        for index, schedule in enumerate(iterations):
            copies.begin()
            try:
                actual = run_iteration(chunks, schedule, Stalls(engine, stream))
            except Exception as error:
                torch.cuda.synchronize()
                text = str(error).splitlines()[0][:80] if str(error) else ""
                return f"raises {type(error).__name__} in iteration {index}: {text}"
            if not all_equal(expected[index], actual):
                return f"wrong gradients in iteration {index}"
            if "B" in schedule and copies.num_copies < copies.at_least(schedule, num_layers):
                return f"moves nothing of some micro-batches in iteration {index}"
    return "right"


class _CountingCopies:
    """Counts the groups that either engine copies out."""

    def __init__(self, engine_name: str, engine: Any) -> None:
        self._ours = engine if engine_name == "slipstream" else None
        self._num_calls = 0

    def begin(self) -> None:
        """Call at the start of an iteration."""
        self._num_calls = 0

    @property
    def num_copies(self) -> int:
        """Number of copies of the iteration that has ended."""
        if self._ours is None:
            return self._num_calls
        return int(self._ours.report.total.num_groups_moved)

    def at_least(self, schedule: str, num_layers: int) -> int:
        """Minimum number of offloaded groups: in every pass, those of all layers but the last."""
        return 2 * (num_layers - 1) * schedule.count("F")

    @contextlib.contextmanager
    def counting(self) -> Iterator[None]:
        """Context in which copies are counted; megatron-core's engine has no counter."""
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as facade

        original = facade.ChunkOffloadHandler.bulk_offload_group

        def counted(*arguments: Any, **options: Any) -> Any:
            self._num_calls += 1
            return original(*arguments, **options)

        with mock.patch.object(facade.ChunkOffloadHandler, "bulk_offload_group", counted):
            yield
