# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Renders a run's report as a self-contained HTML file.

[Note: Nothing in the page is trusted]
Names of modules, warnings and options come from models, users and files. The template escapes all
of them (jinja2 with autoescape), data for the script is JSON with every ``<`` escaped, and the
script only writes text. In addition, the page's content security policy allows only its own style
and script, by hash: the page makes no requests, and injected code would not run.
"""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Mapping
from dataclasses import replace
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NamedTuple, Optional

from jinja2 import Environment, StrictUndefined, Template

from megatron.slipstream.fine_grained_activation_offload.report import (
    HEADS,
    ModuleCounters,
    RankReport,
    Report,
    layer_rows,
)
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.render import format_bytes, render_plan
from megatron.slipstream.plan.walk import Simulation
from megatron.slipstream.plan.whole_files import write_whole
from megatron.slipstream.report_page.findings import findings, next_step
from megatron.slipstream.report_page.groups import GroupTable, group_table
from megatron.slipstream.report_page.iteration import Iteration, figures, iteration_of
from megatron.slipstream.report_page.summary import cards, name_ranks, rank_table

MAX_SHOWN = 8
"""Number of findings shown, the rest being collapsed; of details of each."""


class _RankView(NamedTuple):
    report: RankReport
    remark: str = ""
    iteration: Optional[Iteration] = None
    groups: Optional[GroupTable] = None
    data: Optional[dict[str, Any]] = None


def render_page(
    report: Report, plans: Optional[Mapping[int, Plan]] = None, is_plan: bool = False
) -> str:
    """Render the page as HTML; a rank without a plan has no timeline, memory curve and groups.

    ``is_plan`` says that nothing has run. Raises ``ValueError`` if a plan's times are invalid.
    """
    style, script = _file("page.css"), _file("page.js")
    rank_heads, rank_rows = rank_table(report)
    return _template().render(
        style=style,
        script=script,
        # See [Note: Nothing in the page is trusted].
        policy=f"default-src 'none'; style-src {_source(style)}; script-src {_source(script)}; "
        "img-src data:; base-uri 'none'; form-action 'none'",
        title="Slipstream plan" if is_plan else "Slipstream report",
        is_plan=is_plan,
        subtitle=["one iteration, predicted"] if is_plan else _subtitle(report),
        cards=cards(report),
        findings=findings(report),
        next_step=next_step(report),
        max_shown=MAX_SHOWN,
        rank_heads=rank_heads,
        rank_rows=rank_rows,
        layer_heads=HEADS,
        ranks=[_view(rank, (plans or {}).get(rank.rank)) for rank in report.ranks],
    )


def render_plan_page(plan: Plan, simulation: Simulation) -> str:
    """Render the page of a plan, simulated: the same charts and groups, without measurements."""
    stalls = simulation.stall_ms_by_module
    modules = {name: ModuleCounters(stall_ms=ms) for name, ms in stalls.items()}
    for group in plan.groups:
        counters = modules.setdefault(group.name, ModuleCounters())
        counters.num_groups += 1
        counters.num_groups_moved += group.moves
        counters.d2h_bytes += group.moved_nbytes
    without, planned = plan.peak_bytes() or (0, 0)
    rank = RankReport(
        rank=plan.trace.pp_rank,
        modules=modules,
        plan=render_plan(plan),
        baseline_peak_bytes=without,
        planned_peak_bytes=planned,
        planned_ms=simulation.total_ms,
        host_allocated_bytes=simulation.peak_host_bytes,
        notes=list(plan.notes),
    )
    return render_page(Report([rank]), {rank.rank: plan}, is_plan=True)


def save_page(path: str | Path, report: Report, plans: Optional[Mapping[int, Plan]] = None) -> None:
    """Write :func:`render_page`'s page atomically; it may raise ``OSError``, too."""
    write_whole(path, render_page(report, plans).encode())


def _view(rank: RankReport, plan: Optional[Plan]) -> _RankView:
    if plan is None or not plan.trace.steps:
        return _RankView(rank)
    iteration = iteration_of(plan, rank)
    remark = ""
    # The rank's notes may lack those on options that the plan from times was to honor.
    if rank.plan and render_plan(replace(plan, notes=tuple(rank.notes))) != rank.plan:
        remark = (
            f"The charts of rank {rank.rank} show another plan than the one that it followed: "
            "charts and groups are of the given plan, everything else is of the run"
        )
    return _RankView(rank, remark, iteration, group_table(iteration, rank), figures(iteration))


def _subtitle(report: Report) -> list[str]:
    parts = [f"{len(report.ranks)} rank{'s' if len(report.ranks) != 1 else ''}"]
    if report.ranks:
        found = report.ranks[0].environment
        parts.append(f"{max(rank.num_iterations for rank in report.ranks)} iterations")
        for name in ("GPU", "megatron-core", "torch", "slipstream"):
            if name in found:
                parts.append(found[name] if name == "GPU" else f"{name} {found[name]}")
    return parts


def _source(text: str) -> str:
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    return f"'sha256-{digest}'"


def _file(name: str) -> str:
    return (resources.files(__package__) / name).read_text(encoding="utf-8")


@cache
def _template() -> Template:
    environment = Environment(
        autoescape=True, undefined=StrictUndefined, trim_blocks=True, lstrip_blocks=True
    )
    environment.policies["json.dumps_kwargs"] = {"separators": (",", ":"), "allow_nan": False}
    environment.filters["size"] = format_bytes
    environment.filters["ranks"] = name_ranks
    environment.filters["layer_rows"] = layer_rows
    return environment.from_string(_file("page.html"))
