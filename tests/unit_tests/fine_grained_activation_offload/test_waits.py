# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Which waits are made again: [Note: A wait covers what came before], and where that ends."""

from __future__ import annotations

from collections.abc import Hashable

import pytest
from toy_model import make_chunks, micro_batch

from megatron.slipstream.fine_grained_activation_offload.backend import Event, Stream
from megatron.slipstream.fine_grained_activation_offload.copy_streams import CopyStreams
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import LazyCpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.candidates import PolicyOptions

REUSED = "the id of a stream that is gone, and of the one that came after it"


class OneAfterAnother(LazyCpuBackend):
    """The computation's stream is exchanged for another that gets its id."""

    def __init__(self) -> None:
        super().__init__()
        self.name_of_compute = "first"
        self.waited: list[str] = []
        """Which of the two was told to wait, in order."""

    def stream_id(self, stream: Stream) -> Hashable:
        return REUSED if stream is self.current_stream() else super().stream_id(stream)

    def wait(self, stream: Stream, event: Event) -> None:
        if stream is self.current_stream():
            self.waited.append(self.name_of_compute)
        super().wait(stream, event)


@pytest.mark.parametrize("is_native", [False, True], ids=["Python", "C++"])
def test_a_new_stream_under_the_id_of_an_old_one_waits_itself(is_native: bool) -> None:
    backend = OneAfterAnother()
    manager = PipelineOffloadManager(OffloadEngine(backend, PolicyOptions(), is_native=is_native))
    y = make_chunks()[0](micro_batch(0), manager).square().sum()
    y.backward(retain_graph=True)
    num_waits = len(backend.waited)
    y.backward(retain_graph=True)
    assert len(backend.waited) == num_waits > 0, "what it has waited for is there"
    manager.reset()
    backend.name_of_compute = "second"
    y.backward()
    assert "second" in backend.waited


def test_a_wait_that_a_graph_holds_is_made_again_outside() -> None:
    # The captured one takes place when the graph is replayed, which may be never.
    backend = OneAfterAnother()
    streams = CopyStreams(backend)
    before = streams._signal(streams.d2h, "d2h")
    streams.begin_graph()
    streams.before_use(streams._signal(streams.d2h, "d2h"), REUSED)
    streams.end_graph()
    num_waits = len(backend.waited)
    streams.before_use(before, REUSED)
    assert len(backend.waited) == num_waits + 1
    streams.before_use(before, REUSED)
    assert len(backend.waited) == num_waits + 1
