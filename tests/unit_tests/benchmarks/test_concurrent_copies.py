# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Rates of several GPUs at once: measured with all of them under way, and told per GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from timed_backend import TimedBackend

from benchmarks import concurrent_copies
from benchmarks.concurrent_copies import Amount, Link, measure
from benchmarks.rows import read_rows

NBYTES = 1 << 16


class SharedWall:
    """Memory that all links copy to and from, one copy after another; a millisecond each."""

    def __init__(self) -> None:
        self.time_ms = 0.0
        self.order: list[int] = []


class WalledBackend(TimedBackend):
    """A device whose copies go through the wall."""

    def __init__(self, wall: SharedWall, number: int) -> None:
        super().__init__()
        self._wall, self._number = wall, number
        self.num_host = 0

    def run_copies(self, copies: Any, stream: Any) -> None:
        super().run_copies(copies, stream)
        self._wall.time_ms += 1.0
        self._wall.order.append(self._number)

    def timed_event(self, stream: Any) -> float:
        return self._wall.time_ms

    def elapsed_ms(self, start: float, stop: float) -> float:
        return stop - start

    def allocate_host(self, nbytes: int) -> torch.Tensor:
        self.num_host += 1
        return super().allocate_host(nbytes)

    def free_host(self, buffer: torch.Tensor) -> None:
        self.num_host -= 1


def walled_links(number: int) -> tuple[SharedWall, list[Link]]:
    wall = SharedWall()
    return wall, [Link(WalledBackend(wall, at), NBYTES) for at in range(number)]


def test_all_links_copy_in_the_same_window() -> None:
    amount = Amount(NBYTES, num_copies=3, num_rounds=1)
    for number in (1, 2, 4):
        wall, links = walled_links(number)
        (rates,) = measure(links, ["d2h"], amount)
        # A wall that lets one copy through at a time leaves each of them its part.
        assert rates == [pytest.approx(NBYTES / number / 1e6)] * number
        assert wall.order[-number:] == list(range(number))


def test_both_ways_are_two_rates_of_copies_that_run_together() -> None:
    _, links = walled_links(1)
    out, back = measure(links, ["d2h", "h2d"], Amount(NBYTES, 2, 1))
    assert out == back == [pytest.approx(NBYTES / 2 / 1e6)]


def test_copies_go_the_way_that_they_are_named_for() -> None:
    link = Link(TimedBackend(), 4)
    out, back = link._copies["d2h"], link._copies["h2d"]
    host = link._host.untyped_storage().data_ptr()
    (to_host, of_device), (to_device, of_host) = out, back
    assert to_host.storage.data_ptr() == of_host.storage.data_ptr() == host
    assert of_device.storage.data_ptr() == to_device.storage.data_ptr() != host
    assert {of_device.start, to_device.start} == {0, 4}


def test_the_command_writes_rows_and_a_table(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    wall, links = walled_links(2)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    monkeypatch.setattr(concurrent_copies, "make_links", lambda number, nbytes: links[:number])
    output = tmp_path / "new" / "copies.jsonl"
    arguments = ["--mib", str(NBYTES / (1 << 20)), "--copies", "2", "--output", str(output)]
    assert concurrent_copies.main(arguments) == 0
    captured = capsys.readouterr()
    assert "8 GPUs at once are left out: torch sees 2" in captured.err
    machine, *rates = read_rows(output)
    assert machine["command"].startswith("python -m benchmarks.concurrent_copies --mib")
    assert [(row["num_gpus"], row["way"]) for row in rates] == [
        (number, way) for number in (1, 2) for way in ("out", "back", "both ways")
    ]
    rate = NBYTES / 1e6
    assert rates[0]["d2h_gb_per_s"] == [pytest.approx(rate)]
    assert rates[3]["d2h_gb_per_s"] == [pytest.approx(rate / 2)] * 2
    assert all(link._backend.num_host == 0 for link in links)  # type: ignore[attr-defined]
    text = output.with_suffix(".md").read_text()
    assert f"| 1 | ? | out | D2H | {rate:.1f} | {rate:.1f} | {rate:.1f} |" in text
    assert text.count("| both ways | H2D |") == 2


def test_the_table_tells_the_slowest_the_median_and_the_sum() -> None:
    row = {"kind": "rates", "num_gpus": 3, "way": "out", "nodes": [0, 0, 1]}
    text = concurrent_copies.render([{**row, "d2h_gb_per_s": [50.0, 20.0, 40.0]}])
    assert "| 3 | 0 0 1 | out | D2H | 20.0 | 40.0 | 110.0 |" in text


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "torch sees 0 GPUs"),
        (["--gpus", "one"], "is no list of numbers"),
        (["--copies", "0"], "must be above 0"),
    ],
)
def test_errors_of_the_users_name_the_cure(
    arguments: list[str],
    message: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    num_gpus = 8 if "--copies" in arguments else 0
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_gpus)
    assert concurrent_copies.main(arguments) == 2
    assert message in capsys.readouterr().err
