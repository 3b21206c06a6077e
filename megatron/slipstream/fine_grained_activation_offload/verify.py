# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Optional verification that reloaded bytes equal the offloaded ones.

In the first iterations every storage's bytes are summed four times: on the stream that computed
them, on the d2h stream before the copy out, on the h2d stream after the copy in, and on the stream
that reads them in backward. If two successive sums differ, they identify the failed edge. Released
device memory is filled with NaN, so that nothing is right by luck.

Each sum runs on the stream whose view of the memory it records, so verification adds no ordering
until backward has read the bytes; only then does the host wait.
"""

from __future__ import annotations

import contextlib
import enum
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Bytes, Stream
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.plan.edges import Edge

logger = logging.getLogger(__name__)

NUM_SEGMENTS = 64
"""Number of sums per storage, so that bytes swapped between segments are detected."""


class ChecksumPoint(enum.Enum):
    """The points at which a storage's bytes are summed."""

    COMPUTED = "on the compute stream at their offload"
    OFFLOADED = "on the d2h stream before their copy out"
    RETURNED = "on the h2d stream after their copy in"
    READ = "on the stream of the backward operation that reads them"


_BLAME = ((Edge.E1, Edge.E3), (Edge.E2, Edge.E3), (Edge.E5, Edge.E4))
"""The edges that may have failed if the sums of two successive points differ."""


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Return checksums of a uint8 tensor, int64 ``[NUM_SEGMENTS + 1]``, with wraparound."""
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    per_segment = words.numel() // NUM_SEGMENTS
    segments = words[: per_segment * NUM_SEGMENTS].view(NUM_SEGMENTS, per_segment).sum(dim=1)
    rest = words[per_segment * NUM_SEGMENTS :].sum() + data[data.numel() // 8 * 8 :].sum()
    return torch.cat([segments, rest.view(1)])


_active: weakref.WeakKeyDictionary[Backend, weakref.WeakSet[Verifier]] = weakref.WeakKeyDictionary()
"""Verifiers that have not stopped, by backend: engines may share one."""


@contextlib.contextmanager
def nothing_poisoned(backend: Backend) -> Iterator[None]:
    """Do not fill released memory in here, so that a CUDA graph does not do so in each replay."""
    before, backend.poisons_dropped = backend.poisons_dropped, False
    try:
        yield
    finally:
        backend.poisons_dropped = before


class Verifier:
    """Verifies the offloaded storages of one :class:`ActivationStore`."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        _active.setdefault(backend, weakref.WeakSet()).add(self)
        self._sums: dict[int, dict[ChecksumPoint, torch.Tensor]] = {}
        self.num_verified = 0
        """Number of storages that were reloaded unchanged."""
        backend.poisons_dropped = True

    def stop(self) -> None:
        """Stop verifying; other engines of the backend continue."""
        logger.info(
            "offload_verify: %d storages came back unchanged; verifying ends", self.num_verified
        )
        others = _active.get(self._backend, weakref.WeakSet[Verifier]())
        others.discard(self)
        self._backend.poisons_dropped = bool(others)

    def leaves(self, storages: Sequence[SavedStorage], d2h: Stream) -> None:
        """Sum offloaded bytes: call between the waits and the copies of ``storages`` on ``d2h``."""
        for storage in storages:
            source = storage.source_bytes().view()
            sums = self._sums[storage.serial] = {ChecksumPoint.COMPUTED: checksum(source)}
            self._sum_on(d2h, source, sums, ChecksumPoint.OFFLOADED)

    def returns(self, storages: Sequence[SavedStorage], h2d: Stream) -> None:
        """Sum reloaded bytes: call after the copies in of ``storages`` are enqueued on ``h2d``."""
        for storage in storages:
            sums = self._sums.get(storage.serial)
            if sums is not None and storage.returned is not None:
                data = Bytes(storage.returned, 0, storage.nbytes).view()
                self._sum_on(h2d, data, sums, ChecksumPoint.RETURNED)

    def reads(self, storage: SavedStorage, finish: Callable[[], None]) -> None:
        """Compare the sums when backward first reads a reloaded storage, after its stream's wait.

        ``finish`` blocks the host until the copy streams are idle. If the bytes differ from the
        offloaded ones, a ``RuntimeError`` names the group and the edge.
        """
        sums = self._sums.pop(storage.serial, None)
        if sums is None or storage.returned is None:
            return
        data = Bytes(storage.returned, 0, storage.nbytes).view()
        sums[ChecksumPoint.READ] = checksum(data)
        finish()
        seen = [sums[sight].tolist() for sight in ChecksumPoint]
        for edges, left, right in zip(_BLAME, seen, seen[1:], strict=False):
            if left != right:
                names = " or ".join(edge.name for edge in edges)
                faults = " ".join(f"{edge.name}: {edge.value.without}" for edge in edges)
                raise RuntimeError(
                    f"offload_verify: {storage.nbytes} bytes that {storage.owner.describe()} saved "
                    f"came back changed, for lack of edge {names} ({faults}) Please report this; "
                    "until it is fixed, set fine_grained_activation_offloading=False"
                )
        self.num_verified += 1

    def _sum_on(
        self,
        stream: Stream,
        data: torch.Tensor,
        sums: dict[ChecksumPoint, torch.Tensor],
        at: ChecksumPoint,
    ) -> None:
        nbytes = data.untyped_storage().nbytes()

        def add_sum() -> None:
            # A source discarded by now has no bytes to sum. It is recomputed, so its copy is not
            # read.
            if data.untyped_storage().nbytes() == nbytes:
                sums[at] = checksum(data)

        self._backend.run_on(stream, add_sum)
