# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The page in a real browser: no requests, no errors, and working controls.

Needs ``pip install playwright`` and a Chromium: playwright's own, or one on PATH.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from make_trace import timed
from reported_runs import Run, make_run, make_trace, with_waits

from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.report_page import page as page_module
from megatron.slipstream.report_page.groups import group_table
from megatron.slipstream.report_page.iteration import iteration_of
from megatron.slipstream.report_page.page import save_page

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

NASTY = "</script><img src=x onerror=alert(1)>"
FLAGS = ["--no-sandbox", "--disable-gpu", "--disable-background-networking"]
Opened = Any
"""A playwright page."""


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = [shutil.which(name) for name in ("chromium", "chromium-browser", "google-chrome")]
    with sync_api.sync_playwright() as playwright:
        for path in (None, *filter(None, found)):
            try:
                browser = playwright.chromium.launch(executable_path=path, args=FLAGS)
            except sync_api.Error:
                continue
            yield browser
            browser.close()
            return
        pytest.skip("needs a Chromium: playwright install chromium, or one on PATH")


@pytest.fixture
def open_page(browser: Any, tmp_path: Path) -> Iterator[Callable[..., Opened]]:
    """Opens the page of runs. At the end, there must have been no requests and no errors."""
    requests: list[str] = []
    troubles: list[str] = []
    contexts = []
    path = tmp_path / "report.html"

    def opened(*runs: Run, hash: str = "", **context: Any) -> Opened:
        plans = {run.rank.rank: run.plan for run in runs}
        save_page(path, Report([run.rank for run in runs]), plans)
        context.setdefault("viewport", {"width": 1280, "height": 900})
        contexts.append(browser.new_context(**context))
        page = contexts[-1].new_page()
        page.set_default_timeout(5000)
        page.on("request", lambda request: requests.append(request.url))
        page.on("console", lambda message: troubles.append(message.text))
        page.on("pageerror", lambda error: troubles.append(str(error)))
        page.on("dialog", lambda dialog: (troubles.append(dialog.message), dialog.dismiss()))
        page.goto(path.as_uri() + hash)
        return page

    yield opened
    for context in contexts:
        context.close()
    assert {request.partition("#")[0] for request in requests} <= {path.as_uri()}
    assert troubles == []


def slow_run(rank: int = 0) -> Run:
    """A run in which compute waits, as predicted and as measured."""
    return with_waits(make_run(timed(make_trace(), 1.0, 0.4), rank), {7: 3.0})


def texts(page: Opened, selector: str) -> list[str]:
    return page.locator(selector).all_inner_texts()


def column(page: Opened, title: str) -> list[str]:
    """The texts of the visible rows."""
    table = "section.rank:visible .sortable"
    place = texts(page, f"{table} thead th").index(title) + 1
    return texts(page, f"{table} tbody td:nth-child({place}):visible")


def views(page: Opened) -> list[tuple[float, float]]:
    """The visible part of the iteration in each chart: start and width."""
    parts = page.locator("section.rank:visible .plot").evaluate_all(
        "plots => plots.map(plot => [plot.scrollLeft, plot.clientWidth, plot.scrollWidth])"
    )
    return [(left / whole, width / whole) for left, width, whole in parts]


