# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The cost of the bytes alone: the model without an engine, concurrent with as many copied bytes.

Each layer starts a copy to the host in forward, and one back when backward reaches its input.
Nothing waits for the copies, and they reuse the same memory.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from megatron_models import use_gpu

from benchmarks.ways import Way


class CopiesAlone(Way):
    """A way without an engine, which copies as many bytes as ``ours`` moved before.

    Args:
        off: The same model without an engine.
        chunks: Its chunks.
        num_micro_batches: Micro-batches per iteration.
        ours: Slipstream's engine of the same variant.
    """

    label = "copies"

    def __init__(
        self, off: Way, chunks: Sequence[torch.nn.Module], num_micro_batches: int, ours: Way
    ) -> None:
        self._off, self._ours = off, ours.manager
        self._nbytes = 0
        """Size of each copy; 0 while other ways run."""
        self._buffers: list[torch.Tensor] = []
        """Device and host memory of copies to the host, then of copies back."""
        layers = list(_layers(chunks))
        self._num_copies = len(layers) * num_micro_batches
        """Copies per iteration in each direction."""
        self._streams = [torch.cuda.Stream() for _ in range(2)] if use_gpu() else []
        self._hooks = [layer.register_forward_hook(self._after) for layer in layers]
        self._hooks += [
            layer.register_forward_pre_hook(self._before, with_kwargs=True) for layer in layers
        ]

    def run(self, iteration: int) -> list[torch.Tensor]:
        """See :meth:`Way.run`."""
        self._nbytes = self._ours.report.d2h_bytes // self._num_copies
        if self._nbytes and (not self._buffers or self._buffers[0].numel() < self._nbytes):
            self._buffers = [
                torch.empty(
                    self._nbytes,
                    dtype=torch.uint8,
                    device="cuda" if is_on_device and use_gpu() else "cpu",
                    pin_memory=use_gpu() and not is_on_device,
                )
                for is_on_device in (True, False, True, False)
            ]
        try:
            return self._off.run(iteration)
        finally:
            self._nbytes = 0

    def close(self) -> None:
        """Remove the hooks and free the memory."""
        for hook in self._hooks:
            hook.remove()
        self._buffers.clear()

    def _before(self, _: Any, arguments: Any, options: Any) -> None:
        hidden = options.get("hidden_states", arguments[0] if arguments else None)
        if self._nbytes and hidden is not None and hidden.requires_grad:
            hidden.register_hook(lambda _: self._copy(2, 3, 1))

    def _after(self, *_: Any) -> None:
        if self._nbytes:
            self._copy(1, 0, 0)

    def _copy(self, to: int, source: int, stream: int) -> None:
        destination, origin = (self._buffers[place][: self._nbytes] for place in (to, source))
        if not self._streams:
            destination.copy_(origin)
            return
        with torch.cuda.stream(self._streams[stream]):
            destination.copy_(origin, non_blocking=True)


def _layers(chunks: Sequence[torch.nn.Module]) -> Iterator[torch.nn.Module]:
    for chunk in chunks:
        decoder: Any = chunk.decoder
        yield from decoder.layers
