# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares budgets for activations with recomputation and offloading set by hand.

``python -m benchmarks.budgets FILE`` prints the table of rows that ``benchmarks.run`` wrote.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Optional

from benchmarks.case import Case, Variant
from benchmarks.fit_ways import FULL, recompute_options
from benchmarks.rows import Row, read_rows
from benchmarks.ways import Way

MIB = 2**20


class Comparison:
    """A model without offloading, and twins of it that share its parameters, each set differently.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        from benchmarks.engines import BaseModel

        self._base = BaseModel(case)
        self._off_bytes = 0

    def build(self, variant: Variant, label: str, options: Mapping[str, Any]) -> Way:
        """See :class:`benchmarks.ways.Comparison`."""
        from benchmarks.engines import Engine, build_twin, make_engine

        base = self._base
        if label == "off":
            return Engine(label, base, base.chunks)
        overrides = base.case.model.overrides | recompute_options(variant.recompute)
        model = replace(base.case.model, overrides=overrides)
        chunks, _ = build_twin(base, model, variant.modules if variant.moves else ())
        if not variant.moves:
            return Engine("recomputed", base, chunks)
        options = dict(options)
        if variant.recompute == FULL:
            options["offload_checkpoint_inputs"] = True
        if variant.budget_share:
            budget_bytes = variant.budget_share * self._activation_bytes()
            options["activation_memory_budget"] = budget_bytes / 2**30
        return make_engine(base, label, chunks, options)

    def _activation_bytes(self) -> int:
        """Return the memory of an iteration without offloading beyond weights and gradients."""
        from benchmarks.engines import Engine
        from benchmarks.measure import measure_memory

        if not self._off_bytes:
            off = Engine("off", self._base, self._base.chunks)
            self._off_bytes = measure_memory(off.run).act_bytes
        return self._off_bytes


def table(rows: Sequence[Row]) -> str:
    """Return the Markdown tables of each case: budgets, then settings by hand by memory."""
    summaries = [row for row in rows if row["kind"] == "summary" and row["engine"] != "off"]
    lines: list[str] = []
    for case in dict.fromkeys(row["case"] for row in summaries):
        own = [row for row in summaries if row["case"] == case]
        by_hand = [row for row in own if not row["variant"].startswith("budget=")]
        lines += [f"## {case}", "", *_budget_lines(own, by_hand), "", *_hand_lines(by_hand), ""]
    return "\n".join(lines)


def _budget_lines(own: Sequence[Row], by_hand: Sequence[Row]) -> list[str]:
    lines = [
        "| budget | MiB | predicted | measured | step against off | moved | recomputed | layers | "
        "best by hand within the budget |",
        "|" + " --- |" * 9,
    ]
    for row in own:
        share = row["variant"].partition("=")[2]
        if row["variant"].startswith("budget=") and row.get("error"):
            lines.append(f"| {share} | {row['error']} |" + " |" * 7)
        elif row["variant"].startswith("budget="):
            best = best_within(by_hand, row["budget_bytes"])
            hand = f"{_percent(best)}, {_name(best)}" if best is not None else "none"
            predicted = row["planned_peak_bytes"] - row["resident_bytes"]
            sizes = (row["budget_bytes"], predicted, row["act_bytes"])
            settings = ", ".join(f"{n} {name}" for name, n in row["settings"].items())
            lines.append(
                f"| {share} | {' | '.join(map(_mib, sizes))} | {_percent(row)} | "
                f"{_mib(row['moved_bytes'])} | {_mib(row['recomputed_bytes'])} | {settings} | "
                f"{hand} |"
            )
    return lines


def _hand_lines(by_hand: Sequence[Row]) -> list[str]:
    lines = ["| recomputed\\|moved | measured, MiB | step against off |", "| --- | --- | --- |"]
    good = [row for row in by_hand if not row.get("error")]
    for row in sorted(good, key=lambda row: row["act_bytes"]):
        lines.append(f"| {_name(row)} | {_mib(row['act_bytes'])} | {_percent(row)} |")
    refused = [row for row in by_hand if row.get("error")]
    return lines + [f"| {_name(row)} | {row['error']} | |" for row in refused]


def best_within(by_hand: Sequence[Row], budget_bytes: int) -> Optional[Row]:
    """Return the row with the shortest step among those that need no more memory; None if none."""
    fits = [row for row in by_hand if not row.get("error") and row["act_bytes"] <= budget_bytes]
    return min(fits, key=lambda row: row["overhead_percent"], default=None)


def _name(row: Row) -> str:
    return str(row["variant"]).replace("|", "\\|")


def _mib(nbytes: float) -> str:
    return f"{nbytes / MIB:,.1f}"


def _percent(row: Row) -> str:
    return f"{row['overhead_percent']:+.2f}% ± {row['overhead_percent_standard_error']:.2f}"


if __name__ == "__main__":
    for name in sys.argv[1:]:
        sys.stdout.write(table(read_rows(Path(name))))
