# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The page's script: tables, charts that zoom together, what the pointer shows, and ranks."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
from make_trace import timed
from reported_runs import Run, make_run, make_trace, with_waits

from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.report_page import page as page_module
from megatron.slipstream.report_page.groups import group_table
from megatron.slipstream.report_page.iteration import Iteration, iteration_of
from megatron.slipstream.report_page.page import render_page

pytest.importorskip("py_mini_racer")

from script_pages import ScriptPage

FOLDER = Path(page_module.__file__).parent
WIDTH, LEFT = 1000, 100
"""Pixels: width and left edge of a plot."""
LANES, MEMORY = "inRank('.plot')[0]", "inRank('.plot')[1]"
WHOLE = [[0, 1], [0, 1]]


def slow_run(rank: int = 0) -> Run:
    """A run in which compute waits, as predicted and as measured."""
    return with_waits(make_run(timed(make_trace(), 1.0, 0.4), rank), {7: 3.0})


def opened(*runs: Run, **options: Any) -> ScriptPage:
    plans = {run.rank.rank: run.plan for run in runs}
    return ScriptPage(render_page(Report([run.rank for run in runs]), plans), **options)


def iteration(run: Run) -> Iteration:
    return iteration_of(run.plan, run.rank)


def click(page: ScriptPage, name: str) -> None:
    named = f"(b) => (b.getAttribute('aria-label') ?? b.textContent) === '{name}'"
    page.fire(f"inRank('button').find({named})", "click")


def choose(page: ScriptPage, name: str, value: str) -> None:
    page.run(f"inRank('[data-filter={name}]')[0].value = '{value}'")
    page.fire(f"inRank('[data-filter={name}]')[0]", "change")


def column(page: ScriptPage, title: str) -> list[str]:
    """The texts of the rows that are not hidden."""
    place = page.texts(".sortable th").index(title)
    rows = "inRank('.sortable tbody tr').filter((row) => !row.hidden)"
    return page.get(f"{rows}.map((row) => row.cells[{place}].textContent)")


def views(page: ScriptPage) -> list[list[float]]:
    """The visible part of the iteration in each chart: start and width."""
    return page.get("views()")


def near(*view: float) -> list[Any]:
    """Both charts show this part, to a pixel."""
    return [pytest.approx(view, abs=0.001)] * 2


def move(page: ScriptPage, plot: str, share: float, row: int | None = None, **facts: Any) -> None:
    """Move the pointer to a share of the visible part, over a lane if ``row`` is given."""
    target = plot if row is None else f"inRank('.lane')[{row}]"
    page.fire(target, "pointermove", clientX=LEFT + share * WIDTH, clientY=60, **facts)


def tip(page: ScriptPage) -> list[str] | None:
    element = "document.querySelector('.tip')"
    return page.get(f"{element}.hidden ? null : {element}.children.map((e) => e.textContent)")


