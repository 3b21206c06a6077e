# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Measures which sequence lengths fit, and how fast: ``python -m benchmarks.fit --help``."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Optional

from benchmarks.case import Case
from benchmarks.cases import find_case
from benchmarks.fit_process import Worker
from benchmarks.fit_ways import WAYS, Setup
from benchmarks.rows import Row, RowWriter, read_rows
from megatron.slipstream.cli_plan.options import parse_tokens
from megatron.slipstream.options.fields import parse_tiles

ROOT = Path(__file__).resolve().parents[1]
GIB = 2**30

DESCRIPTION = """\
Find which sequence lengths fit on one GPU for each way to save memory, and how fast they run.
Lengths of one way run in one process until one runs out of memory; the next starts a new process.

ways:
  off         all activations stay on the device
  selective   the modules of --recompute-modules are recomputed
  full        each layer is recomputed as a whole
  megatron    as selective, and megatron-core's own engine moves all modules
  slipstream  the same with ours
  inputs      as full, and ours moves the layers' inputs
  moved       nothing is recomputed, and ours moves all modules, its own too
  tiles       nothing is recomputed but MLPs and loss, in tiles of the sequence; ours moves all
              modules and the MLPs' inputs
  full_tiles  as inputs, with MLPs and loss in tiles
  budget      ours with activation_memory_budget='auto', or --budget-gib
"""
EPILOG = """\
examples:
  python -m benchmarks.fit --tiny --output /tmp/tiny.jsonl         try it, without a GPU
  python -m benchmarks.fit --ways off,full --lengths 8k,32k,40k    a part of the table
  python -m benchmarks.fit --ways full --lengths 40k --longest     also search the longest
  python -m benchmarks.fit --ways slipstream --recompute-modules none --modules core_attn
                                                                   by hand, what a budget chooses
  python -m benchmarks.fit --table FILE                            the table from rows again

A row that is in --output already is not measured again, so that the same command continues after a
limit. --longest extrapolates the memory of what fits.
"""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; return 0, or 2 for a user error."""
    options = _parser().parse_args(arguments)
    try:
        if options.worker:
            from benchmarks.fit_worker import work

            return work(Setup(**json.loads(options.worker)))
        if options.table:
            sys.stdout.write(table(read_rows(options.table)))
            return 0
        return _run(options)
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2


def _parse_lengths(text: str) -> list[int]:
    return [parse_tokens(part) for part in text.split(",")]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.fit",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--case", default="llama3_8b", help="a case of benchmarks.run (default: %(default)s)")
    add("--tiny", action="store_true", help="'smoke' with 32 and 64 tokens, on a tiny device")
    add("--ways", default=",".join(WAYS), metavar="A,B", help="(default: all)")
    about = "tokens of a sequence, ascending (default: 8k,32k,40k)"
    usual = [8192, 32768, 40960]
    add("--lengths", type=_parse_lengths, default=usual, metavar="N,M", help=about)
    add("--longest", action="store_true", help="also search the longest that fits")
    add("--unit", type=parse_tokens, default=8192, metavar="N", help="its step (default: 8k)")
    about = "none, or some (default: %(default)s)"
    add("--recompute-modules", default="mlp,layernorm", metavar="A,B", help=about)
    about = "offload_modules of other ways than moved and budget (default: all of the case)"
    add("--modules", default="", metavar="A,B", help=about)
    add("--micro-batches", type=int, default=1, metavar="N", help="(default: %(default)s)")
    add("--loss-tiles", type=parse_tiles, default=1, metavar="N", help="tiles of the loss, or auto")
    add("--mlp-tiles", type=parse_tiles, default=1, metavar="N", help="of each MLP, or auto")
    add("--device-gib", type=float, metavar="G", help="limit of torch's allocator")
    add("--budget-gib", type=float, metavar="G", help="budget of the way 'budget' (default: auto)")
    about = "an option of OffloadConfig for the ways with our engine; repeatable"
    add("--engine-option", action="append", default=[], metavar="NAME=VALUE", help=about)
    _add_limits(parser)
    add("--output", type=Path, default=ROOT / "benchmarks/results/fit.jsonl", metavar="FILE")
    add("--table", type=Path, metavar="FILE", help="print the Markdown table of rows, and end")
    add("--worker", help=argparse.SUPPRESS)
    return parser


def _add_limits(parser: argparse.ArgumentParser) -> None:
    for name, default, about in (
        ("--iterations", 5, "timed"),
        ("--warmups", 1, "before those"),
        ("--max-planning", 25, "iterations until our plan is settled, at most"),
        ("--search-iterations", 2, "of all kinds, for a length of --longest"),
        ("--point-seconds", 200.0, "begin no further iteration of a point; one is always timed"),
        ("--kill-seconds", 500.0, "end a point that takes longer"),
        ("--seconds", 570.0, "begin no further point"),
    ):
        metavar = "S" if "seconds" in name else "N"
        text = f"{about} (default: %(default)s)"
        parser.add_argument(name, type=type(default), default=default, metavar=metavar, help=text)


class OutOfTime(Exception):
    """The command's time is over."""


