# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The table and the plots from rows: ``python -m benchmarks.table FILE.jsonl``. Needs no GPU."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from benchmarks.cases import CASES, short_name
from benchmarks.rank_memory import drop_rows
from benchmarks.rows import Row, read_rows, with_newer

NONE = "-"
MIB = 1 << 20

LEGEND = """\
- `all` modules: every one that the kind of model can have.
- `step ms`: median and its standard error, by CUDA events on the slowest rank; `time`: by how much
  longer than with the engine off, in pairs of neighbouring iterations, with its standard error.
- `bound`: what `time` must at least be for the plan's peak if copies ran at the link's full rate
  and nothing else were lost: none out before its group has committed, none back after its use.
- `act`: peak of allocated device memory less what is resident between steps; `saved`: by how much
  that is lower than with the engine off; `reserved`: the most the caching allocator held.
- `D2H`: bytes an iteration copies out in copies of 1 MiB and more; `copied/saved`: those of one
  micro-batch for each byte of `saved`; `GB/s`: bytes by time of those copies, out and back;
  `small`: the number of smaller copies, both ways.
- `stall`: what the compute stream waits for copies in an iteration; `host`: host time in the engine
  for each group; `mallocs`: calls of cudaMalloc in three iterations of the steady state.
"""


class Column(NamedTuple):
    """A column of the table."""

    title: str
    cell: Callable[[Row], Optional[str]]


def _number(name: str, digits: int = 0) -> Callable[[Row], Optional[str]]:
    def cell(row: Row) -> Optional[str]:
        value = row.get(name)
        return None if value is None else f"{value:.{digits}f}"

    return cell


def _percent(name: str) -> Callable[[Row], Optional[str]]:
    def cell(row: Row) -> Optional[str]:
        value = row.get(name)
        return None if value is None else f"{value:.2f}%"

    return cell


def _mib(name: str) -> Callable[[Row], Optional[str]]:
    def cell(row: Row) -> Optional[str]:
        value = row.get(name)
        return None if value is None else format_mib(value)

    return cell


def format_mib(num_bytes: float) -> str:
    """In MiB, with decimals only where they would be the first digits."""
    mib = num_bytes / MIB
    return f"{mib:.0f}" if abs(mib) >= 100 else f"{mib:.3g}"


def _with_error(
    name: str, digits: int, unit: str = "", sign: str = ""
) -> Callable[[Row], Optional[str]]:
    def cell(row: Row) -> Optional[str]:
        value, error = row.get(name), row.get(f"{name}_standard_error")
        if value is None:
            return None
        text = f"{value:{sign}.{digits}f}{unit}"
        return text if error is None else f"{text} ± {error:.{digits}f}"

    return cell


def _of_offloading(cell: Callable[[Row], Optional[str]]) -> Callable[[Row], Optional[str]]:
    """Says nothing of the engine off, which everything is compared to."""
    return lambda row: None if row["engine"] == "off" else cell(row)


def _copied(row: Row) -> Optional[str]:
    # The engine's own count where there was no profiler to ask.
    nbytes = row.get("d2h_bulk_bytes", row.get("moved_bytes"))
    return None if nbytes is None else format_mib(nbytes)


def _rates(row: Row) -> Optional[str]:
    rates = [row.get("d2h_gb_per_s"), row.get("h2d_gb_per_s")]
    if rates == [None, None]:
        return None
    return " / ".join(NONE if rate is None else f"{rate:.1f}" for rate in rates)


def _small(row: Row) -> Optional[str]:
    if "d2h_num_small" not in row:
        return None
    return f"{row['d2h_num_small'] + row['h2d_num_small']}"


