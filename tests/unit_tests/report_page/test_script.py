# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The page in a browser: tables, charts that zoom together, what the pointer shows, and ranks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from browser import Browser, BrowserPage, find_browser
from make_trace import timed
from reported_runs import Run, make_run, make_trace, with_waits

from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.trace import KINDS_BETWEEN_GROUPS
from megatron.slipstream.report_page import page as page_module
from megatron.slipstream.report_page.groups import group_table
from megatron.slipstream.report_page.iteration import Iteration, iteration_of
from megatron.slipstream.report_page.page import render_page

EXECUTABLE = find_browser()
pytestmark = pytest.mark.skipif(EXECUTABLE is None, reason="needs chromium: ./run install-browser")

FOLDER = Path(page_module.__file__).parent
LANES, MEMORY = "inRank('.plot')[0]", "inRank('.plot')[1]"
WHOLE = (0, 1)
ALT, CONTROL, META, SHIFT = 1, 2, 4, 8
Open = Callable[..., BrowserPage]


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    started = Browser(str(EXECUTABLE), tmp_path_factory.mktemp("browser"))
    yield started
    started.close()


@pytest.fixture
def opened(browser: Browser, tmp_path: Path) -> Iterator[Open]:
    """Opens the page of some runs; in the end, no script has failed and nothing was refused."""
    pages = []

    def open_page(*runs: Run, fragment: str = "", **options: Any) -> BrowserPage:
        path = tmp_path / f"{len(pages)}.html"
        plans = {run.rank.rank: run.plan for run in runs}
        path.write_text(render_page(Report([run.rank for run in runs]), plans))
        pages.append(page := BrowserPage(browser, path.as_uri() + fragment, **options))
        page.get(
            "window.inRank = (selector) => [...(document.querySelector('section.chosen')"
            " ?? document.querySelector('section.rank')).querySelectorAll(selector)]"
        )
        return page

    yield open_page
    for page in pages:
        assert page.errors() == []
        page.close()


def slow_run(rank: int = 0, options: PolicyOptions | None = None) -> Run:
    """A run in which compute waits, as predicted and as measured."""
    return with_waits(make_run(timed(make_trace(), 1.0, 0.4), rank, options), {7: 3.0})


def iteration(run: Run) -> Iteration:
    return iteration_of(run.plan, run.rank)


def texts(page: BrowserPage, selector: str) -> list[str]:
    """The texts of elements of the rank that is shown."""
    return page.get(f"inRank({selector!r}).map((e) => e.textContent)")


def click(page: BrowserPage, name: str) -> None:
    named = f"(b) => (b.getAttribute('aria-label') ?? b.textContent) === '{name}'"
    page.click(f"inRank('button').find({named})")


def column(page: BrowserPage, title: str) -> list[str]:
    """The texts of the rows that are displayed."""
    place = texts(page, ".sortable th").index(title)
    rows = "inRank('.sortable tbody tr').filter((row) => row.offsetHeight > 0)"
    return page.get(f"{rows}.map((row) => row.cells[{place}].textContent)")


def view(page: BrowserPage, run: Run) -> tuple[float, float]:
    """The visible part of the iteration as the page tells it: start and width."""
    (text,) = texts(page, ".range")
    shown = re.search(r"([\d.e+-]+) to ([\d.e+-]+) ms", text)
    if not shown:
        return WHOLE
    total = iteration(run).total
    start, end = (float(number) / total for number in shown.groups())
    return start, end - start


def near(*part: float) -> Any:
    """This part, to a pixel."""
    return pytest.approx(part, abs=0.002)


def place_of(page: BrowserPage, plot: str, share: float, row: int = 0) -> tuple[float, float]:
    """The place of the window at a share of the visible part, in a lane of the timeline."""
    left, top, width, height = page.box(f"inRank('.ground')[{row}]")
    if plot == MEMORY:
        _, top, _, height = page.box(plot)
    return left + share * width, top + height / 2


