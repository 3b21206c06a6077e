# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The table from rows: ``python -m benchmarks.table FILE.jsonl``. Needs no GPU."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

from benchmarks.case import FIRST, short_name
from benchmarks.cases import CASES
from benchmarks.rows import Row, read_rows

NONE = "-"
MIB = 1 << 20


class Column(NamedTuple):
    """A column of the table, left out if no row has a value."""

    title: str
    cell: Callable[[Row], Optional[str]]
    about: str = ""
    """Its meaning, beyond its title."""


def format_mib(num_bytes: float) -> str:
    """Format a number of bytes in MiB, with three significant digits below 100."""
    mib = num_bytes / MIB
    return f"{mib:.0f}" if abs(mib) >= 100 else f"{mib:.3g}"


def _mib(name: str, show: Callable[[float], str] = format_mib) -> Callable[[Row], Optional[str]]:
    return lambda row: None if row.get(name) is None else show(row[name])


def _number(name: str, digits: int = 0) -> Callable[[Row], Optional[str]]:
    return _mib(name, lambda value: f"{value:.{digits}f}")


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


def _of_others(cell: Callable[[Row], Optional[str]]) -> Callable[[Row], Optional[str]]:
    """Return the cell, but empty for the first way, the baseline of the others."""
    return lambda row: None if row["engine"] in FIRST else cell(row)


def _recomputed(row: Row) -> Optional[str]:
    # With a budget alone the engine knows what layers recompute.
    return format_mib(row["recomputed_bytes"]) if row.get("budget_bytes") else None


def _copied(row: Row) -> Optional[str]:
    # The engine's own count if there was no profiler.
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
    Column(
        "step ms",
        _with_error("step_ms", 2),
        "median and its standard error, by CUDA events on the slowest rank",
    ),
    Column(
        "time",
        _of_others(_with_error("overhead_percent", 2, "%", "+")),
        "by how much longer than the first way (`A+B`: than `A`), in pairs of neighbouring "
        "iterations, with its standard error",
    ),
    Column("host ms", _number("host_ms", 1), "until the host had launched everything"),
    Column("kernels ms", _number("kernel_ms", 1), "during which a kernel ran, by the profiler"),
    Column(
        "bound",
        _with_error("bound_overhead_percent", 2, "%", "+"),
        "what `time` must at least be for the plan's peak if copies ran at the link's full rate "
        "and nothing else were lost: none out before its group commits, none back after its use",
    ),
    Column("held MiB", _mib("held_bytes"), "device memory between steps: graphs' pools, tensors"),
    Column("pools MiB", _mib("graph_pool_bytes"), "of that, the memory pools of graphs"),
    Column("outside MiB", _mib("outside_bytes"), "device memory not from torch's allocator"),
    Column(
        "act MiB",
        _mib("act_bytes"),
        "peak of allocated device memory less what is resident between steps",
    ),
    Column(
        "saved MiB",
        _of_others(_mib("saved_bytes")),
        "by how much `act`, with `held`, is lower than that of the way that `time` compares with",
    ),
    Column(
        "budget MiB",
        lambda row: format_mib(row["budget_bytes"]) if row.get("budget_bytes") else None,
        "the budget for activations",
    ),
    Column("recomputed MiB", _recomputed, "what layers recompute within it"),
    Column("planned MiB", _mib("planned_saved_bytes"), "by how much a plan was to lower the peak"),
    Column("away MiB", _mib("planned_away_bytes"), "the most that a plan has on the host at once"),
    Column("reserved MiB", _mib("reserved_bytes"), "the most that the caching allocator held"),
    Column("D2H MiB", _copied, "what an iteration copies out in copies of 1 MiB and more"),
    Column("copied/saved", _number("copied_per_saved", 2), "of one micro-batch, for `saved`"),
    Column("GB/s", _rates, "bytes by time of those copies, out and back"),
    Column("small", _small, "the number of smaller copies, both ways"),
    Column("stall ms", _number("stall_ms", 2), "for which compute waits for copies"),
    Column("host us/group", _number("host_us_per_group", 0), "host time in the engine"),
    Column(
        "driver us/group",
        _number("driver_us_per_group", 0),
        "the part of it in the driver and the allocator, where C++ calls them",
    ),
    Column("layers us", _number("forward_us", 0), "host time of a forward pass of all layers"),
    Column("mallocs", _number("num_device_allocs"), "calls of cudaMalloc in three iterations"),
)


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command; return 0, or 2 for a user error."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.table", description=__doc__)
    parser.add_argument("rows", type=Path, metavar="FILE.jsonl", help="what benchmarks.run wrote")
    options = parser.parse_args(arguments)
    try:
        for path in write_results(options.rows):
            sys.stdout.write(f"{path}\n")
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