class WayRun:
    """The points of one way.

    Args:
        setup: The way.
        options: Options of the command.
        writer: Where rows go.
        rows: Rows of this way that exist, by tokens.
        deadline_s: No point begins after it, by ``time.monotonic()``.
    """

    def __init__(
        self,
        setup: Setup,
        options: argparse.Namespace,
        writer: RowWriter,
        rows: dict[int, Row],
        deadline_s: float,
    ) -> None:
        self._setup, self._options, self._writer = setup, options, writer
        self._rows, self._deadline_s = rows, deadline_s
        self._worker = Worker(setup, options.kill_seconds)

    def run(self) -> None:
        """Measure the lengths of the table until one dies, then search the longest."""
        options = self._options
        try:
            for tokens in sorted(options.lengths):
                row = self._measure(tokens, options.iterations, options.max_planning)
                if "error" in row:
                    break
            if options.longest and ("error" not in row or row["dies"]):
                self._search()
        finally:
            self._worker.close()

    def _search(self) -> None:
        options = self._options
        try:
            longest, dies_at = find_longest(
                lambda tokens: self._measure(tokens, options.search_iterations, None),
                self._rows,
                options.unit,
            )
        except NotMeasured as error:
            sys.stdout.write(f"{self._setup.way}: the longest is not known: {error}\n")
            return
        fields = {"tokens": longest, "dies_at": dies_at}
        self._writer.write("longest", **self._setup.identity(), **fields)
        sys.stdout.write(f"{self._setup.way}: longest {longest}, dies at {dies_at}\n")
        sys.stdout.flush()

    def _measure(self, tokens: int, iterations: int, max_planning: Optional[int]) -> Row:
        """Return the row of a length, measured now or before.

        Args:
            tokens: The length.
            iterations: Timed iterations; with ``max_planning`` None, iterations of all kinds.
            max_planning: Iterations until our plan is settled, at most.
        """
        is_search = max_planning is None
        known = self._rows.get(tokens)
        if known is not None and (is_search or "error" in known or not known["is_search"]):
            return known
        if time.monotonic() > self._deadline_s:
            raise OutOfTime
        point = {
            "tokens": tokens,
            "iterations": 1 if is_search else iterations,
            "warmups": iterations - 1 if is_search else self._options.warmups,
            "max_planning": max_planning or 0,
            "seconds": self._options.point_seconds,
        }
        begin_s = time.monotonic()
        fields = self._worker.measure(point)
        machine = fields.pop("machine", None)
        if machine is not None:
            command = " ".join(["python -m benchmarks.fit", *sys.argv[1:]])
            self._writer.write("machine", **machine, command=command, case=self._setup.case)
        fields |= {"wall_s": round(time.monotonic() - begin_s, 1), "is_search": is_search}
        self._writer.write("point", **self._setup.identity(), tokens=tokens, **fields)
        sys.stdout.write(f"{_line(self._setup.way, tokens, fields)}\n")
        sys.stdout.flush()
        if "error" not in fields or fields["dies"]:
            self._rows[tokens] = fields
        return fields


class NotMeasured(Exception):
    """A point failed for another reason than memory."""


