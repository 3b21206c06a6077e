# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Limits on the size of plans for models that have not run."""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from megatron.slipstream.cli_plan.options import flag_of
from megatron.slipstream.estimate.synthetic import Workplan

MAX_GROUPS = 100_000
"""Maximum groups of all planned ranks, each of which takes about a millisecond."""

MAX_BYTES = 1 << 60
"""Maximum bytes of activations or state: the planner adds sizes as 64-bit integers."""


def check_sizes(work: Workplan, ranks: Sequence[int], options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for a plan that would take too long, or whose sizes would overflow."""
    count, par, chunks = work.num_micro_batches, work.shape.parallelism, work.chunks.items()
    each = max(1, sum(chunk.num_groups for (rank, _), chunk in chunks if rank in ranks))
    if each * count > MAX_GROUPS:
        smallest = 1 if par.vpp is None else max(par.group_size or 0, par.pp)
        largest = MAX_GROUPS // each // smallest * smallest
        shrink = [f"set --num-micro-batches to {largest} or less"] if largest else []
        if len(ranks) > 1:
            shrink.append("plan one pipeline rank with --rank")
        if not largest:
            shrink.append(f"name fewer modules ({flag_of('offload_modules', options)})")
            shrink.append(f"fewer layers (num_layers={work.shape.num_layers})")
        raise ValueError(
            f"--num-micro-batches={count} is not supported with this model because {count} "
            f"times {each} groups would be planned and the limit is {MAX_GROUPS}; "
            f"{', or '.join(shrink)}"
        )
    most = max(sum(c.saved_bytes for (rank, _), c in chunks if rank == one) for one in ranks)
    if most * count > MAX_BYTES:
        sizes = {
            flag_of("seq_length", options): work.shape.seq_length,
            flag_of("micro_batch_size", options): work.shape.micro_batch_size,
            "--num-micro-batches": count,
        }
        shown = ", ".join(f"{flag}={value}" for flag, value in sizes.items())
        raise ValueError(
            f"{shown}: the activations of a rank are {most * count / 2**30:.3g} GiB per iteration, "
            f"but a plan supports up to {MAX_BYTES >> 30}; reduce one of them"
        )
