# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs several ranks of a job on one GPU, to check correctness rather than speed.

NCCL refuses two ranks of a communicator on one GPU of a host. If ``NCCL_HOSTID`` puts each on a
different host, it connects them by sockets: the same collectives on the same streams, inside CUDA
graphs too, only slower. The GPU time-slices the processes by some milliseconds, so a rank whose
kernel waits for another rank keeps that one waiting.

If ``SLIPSTREAM_RANKS_PER_GPU`` is set, tests and benchmarks count each GPU that many times. For a
script that takes its GPU from ``LOCAL_RANK``::

    torchrun --nproc-per-node 4 -m tools.shared_gpus pretrain_gpt.py ...
"""

from __future__ import annotations

import os
import runpy
import sys

VARIABLE = "SLIPSTREAM_RANKS_PER_GPU"

BYTES_PER_TEST = 16 << 30
"""Device memory of a process that runs GPU tests: most need less, a few up to 25 GiB. On an 80 GB
card four processes pass side by side; of eight, some fail with NCCL out-of-memory errors."""


def ranks_per_gpu() -> int:
    """Return how many ranks may share a GPU.

    Raises:
        ValueError: The variable is not a positive number.
    """
    text = os.environ.get(VARIABLE, "1")
    if not text.isdecimal() or int(text) < 1:
        raise ValueError(f"{VARIABLE}={text} is not a number of ranks; set 1 or more")
    return int(text)


def num_places() -> int:
    """Return for how many ranks there is a GPU, or a share of one, without initialising CUDA."""
    import torch

    return torch.cuda.device_count() * ranks_per_gpu()


def num_tests_per_gpu() -> int:
    """Return how many test processes fit into the memory of the smallest GPU; at least 1."""
    import torch

    count = torch.cuda.device_count()
    sizes = (torch.cuda.get_device_properties(gpu).total_memory for gpu in range(count))
    return max(min(sizes, default=0) // BYTES_PER_TEST, 1)


def share_a_gpu(num_ranks: int) -> bool:
    """Return whether some of this many ranks on this machine share a GPU."""
    import torch

    return 0 < torch.cuda.device_count() < num_ranks


def take_place(rank: int, num_ranks: int) -> int:
    """Return a rank's GPU; call before the process creates its first communicator.

    Args:
        rank: Rank on this machine.
        num_ranks: Number of ranks on this machine.

    Raises:
        ValueError: There are fewer places than ranks.
    """
    import torch

    num_gpus = torch.cuda.device_count()
    if num_ranks > num_places():
        raise ValueError(
            f"{num_ranks} ranks are not possible on {num_gpus} GPU(s); set {VARIABLE}="
            f"{-(-num_ranks // max(num_gpus, 1))} to let them share, where speed does not matter"
        )
    if share_a_gpu(num_ranks):
        os.environ.update(
            NCCL_HOSTID=f"rank{rank}",
            # NCCL looks for a network between hosts.
            NCCL_IB_DISABLE="1",
            NCCL_SOCKET_IFNAME="lo",
        )
    return rank % num_gpus


def main() -> None:
    """Run the script given by the arguments, as a rank that may share its GPU."""
    rank, num_ranks = int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"])
    os.environ["LOCAL_RANK"] = str(take_place(rank, num_ranks))
    del sys.argv[0]
    runpy.run_path(sys.argv[0], run_name="__main__")


if __name__ == "__main__":
    main()