def point(page: BrowserPage, plot: str, share: float, row: int = 0) -> list[str]:
    """Move the pointer and return what it shows."""
    page.mouse("mouseMoved", *place_of(page, plot, share, row))
    return tip(page)


def tip(page: BrowserPage) -> list[str]:
    element = "document.querySelector('.tip')"
    return page.get(f"{element}.hidden ? [] : [...{element}.children].map((e) => e.textContent)")


def wheel(page: BrowserPage, share: float, delta: float, modifiers: int) -> None:
    facts = {"deltaX": 0, "deltaY": delta, "modifiers": modifiers}
    page.mouse("mouseWheel", *place_of(page, LANES, share), **facts)
    page.draw()


def test_the_script_shows_the_rows_that_the_page_has_without_it(opened: Open) -> None:
    run = slow_run()
    with_script, without = opened(run), opened(run, runs_script=False)
    for page, is_hidden in ((with_script, False), (without, True)):
        assert page.get("inRank('.tools').map((e) => e.hidden)") == [is_hidden]
    rows = texts(without, ".sortable tbody tr")
    assert len(rows) == len(run.plan.groups)
    assert texts(with_script, ".sortable tbody tr") == rows
    assert texts(with_script, ".sortable th") == texts(without, ".sortable th")


@pytest.mark.parametrize("title", ["Bytes", "Offload", "Reload late"])
def test_columns_of_numbers_sort_both_ways_and_say_so(opened: Open, title: str) -> None:
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


def test_the_figures_of_ranks_sort_too(opened: Open) -> None:
    runs = [make_run(rank=number, slowness=1.0 + number % 3) for number in range(11)]
    page = opened(*runs)
    table = "[...document.querySelectorAll('main > section:not(.rank) .sortable *')]"
    ranks = f"{table}.filter((e) => e.matches('td:first-child')).map((e) => e.textContent)"
    by_time = sorted(runs, key=lambda run: -run.rank.measured_ms)
    by_number = [f"rank {number}" for number in range(11)]
    assert page.get(ranks) == by_number
    for title, expected in (
        ("Step time", [f"rank {run.rank.rank}" for run in by_time]),
        ("Rank", by_number),
    ):
        page.click(f"{table}.find((e) => e.matches('button') && e.textContent === '{title}')")
        assert page.get(ranks) == expected


def test_columns_of_text_sort_and_one_column_is_sorted_at_a_time(opened: Open) -> None:
    page = opened(slow_run())
    for title in ("Bytes", "Module"):
        click(page, title)
    assert column(page, "Module") == sorted(column(page, "Module"))
    assert texts(page, "th[aria-sort]") == ["Module"]


def test_a_long_table_is_shown_whole_on_demand(opened: Open) -> None:
    run = make_run(make_trace(num_layers=25, num_micro_batches=8))
    page = opened(run)
    assert len(run.plan.groups) == 400
    assert len(column(page, "Group")) == 200
    click(page, "Show all")
    assert len(column(page, "Group")) == 400
    assert page.get("inRank('.more')[0].hidden")
    click(page, "Bytes")
    assert len(column(page, "Group")) == 400
    short = opened(make_run(make_trace(num_layers=25, num_micro_batches=4)))
    assert len(column(short, "Group")) == 200
    assert short.get("inRank('.more')[0].hidden"), "200 rows are not long"


BAR = re.compile(r"M(\S+) (\S+)H(\S+)v(\S+)H\S+z")


