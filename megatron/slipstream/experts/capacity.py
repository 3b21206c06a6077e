# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Raises an error at the end of a step if slots were too small: no row is dropped silently.

The largest number of rows for a slot is kept on the device, and read once at the end of a step.
"""

from __future__ import annotations

import contextlib
import functools
import math
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple, Optional

import torch


class Slots(NamedTuple):
    """The slots of an exchange."""

    num_rows: int
    capacity: int
    num_ranks: int

    @classmethod
    def of(cls, num_rows: int, num_ranks: int, factor: Optional[float]) -> Slots:
        """Return slots of ``factor`` times an even share; None: the largest possible need."""
        even = num_rows / num_ranks
        capacity = num_rows if factor is None else math.ceil(even * factor)
        return cls(num_rows, min(capacity, num_rows), num_ranks)


class LayerCapacity:
    """The largest number of rows that a layer needed in a slot in this step."""

    def __init__(self, rank: int, device: torch.device) -> None:
        self.rank = rank
        self.layer: Optional[int] = None
        """Number of the layer in the model, from 1; None until it is known."""
        self.slots: Optional[Slots] = None
        """Slots of the layer's last exchange."""
        self.largest = torch.zeros(1, dtype=torch.int64, device=device)

    @torch.no_grad()
    def note(self, rows_by_rank: torch.Tensor, slots: Slots) -> None:
        """Record the rows that an exchange needed: int64 ``[num_ranks]``, on the device."""
        self.slots = slots
        torch.maximum(self.largest, rows_by_rank.max(), out=self.largest)


def check_capacity(layers: Iterable[LayerCapacity]) -> None:
    """Check and reset the layers' largest row counts; ``RuntimeError`` if one exceeded its slot.

    The host waits for the device once.
    """
    layers = [layer for layer in layers if layer.slots is not None]
    if not layers:
        return
    largest = torch.cat([layer.largest for layer in layers]).tolist()
    for layer in layers:
        layer.largest.zero_()
    exceeded = [
        (rows * layer.slots.num_ranks / layer.slots.num_rows, -(layer.layer or 0), layer, rows)
        for layer, rows in zip(layers, largest, strict=True)
        if layer.slots is not None and rows > layer.slots.capacity
    ]
    if not exceeded:
        return
    # The factor of the layer with the largest need suffices for the others.
    factor, _, layer, rows = max(exceeded, key=lambda found: found[:2])
    assert layer.slots is not None
    raise RuntimeError(
        f"rank {layer.rank}, layer {layer.layer}: {rows} of {layer.slots.num_rows} rows are for "
        "the experts of one rank, and moe_sync_free_capacity_factor leaves room for "
        f"{layer.slots.capacity}; "
        f"set moe_sync_free_capacity_factor={math.ceil(100 * factor) / 100:g} or more, or leave it "
        "out"
    )


class StepCheck:
    """Checks layers at the end of a step.

    That is where megatron-core finalizes gradients, if its configuration has a function for it; in
    other training loops, each backward ends with a check.
    """

    def __init__(self) -> None:
        self.layers: weakref.WeakSet[LayerCapacity] = weakref.WeakSet()
        self._backward = -1
        """Graph task id of the last backward pass that ends with a check."""
        self._is_off = False

    @contextlib.contextmanager
    def off(self) -> Iterator[None]:
        """Disable checks inside: the passes are not steps, or are captured."""
        was_off, self._is_off = self._is_off, True
        try:
            yield
        finally:
            self._is_off = was_off

    def at_end_of_step(self, config: Any, hidden: torch.Tensor) -> None:
        """Request a check at the end of the step; called in each forward pass of a layer."""
        if self._is_off or self._at_finalize(config):
            return
        if hidden.requires_grad:
            hidden.register_hook(self._check_after_backward)

    def at_end_of_replay(self, config: Any) -> None:
        """Request a check in backward, after a replayed forward, in which layers request none."""
        if not self._at_finalize(config):
            self._check_after_backward()

    def _at_finalize(self, config: Any) -> bool:
        """Hook the check into gradient finalization, and return whether that is possible."""
        finalize = config.finalize_model_grads_func
        if finalize is None:
            return False
        if getattr(finalize, "checked_by", None) is not self:
            config.finalize_model_grads_func = self._checked(finalize)
        return True

    def _checked(self, finalize: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(finalize)
        def checked(*arguments: Any, **options: Any) -> Any:
            result = finalize(*arguments, **options)
            check_capacity(self.layers)
            return result

        setattr(checked, "checked_by", self)  # noqa: B010  # functions have no such attribute
        return checked

    def _check_after_backward(self, _: Optional[torch.Tensor] = None) -> None:
        backward = torch._C._current_graph_task_id()
        if backward == self._backward:
            return
        self._backward = backward
        engine: Any = torch.autograd.Variable._execution_engine
        engine.queue_callback(lambda: check_capacity(self.layers))


step_check = StepCheck()


def checks_capacity(run: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate the forward of a ``MoELayer``.

    With sync-free experts on several expert-parallel ranks, the capacity is checked at the end of
    each training step and of each evaluation pass.
    """

    @functools.wraps(run)
    def forward(layer: Any, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        dispatcher = layer.token_dispatcher
        use: Optional[LayerCapacity] = getattr(dispatcher, "capacity_use", None)
        if use is None or dispatcher.ep_size == 1:
            return run(layer, hidden_states, *arguments, **options)
        use.layer = layer.layer_number
        if torch.is_grad_enabled():
            step_check.at_end_of_step(layer.config, hidden_states)
        output = run(layer, hidden_states, *arguments, **options)
        if not layer.training:
            check_capacity([use])
        return output

    return forward
