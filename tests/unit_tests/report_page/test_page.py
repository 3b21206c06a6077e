# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The page is well-formed, needs nothing from outside, and shows every name as text."""

from __future__ import annotations

import ast
import base64
import hashlib
import json
import re
from collections import Counter
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path
from typing import Optional

import pytest
from make_trace import timed
from reported_runs import make_run, make_trace, with_waits
from toy_model import SCHEDULES, make_chunks, run_schedule

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.report import (
    LayerReport,
    RankReport,
    Report,
)
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.files import load_trace, save_trace
from megatron.slipstream.plan.render import render_plan
from megatron.slipstream.plan.trace import Trace
from megatron.slipstream.plan.walk import simulate
from megatron.slipstream.report_page import page as page_module
from megatron.slipstream.report_page.findings import next_step
from megatron.slipstream.report_page.iteration import iteration_of
from megatron.slipstream.report_page.page import render_page, render_plan_page, save_page

FOLDER = Path(page_module.__file__).parent
NASTY = (
    "</script><img src=x onerror=alert(1)>",
    "<!--<script>",
    "\" onmouseover='alert(1)' x=\"",
    "a\u2028b&lt;{{ 7 * 7 }}{% raw %}",
)
VOID = frozenset("meta link path rect line circle br input".split())
# As in XML, SVG elements without content are self-closing.


