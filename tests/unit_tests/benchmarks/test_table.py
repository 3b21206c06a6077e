# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The table is made from rows alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks import table
from benchmarks.rows import RowWriter, finished, read_rows
from benchmarks.variant import TIMES


def write_summary(writer: RowWriter, engine: str, **fields: Any) -> None:
    common = {"case": "moe", "variant": "core_attn+attn_proj", "rank": 0, "num_ranks": 1}
    writer.write("summary", **{**common, "engine": engine, "error": None, **fields})


def write_example(path: Path) -> None:
    writer = RowWriter(path, "first")
    writer.write(
        "machine",
        device="GPU",
        num_devices=1,
        driver="580.1",
        versions={"torch": "2.11"},
        environment={},
        bandwidth=dict.fromkeys(("d2h_gb_per_s", "h2d_gb_per_s"), 55.0)
        | dict.fromkeys(("d2h_both_gb_per_s", "h2d_both_gb_per_s"), 50.0),
        case="moe",
        command="python -m benchmarks.run --case moe",
    )
    base = {"num_iterations": 10, "overhead_percent_standard_error": 0.1}
    write_summary(
        writer,
        "off",
        step_ms=100.0,
        overhead_percent=0.0,
        act_bytes=900 << 20,
        saved_bytes=0,
        **base,
    )
    write_summary(writer, "megatron", error="AssertionError: Chunk mismatch")
    write_summary(
        writer,
        "slipstream",
        step_ms=101.25,
        step_ms_standard_error=0.125,
        overhead_percent=1.25,
        bound_overhead_percent=0.5,
        act_bytes=500 << 20,
        saved_bytes=400 << 20,
        d2h_bulk_bytes=800 << 20,
        d2h_gb_per_s=52.04,
        h2d_gb_per_s=None,
        d2h_num_small=3,
        h2d_num_small=4,
        copied_per_saved=1.0,
        host_us_per_group=42.4,
        host_us_per_call={"pack": 3.25},
        notes=["no compute time: RuntimeError: why"],
        **base,
    )


def test_the_table_comes_from_rows(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "example.jsonl"
    write_example(rows)
    assert table.main([str(rows)]) == 0
    written = [Path(line) for line in capsys.readouterr().out.split()]
    assert [path.name for path in written] == [
        "example.jsonl",
        "example.md",
    ]
    assert all(path.stat().st_size > 0 for path in written)
    text = (tmp_path / "example.md").read_text()
    assert "GPU (1 seen), driver 580.1; torch 2.11" in text
    assert "Pinned copies reach 55.0 GB/s" in text
    assert (
        "|  | slipstream | 101.25 ± 0.12 | +1.25% ± 0.10 | +0.50% | 500 | 400 | 800 | 1.00 | "
        "52.0 / - | 7 | 42 |"
    ) in text
    assert "| core_attn attn_proj | off | 100.00 | - | - | 900 | - | - |" in text
    # Empty columns are left out, and so are their explanations.
    assert "| modules | engine | step ms | time | bound | act MiB | saved MiB | D2H MiB |" in text
    assert "- `small`: the number of" in text
    assert "mallocs" not in text
    assert "- core_attn attn_proj, megatron, rank 0: AssertionError: Chunk mismatch" in text
    assert "- core_attn attn_proj, slipstream, rank 0: no compute time" in text
    assert "| core_attn attn_proj | slipstream | 3.2 |" in text


def test_ranks_that_shared_a_gpu_have_a_table_without_times(tmp_path: Path) -> None:
    rows = tmp_path / "shared.jsonl"
    write_example(rows)
    kept = [row for row in read_rows(rows) if row["kind"] == "machine"]
    for row in read_rows(rows):
        if row["kind"] == "summary" and "act_bytes" in row:
            kept.append({name: value for name, value in row.items() if name not in TIMES})
    rows.write_text("".join(json.dumps(row) + "\n" for row in kept))
    assert table.write_results(rows) == [rows, rows.with_suffix(".md")]
    text = rows.with_suffix(".md").read_text()
    assert "| modules | engine | bound | act MiB |" in text
    assert "| core_attn attn_proj | off | - | 900 | - | - |" in text
    assert "|  | slipstream | +0.50% | 500 | 400 |" in text


def test_an_edited_title_is_kept(tmp_path: Path) -> None:
    rows, page = tmp_path / "example.jsonl", tmp_path / "example.md"
    write_example(rows)
    table.write_results(rows)
    text = page.read_text()
    assert text.startswith("# Side by side\n")
    page.write_text(text.replace("Side by side", "An example", 1))
    table.write_results(rows)
    assert page.read_text() == text.replace("Side by side", "An example", 1)


def test_a_later_summary_replaces_an_earlier_one(tmp_path: Path) -> None:
    rows = tmp_path / "example.jsonl"
    write_example(rows)
    write_summary(RowWriter(rows, "second"), "off", step_ms=200.0, overhead_percent=0.0)
    latest = table.latest_summaries(read_rows(rows))
    assert [row["engine"] for row in latest] == ["off", "megatron", "slipstream"]
    assert latest[0]["step_ms"] == 200.0


def test_a_run_knows_what_it_has_finished(tmp_path: Path) -> None:
    rows = tmp_path / "example.jsonl"
    write_example(rows)
    modules = "core_attn+attn_proj"
    expected = {(modules, engine) for engine in ("off", "megatron", "slipstream")}
    assert finished(read_rows(rows), "first", "moe") == expected
    assert finished(read_rows(rows), "second", "moe") == set()
    assert finished(read_rows(rows), "first", "dense") == set()


def test_infinities_are_written_as_null(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    RowWriter(path, "run").write("summary", error=float("inf"), nested={"ms": float("nan")})
    row = json.loads(path.read_text())
    assert row["error"] is None
    assert row["nested"] == {"ms": None}


def test_without_a_file_a_row_goes_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    RowWriter(None, "run").write("summary", step_ms=1.0)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "content, message",
    [
        ("not json\n", "rows.jsonl:1: not a row"),
        ('{"no": "kind"}\n', "rows.jsonl:1: not a row"),
        ("", "holds no summary rows"),
    ],
)
def test_a_file_that_holds_no_results_is_refused(
    tmp_path: Path, content: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_text(content)
    assert table.main([str(path)]) == 2
    assert message in capsys.readouterr().err
