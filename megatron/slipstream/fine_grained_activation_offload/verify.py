# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The guard that users can switch on: is what comes back what left?

For the first iterations every storage's bytes are summed four times: where they were computed, on
the d2h stream as the copy out reads them, on the h2d stream as the copy in has written them, and
where backward reads them. Two neighbouring sums that differ tell which ordering failed. Device
memory that is released is filled with NaN meanwhile, so that nothing is right by luck.

The sums run on the streams whose view they record, so that the guard orders nothing that would not
be ordered without it, up to the moment backward has read; only then the host waits.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Sequence

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Bytes, Stream
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage

NUM_SEGMENTS = 64
"""Sums per storage: bytes that change places between two segments show."""


class ChecksumPoint(enum.Enum):
    """Where a storage's bytes are summed."""

    COMPUTED = "on the compute stream when they left"
    OFFLOADED = "on the d2h stream before their copy out"
    RETURNED = "on the h2d stream after their copy in"
    READ = "on the stream of the backward operation that reads them"


_BLAME = {
    (ChecksumPoint.COMPUTED, ChecksumPoint.OFFLOADED): (
        "the copy out read them before they were computed, or after their memory was reused: edge "
        "E1 or E3"
    ),
    (ChecksumPoint.OFFLOADED, ChecksumPoint.RETURNED): (
        "the host buffer was overwritten before its copy in, or the device memory during the copy "
        "out: edge E2 or E3"
    ),
    (ChecksumPoint.RETURNED, ChecksumPoint.READ): (
        "backward read them before their copy in was done, or something overwrote them since: edge "
        "E5 or E4"
    ),
}


def checksum(data: torch.Tensor) -> torch.Tensor:
    """Sums of the bytes of a uint8 tensor, int64 ``[NUM_SEGMENTS + 1]``, wrapping around."""
    words = data[: data.numel() // 8 * 8].view(torch.int64)
    per_segment = words.numel() // NUM_SEGMENTS
    segments = words[: per_segment * NUM_SEGMENTS].view(NUM_SEGMENTS, per_segment).sum(dim=1)
    rest = words[per_segment * NUM_SEGMENTS :].sum() + data[data.numel() // 8 * 8 :].sum()
    return torch.cat([segments, rest.view(1)])


class Verifier:
    """Follows the storages that are away. One for each :class:`ActivationStore` that is watched."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._sums: dict[int, dict[ChecksumPoint, torch.Tensor]] = {}
        self.num_verified = 0
        """Storages that have come back unchanged."""
        backend.poisons_dropped = True

    def stop(self) -> None:
        """Watch no more."""
        self._backend.poisons_dropped = False

    def leaves(self, storages: Sequence[SavedStorage], d2h: Stream) -> None:
        """Copies out of ``storages`` follow on ``d2h``; called between their waits and them."""
        for storage in storages:
            source = storage.source_bytes().view()
            sums = self._sums[storage.serial] = {ChecksumPoint.COMPUTED: checksum(source)}
            self._sum_on(d2h, source, sums, ChecksumPoint.OFFLOADED)

    def returns(self, storages: Sequence[SavedStorage], h2d: Stream) -> None:
        """Copies in of ``storages`` have just been put into ``h2d``."""
        for storage in storages:
            sums = self._sums.get(storage.serial)
            if sums is not None and storage.returned is not None:
                data = Bytes(storage.returned, 0, storage.nbytes).view()
                self._sum_on(h2d, data, sums, ChecksumPoint.RETURNED)

    def reads(self, storage: SavedStorage, finish: Callable[[], None]) -> None:
        """Backward reads ``storage`` now, for the first time.

        Args:
            storage: Returned, and ordered before the current stream.
            finish: Blocks the host until the copy streams are idle.

        Raises:
            RuntimeError: The bytes are not those that left; names group and edge.
        """
        sums = self._sums.pop(storage.serial, None)
        if sums is None or storage.returned is None:
            return
        data = Bytes(storage.returned, 0, storage.nbytes).view()
        sums[ChecksumPoint.READ] = checksum(data)
        finish()
        seen = [sums[sight].tolist() for sight in ChecksumPoint]
        for (first, second), left, right in zip(_BLAME, seen, seen[1:], strict=False):
            if left != right:
                raise RuntimeError(
                    f"offload_verify: {storage.nbytes} bytes that {storage.owner.describe()} saved "
                    f"came back changed: {_BLAME[first, second]}. Please report this; until it is "
                    "mended set fine_grained_activation_offloading=False"
                )
        self.num_verified += 1

    def _sum_on(
        self,
        stream: Stream,
        data: torch.Tensor,
        sums: dict[ChecksumPoint, torch.Tensor],
        at: ChecksumPoint,
    ) -> None:
        self._backend.run_on(stream, lambda: sums.__setitem__(at, checksum(data)))