class Page(HTMLParser):
    """A page as a browser reads it, as far as these tests need."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.tags: Counter[str] = Counter()
        self.attributes: list[tuple[str, str, Optional[str]]] = []
        self.texts: list[str] = []
        self.ids: list[str] = []
        self.scripts: list[tuple[dict[str, Optional[str]], str]] = []
        self.styles: list[str] = []
        self._open: list[str] = []
        self.feed(text)
        self.close()
        assert self._open == [], "every element is closed"

    def handle_starttag(self, tag: str, attrs: list[tuple[str, Optional[str]]]) -> None:
        self._note(tag, attrs)
        if tag not in VOID:
            self._open.append(tag)
            if tag == "script":
                self.scripts.append((dict(attrs), ""))
            elif tag == "style":
                self.styles.append("")

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, Optional[str]]]) -> None:
        self._note(tag, attrs)

    def _note(self, tag: str, attrs: list[tuple[str, Optional[str]]]) -> None:
        self.tags[tag] += 1
        self.attributes += [(tag, name, value) for name, value in attrs]
        self.ids += [value for name, value in attrs if name == "id" and value is not None]

    def handle_endtag(self, tag: str) -> None:
        assert self._open.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        if self._open[-1:] == ["script"]:
            attributes, text = self.scripts[-1]
            self.scripts[-1] = attributes, text + data
        elif self._open[-1:] == ["style"]:
            self.styles[-1] += data
        else:
            self.texts.append(data)

    @property
    def text(self) -> str:
        """The text of the page."""
        return " ".join(" ".join(self.texts).split())

    @property
    def data(self) -> list[dict[str, object]]:
        """The data that the script reads, by rank."""
        kind = "application/json"
        return [json.loads(text) for attrs, text in self.scripts if attrs.get("type") == kind]


@pytest.fixture(scope="module")
def two_ranks() -> str:
    runs = [make_run(rank=0), with_waits(make_run(rank=3, slowness=1.5), {4: 2.0})]
    return render_page(
        Report([run.rank for run in runs]), {run.rank.rank: run.plan for run in runs}
    )


def test_the_page_is_well_formed_and_its_ids_are_unique(two_ranks: str) -> None:
    page = Page(two_ranks)
    assert two_ranks.startswith("<!doctype html>")
    assert len(page.ids) == len(set(page.ids)) > 4
    links = [value for tag, name, value in page.attributes if (tag, name) == ("a", "href")]
    labels = [
        value
        for _, name, value in page.attributes
        if name in ("aria-labelledby", "aria-describedby")
    ]
    assert links
    assert {link.removeprefix("#") for link in links if link} <= set(page.ids)
    assert set(labels) <= set(page.ids)


def test_the_figures_for_the_script_are_those_of_the_runs(two_ranks: str) -> None:
    first, second = Page(two_ranks).data
    run = make_run(rank=0)
    iteration = iteration_of(run.plan, run.rank)
    assert first["total"] == pytest.approx(iteration.total)
    groups = [f"{group.key}.{group.name}" for group in run.plan.groups]
    of_no_group = [f"{p}.{name}" for name in ("output_layer", "backward") for p in (0, 1)]
    assert first["owners"] == [*groups, *of_no_group]
    assert [lane["name"] for lane in first["lanes"]] == [  # type: ignore[attr-defined]
        lane.name for lane in iteration.lanes
    ]
    assert second["total"] > first["total"]  # type: ignore[operator]


def test_what_a_user_wants_to_see_at_once_is_on_top(two_ranks: str) -> None:
    text = Page(two_ranks).text
    order = ["Device memory saved", "Step time", "problem", "Ranks", "Timeline", "Memory", "Groups"]
    places = [text.index(word) for word in order]
    assert places == sorted(places)
    assert "The iteration takes longer than planned" in text


def test_layers_are_shown_by_kind_and_setting() -> None:
    layers = [LayerReport("mlp", "dense", 4 << 20, 1 << 20, 2 << 20, 0.5, "it is full")] * 3
    rank = replace(make_run().rank, layers=layers, tiles={"mlp": 4}, budget_bytes=9 << 20)
    text = Page(render_page(Report([rank]))).text
    assert "Budget for activations: 9.0 MiB. mlp runs in 4 pieces of the sequence." in text
    assert "Recomputes Kept Moved Recomputed Backward longer by Why 0 to 2 dense mlp" in text
    assert "0 to 2 dense mlp 3.0 MiB 3.0 MiB 6.0 MiB 1.5 ms it is full" in text
    assert "Budget" not in Page(render_page(make_run().report)).text


def test_a_run_without_problems_has_a_next_step() -> None:
    report = make_run().report
    assert f"Next step: {next_step(report)}" in " ".join(Page(render_page(report)).text.split())


def test_ranks_are_shown_by_pipeline_stage() -> None:
    ranks = [replace(make_run(rank=number).rank, pp_rank=number % 2) for number in range(4)]
    text = Page(render_page(Report(ranks))).text
    assert re.search("Rank Stage .* rank 0 0 .* rank 2 0 .* rank 1 1 .* rank 3 1 ", text)
    assert "Rank 0 2 1 3 Rank 0" in text, "links to each, before the first"
    ranks = [replace(rank, pp_rank=0) for rank in ranks]
    assert "Stage" not in Page(render_page(Report(ranks))).text


def test_nothing_is_fetched_from_anywhere(two_ranks: str) -> None:
    page = Page(two_ranks)
    fetching = {"src", "href", "srcset", "action", "data", "poster", "background", "xlink:href"}
    for tag, name, value in page.attributes:
        if name in fetching:
            assert value is not None
            assert value.startswith("#") or (tag, value) == ("link", "data:,"), (tag, name, value)
        assert not name.startswith("on"), f"{name} of {tag} would need an inline handler"
        assert name != "style", "the policy refuses style attributes"
    (style,) = page.styles
    assert not re.search(r"url\(|@import|@font-face", style)
    script = page.scripts[-1][1]
    namespaces = {"http://www.w3.org/2000/svg"}
    assert set(re.findall(r"https?://[^\"'\s)]+", two_ranks)) <= namespaces
    ways = r"\b(fetch|XMLHttpRequest|WebSocket|EventSource|import|Function)\s*\(|sendBeacon|\.src\b"
    ways += r"|localStorage|cookie|innerHTML|outerHTML|insertAdjacent|document\.write|\beval\b"
    assert not re.search(ways, script)


def test_the_policy_allows_this_style_and_this_script_alone(two_ranks: str) -> None:
    page = Page(two_ranks)
    policy = next(v for _, name, v in page.attributes if name == "content" and v and "src" in v)
    rules = dict(rule.strip().split(" ", 1) for rule in policy.split(";"))
    assert rules.keys() == {
        *("default-src", "style-src", "script-src", "img-src", "base-uri", "form-action"),
    }
    assert rules["default-src"] == rules["base-uri"] == rules["form-action"] == "'none'"
    run = [text for attributes, text in page.scripts if "type" not in attributes]
    for directive, texts in (("style-src", page.styles), ("script-src", run)):
        (text,) = texts
        digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
        assert rules[directive] == f"'sha256-{digest}'"


@pytest.mark.parametrize("name", NASTY)
def test_a_name_is_text_wherever_it_comes_from(name: str) -> None:
    run = make_run(make_trace(modules=("core_attn", name)))
    rank = replace(
        run.rank,
        warnings={name: 2},
        notes=[name + "!"],
        late_groups={name: 1},
        settings={name: [name], "plain": name},
        environment={name: name, "GPU": name, "torch": name},
        graphs={name: run.rank.modules[name]},
        plan=run.rank.plan + name,
        layers=[LayerReport(kind=name, setting=name, reason=name)],
        tiles={name: 2},
        budget_bytes=1,
        budget_reason=name,
    )
    other = replace(rank, rank=1, settings={name: "other"}, environment={})
    modules = {name: replace(run.rank.modules[name], num_late=1, stall_ms=9.0)}
    other.modules = modules
    plain = make_run(make_trace(modules=("core_attn", "plain")))
    reports = {
        name: Report([rank, other]),
        "plain": Report([plain.rank, replace(plain.rank, rank=1)]),
    }
    page = Page(render_page(reports[name], {0: run.plan}))
    harmless = Page(render_page(reports["plain"], {0: plain.plan}))
    assert not page.tags["img"]
    assert page.tags["script"] == harmless.tags["script"] == 2
    assert {n for _, n, _ in page.attributes if n.startswith("on")} == set()
    shown = " ".join(name.split())
    assert page.text.count(shown) > 10
    (data,) = page.data
    assert any(name in str(owner) for owner in data["owners"])  # type: ignore[attr-defined]


def test_all_groups_are_in_the_page_and_numbers_have_what_they_are_sorted_by() -> None:
    run = make_run(make_trace(num_layers=16, num_micro_batches=4))
    text = render_page(run.report, {0: run.plan})
    page = Page(text)
    (body,) = re.findall(r'class="sortable.*?<tbody>\s*<tr>(.*?)</tbody>', text, re.DOTALL)
    rows = [re.findall(r"<td([^>]*)>(.*?)</td>", row, re.DOTALL) for row in body.split("<tr>")]
    groups = [str(group.key) for group in run.plan.groups]
    assert len(groups) == 128
    assert [re.sub(r"<[^>]*>", "", row[0][1]) for row in rows] == groups
    assert {f"Show group {key} in the timeline" for key in groups} <= {
        value for _, name, value in page.attributes if name == "aria-label"
    }
    orders = [float(row[0][0].split('"')[1]) for row in rows]
    assert orders == sorted(orders)
    assert len(set(orders)) == len(groups)


def test_a_rank_without_a_plan_says_how_to_get_its_timeline() -> None:
    run = make_run()
    page = Page(render_page(Report([run.rank, RankReport(1)]), {0: run.plan}))
    assert len(page.data) == 1
    assert page.text.count("--offload-trace-path trace.json") == 1


def test_a_plan_without_the_notes_of_its_first_iteration_is_no_other() -> None:
    run = make_run()
    trace, options = replace(run.plan.trace, step_ms=()), PolicyOptions(max_overhead_percent=1)
    plan = build_plan(trace, options)
    assert plan.notes
    report = replace(run.rank, plan=render_plan(replace(plan, notes=())), notes=[])
    assert "another plan" not in Page(render_page(Report([report]), {0: plan})).text


def test_a_plan_that_the_rank_did_not_follow_is_said_to_be_another() -> None:
    run = make_run()
    assert "another plan" not in Page(render_page(run.report, {0: run.plan})).text
    other = build_plan(run.plan.trace, PolicyOptions(activation_offload_fraction=0.5))
    assert (
        "The charts of rank 0 show another plan" in Page(render_page(run.report, {0: other})).text
    )


def test_memory_that_came_later_is_explained() -> None:
    run = make_run()
    assert "The measured curve includes" not in Page(render_page(run.report, {0: run.plan})).text
    rank = replace(run.rank, later_bytes=3 << 20)
    assert (
        "The measured curve includes 3.0 MiB that"
        in Page(render_page(Report([rank]), {0: run.plan})).text
    )


@pytest.mark.parametrize(
    "report", [Report([]), Report([RankReport()])], ids=["no ranks", "nothing done"]
)
def test_a_report_of_nothing_is_a_page_too(report: Report) -> None:
    assert "No problem found" in Page(render_page(report)).text


def test_many_findings_and_ranks_are_folded() -> None:
    ranks = [
        RankReport(number, warnings={f"warning {place}": number + 1 for place in range(20)})
        for number in range(20)
    ]
    page = Page(render_page(Report(ranks)))
    assert "20 problems" in page.text
    assert page.tags["details"] == 1
    assert "12 more" in page.text
    assert "and 12 more ranks" in page.text


def test_a_page_is_written_whole_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "new" / "report.html"
    run = make_run()
    save_page(path, run.report, {0: run.plan})
    assert path.read_text() == render_page(run.report, {0: run.plan})
    assert [item.name for item in path.parent.iterdir()] == ["report.html"]


def test_a_long_iteration_makes_a_page_of_a_few_megabytes() -> None:
    # An eighth of 100 layers in 16 micro-batches.
    run = make_run(make_trace(num_layers=25, num_micro_batches=8))
    num_groups = len(run.plan.groups)
    assert num_groups == 400
    assert len(render_page(run.report, {0: run.plan})) < 600 * num_groups + 100_000


def test_the_page_of_a_real_run_is_of_the_plan_that_it_followed(tmp_path: Path) -> None:
    manager = PipelineOffloadManager(OffloadEngine(CpuBackend()))
    chunks = make_chunks(1)
    for _ in range(4):
        run_schedule(chunks, SCHEDULES["accumulation"], manager)
    manager.finish_report()
    assert manager.plan is not None
    save_trace(manager.plan.trace, tmp_path / "trace.json")
    report = Report.from_json(Report([manager.report]).to_json())
    (rank,) = report.ranks
    assert rank.options is not None
    plan = build_plan(load_trace(tmp_path / "trace.json"), rank.options)
    page = Page(render_page(report, {0: plan}))
    assert "another plan" not in page.text
    assert "Nothing was timed" in page.text
    (data,) = page.data
    assert data["unit"] == "marks"
    assert len(data["lanes"][0]["bars"]["start"]) == len(plan.trace.steps)  # type: ignore[index]
    assert rank.iteration_ms
    assert len(rank.iteration_ms) == 3


def test_the_page_needs_the_plans_and_the_report_and_nothing_else_of_the_engine() -> None:
    allowed = re.compile(
        r"megatron\.slipstream\.(plan|estimate|report_page|options\.rules|"
        r"fine_grained_activation_offload\.report)\b"
    )
    for path in FOLDER.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and (node.module or "").startswith("megatron"):
                assert allowed.match(node.module or ""), f"{path.name} imports {node.module}"


# A plan.

LATE = timed(make_trace(), 1.0, 0.4)
TRACES = {
    "stalls": LATE,
    "no readings": replace(LATE, memory=()),
    "no compute": timed(make_trace(), 0.0, 1.0),
    "hundreds": timed(make_trace(num_layers=24, num_micro_batches=8), 1.0, 0.4),
    "empty": replace(LATE, steps=(), groups=(), storages=(), step_ms=(), memory=()),
}


@pytest.mark.parametrize("trace", TRACES.values(), ids=TRACES)
def test_any_plan_has_a_page_of_what_is_predicted(trace: Trace) -> None:
    plan = build_plan(trace, PolicyOptions())
    simulation = simulate(plan)
    text = render_plan_page(plan, simulation)
    assert text == render_plan_page(plan, simulation)
    page = Page(text)
    assert page.text.startswith("Slipstream plan Slipstream plan one iteration, predicted")
    assert ("planned, not measured" in page.text) == (simulation.total_ms > 0)
    assert f"{sum(group.moves for group in plan.groups)} of {len(plan.groups)} groups" in page.text
    assert (f"{simulation.stall_ms:.1f} ms of stalls" in page.text) == (simulation.stall_ms > 0)
    assert len(page.data) == bool(trace.steps)
    for words in ("No problem", "Next step", "Configuration", "last iteration", "to train"):
        assert words not in page.text, "nothing has run"


def test_a_plan_that_cannot_follow_its_options_says_so_on_its_page() -> None:
    plan = build_plan(LATE, PolicyOptions(target_memory_bytes=1))
    assert plan.notes
    page = Page(render_plan_page(plan, simulate(plan)))
    assert "1 problem" in page.text
    assert plan.notes[0] in page.text