@pytest.mark.parametrize("is_zoomed", [False, True], ids=["whole", "zoomed"])
def test_every_bar_in_view_is_drawn_once_at_its_time_in_its_colour(
    opened: Open, is_zoomed: bool
) -> None:
    run = slow_run()
    page, drawn = opened(run), iteration(run)
    if is_zoomed:
        click(page, "Zoom in")
    pixels = page.get("inRank('.ground')[0].getBoundingClientRect().width")
    found = [
        (name, *map(float, bar))
        for name, path in page.get(
            "inRank('path.bar, path.wait').map((e) => ['class', 'd'].map((n) => e.getAttribute(n)))"
        )
        for bar in BAR.findall(path)
    ]
    start, width = (0.25, 0.5) if is_zoomed else WHOLE
    expected = []
    for row, lane in enumerate(drawn.lanes):
        for bar in (*lane.bars, *lane.waits):
            left, right = (
                (time / drawn.total - start) / width * pixels for time in (bar.start_ms, bar.end_ms)
            )
            if right <= 0 or left >= pixels:
                continue
            top, height, colour = 18 + 38 * row, 30, f"m{drawn.colours.get(bar.cause.name)}"
            if bar in lane.waits:
                top, height, colour = top - 3, 36, "wait"
            elif bar.cause.kind in KINDS_BETWEEN_GROUPS:
                colour = "other"
            left, right = max(left, -9), min(right, pixels + 9)
            expected.append((colour, left, top, right, height))
    found = [(name.split()[-1], *bar) for name, *bar in found if bar[2] > 0 and bar[0] < pixels]
    assert len(found) == len(expected) > 20
    for one, other in zip(sorted(found), sorted(expected), strict=True):
        assert one[0] == other[0]
        assert one[1:] == pytest.approx(other[1:], abs=0.02)


@pytest.mark.parametrize("is_zoomed", [False, True], ids=["whole", "zoomed"])
def test_memory_has_each_steps_bytes_from_its_time_on_and_its_peak(
    opened: Open, is_zoomed: bool
) -> None:
    run = slow_run(options=PolicyOptions(target_memory_bytes=8 << 20))
    page, drawn = opened(run), iteration(run)
    if is_zoomed:
        click(page, "Zoom in")
    start, width = (0.25, 0.5) if is_zoomed else WHOLE
    pixels = page.get("inRank('.ground')[0].getBoundingClientRect().width")
    texts_and_places = page.get(
        "[inRank('.memory > svg > text').map((e) => parseFloat(e.textContent)),"
        "inRank('.memory .grid').map((e) => Number(e.getAttribute('y1')))]"
    )
    (zero, *_, high), (bottom, *_, top) = texts_and_places
    assert (zero, bottom, top) == (0, 230, 0)

    def height(nbytes: int) -> float:
        return bottom * (1 - nbytes / (1 << 20) / high)

    for name, values in drawn.memory.items():
        path = page.get(f"inRank('path.curve.{name}')[0].getAttribute('d')")
        points = [
            (float(x), float(y)) for x, y in re.findall(r"[MH]([^\sV]+)[ V]([^\sHMV]+)", path)
        ]
        for place, value in zip(drawn.step_starts, values, strict=True):
            at = (place / drawn.total - start) / width * pixels
            if 0 <= at < pixels:
                shown = [y for x, y in points if x <= at + 0.02][-1]
                assert shown == pytest.approx(height(value), abs=0.2)
        if name != "host":
            peak = page.get(
                f"inRank('circle.{name}').map((e) => [e.cx, e.cy].map((v) => v.baseVal.value))"
            )
            at = drawn.step_starts[values.index(max(values))] / drawn.total
            ((x, y),) = peak
            assert x == pytest.approx((at - start) / width * pixels, abs=0.1)
            assert y == pytest.approx(height(max(values)), abs=0.2)
    target = page.get("inRank('.memory line.target').map((e) => e.y1.baseVal.value)")
    assert target == pytest.approx([height(8 << 20)], abs=0.2)


def test_both_charts_zoom_and_move_together(opened: Open) -> None:
    run = slow_run()
    page = opened(run)
    assert view(page, run) == WHOLE
    click(page, "Zoom in")
    assert view(page, run) == near(0.25, 0.5)
    page.get(f"{LANES}.focus()")
    page.press("-")
    assert view(page, run) == WHOLE
    page.click_at(*place_of(page, LANES, 0.25), count=2)
    start, width = view(page, run)
    assert width == pytest.approx(1 / 3, abs=0.001)
    assert start + width / 4 == pytest.approx(0.25, abs=0.01), "what is under the pointer stays"
    x, y = place_of(page, MEMORY, 0.5)
    page.mouse("mouseMoved", x, y)
    eighth = page.get("inRank('.ground')[0].getBoundingClientRect().width / 8")
    page.mouse("mousePressed", x, y, button="left", buttons=1)
    page.mouse("mouseMoved", x - eighth, y, button="left", buttons=1)
    page.mouse("mouseReleased", x, y, button="left")
    page.draw()
    assert view(page, run) == near(start + width / 8, width)
    first, second = page.get("inRank('.axis').map((axis) => axis.textContent)")
    assert first == second, "the other chart moves too"
    click(page, "All")
    assert view(page, run) == WHOLE


