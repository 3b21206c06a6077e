# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Losses of short trainings, and how far two of them are apart."""

from __future__ import annotations

import torch
from tiny_gpt import ModelCase, build_chunks, initialize, make_config, run_step

NUM_DATA = 8
"""Steps with data of their own, which come again: the model learns them by heart."""
STABLE_RATE = 1e-4
"""Learning rate at which losses of models with hidden size 1024 or more have no spikes, whose steps
and heights rounding changes."""


def losses(
    rank: int,
    num_ranks: int,
    port: int,
    case: ModelCase,
    seed: int,
    num_steps: int,
    learning_rate: float = 1e-3,
) -> list[float]:
    """The loss of each step of a training."""
    initialize(case, rank, num_ranks, port)
    config = make_config(case)
    chunks = build_chunks(case, config, seed)
    parameters = [parameter for chunk in chunks for parameter in chunk.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=learning_rate)
    found = []
    for step in range(num_steps):
        optimizer.zero_grad()
        of_step = run_step(case, config, chunks, step % NUM_DATA, 2)
        optimizer.step()
        found.append(torch.stack(of_step).mean())
    return torch.stack(found).tolist()


def distance(left: list[float], right: list[float]) -> float:
    return max(abs(a - b) for a, b in zip(left, right, strict=True))