def test_the_script_inserts_text_only_and_asks_for_nothing() -> None:
    script = (FOLDER / "page.js").read_text()
    ways = r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(|fetch\(|XMLHttp"
    ways += r"|import\(|WebSocket|EventSource|sendBeacon|\.src\b|localStorage|cookie"
    assert re.findall(ways, script) == []


def test_the_script_shows_the_rows_that_the_page_has_without_it() -> None:
    run = slow_run()
    with_script, without = opened(run), opened(run, runs_script=False)
    for page, is_hidden in ((with_script, False), (without, True)):
        assert page.get("inRank('.tools').map((e) => e.hidden)") == [is_hidden] * 2
    rows = without.texts(".sortable tbody tr")
    assert len(rows) == len(run.plan.groups)
    assert with_script.texts(".sortable tbody tr") == rows
    assert with_script.texts(".sortable th") == without.texts(".sortable th")


@pytest.mark.parametrize("title", ["Bytes", "Offload", "Reload late"])
def test_columns_of_numbers_sort_both_ways_and_say_so(title: str) -> None:
    run = slow_run()
    page = opened(run)
    table = group_table(iteration(run), run.rank)
    place = [item.title for item in table.columns].index(title)
    cells = [row[place] for row in table.rows]
    order = {
        cell.text: float(cell.text) if cell.order is None else cell.order
        for cell in cells
        if cell.text
    }
    shown = [cell.text for cell in cells]
    num_empty = shown.count("")
    directions = []
    for _ in range(2):
        click(page, title)
        ((head, direction),) = page.get(
            "inRank('th[aria-sort]').map((e) => [e.textContent, e.ariaSort])"
        )
        directions.append(direction)
        assert head == title
        found = column(page, title)
        assert sorted(found) == sorted(shown)
        assert found[len(found) - num_empty :] == [""] * num_empty, "what is not known comes last"
        numbers = [order[text] for text in found if text]
        assert numbers == sorted(numbers, reverse=direction == "descending")
    assert sorted(directions) == ["ascending", "descending"]


def test_columns_of_text_sort_and_one_column_is_sorted_at_a_time() -> None:
    page = opened(slow_run())
    for title in ("Bytes", "Module"):
        click(page, title)
    assert column(page, "Module") == sorted(column(page, "Module"))
    assert page.texts("th[aria-sort]") == ["Module"]


def test_groups_are_chosen_by_module_and_by_what_happens() -> None:
    run = slow_run()
    page, num_groups = opened(run), len(run.plan.groups)
    for choice, expected in (
        ("moves", sum(group.moves for group in run.plan.groups)),
        ("stays", sum(not group.moves for group in run.plan.groups)),
        ("waits", sum(group_table(iteration(run), run.rank).waits)),
    ):
        choose(page, "state", choice)
        assert len(column(page, "Group")) == expected > 0
        assert page.texts(".count") == [f"{expected} of {num_groups} groups"]
    choose(page, "state", "")
    choose(page, "module", "moe_act")
    assert set(column(page, "Module")) == {"moe_act"}


def test_a_long_table_is_shown_whole_on_demand() -> None:
    run = make_run(make_trace(num_layers=25, num_micro_batches=8))
    page = opened(run)
    is_short = "inRank('.short').length === 1 && !inRank('.more')[0].hidden"
    assert len(column(page, "Group")) == len(run.plan.groups) == 400
    assert page.get(is_short)
    (rows,) = re.findall(r"const SHORT_ROWS = (\d+)", (FOLDER / "page.js").read_text())
    hidden = f".short tr:nth-child(n + {int(rows) + 1} of :not([hidden])) {{ display: none; }}"
    assert hidden in (FOLDER / "page.css").read_text()
    click(page, "Show all")
    assert page.get("inRank('.short').length === 0 && inRank('.more')[0].hidden")
    choose(page, "module", "moe_act")
    assert page.get("inRank('.more')[0].hidden"), "200 rows are not long"


def test_both_charts_zoom_and_move_together() -> None:
    page = opened(slow_run())
    assert views(page) == WHOLE
    click(page, "Zoom in")
    assert views(page) == near(0.25, 0.5)
    page.run(f"{MEMORY}.scrollLeft += 100; settle()")  # as a browser does for an arrow key
    assert views(page) == near(0.3, 0.5)
    page.fire(LANES, "keydown", key="-")
    assert views(page) == WHOLE
    page.fire(LANES, "dblclick", clientX=LEFT + WIDTH / 4)
    (start, width), _ = views(page)
    assert views(page) == near(start, 1 / 3)
    assert start + width / 4 == pytest.approx(0.25, abs=0.01), "what is under the pointer stays"
    move(page, LANES, 0.25, buttons=1, movementX=-WIDTH / 8)
    assert views(page) == near(start + width / 8, width)
    click(page, "All")
    assert views(page) == WHOLE


def test_keys_with_a_modifier_are_the_browsers() -> None:
    page = opened(slow_run())
    for modifier in ("ctrlKey", "metaKey", "altKey"):
        page.fire(LANES, "keydown", key="+", **{modifier: True})
    assert views(page) == WHOLE
    page.fire(LANES, "keydown", key="+")
    assert views(page) == near(0.25, 0.5)


def test_the_wheel_scrolls_the_page_unless_a_key_says_zoom() -> None:
    page = opened(slow_run())
    facts = {"deltaY": -100, "clientX": LEFT + WIDTH / 2}
    assert not page.fire(LANES, "wheel", **facts)
    assert views(page) == WHOLE
    assert page.fire(LANES, "wheel", ctrlKey=True, **facts)
    assert views(page)[0][1] < 0.9


def test_what_is_under_the_pointer_stays_however_far_it_is_zoomed() -> None:
    page, place = opened(slow_run()), 0.3
    for _ in range(14):
        page.fire(LANES, "wheel", ctrlKey=True, deltaY=-70, clientX=LEFT + place * WIDTH)
    start, width = views(page)[0]
    assert width < 0.002
    assert (place - start) / width == pytest.approx(place, abs=0.02)


def test_another_width_of_the_window_shows_the_same() -> None:
    page = opened(slow_run())
    click(page, "Zoom in")
    page.run("for (const plot of inRank('.plot')) plot.scrolledTo = 0; resize()")
    assert views(page) == near(0.25, 0.5)


def test_the_pointer_shows_the_action_and_its_figures() -> None:
    run = slow_run()
    page, drawn = opened(run), iteration(run)
    for row, lane in enumerate(drawn.lanes):
        for bar in (*lane.bars[:3], lane.bars[-1]):
            move(page, LANES, (bar.start + bar.end) / 2 / drawn.total, row)
            name, times, *rest = tip(page) or []
            assert name == str(bar.cause)
            assert times == f"{bar.end - bar.start:.3f} ms, from {bar.start:.3f} ms"
            assert bool(rest) == bool(bar.nbytes)
    wait = drawn.lanes[0].waits[0]
    move(page, LANES, (wait.start + wait.end) / 2 / drawn.total, 0)
    assert (tip(page) or [""])[0] == f"stall at {wait.cause}"
    page.fire(LANES, "pointerleave")
    assert tip(page) is None


def test_the_pointer_shows_memory() -> None:
    run, step, mib = slow_run(), 9, 1 << 20
    page, drawn = opened(run), iteration(run)
    bar = drawn.compute[step]
    move(page, MEMORY, (bar.start + bar.end) / 2 / drawn.total)
    assert (tip(page) or [])[1:4] == [
        f"without the plan: {drawn.memory.without_plan[step] / mib:.2f} MiB",
        f"with the plan: {drawn.memory.with_plan[step] / mib:.2f} MiB",
        f"measured: {drawn.peak_bytes[step] / mib:.2f} MiB",
    ]


def test_waits_are_gone_to_one_by_one() -> None:
    run = slow_run()
    page, drawn = opened(run), iteration(run)
    waits = sorted(wait.start for lane in drawn.lanes for wait in lane.waits)

    def is_in_view(place: float) -> bool:
        start, width = views(page)[0]
        return width < 1 and start * drawn.total <= place <= (start + width) * drawn.total

    for place in [*waits, waits[0]]:
        page.fire(LANES, "keydown", key="n")
        assert is_in_view(place)
        assert "stalls compute for" in page.texts(".range")[0]
    page.fire(LANES, "keydown", key="p")
    assert is_in_view(waits[-1])
    before = views(page)
    click(page, "Next stall")
    click(page, "Previous stall")
    assert views(page) == before


def test_without_waits_there_are_none_to_go_to() -> None:
    page = opened(make_run(make_trace(is_timed=False)))
    disabled = page.get("inRank('button').filter((b) => b.disabled).map((b) => b.dataset.do)")
    assert disabled == ["previous", "next", "out", "all"]


def test_a_group_is_shown_in_the_timeline() -> None:
    run = slow_run()
    page, drawn = opened(run), iteration(run)
    link = "inRank('.sortable a').find((a) => a.textContent === '1.2')"
    assert page.fire(link, "click")
    bars = [bar for lane in drawn.lanes for bar in lane.bars if str(bar.cause.key) == "1.2"]
    start, width = views(page)[0]
    assert start * drawn.total <= min(bar.start for bar in bars)
    assert (start + width) * drawn.total >= max(bar.end for bar in bars)
    assert width < 1
    assert page.get("inRank('.labels rect').length") == len(bars)


def test_one_rank_is_shown_at_a_time_and_links_lead_to_the_others() -> None:
    page = opened(*(slow_run(rank) for rank in range(3)))
    shown, link = "shownRank().attributes.id", "document.querySelectorAll('nav.ranks a')[2]"
    assert page.get(shown) == "rank-0"
    assert page.get("document.querySelectorAll('section.chosen').length") == 1
    for modifier in ("ctrlKey", "metaKey", "shiftKey"):  # another tab or window
        assert not page.fire(link, "click", **{modifier: True})
    assert page.fire(link, "click")
    assert page.get(shown) == "rank-2"
    current = "document.querySelectorAll('[aria-current]').map((e) => e.textContent)"
    assert page.get(current) == ["2"]
    click(page, "Zoom in")
    page.run("goBack()")
    assert page.get(shown) == "rank-0"
    assert views(page) == WHOLE, "each rank has its own view"
    page.fire(link, "click")
    assert views(page) == near(0.25, 0.5), "and keeps it"
    page.run("location.hash = '#rank-1'; windowListeners.hashchange(); settle()")
    assert page.get(shown) == page.get("windowListeners.shown.attributes.id") == "rank-1"


def test_without_the_script_all_ranks_are_shown() -> None:
    page = opened(*(slow_run(rank) for rank in range(3)), runs_script=False)
    assert page.get("document.querySelectorAll('section.rank').map((e) => e.hidden)") == [False] * 3
    # With it, ranks are not laid out before one is chosen: with many that takes seconds.
    rule = "@media (scripting: enabled) { section.rank:not(.chosen) { display: none; } }"
    assert (FOLDER / "page.css").read_text().count("section.rank:not(.chosen)") == 1
    assert rule in (FOLDER / "page.css").read_text()


def test_a_link_can_name_a_rank() -> None:
    page = opened(*(slow_run(rank) for rank in range(3)), fragment="#rank-1")
    assert page.get("shownRank().attributes.id") == "rank-1"
    assert page.get("windowListeners.shown.attributes.id") == "rank-1"
