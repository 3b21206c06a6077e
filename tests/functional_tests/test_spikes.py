# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Random sequence lengths with spikes: a budget fits what ends in an error without it.

``--soak-iterations 500`` is the full length; the default is short enough for every GPU run.
"""

from __future__ import annotations

import gc
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from unittest.mock import patch

import pytest
import tiny_gpt
import torch
from budgeted_training import of_lengths
from gpu_models import DENSE, MIN_NUMEL
from tiny_gpt import DENSE_MODULES, build_chunks, initialize, make_config, train_steps

from megatron.slipstream.integration import install
from megatron.slipstream.options.fields import OffloadConfig

CASE = replace(DENSE, num_layers=16, hidden_size=1024, num_attention_heads=8, seq_length=8192)
NUM_SETTLING = 20
"""Steps before the first spike."""
SPIKES_EVERY = 40
"""Steps from one to the next."""
SHARE_OF_PEAK = 0.65
"""What the device has for activations: more than whole layers recomputed need, 8192^2 gradients of
scores for each head among it if attention is deterministic."""


def lengths_of(number: int) -> list[int]:
    """Lengths of steps: at random up to a quarter of the case's, and spikes of its own length."""
    draw, unit = random.Random(7), CASE.seq_length // 64
    lengths = [unit * draw.randint(4, 16) for _ in range(number)]
    for step in range(NUM_SETTLING, number, SPIKES_EVERY):
        lengths[step] = CASE.seq_length
    return lengths


@dataclass
class Spiked:
    """A training with spikes."""

    digests: list[tuple[int, ...]] = field(default_factory=list)
    """Of the losses and gradients of each step."""
    resident_bytes: int = 0
    peak_bytes: int = 0
    error: str = ""


def train_spiked(number: int, budget: object = None) -> Spiked:
    """Train with :func:`lengths_of`, within a budget or without the engine."""
    result, modules = Spiked(), ()
    options: dict[str, object] = {}
    if budget is not None:
        install.install(OffloadConfig(activation_memory_budget=budget))  # type: ignore[arg-type]
        modules, options = DENSE_MODULES, dict(MIN_NUMEL)
    gc.collect()
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats()
    config = make_config(CASE, modules, **options)
    chunks = build_chunks(CASE, config)
    with patch.object(tiny_gpt, "run_step", of_lengths(lengths_of(number))):
        try:
            for results in train_steps(CASE, config, chunks, [1] * number):
                result.digests.append(digest_of(results))
                if not result.resident_bytes:
                    result.resident_bytes = torch.cuda.memory_allocated()
        except torch.OutOfMemoryError as error:
            result.error = str(error)
    result.peak_bytes = torch.cuda.max_memory_allocated()
    install.uninstall()
    return result


def digest_of(tensors: Sequence[torch.Tensor]) -> tuple[int, ...]:
    """Return sums of the bits of tensors, each plain and weighted by place."""
    sums = []
    for tensor in tensors:
        kind = {2: torch.int16, 4: torch.int32}[tensor.element_size()]
        bits = tensor.detach().contiguous().view(-1).view(kind).long()
        places = torch.arange(bits.numel(), device=bits.device) % 65521 + 1
        sums.append(torch.stack([bits.sum(), (bits * places).sum()]))
    return tuple(torch.cat(sums).tolist())


@contextmanager
def device_limited(nbytes: int) -> Iterator[None]:
    """Context in which torch's allocator has so many bytes."""
    torch.cuda.set_per_process_memory_fraction(nbytes / torch.cuda.mem_get_info()[1])
    try:
        yield
    finally:
        torch.cuda.set_per_process_memory_fraction(1.0)


def test_a_digest_tells_one_bit_and_the_order() -> None:
    tensor = torch.arange(8, dtype=torch.float32)
    changed = tensor.clone()
    changed.view(torch.int32)[3] ^= 1
    digests = {digest_of([one]) for one in (tensor, changed, tensor.flip(0))}
    assert len(digests) == 3
    assert digest_of([tensor.clone()]) == digest_of([tensor])


@pytest.mark.gpu
@pytest.mark.exclusive
@pytest.mark.timeout(600)
def test_a_budget_fits_spikes_that_end_in_an_error_without_it(
    request: pytest.FixtureRequest, record_row: Callable[..., None]
) -> None:
    number = request.config.getoption("--soak-iterations")
    initialize(CASE)
    room = train_spiked(number)
    assert room.error == ""
    activation_bytes = room.peak_bytes - room.resident_bytes
    limit_bytes = room.resident_bytes + int(SHARE_OF_PEAK * activation_bytes)
    with device_limited(limit_bytes):
        off = train_spiked(number)
    with device_limited(limit_bytes):
        ours = train_spiked(number, "auto")
    record_row(
        "spikes",
        num_steps=number,
        num_spikes=lengths_of(number).count(CASE.seq_length),
        limit_bytes=limit_bytes,
        peak_bytes=[one.peak_bytes for one in (room, off, ours)],
        num_ended=[len(one.digests) for one in (room, off, ours)],
        errors=[one.error[:200] for one in (off, ours)],
    )
    assert off.error.startswith("CUDA out of memory")
    assert len(off.digests) == NUM_SETTLING, "the first spike"
    assert ours.error == ""
    assert ours.digests == room.digests
