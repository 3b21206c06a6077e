# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How a corpus packs, greedy and balanced: a table, and a picture of one global batch.

Nothing is trained. What is shown is what `--sequence-packing` will do with the same numbers: how
much of the buffers documents fill, and for how long data-parallel ranks would wait for the slowest
if attention, which costs the square of a document's length, were all that they do.
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

from megatron.slipstream.packed_sequences.dataset import (  # noqa: E402
    PackIndex,
    PackingPlan,
    build_index,
)
from megatron.slipstream.packed_sequences.options import pack_limits  # noqa: E402
from megatron.slipstream.packed_sequences.packing import attention_work  # noqa: E402

PACKINGS = ("greedy", "balanced")

_EXAMPLES = """\
example:
  python tools/preprocess_text.py examples/data/first_folio/*.txt --min-document-chars 1 \\
      --output-prefix .cache/speeches
  python tools/show_packing.py .cache/speeches --seq-length 512 --thd-max-packed-sequences 32 \\
      --global-batch-size 16 --num-ranks 4 --output packing.png
"""

DOCUMENT_COLOURS = ("#4477aa", "#7fb0d6")
"""In turn, so that neighbours differ."""
PADDING_COLOUR = "#ffffff"
WAITING_COLOUR = "#f3c6c6"
SLOWEST_COLOUR = "#d40000"


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
        packed = [Packed.of(lengths, packing, args) for packing in PACKINGS]
        num_batches = len(packed[0].work())
        if not 0 <= args.batch < num_batches:
            raise ValueError(
                f"batch={args.batch} is none of the {num_batches} batches of the corpus; set 0 to "
                f"{num_batches - 1}"
            )
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(f"{len(lengths)} documents of {lengths.min()} to {lengths.max()} tokens")
    print(table(packed))
    if args.output:
        draw(Path(args.output), lengths, packed, args.batch)
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("prefix", metavar="PREFIX", help="of a corpus, as in --data-path")
    parser.add_argument("--seq-length", type=int, required=True, help="tokens of a buffer")
    parser.add_argument(
        "--thd-max-packed-sequences", type=int, help="documents of a buffer (one for 64 tokens)"
    )
    parser.add_argument(
        "--global-batch-size", type=int, default=16, help="buffers of a batch (%(default)s)"
    )
    parser.add_argument(
        "--num-ranks", type=int, default=4, help="data-parallel ranks (%(default)s)"
    )
    parser.add_argument("--seed", type=int, default=1234, help="of the shuffle (%(default)s)")
    parser.add_argument("--output", metavar="FILE", help="draw a global batch here, as PNG")
    parser.add_argument("--batch", type=int, default=0, help="which one (%(default)s)")
    return parser


def lengths_of(prefix: str) -> np.ndarray[Any, Any]:
    """Number of tokens of each document.

    Raises:
        ValueError: There is no such corpus.
    """
    if not Path(f"{prefix}.idx").exists():
        raise ValueError(f"{prefix}.idx does not exist; make it with tools/preprocess_text.py")
    with warnings.catch_warnings():
        # Megatron warns about every optional package that is absent; none matters here.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import IndexedDataset

        # Its arrays are the file itself, which it closes when nobody holds it any more.
        corpus = IndexedDataset(prefix)
        return np.array(corpus.sequence_lengths)


