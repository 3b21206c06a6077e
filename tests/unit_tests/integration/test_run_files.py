# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A training leaves its report, its trace and its record, however it ends."""

from __future__ import annotations

import json
import os
import re
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_script
from ranks import run_ranks

from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.plan.files import load_trace

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the flags are those of a machine without a GPU"
)

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-layers 2 --hidden-size 32
    --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1
    --lr 1e-3 --train-iters 6 --eval-iters 1 --eval-interval 100 --log-interval 1
    --fine-grained-activation-offloading --offload-modules core_attn attn_proj
    --min-offloaded-tensor-size 1
    --offload-trace-path trace.json --run-record-path record.json --megatron-output-path -
""".split()
REPORT = ["--offload-report-path", "report.json"]
FILES = ["record.json", "report.json", "trace.json"]

SCRIPT = """
import os, signal, sys
from megatron.slipstream.integration.entry import providers, training
from megatron.training import get_args

forward_step = providers.forward_step

def step(*arguments, **named):
    if get_args().curr_iteration == 3:
        {what}
    return forward_step(*arguments, **named)

providers.forward_step = step
sys.exit(training.main(sys.argv[1:]))
"""

AN_HOUR_PASSES = "sys.modules['megatron.training.training']._TRAIN_START_TIME -= 3600"
SIGTERM = "os.kill(os.getpid(), signal.SIGTERM)"
ENDS: dict[str, tuple[str, list[str], int, int]] = {
    # Event in the fourth iteration, flags, exit code, recorded iterations.
    "at an interval": ("pass", ["--exit-interval", "3"], 0, 3),
    "after a time": (AN_HOUR_PASSES, ["--exit-duration-in-mins", "5"], 0, 4),
    "on a signal": (SIGTERM, ["--exit-signal-handler"], 0, 4),
    "on Ctrl-C": ("os.kill(os.getpid(), signal.SIGINT)", [], 130, 3),
    "by an error": ("raise ZeroDivisionError", [], 1, 3),
    "with a code": ("sys.exit(7)", [], 7, 3),
    "killed": (
        "os.kill(os.getpid(), signal.SIGKILL)",
        ["--output-interval", "2"],
        -signal.SIGKILL,
        2,
    ),
}


def train(folder: Path, what: str, *flags: str) -> tuple[int, str]:
    script = folder / "train.py"
    script.write_text(SCRIPT.format(what=what))
    done = run_script(script, *FLAGS, *flags, folder=folder)
    script.unlink()
    return done.returncode, done.stdout + done.stderr


@pytest.mark.parametrize("end", ENDS)
def test_the_files_are_there_however_a_training_ends(end: str, tmp_path: Path) -> None:
    what, flags, code, num_iterations = ENDS[end]
    flags = ["--global-batch-size", "1", *REPORT, *flags]
    found, output = train(tmp_path, what, *flags)
    assert found == code, output
    assert sorted(os.listdir(tmp_path)) == FILES, output
    record = json.loads((tmp_path / "record.json").read_text())
    assert len(record["iterations"]) == num_iterations
    (rank,) = Report.from_json((tmp_path / "report.json").read_text()).ranks
    assert rank.num_iterations == num_iterations
    assert rank.d2h_bytes > 0
    trace = load_trace(tmp_path / "trace.json")
    assert trace.groups
    assert trace.seq_length == int(FLAGS[FLAGS.index("--seq-length") + 1])
    # In the middle of an iteration the weights are not a result.
    assert ("weights_sha256" in record) == (code == 0)
    paths = "offload_report_path=report.json, offload_trace_path=trace.json, run_record_path="
    assert (f"written: {paths}record.json" in output) == (end != "killed"), output
    if end == "on Ctrl-C":
        assert "Traceback" not in output
        assert "ERROR" not in output
        assert "interrupted after iteration 3; no checkpoint was saved, since --save is" in output


def test_a_training_that_fails_at_once_says_what_is_missing(tmp_path: Path) -> None:
    what = "pass\n    raise ZeroDivisionError('of its own')"  # in every iteration
    code, output = train(tmp_path, what, "--global-batch-size", "1", *REPORT)
    assert code == 1
    assert "ZeroDivisionError: of its own" in output
    assert "offload_trace_path: nothing is written, since no iteration has been" in output
    assert sorted(os.listdir(tmp_path)) == ["record.json", "report.json"]


def test_a_negative_interval_is_refused(tmp_path: Path) -> None:
    code, output = train(tmp_path, "pass", "--global-batch-size", "1", "--output-interval", "-1")
    assert code == 2
    assert "error: output_interval=-1 is negative; set 1 or more" in output


def test_two_files_of_one_name_are_refused_by_both_options(tmp_path: Path) -> None:
    flags = ["--global-batch-size", "1", "--offload-report-path", "./trace.json"]
    code, output = train(tmp_path, "pass", *flags)
    assert code == 2
    assert (
        "error: offload_trace_path=trace.json is not supported with "
        "offload_report_path=trace.json because each would replace the other's file; set "
        "offload_trace_path to another file"
    ) in output
    assert os.listdir(tmp_path) == []


def _end_early(rank: int, num_ranks: int, port: int, folder: Path, flags: list[str]) -> Any:
    from megatron.slipstream.integration.entry import training

    os.chdir(folder)
    with pytest.raises(SystemExit) as end:
        training.main(flags)
    return end.value.code


def test_all_ranks_are_on_the_page_of_a_training_that_ends_early(tmp_path: Path) -> None:
    import megatron.slipstream.integration.entry.providers  # noqa: F401  (once, for all that fork)

    flags = [*FLAGS, "--global-batch-size", "2", "--exit-interval", "2"]
    flags += ["--offload-report-path", "page.html", "--output-interval", "1"]
    flags += ["--pipeline-model-parallel-size", "2"]
    assert run_ranks(2, _end_early, tmp_path, flags) == [0, 0]
    names = ["page.html", "record.json", "record.rank1.json", "trace.json", "trace.rank1.json"]
    assert sorted(os.listdir(tmp_path)) == names
    page = (tmp_path / "page.html").read_text()
    assert "2 ranks" in page
    assert re.search(r"<th[^>]*>(<button[^>]*>)?Stage", page), "which only a second stage has"
