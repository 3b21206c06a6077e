# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The CPU backend with a clock: iterations are timed and replanned without a GPU."""

from __future__ import annotations

import time
from typing import Optional

import pytest
import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Event, Stream
from megatron.slipstream.fine_grained_activation_offload.copy_rates import BANDWIDTH_NBYTES
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend


class TimedBackend(CpuBackend):
    """Its streams have wall-clock time; events complete when the test says so."""

    takes_time = True
    host_slab_bytes = BANDWIDTH_NBYTES

    def __init__(self) -> None:
        super().__init__()
        self.has_come = True

    def timed_event(self, stream: Stream) -> Event:
        return time.perf_counter()

    def elapsed_ms(self, start: Event, stop: Event) -> Optional[float]:
        return 1e3 * (stop - start) if self.has_come else None

    def allocate_scratch(self, nbytes: int) -> Optional[torch.UntypedStorage]:
        return self.allocate_device(nbytes, torch.device("cpu"))


def take_times_on_cpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """The CPU backend of this process, and of ranks that are forked from it, takes times."""
    for name in ("takes_time", "timed_event", "elapsed_ms", "host_slab_bytes", "allocate_scratch"):
        monkeypatch.setattr(CpuBackend, name, getattr(TimedBackend, name))
    monkeypatch.setattr(CpuBackend, "has_come", True, raising=False)
