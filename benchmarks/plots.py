# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Plots of summary rows: overhead, and overhead against memory saved."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.case import FIRST, short_name
from benchmarks.rows import Row

MIB = 1 << 20
COLORS = {"megatron": "#9a6fb0", "slipstream": "#1b7f5c"}
TUNINGS = ("#66b391", "#0d4d38", "#a6d8c2")
"""Colors of Slipstream's tunings, in order of appearance."""
ERROR_BARS = {"ecolor": "dimgray", "elinewidth": 0.8, "capsize": 2}


def plot_overhead(rows: Sequence[Row], path: Path) -> None:
    """Plot each engine's overhead as bars, a panel per case, a group per variant; mark the bound.

    Args:
        rows: Summary rows with figures. Only rank 0 is shown: times are the slowest rank's.
        path: A PNG file.
    """
    figure, panels = _panels(rows, height=lambda mine: 1.1 + 0.2 * len(mine))
    colors = _colors(rows)
    for axes, (_, mine) in panels:
        variants = list(dict.fromkeys(row["variant"] for row in mine))
        height = 0.8 / max(1, len({row["engine"] for row in mine}))
        engines = [engine for engine in colors if any(row["engine"] == engine for row in mine)]
        for row in mine:
            place = variants.index(row["variant"]) + height * engines.index(row["engine"])
            value = row["overhead_percent"]
            error, bound = _error(row), row.get("bound_overhead_percent")
            axes.barh(
                *(place, value, height),
                color=colors[row["engine"]],
                align="edge",
                xerr=error,
                error_kw=ERROR_BARS,
            )
            axes.annotate(
                f"{value:+.1f}%",
                (max(value + error, bound or 0, 0), place + height / 2),
                xytext=(3, 0),
                textcoords="offset points",
                va="center",
                fontsize=7,
            )
            if bound is not None:
                axes.plot([bound, bound], [place, place + height], color="black", linewidth=2)
        axes.set_yticks(
            [index + 0.4 for index in range(len(variants))],
            [_wrapped(variant) for variant in variants],
            fontsize=7,
        )
        axes.invert_yaxis()
        axes.axvline(0, color="gray", linewidth=0.8)
        axes.margins(x=0.15)
        axes.set_xlabel(
            "step time over the first way, % (black: physical bound; gray: standard error)",
            fontsize=8,
        )
    _finish(figure, colors, path)


def plot_tradeoff(rows: Sequence[Row], path: Path) -> None:
    """Plot each engine's overhead against the memory saved; a line joins engines on one variant.

    Args:
        rows: Summary rows with figures, as for :func:`plot_overhead`.
        path: A PNG file.
    """
    figure, panels = _panels(rows, height=lambda mine: 3.2)
    colors = _colors(rows)
    for axes, (_, mine) in panels:
        points = [row for row in mine if row.get("saved_bytes") is not None]
        for variant in dict.fromkeys(row["variant"] for row in points):
            group = [row for row in points if row["variant"] == variant]
            saved = [row["saved_bytes"] / MIB for row in group]
            overhead = [row["overhead_percent"] for row in group]
            axes.plot(saved, overhead, color="lightgray", linewidth=0.8, zorder=1)
            for x, y, row in zip(saved, overhead, group, strict=True):
                color = colors[row["engine"]]
                axes.errorbar(x, y, _error(row), fmt="o", ms=4, color=color, elinewidth=0.8)
            top = max(range(len(group)), key=lambda index: overhead[index])
            axes.annotate(
                _wrapped(variant),
                (saved[top], overhead[top]),
                xytext=(4, 4),
                textcoords="offset points",
                fontsize=6,
                color="dimgray",
            )
        axes.axhline(0, color="gray", linewidth=0.8)
        axes.margins(0.15)
        axes.set_xlabel("peak device memory saved, MiB", fontsize=8)
        axes.set_ylabel("step time over the first way,\n% ± standard error", fontsize=8)
    _finish(figure, colors, path)


def _panels(rows: Sequence[Row], height: Any) -> tuple[Any, Any]:
    """Return a figure with a panel per case, and each panel with its case and rows."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    shown = [row for row in rows if row["rank"] == 0 and row["engine"] not in FIRST]
    cases = {case: [row for row in shown if row["case"] == case] for case in _cases(shown)}
    heights = [height(mine) for mine in cases.values()]
    figure, axes = pyplot.subplots(
        len(cases),
        figsize=(7.5, sum(heights) + 0.5),
        height_ratios=heights,
        squeeze=False,
        layout="constrained",
    )
    for panel, case in zip(axes[:, 0], cases, strict=True):
        panel.set_title(case, loc="left", fontsize=9)
        panel.tick_params(labelsize=7)
    return figure, list(zip(axes[:, 0], cases.items(), strict=True))


def _cases(rows: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(row["case"] for row in rows))


def _colors(rows: Sequence[Row]) -> dict[str, str]:
    """Return a color for each engine, megatron-core's first."""
    labels = dict.fromkeys(row["engine"] for row in rows if row["engine"] not in FIRST)
    tunings = [label for label in labels if label not in COLORS]
    colors = {label: color for label, color in COLORS.items() if label in labels}
    return colors | {label: TUNINGS[i % len(TUNINGS)] for i, label in enumerate(tunings)}


def _error(row: Row) -> float:
    """Return the standard error of the row's overhead; 0 if one iteration gives none."""
    error = row.get("overhead_percent_standard_error")
    return error if error is not None and math.isfinite(error) else 0.0


def _wrapped(variant: str) -> str:
    return textwrap.fill(short_name(variant), width=24, break_long_words=False)


def _finish(figure: Any, colors: dict[str, str], path: Path) -> None:
    from matplotlib import pyplot
    from matplotlib.patches import Patch

    handles = [Patch(color=color, label=label) for label, color in colors.items()]
    figure.legend(handles=handles, loc="outside upper right", ncols=len(handles), fontsize=8)
    figure.savefig(path, dpi=130)
    pyplot.close(figure)
