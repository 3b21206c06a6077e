# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Thousands of steps of an MoE whose shapes change from step to step, under random stalls.

``--soak-iterations 2000`` is the full length; the default is short enough for every GPU run.
"""

from __future__ import annotations

import os
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from tiny_gpt import MOE_MODULES, ModelCase, build_chunks, initialize, make_config, run_step

CASE = ModelCase(
    "moe",
    num_layers=3,
    hidden_size=256,
    num_attention_heads=4,
    seq_length=512,
    micro_batch_size=2,
    vocab_size=1024,
    bf16=True,
)
SEQ_LENGTHS = (64, 128, 192, 256, 320, 384, 448, 512)
MAX_MICRO_BATCHES = 3
LEARNING_RATE = 0.05
STALL_PROBABILITY = 0.1
MAX_STALL_CYCLES = 4_000_000
"""About 2 ms on an H200."""


MAX_GROWTH_BYTES = 16 << 20
"""Of the process, in the second half: 2000 iterations that leave 1 KiB a group exceed it."""


def _process_bytes() -> int:
    """Host memory of this process, pinned memory included."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


class RandomStalls:
    """Puts sleeps of random length into the copy streams while the model runs.

    Module hooks do it, which run whether the copies themselves are issued in Python or in C++.
    """

    def __init__(
        self,
        store: Any,
        chunks: Sequence[torch.nn.Module],
        places: tuple[type[torch.nn.Module], ...],
        seed: int,
    ) -> None:
        self._random = random.Random(seed)
        self._streams = (store.copy_streams.d2h, store.copy_streams.h2d)
        self.num_stalls = 0
        for chunk in chunks:
            for module in chunk.modules():
                if isinstance(module, places):
                    module.register_forward_pre_hook(self._stall)
                    module.register_full_backward_pre_hook(self._stall)

    def _stall(self, *_: object) -> None:
        for stream in self._streams:
            if self._random.random() < STALL_PROBABILITY:
                self.num_stalls += 1
                with torch.cuda.stream(stream):
                    torch.cuda._sleep(self._random.randrange(MAX_STALL_CYCLES))


class MovedByCpp:
    """Counts the bytes that C++ copies out, beside those of the Python path."""

    def __init__(self, store: Any) -> None:
        self.num_bytes = 0
        self._original = store.end_iteration
        store.end_iteration = self._end_iteration

    def _end_iteration(self) -> Any:
        counted = self._original()
        if counted.in_cpp is not None:
            self.num_bytes += sum(amounts["d2h_bytes"] for _, amounts in counted.in_cpp.items())
        return counted


def _train_step(case: ModelCase, config: Any, chunks: Any, step: int, count: int) -> torch.Tensor:
    """One step of plain gradient descent; the step's losses."""
    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
    losses = run_step(case, config, chunks, step, count)
    with torch.no_grad():
        for chunk in chunks:
            for parameter in chunk.parameters():
                if parameter.grad is not None:
                    parameter.add_(parameter.grad, alpha=-LEARNING_RATE)
    return torch.stack(losses)


@pytest.mark.gpu
@pytest.mark.exclusive
@pytest.mark.timeout(1200)
@pytest.mark.parametrize("offload_native", ["auto", "off"])
def test_losses_stay_equal_and_memory_stays_flat(
    offload_native: Any, request: pytest.FixtureRequest, record_row: Callable[..., None]
) -> None:
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron.slipstream.integration import install
    from megatron.slipstream.options.fields import OffloadConfig

    num_iterations = request.config.getoption("--soak-iterations")
    initialize(CASE)
    manager = install.install(OffloadConfig(offload_backend="cuda", offload_native=offload_native))
    off_config, on_config = make_config(CASE), make_config(CASE, MOE_MODULES)
    off, on = build_chunks(CASE, off_config), build_chunks(CASE, on_config)
    places = (TransformerLayer, SelfAttention, MoELayer)
    stalls = RandomStalls(manager.store, on, places, seed=1)
    moved_by_cpp = MovedByCpp(manager.store)
    choice = random.Random(2)
    moved_bytes = 0
    marks: list[tuple[int, int, int]] = []
    process_bytes: list[int] = []
    for step in range(num_iterations):
        case = replace(CASE, seq_length=choice.choice(SEQ_LENGTHS))
        count = choice.randint(1, MAX_MICRO_BATCHES)
        expected = _train_step(case, off_config, off, step, count)
        actual = _train_step(case, on_config, on, step, count)
        assert torch.equal(expected, actual), f"step {step}: {expected} and {actual}"
        moved_bytes += manager.report.d2h_bytes
        if (step + 1) % (num_iterations // 10) == 0:
            torch.cuda.synchronize()
            pool = manager.store.host_pool
            marks.append((torch.cuda.memory_allocated(), pool.allocated_bytes, step + 1))
            process_bytes.append(_process_bytes())
            record_row(
                "soak",
                step=step + 1,
                loss=float(actual.mean()),
                offload_native=offload_native,
                moved_bytes=moved_bytes,
                moved_by_cpp_bytes=moved_by_cpp.num_bytes,
                num_stalls=stalls.num_stalls,
                device_bytes=marks[-1][0],
                host_bytes=marks[-1][1],
                host_lent_bytes=pool.in_use_bytes,
                num_plans=manager.report.num_plans,
                process_bytes=process_bytes[-1],
            )
    for left, right in zip(off[0].parameters(), on[0].parameters(), strict=True):
        assert torch.equal(left, right)
    assert manager.store.host_pool.in_use_bytes == 0
    half = marks[len(marks) // 2 :]
    assert max(device for device, _, _ in half) - min(device for device, _, _ in half) < 1 << 20
    assert half[0][1] == half[-1][1], "host memory still grows"
    assert process_bytes[-1] - process_bytes[len(process_bytes) // 2] < MAX_GROWTH_BYTES
    assert stalls.num_stalls > num_iterations
    assert moved_bytes > 0
    assert (moved_by_cpp.num_bytes > 0) == (offload_native == "auto")
