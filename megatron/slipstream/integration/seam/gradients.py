# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Count gradients in ``grad``: megatron-core's data parallelism has them in its buffers."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import torch
from torch.utils.hooks import RemovableHandle


class Gradients:
    """Counts gradients of the parameters of ``modules()``, and detects new ones."""

    def __init__(self, modules: Callable[[], Iterable[torch.nn.Module]]) -> None:
        self._modules = modules
        self._hooks: list[RemovableHandle] = []

    def count(self) -> int:
        """Return the size of the parameters' current gradients in bytes."""
        gradients = (parameter.grad for parameter in self._parameters())
        return sum(gradient.nbytes for gradient in gradients if gradient is not None)

    def begin(self, come: Callable[[int], None]) -> None:
        """Call ``come`` once with the bytes of each gradient that appears from now on."""
        self.end()
        missing = [p for p in self._parameters() if p.requires_grad and p.grad is None]
        waiting = {id(parameter) for parameter in missing}

        def note(parameter: torch.Tensor) -> None:
            if id(parameter) in waiting and parameter.grad is not None:
                waiting.discard(id(parameter))
                come(parameter.grad.nbytes)

        for parameter in missing:
            self._hooks.append(parameter.register_post_accumulate_grad_hook(note))

    def end(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks.clear()

    def _parameters(self) -> Iterator[torch.nn.Parameter]:
        for module in self._modules():
            yield from module.parameters()