COLUMNS = (
    Column("engine", lambda row: row["engine"]),
    Column("step ms", _with_error("step_ms", 2)),
    Column("time", _of_offloading(_with_error("overhead_percent", 2, "%", "+"))),
    Column("bound", _with_error("bound_overhead_percent", 2, "%", "+")),
    Column("act MiB", _mib("act_bytes")),
    Column("saved MiB", _of_offloading(_mib("saved_bytes"))),
    Column("reserved MiB", _mib("reserved_bytes")),
    Column("D2H MiB", _copied),
    Column("copied/saved", _number("copied_per_saved", 2)),
    Column("GB/s", _rates),
    Column("small", _small),
    Column("stall ms", _number("stall_ms", 2)),
    Column("host us/group", _number("host_us_per_group", 0)),
    Column("mallocs", _number("num_device_allocs")),
)

RANK_COLUMNS = (
    Column("engine", lambda row: row["engine"]),
    Column("rank", lambda row: str(row["rank"])),
    Column("peak MiB off", _mib("off_peak_bytes")),
    Column("ours", _mib("peak_bytes")),
    Column("built-in", _mib("builtin_peak_bytes")),
    Column("drop MiB ours", _mib("drop_bytes")),
    Column("theoretical", _mib("theoretical_drop_bytes")),
    Column("reached", _percent("drop_percent")),
    Column("drop MiB built-in", _mib("builtin_drop_bytes")),
    Column("all marked", _mib("movable_drop_bytes")),
    Column("reached", _percent("builtin_drop_percent")),
)
RANK_LEGEND = """\
Peak device memory of each rank, everything counted. `theoretical`: of what our plan moves, the most
bytes that are saved at once beside the group in use, each storage once; `all marked`: the same if
all moved that is marked and can, which the built-in engine is held against."""


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns 0, or 2 for an error of the user's."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("rows", type=Path, metavar="FILE.jsonl", help="what benchmarks.run wrote")
    parser.add_argument(
        "--take",
        type=Path,
        nargs="+",
        default=[],
        metavar="FILE.jsonl",
        help="bring what these files have measured into the first, in place of what it has of the "
        "same cases and sets of modules",
    )
    options = parser.parse_args(arguments)
    try:
        if options.take:
            _take(options.rows, options.take)
        for path in write_results(options.rows):
            sys.stdout.write(f"{path}\n")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _take(path: Path, newer: Sequence[Path]) -> None:
    rows = read_rows(path) if path.exists() else []
    for other in newer:
        rows = with_newer(rows, read_rows(other))
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_results(path: Path) -> list[Path]:
    """Write table and plots beside a file of rows. Returns all files, the rows first.

    Raises:
        ValueError: The file has no rows of results.
    """
    from benchmarks.plots import plot_overhead, plot_tradeoff

    rows = read_rows(path)
    summaries = latest_summaries(rows)
    if not summaries:
        raise ValueError(f"{path} holds no summary rows; it is not what benchmarks.run wrote")
    table = path.with_suffix(".md")
    table.write_text(render(rows, path.name))
    written = [path, table]
    measured = [row for row in summaries if row.get("step_ms") is not None]
    if any(row["engine"] != "off" for row in measured):
        written.append(path.with_name(path.stem + "_overhead.png"))
        plot_overhead(measured, written[-1])
        written.append(path.with_name(path.stem + "_tradeoff.png"))
        plot_tradeoff(measured, written[-1])
    return written


def latest_summaries(rows: Iterable[Row]) -> list[Row]:
    """The last summary of each case, variant, engine and rank.

    In the order of the suite's cases, and within a case of first appearance.
    """
    latest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["kind"] == "summary":
            latest[row["case"], row["variant"], row["engine"], row["rank"]] = row
    order = {case.name: number for number, case in enumerate(CASES)}
    return sorted(latest.values(), key=lambda row: order.get(row["case"], len(order)))


