# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Print a table of how a corpus packs, greedy and balanced.

Nothing is trained. The table shows what `--sequence-packing` does with the same numbers: how much
of the buffers documents fill, and how long data-parallel ranks would wait for the slowest if their
only cost were attention, which is quadratic in a document's length.
"""

from __future__ import annotations

import argparse
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.slipstream.packed_sequences.dataset import PackIndex, PackingPlan  # noqa: E402
from megatron.slipstream.packed_sequences.packing import attention_work, pack_limits  # noqa: E402

_EXAMPLES = """\
example:
  python tools/preprocess_text.py examples/data/first_folio/*.txt --min-document-chars 1 \\
      --output-prefix .cache/speeches
  python tools/show_packing.py .cache/speeches --seq-length 512 --thd-max-packed-sequences 32 \\
      --global-batch-size 16 --num-ranks 4
"""


def main(argv: Sequence[str] | None = None) -> int:
    parser = _parser()
    args = parser.parse_args(argv)
    args.context_parallel_size = 1
    try:
        if args.num_ranks < 1 or args.global_batch_size % args.num_ranks:
            raise ValueError(
                f"global_batch_size={args.global_batch_size} is not a multiple of num_ranks="
                f"{args.num_ranks}; set one that is"
            )
        lengths = lengths_of(args.prefix)
        packed = [Packed.of(lengths, packing, args) for packing in ("greedy", "balanced")]
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(f"{len(lengths)} documents of {lengths.min()} to {lengths.max()} tokens")
    print(table(packed))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("prefix", metavar="PREFIX", help="of a corpus, as in --data-path")
    add("--seq-length", type=int, required=True, help="tokens of a buffer")
    add("--thd-max-packed-sequences", type=int, help="documents of a buffer (one for 64 tokens)")
    add("--global-batch-size", type=int, default=16, help="buffers of a batch (%(default)s)")
    add("--num-ranks", type=int, default=4, help="data-parallel ranks (%(default)s)")
    add("--seed", type=int, default=1234, help="of the shuffle (%(default)s)")
    return parser


def lengths_of(prefix: str) -> np.ndarray[Any, Any]:
    """Return the number of tokens of each document; a ``ValueError`` if there is no such corpus."""
    if not Path(f"{prefix}.idx").exists():
        raise ValueError(f"{prefix}.idx does not exist; make it with tools/preprocess_text.py")
    with warnings.catch_warnings(action="ignore"):  # about every missing optional package
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        corpus = IndexedDataset(prefix)  # Its arrays map the file, until the last reference.
        return np.array(corpus.sequence_lengths)


class Packed(NamedTuple):
    """One epoch of a corpus in buffers."""

    plan: PackingPlan
    index: PackIndex

    @classmethod
    def of(cls, lengths: np.ndarray[Any, Any], packing: Any, args: argparse.Namespace) -> Packed:
        """Pack the corpus as training does; a ``ValueError`` if it does not fill a batch."""
        size = args.global_batch_size
        plan = PackingPlan(pack_limits(args), packing, size, args.num_ranks, args.seed)
        index = PackIndex.build(lengths, np.arange(len(lengths)), plan)
        if len(index) < size:
            raise ValueError(
                f"global_batch_size={size} is more than the {len(index)} buffers that the corpus "
                "fills; set fewer"
            )
        return cls(plan, index)

    def work(self) -> np.ndarray[Any, Any]:
        """Return attention's cost ``[batches, micro-batches, ranks]`` in complete batches."""
        work = np.array([attention_work(self.index[n]) for n in range(len(self.index))])
        size = self.plan.packs_per_batch
        num_batches = len(work) // size
        return work[: num_batches * size].reshape(num_batches, -1, self.plan.num_ranks)

    def waits(self) -> tuple[float, float]:
        """Return how much longer than the mean the slowest rank takes in total, as a fraction.

        If ranks wait for each other after every micro-batch (as with expert or pipeline
        parallelism), and if they do so after every iteration.
        """
        work = self.work()
        each = work.max(axis=2).sum() / work.mean(axis=2).sum() - 1
        total = work.sum(axis=1)
        return float(each), float(total.max(axis=1).sum() / total.mean(axis=1).sum() - 1)


def table(packed: Sequence[Packed]) -> str:
    rows: list[tuple[str, list[str]]] = [
        ("packing", [item.plan.packing for item in packed]),
        ("buffers of an epoch", [str(len(item.index)) for item in packed]),
        ("filled by documents", [percent(item.index.filling(item.plan.limits)) for item in packed]),
        (
            f"hold {packed[0].plan.limits.max_sequences} documents, the most they may",
            [percent(item.index.part_with(item.plan.limits.max_sequences)) for item in packed],
        ),
        ("waiting, if ranks meet after each micro-batch", [percent(i.waits()[0]) for i in packed]),
        ("waiting, if ranks meet after each iteration", [percent(i.waits()[1]) for i in packed]),
    ]
    return "\n".join(f"{name:<48}" + "".join(f"{c:>10}" for c in cells) for name, cells in rows)


def percent(part: float) -> str:
    return f"{100 * part:.1f}%"


if __name__ == "__main__":
    sys.exit(main())