def find_longest(
    measure: Callable[[int], Row], known: Mapping[int, Row], unit: int
) -> tuple[int, int]:
    """Return the longest multiple of ``unit`` tokens that fits, and the next, which dies.

    Args:
        measure: Returns the row of a number of tokens.
        known: Rows by tokens; ``measure`` may add to them.
        unit: Tokens.

    Raises:
        NotMeasured: A point failed for another reason than memory.
    """
    rows = dict(known)
    for number in range(100):
        low = max((n for n, row in rows.items() if "error" not in row), default=0)
        high = min((n for n, row in rows.items() if "error" in row), default=None)
        first = low // unit + 1
        if high is not None and first * unit >= high:
            return low // unit * unit, high
        last = -(-high // unit) - 1 if high is not None else None
        guess = predict_longest(rows) // unit
        if last is not None:
            # Predictions fail where the curve bends; halving ends.
            guess = (first + last) // 2 if number > 2 else min(guess, last)
        tokens = max(guess, first) * unit
        rows[tokens] = measure(tokens)
        if "error" in rows[tokens] and not rows[tokens]["dies"]:
            raise NotMeasured(f"{tokens} tokens: {rows[tokens]['error']}")
    raise NotMeasured("100 lengths were not enough")


def predict_longest(rows: Mapping[int, Row]) -> int:
    """Return the tokens at which reserved memory reaches the device's, by a line; 0 if unknown."""
    fits = sorted(tokens for tokens, row in rows.items() if "error" not in row)
    if not fits:
        return 0
    row = rows[fits[-1]]
    per_token = (row["reserved_bytes"] - row["resident_bytes"]) / fits[-1]
    if per_token <= 0:
        return 0
    predicted = int((row["device_bytes"] - row["resident_bytes"]) / per_token)
    return min(predicted, 8 * fits[-1])  # not far beyond what was measured


def _text(value: Optional[float], unit: float, digits: int) -> str:
    """Return a figure, nothing if it was not measured."""
    return "" if value is None else f"{value / unit:,.{digits}f}"


def _line(way: str, tokens: int, row: Row) -> str:
    if "error" in row:
        return f"{way:10} {tokens:7} {'dies' if row['dies'] else 'fails'}: {row['error']}"
    gib = [row[name] / GIB for name in ("peak_bytes", "reserved_bytes")]
    moved = f", moved {row['moved_bytes'] / GIB:.1f}" if row.get("moved_bytes") else ""
    planning = "" if row.get("is_settled", True) else ", not settled"
    return (
        f"{way:10} {tokens:7} {row['step_ms']:10.1f} ms (n={row['num_iterations']}, first "
        f"{row['first_ms']:.0f}), {row['tokens_per_s']:.0f} tokens/s, GiB: allocated {gib[0]:.2f}, "
        f"reserved {gib[1]:.2f}{moved}{planning} [{row['wall_s']:.0f} s]"
    )


def _run(options: argparse.Namespace) -> int:
    if options.tiny:
        options.case, options.lengths, options.unit = "smoke", [32, 64], 32
        options.device_gib = 0.006
    case = find_case(options.case)
    if case.num_ranks > 1:
        raise ValueError(
            f"--case {case.name} is not supported because it needs {case.num_ranks} ranks and "
            "lengths are those of one GPU; set a case of one"
        )
    setups = [_setup(options, case, way) for way in options.ways.split(",")]
    options.output.parent.mkdir(parents=True, exist_ok=True)
    rows = read_rows(options.output) if options.output.exists() else []
    writer = RowWriter(options.output, time.strftime("%Y-%m-%dT%H:%M:%S"))
    deadline_s = time.monotonic() + options.seconds
    try:
        for setup in setups:
            WayRun(setup, options, writer, points_of(rows, setup), deadline_s).run()
    except OutOfTime:
        sys.stdout.write("time is over; the same command continues\n")
    if options.output.exists():
        sys.stdout.write(table(read_rows(options.output)))
    return 0


def _setup(options: argparse.Namespace, case: Case, way: str) -> Setup:
    if way not in WAYS:
        raise ValueError(f"--ways {way} is not one; set some of: {', '.join(WAYS)}")
    from benchmarks.run import engine_options

    def names(text: str) -> tuple[str, ...]:
        return tuple(filter(None, text.replace("+", ",").split(",")))

    return Setup(
        case=case.name,
        way=way,
        recompute=() if options.recompute_modules == "none" else names(options.recompute_modules),
        modules=names(options.modules) or case.variants[-1].modules,
        micro_batches=options.micro_batches,
        loss_tiles=options.loss_tiles,
        mlp_tiles=options.mlp_tiles,
        device_gib=options.device_gib,
        budget=options.budget_gib or "auto",
        options=engine_options(options.engine_option),
    )


def points_of(rows: Sequence[Row], setup: Setup) -> dict[int, Row]:
    """Return the rows of a way by tokens; of two of a length, the one with more iterations."""
    # As JSON has it: lists for tuples.
    identity = json.loads(json.dumps(setup.identity()))
    defaults = {name: getattr(Setup, name, None) for name in identity}
    found: dict[int, Row] = {}
    for row in rows:
        is_ours = row["kind"] == "point" and all(
            row.get(name, defaults[name]) == value for name, value in identity.items()
        )
        if is_ours and ("error" not in row or row["dies"]):
            before = found.get(row["tokens"])
            if before is None or before["is_search"] or not row["is_search"]:
                found[row["tokens"]] = row
    return found


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown table of points, and the longest of each way."""
    head = ("case", "way", "tokens", "step, ms", "tokens/s", "n", "allocated, GiB", "reserved, GiB",
            "moved, GiB")  # fmt: skip
    lines = [head, ("---",) * len(head)]
    for row in rows:
        if row["kind"] == "longest":
            text = f"longest; {row['dies_at']:,} dies"
            lines.append((row["case"], row["way"], f"{row['tokens']:,}", text, *([""] * 5)))
        elif row["kind"] == "point" and "error" in row:
            text = "dies" if row["dies"] else "fails"
            lines.append((row["case"], row["way"], f"{row['tokens']:,}", text, *([""] * 5)))
        elif row["kind"] == "point" and not row["is_search"]:
            gib = [row[name] for name in ("peak_bytes", "reserved_bytes", "moved_bytes")]
            step_ms, rate = _text(row["step_ms"], 1, 1), _text(row["tokens_per_s"], 1, 0)
            if not row.get("is_settled", True):
                step_ms += ", not settled"  # Times of plans on trial, not of the one that is kept.
            figures = (
                *(step_ms, rate),
                row["num_iterations"] or "",
                *(_text(nbytes, GIB, 1) for nbytes in gib),
            )
            lines.append((row["case"], row["way"], f"{row['tokens']:,}", *figures))
    return "".join(f"| {' | '.join(map(str, line))} |\n" for line in lines)


if __name__ == "__main__":
    sys.exit(main())