def near(*views: tuple[float, float]) -> list[Any]:
    """Both charts show the same part, to a pixel."""
    return [pytest.approx(view, abs=0.001) for view in views] * (2 // len(views))


def settle(page: Opened) -> None:
    """Wait until the next frame has been drawn."""
    page.evaluate("() => new Promise(done => requestAnimationFrame(() => setTimeout(done, 0)))")


def test_a_page_opens_with_nothing_from_outside_and_runs_nothing_of_a_name(
    open_page: Callable[..., Opened],
) -> None:
    run = make_run(make_trace(modules=("core_attn", NASTY)))
    rank = replace(run.rank, warnings={NASTY: 1}, settings={NASTY: NASTY})
    page = open_page(Run(rank, run.plan), replace_rank(run, 1))
    assert page.locator("img").count() == 0
    assert NASTY in page.locator(".findings").inner_text()
    assert NASTY in column(page, "Module")
    page.locator("[data-filter=module]:visible").select_option(NASTY)
    assert set(column(page, "Module")) == {NASTY}


def replace_rank(run: Run, rank: int) -> Run:
    return Run(replace(run.rank, rank=rank), run.plan)


def test_the_policy_stops_what_would_be_injected(browser: Any, tmp_path: Path) -> None:
    run = make_run()
    save_page(tmp_path / "report.html", run.report, {0: run.plan})
    page = browser.new_page()
    refused: list[str] = []
    page.on("console", lambda message: refused.append(message.text))
    page.goto((tmp_path / "report.html").as_uri())
    page.evaluate(
        """() => {
            document.body.insertAdjacentHTML('beforeend',
                '<img src="http://127.0.0.1:9/x.png" onerror="window.injected = 1">');
            const script = document.createElement('script');
            script.textContent = 'window.injected = 2';
            document.body.append(script);
        }"""
    )
    page.wait_for_timeout(200)
    assert page.evaluate("window.injected") is None
    assert len(refused) >= 2
    page.close()


@pytest.mark.parametrize("width", [600, 1280, 1920])
@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_nothing_is_wider_than_the_window(
    open_page: Callable[..., Opened], width: int, scheme: str
) -> None:
    runs = [slow_run(rank) for rank in range(3)]
    page = open_page(*runs, viewport={"width": width, "height": 900}, color_scheme=scheme)
    assert page.evaluate("document.documentElement.scrollWidth") <= width
    ground, ink = page.evaluate(
        "[getComputedStyle(document.body).backgroundColor, getComputedStyle(document.body).color]"
    )
    lightness = [sum(map(int, re.findall(r"\d+", colour))) for colour in (ground, ink)]
    assert (lightness[0] > lightness[1]) == (scheme == "light")


def test_the_script_shows_the_rows_that_the_page_has_without_it(
    open_page: Callable[..., Opened],
) -> None:
    with_script = open_page(slow_run())
    without = open_page(slow_run(), java_script_enabled=False)
    assert with_script.locator(".tools").first.is_visible()
    assert not without.locator(".tools").first.is_visible()
    rows = texts(without, ".sortable tbody tr")
    assert len(rows) == len(slow_run().plan.groups)
    assert texts(with_script, ".sortable tbody tr") == rows
    assert texts(with_script, ".sortable thead th") == texts(without, ".sortable thead th")


def test_columns_sort_both_ways_by_mouse_and_by_key_and_say_so(
    open_page: Callable[..., Opened],
) -> None:
    page = open_page(slow_run())
    table = group_table(iteration_of(slow_run().plan, slow_run().rank), slow_run().rank)
    titles = [item.title for item in table.columns]
    for title in ("Bytes", "Offload", "Reload late"):
        place = titles.index(title)
        cells = [row[place] for row in table.rows]
        numbers = [
            cell.order if cell.order is not None else float(cell.text)
            for cell in cells
            if cell.text
        ]
        shown = [cell.text for cell in cells]
        empty = shown.count("")
        for direction in ("descending", "ascending"):
            button = page.get_by_role("columnheader", name=title, exact=True).get_by_role("button")
            if direction == "ascending":
                button.focus()
                page.keyboard.press("Enter")
            else:
                button.click()
            head = page.locator(f"th[aria-sort={direction}]")
            assert head.inner_text() == title
            found = column(page, title)
            assert sorted(found) == sorted(shown)
            assert found[len(found) - empty :] == [""] * empty, "what is not known comes last"
            if title != "Bytes":
                order = [float(text) for text in found if text]
                assert order == sorted(order, reverse=direction == "descending")
            else:
                first = max(numbers) if direction == "descending" else min(numbers)
                assert found[0] == shown[numbers.index(first)]
    page.get_by_role("columnheader", name="Module").get_by_role("button").click()
    assert column(page, "Module") == sorted(column(page, "Module"))
    assert page.locator("th[aria-sort]").count() == 1


def test_groups_are_chosen_by_module_and_by_what_happens(
    open_page: Callable[..., Opened],
) -> None:
    run = slow_run()
    page = open_page(run)
    num_groups = len(run.plan.groups)
    state = page.locator("[data-filter=state]")
    for choice, expected in (
        ("moves", sum(group.moves for group in run.plan.groups)),
        ("stays", sum(not group.moves for group in run.plan.groups)),
        ("waits", sum(group_table(iteration_of(run.plan, run.rank), run.rank).waits)),
    ):
        state.select_option(choice)
        assert len(column(page, "Group")) == expected > 0
        assert page.locator(".count").inner_text() == f"{expected} of {num_groups} groups"
    state.select_option("")
    page.locator("[data-filter=module]").select_option("moe_act")
    assert set(column(page, "Module")) == {"moe_act"}


def test_a_long_table_is_shown_whole_on_demand(open_page: Callable[..., Opened]) -> None:
    run = make_run(make_trace(num_layers=25, num_micro_batches=8))
    page = open_page(run)
    groups = [str(group.key) for group in run.plan.groups]
    assert len(groups) == 400
    assert column(page, "Group") == groups[:200]
    page.get_by_role("columnheader", name="Group").get_by_role("button").click()
    page.get_by_role("columnheader", name="Group").get_by_role("button").click()
    assert column(page, "Group") == groups[::-1][:200]
    page.get_by_role("button", name="Show all").click()
    assert column(page, "Group") == groups[::-1]
    assert not page.get_by_role("button", name="Show all").is_visible()
    page.locator("[data-filter=module]").select_option("moe_act")
    assert len(column(page, "Group")) == 200


def test_both_charts_zoom_and_move_together(open_page: Callable[..., Opened]) -> None:
    page = open_page(slow_run())
    assert views(page) == [(0, 1), (0, 1)]
    page.get_by_role("button", name="Zoom in").click()
    settle(page)
    assert views(page) == near((0.25, 0.5))
    lanes = page.locator(".plot.lanes")
    lanes.focus()
    page.keyboard.press("ArrowRight")
    page.wait_for_timeout(500)
    assert views(page)[0][0] > 0.26
    assert views(page) == near(views(page)[0])
    page.keyboard.press("-")
    settle(page)
    assert views(page) == [(0, 1)] * 2
    box = lanes.bounding_box()
    x, y = box["x"] + box["width"] / 4, box["y"] + 60
    page.mouse.dblclick(x, y)
    settle(page)
    (start, width), other = views(page)
    assert (start, width) == other
    assert width == pytest.approx(1 / 3, abs=0.001)
    assert start + width / 4 == pytest.approx(0.25, abs=0.01), "what is under the pointer stays"
    page.mouse.move(x, y)
    page.mouse.down()
    page.mouse.move(x - box["width"] / 8, y, steps=4)
    page.mouse.up()
    settle(page)
    assert views(page)[0][0] == pytest.approx(start + width / 8, abs=0.01)
    page.get_by_role("button", name="All", exact=True).click()
    settle(page)
    assert views(page) == [(0, 1)] * 2


def test_the_wheel_scrolls_the_page_unless_a_key_says_zoom(
    open_page: Callable[..., Opened],
) -> None:
    page = open_page(slow_run())
    page.locator(".plot.lanes").hover()
    page.mouse.wheel(0, 100)
    page.wait_for_timeout(300)
    assert page.evaluate("scrollY") > 50
    assert views(page) == [(0, 1)] * 2
    page.locator(".plot.lanes").hover()
    page.keyboard.down("Control")
    page.mouse.wheel(0, -100)
    settle(page)
    page.keyboard.up("Control")
    assert views(page)[0][1] < 0.9


def test_what_is_under_the_pointer_stays_however_far_it_is_zoomed(
    open_page: Callable[..., Opened],
) -> None:
    page = open_page(slow_run())
    box = page.locator(".plot.lanes .area").bounding_box()
    x = round(box["x"] + 0.3 * box["width"])
    place = (x - box["x"]) / box["width"]
    page.mouse.move(x, box["y"] + 50)
    page.keyboard.down("Control")
    for _ in range(14):
        page.mouse.wheel(0, -70)
        settle(page)
    page.keyboard.up("Control")
    start, width = views(page)[0]
    assert width < 0.002
    assert (place - start) / width == pytest.approx(place, abs=0.02)


def test_another_width_of_the_window_shows_the_same(open_page: Callable[..., Opened]) -> None:
    page = open_page(slow_run())
    page.get_by_role("button", name="Zoom in").click()
    settle(page)
    settle(page)
    page.set_viewport_size({"width": 800, "height": 900})
    settle(page)
    settle(page)
    assert views(page) == near((0.25, 0.5))


def test_the_pointer_shows_the_action_and_its_figures(open_page: Callable[..., Opened]) -> None:
    run = slow_run()
    iteration = iteration_of(run.plan, run.rank)
    page = open_page(run)
    area = page.locator(".plot.lanes .area")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    tip = page.locator(".tip")
    for row, lane in enumerate(iteration.lanes):
        for bar in (*lane.bars[:3], lane.bars[-1]):
            middle = (bar.start + bar.end) / 2 / iteration.total
            page.mouse.move(box["x"] + middle * box["width"], box["y"] + 38 * row + 15)
            name, times, *rest = tip.inner_text().splitlines()
            assert name == str(bar.cause)
            assert times == f"{bar.end - bar.start:.3f} ms, from {bar.start:.3f} ms"
            assert bool(rest) == bool(bar.nbytes)
    wait = iteration.lanes[0].waits[0]
    middle = (wait.start + wait.end) / 2 / iteration.total
    page.mouse.move(box["x"] + middle * box["width"], box["y"] + 15)
    assert tip.inner_text().splitlines()[0] == f"stall at {wait.cause}"
    page.mouse.move(box["x"], box["y"] - 300)
    assert not tip.is_visible()


def test_the_pointer_shows_memory(open_page: Callable[..., Opened]) -> None:
    run = slow_run()
    iteration = iteration_of(run.plan, run.rank)
    page = open_page(run)
    area = page.locator(".plot.memory .area")
    area.scroll_into_view_if_needed()
    box = area.bounding_box()
    step = 9
    bar = iteration.compute[step]
    middle = (bar.start + bar.end) / 2 / iteration.total
    page.mouse.move(box["x"] + middle * box["width"], box["y"] + 90)
    lines = page.locator(".tip").inner_text().splitlines()
    mib = 1 << 20
    assert lines[1:4] == [
        f"without the plan: {iteration.memory.without_plan[step] / mib:.2f} MiB",
        f"with the plan: {iteration.memory.with_plan[step] / mib:.2f} MiB",
        f"measured: {iteration.peak_bytes[step] / mib:.2f} MiB",
    ]


def test_waits_are_gone_to_one_by_one(open_page: Callable[..., Opened]) -> None:
    run = slow_run()
    iteration = iteration_of(run.plan, run.rank)
    waits = sorted(wait.start for lane in iteration.lanes for wait in lane.waits)
    page = open_page(run)
    page.locator(".plot.lanes").focus()
    for place in [*waits, waits[0]]:
        page.keyboard.press("n")
        settle(page)
        start, width = views(page)[0]
        assert start * iteration.total <= place <= (start + width) * iteration.total
        assert width < 1
        assert "stalls compute for" in page.locator(".range").inner_text()
    page.keyboard.press("p")
    settle(page)
    start, width = views(page)[0]
    assert start * iteration.total <= waits[-1] <= (start + width) * iteration.total
    before = views(page)
    page.get_by_role("button", name="Next stall").click()
    page.get_by_role("button", name="Previous stall").click()
    settle(page)
    assert views(page) == before


def test_without_waits_there_are_none_to_go_to(open_page: Callable[..., Opened]) -> None:
    page = open_page(make_run(make_trace(is_timed=False)))
    assert page.get_by_role("button", name="Next stall").is_disabled()
    assert page.get_by_role("button", name="Zoom out").is_disabled()


def test_a_group_is_shown_in_the_timeline(open_page: Callable[..., Opened]) -> None:
    run = slow_run()
    iteration = iteration_of(run.plan, run.rank)
    page = open_page(run)
    page.get_by_role("link", name="Show group 1.2 in the timeline").click()
    settle(page)
    bars = [bar for lane in iteration.lanes for bar in lane.bars if str(bar.cause.key) == "1.2"]
    start, width = views(page)[0]
    assert start * iteration.total <= min(bar.start for bar in bars)
    assert (start + width) * iteration.total >= max(bar.end for bar in bars)
    assert width < 1
    assert page.locator(".labels rect").count() == len(bars)


def test_one_rank_is_shown_at_a_time_and_links_lead_to_the_others(
    open_page: Callable[..., Opened],
) -> None:
    page = open_page(*(slow_run(rank) for rank in range(3)))
    shown = page.locator("section.rank:visible")
    assert shown.get_attribute("id") == "rank-0"
    page.get_by_label("Rank to show").get_by_role("link", name="2").click()
    assert shown.get_attribute("id") == "rank-2"
    assert texts(page, "nav a[aria-current]") == ["2"]
    assert len(views(page)) == 2
    page.get_by_role("button", name="Zoom in").click()
    page.go_back()
    assert shown.get_attribute("id") == "rank-0"
    assert views(page) == [(0, 1)] * 2, "each rank has its own view"
    page.get_by_label("Rank to show").get_by_role("link", name="2").click()
    settle(page)
    assert views(page) == near((0.25, 0.5)), "and keeps it"
    page.go_back()
    page.get_by_label("Figures of all ranks").get_by_role("link", name="rank 1").click()
    sync_api.expect(page.locator("#rank-title-1")).to_be_in_viewport()
    assert shown.get_attribute("id") == "rank-1"


def test_without_the_script_all_ranks_are_shown(open_page: Callable[..., Opened]) -> None:
    page = open_page(*(slow_run(rank) for rank in range(3)), java_script_enabled=False)
    assert page.locator("section.rank:visible").count() == 3


def test_ranks_are_not_laid_out_before_one_is_chosen(
    open_page: Callable[..., Opened], monkeypatch: pytest.MonkeyPatch
) -> None:
    # With many ranks this takes seconds.
    read = page_module._file
    monkeypatch.setattr(page_module, "_file", lambda name: "" if name == "page.js" else read(name))
    page = open_page(slow_run(), slow_run(1))
    assert page.locator("section.rank").count() == 2
    assert page.locator("section.rank:visible").count() == 0


def test_a_link_can_name_a_rank(open_page: Callable[..., Opened]) -> None:
    page = open_page(*(slow_run(rank) for rank in range(3)), hash="#rank-1")
    assert page.locator("section.rank:visible").get_attribute("id") == "rank-1"