class Packed(NamedTuple):
    """One epoch of a corpus in buffers."""

    plan: PackingPlan
    index: PackIndex

    @classmethod
    def of(cls, lengths: np.ndarray[Any, Any], packing: Any, args: argparse.Namespace) -> Packed:
        """As training packs it with these arguments.

        Raises:
            ValueError: It fills no batch.
        """
        plan = PackingPlan(
            limits=pack_limits(args),
            packing=packing,
            packs_per_batch=args.global_batch_size,
            num_ranks=args.num_ranks,
            seed=args.seed,
        )
        index = build_index(lengths, np.arange(len(lengths)), plan)
        if len(index) < plan.packs_per_batch:
            raise ValueError(
                f"global_batch_size={plan.packs_per_batch} is more than the {len(index)} buffers "
                "that the corpus fills; set fewer"
            )
        return cls(plan, index)

    def work(self) -> np.ndarray[Any, Any]:
        """Attention's cost ``[batches, micro-batches, ranks]``, of complete batches."""
        work = np.array([attention_work(self.index[n]) for n in range(len(self.index))])
        size = self.plan.packs_per_batch
        num_batches = len(work) // size
        return work[: num_batches * size].reshape(num_batches, -1, self.plan.num_ranks)

    def waits(self) -> tuple[float, float]:
        """How much longer than the mean the slowest rank takes, in all, as a part.

        If ranks wait for each other after every micro-batch (expert or pipeline parallel do), and
        if they do so after every iteration.
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


# The picture


def draw(path: Path, lengths: np.ndarray[Any, Any], packed: Sequence[Packed], batch: int) -> None:
    """Lengths of all documents; then a global batch of each packing, and what it costs."""
    from matplotlib.figure import Figure

    figure = Figure((10, 9.5), dpi=130, layout="constrained")
    figure.set_facecolor("white")
    grid = figure.add_gridspec(1 + len(packed), 2, height_ratios=[1, *[2] * len(packed)])
    _draw_lengths(figure.add_subplot(grid[0, :]), lengths, packed[0].plan.limits.max_tokens)
    most = max(item.work()[batch].max() for item in packed)
    for row, item in enumerate(packed, start=1):
        buffers = figure.add_subplot(grid[row, 0])
        costs = figure.add_subplot(grid[row, 1], sharey=buffers)
        _draw_buffers(buffers, item, batch)
        _draw_costs(costs, item, batch)
        costs.set_xlim(0, 1.02 * most)
    figure.legend(*costs.get_legend_handles_labels(), loc="outside lower right", ncols=2)
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_lengths(axes: Any, lengths: np.ndarray[Any, Any], max_tokens: int) -> None:
    bins = np.geomspace(1, lengths.max() + 1, 40)
    axes.hist(lengths, bins=bins, color=DOCUMENT_COLOURS[0])
    axes.axvline(max_tokens, color="#6b6b6b", linestyle="--", linewidth=1)
    axes.text(max_tokens, axes.get_ylim()[1], " buffer", ha="left", va="top", color="#6b6b6b")
    axes.set_xscale("log")
    axes.xaxis.set_major_formatter("{x:.0f}")
    axes.set(xlabel="tokens of a document", ylabel="documents", title=f"{len(lengths)} documents")
    _bare(axes)


def _places(item: Packed) -> list[float]:
    """Where each buffer of a batch is drawn: those of one micro-batch together."""
    ranks = item.plan.num_ranks
    return [-(n + n // ranks * 0.8) for n in range(item.plan.packs_per_batch)]


def _draw_buffers(axes: Any, item: Packed, batch: int) -> None:
    size = item.plan.packs_per_batch
    places = _places(item)
    limits = item.plan.limits
    for number, place in enumerate(places):
        axes.barh(
            place, limits.max_tokens, 0.8, color=PADDING_COLOUR, edgecolor="#9b9b9b", linewidth=0.5
        )
        begin = 0
        for turn, piece in enumerate(item.index[batch * size + number]):
            axes.barh(place, piece.length, 0.8, begin, color=DOCUMENT_COLOURS[turn % 2])
            begin += limits.footprint(piece.length)
    ranks = item.plan.num_ranks
    axes.set_yticks(places, [f"rank {number % ranks}" for number in range(size)], fontsize=7)
    axes.set_xlim(0, limits.max_tokens)
    axes.set(
        xlabel="tokens",
        title=f"{item.plan.packing}: documents in buffers",
        ylabel="buffers, by micro-batch",
    )
    _bare(axes)


def _draw_costs(axes: Any, item: Packed, batch: int) -> None:
    """Bars of each buffer's cost; up to the slowest of its micro-batch the other ranks wait."""
    places = _places(item)
    work = item.work()[batch]
    for number, place in enumerate(places):
        turn, rank = divmod(number, item.plan.num_ranks)
        slowest = work[turn].max()
        first = number == 0
        own = work[turn, rank]
        axes.barh(place, own, 0.8, color=DOCUMENT_COLOURS[0], label="attention" if first else None)
        axes.barh(
            place, slowest - own, 0.8, own, color=WAITING_COLOUR, label="waits" if first else None
        )
        if rank == 0:
            last = places[number + item.plan.num_ranks - 1]
            axes.plot([slowest] * 2, [place + 0.5, last - 0.5], color=SLOWEST_COLOUR, linewidth=1.5)
    idle = work.max(axis=1).sum() / work.mean(axis=1).sum() - 1
    axes.set(
        xlabel="cost of attention: squared lengths, summed",
        title=f"{item.plan.packing}: waiting for the slowest rank, +{100 * idle:.0f}%",
        xticks=[],
    )
    axes.tick_params(labelleft=False)
    _bare(axes)


def _bare(axes: Any) -> None:
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    axes.tick_params(axis="y", length=0)


if __name__ == "__main__":
    sys.exit(main())
