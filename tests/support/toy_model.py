# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A small stack of marked layers, and pipeline schedules driven by hand, to test the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Optional

import torch
from hand_driven import is_native_run
from marked_group import offload_group

from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.engine_setup import make_backend
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.candidates import PolicyOptions

WIDTH = 48


class Layer(torch.nn.Module):
    """Two groups that share a storage: the first one's output is the second one's input."""

    def __init__(self) -> None:
        super().__init__()
        self.up = torch.nn.Linear(WIDTH, 2 * WIDTH)
        self.down = torch.nn.Linear(WIDTH, WIDTH)
        self.norm = torch.nn.LayerNorm(WIDTH)

    def forward(self, x: torch.Tensor, manager: Optional[PipelineOffloadManager]) -> torch.Tensor:
        if manager is None:
            return x + self.second(self.first(self.norm(x)))
        normed = self.norm(x)
        with offload_group(manager, "first") as group:
            hidden = self.first(normed)
        hidden = group.commit(hidden)
        with offload_group(manager, "second") as group:
            out = self.second(hidden)
        return x + group.commit(out)

    def first(self, x: torch.Tensor) -> torch.Tensor:
        left, right = self.up(x).chunk(2, dim=-1)
        return torch.tanh(left * torch.sigmoid(right))

    def second(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.down(hidden * hidden)


class Chunk(torch.nn.Module):
    """One model chunk."""

    def __init__(self, num_layers: int, vp_stage: int = 0) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Layer() for _ in range(num_layers))
        self.vp_stage = vp_stage

    def forward(
        self, x: torch.Tensor, manager: Optional[PipelineOffloadManager] = None
    ) -> torch.Tensor:
        if manager is not None:
            manager.init_model_chunk_offload_handler(0, None, self.vp_stage, 1)
        for layer in self.layers:
            x = layer(x, manager)
        return x


def make_manager(
    backend: str, rank: int = 0, num_verified_iterations: int = 0, **options: Any
) -> PipelineOffloadManager:
    """An engine on the backend of that name; ``options`` are those of ``PolicyOptions``.

    With ", native" after the name, the hooks in C++ run.
    """
    name, is_native = is_native_run(backend)
    arguments = (PolicyOptions(**options), rank, num_verified_iterations, is_native)
    return PipelineOffloadManager(OffloadEngine(make_backend(name), *arguments))


def make_chunks(num_chunks: int = 1, num_layers: int = 3) -> list[Chunk]:
    """Model chunks with the same weights on every call."""
    torch.manual_seed(5)
    return [Chunk(num_layers, stage) for stage in range(num_chunks)]


def micro_batch(index: int, rows: int = 7) -> torch.Tensor:
    """The input of one micro-batch, ``[rows, WIDTH]``, requiring a gradient."""
    generator = torch.Generator().manual_seed(1000 + index)
    return torch.randn(rows, WIDTH, generator=generator, requires_grad=True)


def run_schedule(
    chunks: Sequence[Chunk],
    schedule: str,
    manager: Optional[PipelineOffloadManager],
    rows: int = 7,
) -> list[torch.Tensor]:
    """Run an iteration, given as text, and return every gradient.

    ``"F0.0 F0.1 B0.0 F1.0 ..."``: forward or backward of a chunk on a micro-batch. Each pass is
    its own graph, as in a pipeline stage; weight gradients accumulate.
    """
    for chunk in chunks:
        chunk.zero_grad(set_to_none=True)
    device = next(chunks[0].parameters()).device
    outputs: dict[str, tuple[torch.Tensor, torch.Tensor]] = {}
    gradients: list[torch.Tensor] = []
    for action in schedule.split():
        stage, index = (int(part) for part in action[1:].split("."))
        if action[0] == "F":
            x = micro_batch(index, rows).to(device).detach().requires_grad_()
            outputs[action[1:]] = (x, chunks[stage](x, manager))
        else:
            x, y = outputs.pop(action[1:])
            y.square().sum().backward()
            assert x.grad is not None
            gradients.append(x.grad)
    if manager is not None:
        manager.reset()
    weights = (p.grad for chunk in chunks for p in chunk.parameters())
    return gradients + [grad.clone() for grad in weights if grad is not None]


SCHEDULES = {
    "one micro-batch": "F0.0 B0.0",
    "accumulation": "F0.0 B0.0 F0.1 B0.1 F0.2 B0.2",
    "1F1B first of two": "F0.0 F0.1 B0.0 F0.2 B0.1 F0.3 B0.2 B0.3",
    "1F1B first of four": "F0.0 F0.1 F0.2 F0.3 B0.0 F0.4 B0.1 B0.2 B0.3 B0.4",
    "interleaved first of two": (
        "F0.0 F0.1 F1.0 F1.1 F0.2 B1.0 F0.3 B1.1 F1.2 B0.0 F1.3 B0.1 B1.2 B1.3 B0.2 B0.3"
    ),
    "all forward, all backward": "F0.0 F0.1 F0.2 B0.2 B0.1 B0.0",
}


def all_equal(left: Sequence[torch.Tensor], right: Sequence[torch.Tensor]) -> bool:
    """Whether two lists of tensors are equal bit by bit (NaN equals nothing)."""
    return len(left) == len(right) and all(
        torch.equal(a, b) for a, b in zip(left, right, strict=True)
    )