TITLE = "# Side by side"
"""Default title of a page; an edited title is kept."""


def write_results(path: Path) -> list[Path]:
    """Write the table next to a file of rows; return both files, the rows first.

    Raises:
        ValueError: The file has no rows of results.
    """
    rows = read_rows(path)
    if not latest_summaries(rows):
        raise ValueError(f"{path} holds no summary rows; it is not what benchmarks.run wrote")
    table = path.with_suffix(".md")
    title = table.read_text().partition("\n")[0] if table.exists() else TITLE
    table.write_text(render(rows, path.name, title))
    return [path, table]


def latest_summaries(rows: Iterable[Row]) -> list[Row]:
    """Return the last summary of each case, variant, engine and rank.

    Ordered by the suite's cases, and within a case by first appearance.
    """
    latest: dict[tuple[Any, ...], Row] = {}
    for row in rows:
        if row["kind"] == "summary":
            latest[row["case"], row["variant"], row["engine"], row["rank"]] = row
    order = {case.name: number for number, case in enumerate(CASES)}
    return sorted(latest.values(), key=lambda row: order.get(row["case"], len(order)))


def render(rows: Sequence[Row], rows_name: str, title: str = TITLE) -> str:
    """Return the table as Markdown."""
    summaries = latest_summaries(rows)
    cases = list(dict.fromkeys(row["case"] for row in summaries))
    machines = [row for row in rows if row["kind"] == "machine"]
    shown = [column for column in _shown(COLUMNS, summaries) if column.about]
    legend = ["- `all` modules: every one that the kind of model can have."]
    legend += [f"- `{column.title}`: {column.about}." for column in shown]
    parts = [title, *_machine_lines(machines), f"Raw rows: {rows_name}."]
    parts.append("\n".join(legend))
    about = {case.name: case.about for case in CASES}
    for case in cases:
        mine = [row for row in summaries if row["case"] == case]
        parts += [f"## {case}", about.get(case, "") + ".", *_case_tables(mine)]
    return "\n\n".join(part.strip() for part in parts if part) + "\n"


def _machine_lines(machines: Sequence[Row]) -> list[str]:
    """Return lines that show each different machine and command once."""
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
    # There are no times if ranks shared a GPU.
    figures = ("step_ms", "act_bytes")
    measured = [row for row in rows if any(row.get(name) is not None for name in figures)]
    parts = []
    if measured:
        several = any(row["num_ranks"] > 1 for row in measured)
        rank = [Column("rank", lambda row: str(row["rank"]))] if several else []
        parts.append(_table([*rank, *COLUMNS], measured))
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
    """Return a Markdown table whose first column names the variant on the variant's first row."""
    columns = _shown(columns, rows)
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


def _shown(columns: Sequence[Column], rows: Sequence[Row]) -> list[Column]:
    """Return the columns in which some row has a value."""
    return [column for column in columns if any(column.cell(row) for row in rows)]


def _place(rows: Sequence[Row]) -> Callable[[Mapping[str, Any]], Any]:
    """Return a sort key: variants and engines by first appearance, an engine's ranks together."""
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    engines = list(dict.fromkeys(row["engine"] for row in rows))
    return lambda row: (variants.index(row["variant"]), engines.index(row["engine"]), row["rank"])


if __name__ == "__main__":
    sys.exit(main())
