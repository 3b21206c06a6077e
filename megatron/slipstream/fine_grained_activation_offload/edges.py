# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The edge table: every wait that the package issues, and what would be damaged without it.

The line of a wait carries the id of its row, in Python and in C++; a test finds all waits of the
package. Those of Python's engine are issued by ``copy_streams``, those of C++ by
``native/store.h`` and ``native/storage.h``, those of whole-chunk graphs by
``chunk_graphs/backend.py``.

====  =========================  ===========================  =====================================
id    signal                     waiter                       protects
====  =========================  ===========================  =====================================
E1    compute, after a group's   d2h, before the group's      the group's tensors on the device:
      commit                     D2H copies                   read only after being computed
E2    h2d or d2h, after the      d2h, before the next copy    the host buffer: overwritten only
      last copies of its bytes   into any of its bytes        after being read
E3    d2h, after the D2H copies  compute, before the device   the group's tensors on the device:
                                 memory is released           reused only after being read
E4    compute, where an H2D      h2d, before the H2D copies   the copy's destination: memory that
      copy is started                                         compute used until then
E5    h2d, after the H2D copies  the consumer's stream,       the reloaded tensors: read only after
                                 before backward reads them   being written
E6    h2d, after the H2D copies  compute, before memory that  the destination of an unread copy:
                                 was never read is released   reused only after being written
E7    d2h and h2d, or a stream   the host, before pinned      host buffers: returned to the system
      that has joined them       memory is unpinned           only when no copy uses them
E8    the consumer's stream,     the allocator, before it     the reloaded tensors: their memory is
      when reloaded memory is    reallocates the memory       reused only after being read
      freed (d2h, with nodes)                                 (or the group's own tensors)
E9    d2h and h2d, after the     compute, at the end of the   memory that the next graph writes or
      copies of a graph          graph                        reads: this graph's copies have ended
E10   compute, before a forward  the slot's stream, before    all that the graph reads: read only
      graph is replayed          the graph                    after being computed
E11   the slot's stream, where   compute, before it reads     the graph's results: read only after
      only the graph's copies    the results                  being computed
      are left
E12   the slot's stream, after   compute, before anything     the slot's memory and static inputs:
      the graph                  uses the slot's memory       written only after being read
====  =========================  ===========================  =====================================

Under CUDA graph capture, E1 to E6, E8 and E9 are edges inside the graph. E10 to E12 surround one:
[Note: The tail of a forward graph] in ``chunk_graphs/backend.py``.

The other waits block the host or follow communication, and protect no copy:

====  =========================================================================================
H1    the host, at a predicted stall, until a group's copies have ended: copies are faster then
      ([Note: Waiting streams slow copies down] in ``host_sync_points``)
H2    the host, until the device is idle: before and after captures, and where memory or time is
      measured
H3    the current stream or the host, until ranks have exchanged sizes or opened connections
====  =========================================================================================
"""

from __future__ import annotations

import enum


class Edge(enum.Enum):
    """The edges of the first table in the module docstring. ``native/driver.h`` has E1 to E6."""

    E1 = "a copy out waits for the computation of its source"
    E2 = "a copy out waits for the last copies that used the bytes of its host buffer"
    E3 = "device memory is released after its copy out"
    E4 = "a copy in waits for the computation that used its destination"
    E5 = "backward waits for the copy in of the tensors that it reads"
    E6 = "unused device memory is released after its copy in"
    E7 = "host memory is unpinned after all copies"
    E8 = "reloaded memory is reallocated after reads on other streams than it was allocated for"
    E9 = "a captured graph ends after its copies"
    E10 = "a forward graph with a tail begins after the computation before it"
    E11 = "the results of a forward graph with a tail are read after being computed"
    E12 = "the memory of a slot is used again after the tail of its forward graph"