def test_keys_with_a_modifier_are_the_browsers(opened: Open) -> None:
    run = slow_run()
    page = opened(run)
    page.get(f"{LANES}.focus()")
    for modifier in (CONTROL, META, ALT):
        page.press("+", modifier)
    assert view(page, run) == WHOLE
    page.press("+")
    assert view(page, run) == near(0.25, 0.5)
    page.press("ArrowRight")
    start, width = view(page, run)
    assert start > 0.26
    assert width == pytest.approx(0.5, abs=0.001)


def test_the_wheel_scrolls_the_page_unless_a_key_says_zoom(opened: Open) -> None:
    run = slow_run()
    page = opened(run)
    wheel(page, 0.5, -100, 0)
    assert view(page, run) == WHOLE
    wheel(page, 0.5, -100, CONTROL)
    assert view(page, run)[1] < 0.9


def test_what_is_under_the_pointer_stays_however_far_it_is_zoomed(opened: Open) -> None:
    run = slow_run()
    page = opened(run)
    left, _, pixels, _ = page.box("inRank('.ground')[0]")
    place = (round(left + 0.3 * pixels) - left) / pixels
    for _ in range(14):
        wheel(page, place, -70, CONTROL)
    start, width = view(page, run)
    assert width < 0.002
    assert (place - start) / width == pytest.approx(place, abs=0.01)


def test_another_width_of_the_window_shows_the_same(opened: Open) -> None:
    run = slow_run()
    page = opened(run)
    click(page, "Zoom in")
    page.resize(700)
    page.draw()
    assert view(page, run) == near(0.25, 0.5)


def test_the_pointer_shows_the_action_and_its_figures(opened: Open) -> None:
    run = slow_run()
    page, drawn = opened(run), iteration(run)
    for row, lane in enumerate(drawn.lanes):
        for bar in (*lane.bars[:3], lane.bars[-1]):
            name, times, *rest = point(
                page, LANES, (bar.start_ms + bar.end_ms) / 2 / drawn.total, row
            )
            assert name == str(bar.cause)
            assert times == f"{bar.end_ms - bar.start_ms:.3f} ms, from {bar.start_ms:.3f} ms"
            assert bool(rest) == bool(bar.nbytes)
    wait = drawn.lanes[0].waits[0]
    name, *_ = point(page, LANES, (wait.start_ms + wait.end_ms) / 2 / drawn.total, 0)
    assert name == f"stall at {wait.cause}"
    page.mouse("mouseMoved", 1, 1)
    assert tip(page) == []


def test_the_pointer_shows_memory(opened: Open) -> None:
    run, step, mib = slow_run(), 9, 1 << 20
    page, drawn = opened(run), iteration(run)
    bar = drawn.compute[step]
    assert point(page, MEMORY, (bar.start_ms + bar.end_ms) / 2 / drawn.total)[1:4] == [
        f"without the plan: {drawn.memory['without'][step] / mib:.2f} MiB",
        f"with the plan: {drawn.memory['with'][step] / mib:.2f} MiB",
        f"measured: {drawn.peak_bytes[step] / mib:.2f} MiB",
    ]


