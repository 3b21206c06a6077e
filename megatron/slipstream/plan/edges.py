# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The edge table: every wait that the package issues, and what would be damaged without it.

The line of a wait carries the id of its row, in Python and in C++; a test finds all waits of the
package. Those of Python's engine are issued by ``copy_streams``, those of C++ by
``native/store.h`` and ``native/storage.h``, those of whole-chunk graphs by
``graphs/capture.py``.

The proof of a plan and its simulation take their orderings from here (:data:`EDGES`), and so do the
safety properties their texts. Under CUDA graph capture, E1 to E6, E8 and E9 are edges inside the
graph. E10 to E12 surround one: [Note: The tail of a forward graph] in ``graphs/capture.py``.
"""

from __future__ import annotations

import enum
from typing import Literal, NamedTuple, Optional


class Queue(enum.IntEnum):
    """The queues that run operations."""

    COMPUTE = 0
    D2H = 1
    H2D = 2


class OpKind(enum.Enum):
    """The kinds of operations. Each value is the queue and what the operation does there."""

    COMPUTE = (Queue.COMPUTE, "the model's computation between one step and the next")
    WRITE = (Queue.COMPUTE, "forward has computed the storages")
    SAVE = (Queue.COMPUTE, "forward has read storages that another group saved first")
    START_OUT = (Queue.COMPUTE, "the point from which a copy out may start")
    COPY_OUT = (Queue.D2H, "copies device memory into host buffers")
    RELEASE = (Queue.COMPUTE, "device memory is released: later operations may overwrite it")
    START_IN = (Queue.COMPUTE, "the point from which a copy back may start: its memory is new")
    COPY_IN = (Queue.H2D, "copies host buffers into new device memory")
    USE = (Queue.COMPUTE, "backward reads the reloaded memory")
    ABANDON = (Queue.COMPUTE, "reloaded memory is released unread: it may be overwritten")

    __hash__ = object.__hash__  # Enum's is a Python function, and lookups of kinds are hot.

    def __init__(self, queue: Queue, _: str) -> None:
        self.queue = queue
        """The queue that it runs on."""
        self.is_copy = queue is not Queue.COMPUTE
        """Whether it runs on a copy queue."""


class EdgeRule(NamedTuple):
    """An edge between operations.

    Before an operation of kind ``waiter`` runs, its queue waits for the operation of kind
    ``signal`` on the same storage or, if ``same`` is "buffer", on the storages that previously
    occupied bytes of its host buffer.
    """

    id: str
    signal: OpKind
    waiter: OpKind
    same: Literal["storage", "buffer"] = "storage"


class _Row(NamedTuple):
    signal: str
    waiter: str
    protects: str
    without: str
    """What happens if the edge is missing."""
    safety: str = ""
    """The property of a safe plan that rests on the edge; "" if plans do not know the edge."""
    rule: Optional[EdgeRule] = None
    """The edge in a plan; None if it orders the host, the allocator or graphs."""


class Edge(enum.Enum):
    """The edges. C++ issues those with a rule."""

    E1 = _Row(
        signal="compute, after a group's commit",
        waiter="d2h, before the group's D2H copies",
        protects="the group's tensors on the device: read only after being computed",
        without="A copy out starts while the layer still computes, and copies older bytes.",
        safety="a copy out reads what compute has written",
        rule=EdgeRule("E1", OpKind.START_OUT, OpKind.COPY_OUT),
    )
    E2 = _Row(
        signal="h2d or d2h, after the last copies of its bytes",
        waiter="d2h, before the next copy into any of its bytes",
        protects="the host buffer: overwritten only after being read",
        without="A host buffer is overwritten while the copy in of its last use still reads it.",
        safety="a host buffer is written after the last copies of its bytes",
        # A planned D2H copy is never cancelled, so a buffer's last copies are always H2D copies.
        rule=EdgeRule("E2", OpKind.COPY_IN, OpKind.COPY_OUT, same="buffer"),
    )
    E3 = _Row(
        signal="d2h, after the D2H copies",
        waiter="compute, before the device memory is released",
        protects="the group's tensors on the device: reused only after being read",
        without="Device memory is reused while the copy out still reads it.",
        safety="device memory is used again after its copy out",
        rule=EdgeRule("E3", OpKind.COPY_OUT, OpKind.RELEASE),
    )
    E4 = _Row(
        signal="compute, where an H2D copy is started",
        waiter="h2d, before the H2D copies",
        protects="the copy's destination: memory that compute used until then",
        without="A copy in writes memory whose last use is still queued.",
        safety="a copy back writes memory after its last use by compute",
        rule=EdgeRule("E4", OpKind.START_IN, OpKind.COPY_IN),
    )
    E5 = _Row(
        signal="h2d, after the H2D copies",
        waiter="the consumer's stream, before backward reads them",
        protects="the reloaded tensors: read only after being written",
        without="Backward reads before the copy in has arrived.",
        safety="backward reads what the copy back has written",
        rule=EdgeRule("E5", OpKind.COPY_IN, OpKind.USE),
    )
    E6 = _Row(
        signal="h2d, after the H2D copies",
        waiter="compute, before memory that was never read is released",
        protects="the destination of an unread copy: reused only after being written",
        without="Reloaded memory that nothing read is reused, and the late copy overwrites it.",
        safety="unread returned memory is used again after its copy back",
        rule=EdgeRule("E6", OpKind.COPY_IN, OpKind.ABANDON),
    )
    E7 = _Row(
        signal="d2h and h2d, or a stream that has joined them",
        waiter="the host, before pinned memory is unpinned",
        protects="host buffers: returned to the system only when no copy uses them",
        without="Host memory is unpinned while a copy writes to it.",
    )
    E8 = _Row(
        signal="the consumer's stream, when reloaded memory is freed (d2h, with nodes)",
        waiter="the allocator, before it reallocates the memory",
        protects="the reloaded tensors (or the group's own): reused only after being read",
        without="Memory is reused on the stream that it was allocated for while another stream "
        "still reads it.",
    )
    E9 = _Row(
        signal="d2h and h2d, after the copies of a graph",
        waiter="compute, at the end of the graph",
        protects="memory that the next graph writes or reads: this graph's copies have ended",
        without="A captured graph ends before its copies: CUDA refuses it.",
    )
    E10 = _Row(
        signal="compute, before a forward graph is replayed",
        waiter="the slot's stream, before the graph",
        protects="all that the graph reads: read only after being computed",
        without="A forward graph with a tail reads inputs that are still being computed.",
    )
    E11 = _Row(
        signal="the slot's stream, where only the graph's copies are left",
        waiter="compute, before it reads the results",
        protects="the graph's results: read only after being computed",
        without="Its results are read before the graph has computed them.",
    )
    E12 = _Row(
        signal="the slot's stream, after the graph",
        waiter="compute, before anything uses the slot's memory",
        protects="the slot's memory and static inputs: written only after being read",
        without="Backward, or the slot's next user, overwrites what the last copies still read.",
    )

    @property
    def rule(self) -> Optional[EdgeRule]:
        """The edge between operations of a plan; None if plans do not know it."""
        return self.value.rule


class OtherWait(enum.Enum):
    """The other waits, which protect no copy."""

    H2 = (
        "the host, until the device is idle: before and after captures, before graphs are deleted, "
        "and where memory or time is measured"
    )
    H3 = "the current stream or the host, until ranks have exchanged sizes or opened connections"


EDGES = tuple(edge.rule for edge in Edge if edge.rule is not None)
"""The edges between operations of a plan."""


def safety_by(*edges: Edge, text: str = "") -> str:
    """Return the text of a safety property with the edges that it rests on.

    Args:
        edges: The edges.
        text: The property; "" for that of the first edge.
    """
    return f"{text or edges[0].value.safety} ({' and '.join(edge.name for edge in edges)})"
