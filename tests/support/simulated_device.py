# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A device whose time is computed: its clock falls under load, as a GPU's at its power limit."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional
from unittest.mock import patch

import torch
from timed_backend import TimedBackend
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.slipstream.fine_grained_activation_offload.backend import (
    Copy,
    Event,
    Stream,
    nbytes_of,
)
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend

_run_copies = CpuBackend.run_copies


class SimulatedDevice(TorchDispatchMode):
    """Operations take time on the compute stream, by the elements that they make.

    Args:
        gb_per_s: Bandwidth of copies, each way.
        most_boost: By which share it computes faster if it has waited a lot.
    """

    MS_PER_ELEMENT = 1e-5
    MS_PER_FLOP = 1e-7
    MEMORY_MS = 2.0
    """For how long a wait counts for its clock."""
    WAITS_FOR_MOST = 0.25
    """The share of waits from which on its clock is the highest."""

    def __init__(self, gb_per_s: float, most_boost: float) -> None:
        super().__init__()
        self.gb_per_s = gb_per_s
        self.most_boost = most_boost
        self.now: dict[int, float] = {}
        """The time of each stream, in milliseconds, by its id."""
        self._busy = self._idle = 0.0

    def time(self, stream: Stream) -> float:
        return self.now.get(id(stream), 0.0)

    def _pass(self, busy_ms: float, idle_ms: float) -> None:
        ms = busy_ms + idle_ms
        self.now[id(None)] = self.time(None) + ms
        kept = math.exp(-ms / self.MEMORY_MS)
        self._busy = self._busy * kept + busy_ms
        self._idle = self._idle * kept + idle_ms

    def compute(self, ms: float) -> None:
        """Let computation go on that takes this long at the lowest clock."""
        total = self._busy + self._idle
        waits = self._idle / total if total else 0.0
        self._pass(ms / (1 + self.most_boost * min(1.0, waits / self.WAITS_FOR_MOST)), 0.0)

    def wait(self, stream: Stream, event: Event) -> None:
        waited = max(0.0, event - self.time(stream))
        if stream is None:
            self._pass(0.0, waited)
        else:
            self.now[id(stream)] = self.time(stream) + waited

    def copy(self, copies: Sequence[Copy], stream: Stream) -> None:
        nbytes = sum(map(nbytes_of, copies))
        self.now[id(stream)] = self.time(stream) + nbytes / self.gb_per_s / 1e6

    def __torch_dispatch__(self, op: Any, types: Any, args: Any = (), options: Any = None) -> Any:
        made = op(*args, **(options or {}))
        name = op.overloadpacket.__name__
        is_new = isinstance(made, torch.Tensor) and made.is_floating_point()
        if is_new and not op.is_view and not name.startswith("empty") and name[-1] != "_":
            ms = made.numel() * self.MS_PER_ELEMENT
            if name in ("mm", "addmm", "bmm", "baddbmm"):
                ms = 2 * made.numel() * args[-2].shape[-1] * self.MS_PER_FLOP
            self.compute(ms)
        return made


@contextmanager
def simulated_on_cpu(device: SimulatedDevice) -> Iterator[None]:
    """Context in which the CPU backend of this process has the time of a simulated device."""

    def run_copies(backend: CpuBackend, copies: Sequence[Copy], stream: Stream) -> None:
        device.copy(copies, stream)
        _run_copies(backend, copies, stream)

    def elapsed_ms(_: CpuBackend, start: Event, stop: Event) -> Optional[float]:
        return float(stop - start)

    methods = {
        "takes_time": True,
        "host_slab_bytes": TimedBackend.host_slab_bytes,
        "allocate_scratch": TimedBackend.allocate_scratch,
        "record": lambda _, stream: device.time(stream),
        "timed_event": lambda _, stream: device.time(stream),
        "elapsed_ms": elapsed_ms,
        "wait": lambda _, stream, event: device.wait(stream, event),
        "wait_on_host": lambda _, stream: device.wait(None, device.time(stream)),
        "run_copies": run_copies,
    }
    with patch.multiple(CpuBackend, create=True, **methods), device:
        yield