def render(rows: Sequence[Row], rows_name: str) -> str:
    """The table as Markdown."""
    summaries = latest_summaries(rows)
    cases = list(dict.fromkeys(row["case"] for row in summaries))
    machines = [row for row in rows if row["kind"] == "machine"]
    parts = ["# Engines side by side", *_machine_lines(machines), f"Raw rows: {rows_name}.", LEGEND]
    about = {case.name: case.about for case in CASES}
    for case in cases:
        mine = [row for row in summaries if row["case"] == case]
        parts += [f"## {case}", about.get(case, "") + ".", *_case_tables(mine)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _machine_lines(machines: Sequence[Row]) -> list[str]:
    """Each different machine and command once."""
    seen: dict[str, None] = {}
    for row in machines:
        versions = ", ".join(f"{name} {value}" for name, value in row["versions"].items())
        driver = f", driver {row['driver']}" if row.get("driver") else ""
        settings = ", ".join(f"`{name}={value}`" for name, value in row["environment"].items())
        text = f"{row['device']} ({row['num_devices']} seen){driver}; {versions}; {settings}."
        seen[text] = None
        if row.get("bandwidth"):
            rates = row["bandwidth"]
            seen.setdefault(
                f"Pinned copies reach {rates['d2h_gb_per_s']:.1f} GB/s to the host and "
                f"{rates['h2d_gb_per_s']:.1f} GB/s to the device, {rates['d2h_both_gb_per_s']:.1f} "
                f"and {rates['h2d_both_gb_per_s']:.1f} GB/s both at once (case {row['case']})."
            )
        seen[f"`{row['command']}`"] = None
    return list(seen)


def _case_tables(rows: Sequence[Row]) -> list[str]:
    # Without times where ranks shared a GPU.
    figures = ("step_ms", "act_bytes")
    measured = [row for row in rows if any(row.get(name) is not None for name in figures)]
    parts = []
    if measured:
        several = any(row["num_ranks"] > 1 for row in measured)
        rank = [Column("rank", lambda row: str(row["rank"]))] if several else []
        parts.append(_table([*rank, *COLUMNS], measured))
        drops = drop_rows(measured) if several else []
        if drops:
            parts += [RANK_LEGEND, _table(RANK_COLUMNS, drops)]
        offloading = [row for row in measured if row.get("host_us_per_call")]
        if offloading:
            parts.append("Host time of one call, in microseconds:")
            calls = dict.fromkeys(call for row in offloading for call in row["host_us_per_call"])
            timed = [Column(f"`{call}`", _call(call)) for call in calls]
            parts.append(_table([*rank, COLUMNS[0], *timed], offloading))
    if not measured:
        parts.append("Nothing was measured.")
    remarks = [(row, row["error"]) for row in rows if row.get("error")]
    remarks += [(row, note) for row in rows for note in row.get("notes") or ()]
    if remarks:
        lines = [f"- {_where(row)}: {text}" for row, text in remarks]
        parts.append("\n".join(lines))
    return parts


def _where(row: Row) -> str:
    return f"{short_name(row['variant'])}, {row['engine']}, rank {row['rank']}"


def _call(name: str) -> Callable[[Row], Optional[str]]:
    def cell(row: Row) -> Optional[str]:
        value = row["host_us_per_call"].get(name)
        return None if value is None else f"{value:.1f}"

    return cell


def _table(columns: Sequence[Column], rows: Sequence[Row]) -> str:
    """A Markdown table with a first column for the variant, which is named on its first row."""
    lines = [
        "| modules | " + " | ".join(column.title for column in columns) + " |",
        "|" + "---|" * (len(columns) + 1),
    ]
    previous = None
    for row in sorted(rows, key=_place(rows)):
        variant = row["variant"]
        cells = [column.cell(row) or NONE for column in columns]
        shown = short_name(variant) if variant != previous else ""
        lines.append(f"| {shown} | " + " | ".join(cells) + " |")
        previous = variant
    return "\n".join(lines)


def _place(rows: Sequence[Row]) -> Callable[[Mapping[str, Any]], Any]:
    """Variants and engines in order of appearance, ranks of one engine together."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    return lambda row: (variants.index(row["variant"]), engines.index(row["engine"]), row["rank"])


if __name__ == "__main__":
    sys.exit(main())