def test_waits_are_gone_to_one_by_one(opened: Open) -> None:
    run = slow_run()
    page, drawn = opened(run), iteration(run)
    waits = sorted(wait.start_ms for lane in drawn.lanes for wait in lane.waits)
    page.get(f"{LANES}.focus()")

    def is_in_view(place: float) -> bool:
        start, width = view(page, run)
        return width < 1 and start * drawn.total <= place <= (start + width) * drawn.total

    for place in [*waits, waits[0]]:
        page.press("n")
        assert is_in_view(place)
        assert "stalls compute for" in texts(page, ".range")[0]
    page.press("p")
    assert is_in_view(waits[-1])
    before = view(page, run)
    click(page, "Next stall")
    click(page, "Previous stall")
    assert view(page, run) == before


def test_without_waits_there_are_none_to_go_to(opened: Open) -> None:
    page = opened(make_run(make_trace(is_timed=False)))
    disabled = page.get("inRank('button').filter((b) => b.disabled).map((b) => b.dataset.do)")
    assert disabled == ["previous", "next", "out", "all"]


def test_a_group_is_shown_in_the_timeline(opened: Open) -> None:
    run = slow_run()
    page, drawn = opened(run), iteration(run)
    page.click("inRank('.sortable a').find((a) => a.textContent === '1.2')")
    bars = [bar for lane in drawn.lanes for bar in lane.bars if str(bar.cause.key) == "1.2"]
    start, width = view(page, run)
    assert start * drawn.total <= min(bar.start_ms for bar in bars)
    assert (start + width) * drawn.total >= max(bar.end_ms for bar in bars)
    assert width < 1
    assert page.get("inRank('.picked').length") == len(bars)
    assert page.get(f"document.activeElement === {LANES}")


def test_one_rank_is_shown_at_a_time_and_links_lead_to_the_others(opened: Open) -> None:
    runs = [slow_run(rank) for rank in range(3)]
    page = opened(*runs)
    sections = "[...document.querySelectorAll('section.rank')]"
    shown = f"{sections}.filter((e) => e.offsetHeight).map((e) => e.id)"
    link = "document.querySelectorAll('nav.ranks a')[2]"
    assert page.get(shown) == ["rank-0"]
    page.get("document.addEventListener('click', (event) => event.preventDefault())")
    for modifier in (CONTROL, META, SHIFT):  # another tab or window
        page.click(link, modifier)
        assert page.get(shown) == ["rank-0"]
    page.click(link)
    assert page.get(shown) == ["rank-2"]
    current = "[...document.querySelectorAll('[aria-current]')].map((e) => e.textContent)"
    assert page.get(current) == ["2"]
    click(page, "Zoom in")
    page.get("new Promise((done) => { addEventListener('popstate', done); history.back(); })")
    page.draw()
    assert page.get(shown) == ["rank-0"]
    assert view(page, runs[0]) == WHOLE, "each rank has its own view"
    page.click(link)
    assert view(page, runs[2]) == near(0.25, 0.5), "and keeps it"
    changed = "addEventListener('hashchange', done); location.hash = '#rank-1'"
    page.get(f"new Promise((done) => {{ {changed}; }})")
    page.draw()
    assert page.get(shown) == ["rank-1"]
    assert page.get("document.querySelector('#rank-1').getBoundingClientRect().top < 200")


def test_without_the_script_all_ranks_are_shown(opened: Open) -> None:
    page = opened(*(slow_run(rank) for rank in range(3)), runs_script=False)
    heights = page.get("[...document.querySelectorAll('section.rank')].map((e) => e.offsetHeight)")
    assert len(heights) == 3
    assert all(heights)


def test_a_link_can_name_a_rank(opened: Open) -> None:
    page = opened(*(slow_run(rank) for rank in range(3)), fragment="#rank-1")
    assert page.get("document.querySelector('section.chosen').id") == "rank-1"
    assert page.get("document.querySelector('#rank-1').getBoundingClientRect().top < 200")


@pytest.mark.parametrize("width", [1280, 400])
def test_the_page_fits_into_a_window_of_any_width(opened: Open, width: int) -> None:
    page = opened(*(slow_run(rank) for rank in range(3)), width=width)
    assert page.get("document.documentElement.scrollWidth") <= width
