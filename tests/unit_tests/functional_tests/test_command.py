# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The runner starts trainings as Megatron-LM's scripts do, and tells how they went."""

from __future__ import annotations

import dataclasses
import json
import stat
import sys
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tools.functional_tests import command, launch
from tools.functional_tests.cases import find_cases, load_case
from tools.functional_tests.golden import read_golden
from tools.functional_tests.launch import Training, TrainingError

FAKE_PYTHON = """#!/bin/sh
# Stands for a Python that trains: notes how it was called, shows three iterations, and leaves a
# record, in which offloading has a lower peak.
echo "$*" >>"$CALLS"
for n in 1 2 3; do
  zeros="num zeros: $n.0 |"
  echo "[default0]: [time] iteration        $n/       3 | lm loss: 4.0E+00 | ${ZEROS-$zeros} x"
done
[ -z "$STATUS" ] || { echo "[default0]: ValueError: no luck"; exit $STATUS; }
[ -z "$SLEEP" ] || exec sleep $SLEEP
peak=100 moved=0
case "$*" in *--fine-grained*) peak=50 moved=10 ;; esac
one="{\\"loss\\": ${LOSS:-4.0}, \\"activation_peak_bytes\\": $peak, \\"graph_pool_bytes\\": 0,"
one="$one \\"bytes_offloaded\\": $moved}"
while [ $# -gt 1 ]; do [ "$1" != --run-record-path ] || record=$2; shift; done
echo "{\\"iterations\\": [$one, $one, $one], \\"gradients_sha256\\": \\"g\\"," \\
  "\\"weights_sha256\\": \\"w$TURN\\"}" >"$record"
mkdir -p "$CHECKPOINT_SAVE_PATH/iter_0000003"
"""

CASE = """\
ENV_VARS:
  OF_THE_CASE: 1
BEFORE_SCRIPT: |-
  export TURN=$(cat ${OUTPUT_PATH}/../turn 2>/dev/null || true)
  echo before >>$CALLS
AFTER_SCRIPT: echo after >>$CALLS
MODEL_ARGS:
  --train-iters: 3
  --bf16: true
  --transformer-impl: transformer_engine
  --fine-grained-activation-offloading: true
  --offload-modules: "[core_attn attn_proj]"
TEST_TYPE: regular
"""


@pytest.fixture
def calls(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which the fake Python notes its calls."""
    python = tmp_path / "bin" / "python"
    python.parent.mkdir()
    python.write_text(FAKE_PYTHON)
    python.chmod(python.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setattr(sys, "executable", str(python))
    monkeypatch.setenv("CALLS", str(tmp_path / "calls"))
    return tmp_path / "calls"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder of cases with one, by a name that has a recipe."""
    case = tmp_path / "cases" / "gpt" / "gpt3_offload"
    case.mkdir(parents=True)
    (case / "model_config.yaml").write_text(CASE)
    return tmp_path / "cases"


def training(folder: Path, **changes: Any) -> Training:
    case = load_case(folder / "gpt" / "gpt3_offload")
    out = folder.parent / "out"
    return dataclasses.replace(Training(case, True, "cpu", 1, out / "on", out), **changes)


def run(folder: Path, *arguments: str) -> int:
    out = str(folder.parent / "out")
    return command.main([*arguments, "--cases-folder", str(folder), "--output-dir", out])


# --- one training ---------------------------------------------------------------------------------


def test_a_training_is_launched_as_by_megatrons_scripts(folder: Path, calls: Path) -> None:
    seen: list[int] = []
    result = training(folder, num_ranks=1).run(seen.append)
    before, launched, after = calls.read_text().splitlines()
    assert (before, after) == ("before", "after")
    assert launched.startswith("-m torch.distributed.run --nproc_per_node 1 --nnodes 1")
    _, _, flags = launched.partition(" pretrain_gpt.py ")
    assert "--offload-modules core_attn attn_proj" in flags
    assert seen == [1, 2, 3]
    assert result.losses() == {1: 4.0, 2: 4.0, 3: 4.0}
    assert result.num_zeros == {1: 1.0, 2: 2.0, 3: 3.0}


def test_without_a_gpu_the_flags_for_one_are_replaced_and_copies_are_late(folder: Path) -> None:
    on_gpu, on_cpu = (training(folder, platform=name).arguments() for name in ("h200", "cpu"))
    assert on_gpu["--transformer-impl"] == "transformer_engine"
    assert on_gpu["--bf16"] == "true"
    assert "--offload-backend" not in on_gpu
    assert on_cpu["--transformer-impl"] == "local"
    assert "--bf16" not in on_cpu
    assert on_cpu["--offload-backend"] == "cpu-lazy"
    without = training(folder, offloads=False).arguments()
    assert not [flag for flag in without if "offload" in flag]


def test_the_processes_have_the_environment_of_the_case_and_none_of_another_launcher(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("RANK", "3")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0,1")
    for platform, devices in (("cpu", ""), ("h200", "0,1")):
        environment = training(folder, platform=platform).environment()
        assert environment["OF_THE_CASE"] == "1"
        assert environment["CUDA_VISIBLE_DEVICES"] == devices
        assert "RANK" not in environment


def test_a_failed_training_is_told_with_the_end_of_its_log(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATUS", "3")
    with pytest.raises(TrainingError, match=r"status 3(.|\n)*ValueError: no luck"):
        training(folder).run()
    assert calls.read_text().splitlines()[-1] == "after"


def test_a_training_that_takes_too_long_is_ended(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLEEP", "60")
    started = time.monotonic()
    with pytest.raises(TrainingError, match="took more than 0.5 s"):
        training(folder, timeout_s=0.5).run()
    assert time.monotonic() - started < 40


def test_a_training_that_leaves_no_record_has_failed(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("STATUS", "0")
    with pytest.raises(TrainingError, match="left no .*record1.json"):
        training(folder).run()


def test_an_interrupted_run_ends_its_trainings(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SLEEP", "60")

    def interrupt(*_: object) -> None:
        while len(launch._running) < 2:
            time.sleep(0.01)
        raise KeyboardInterrupt

    monkeypatch.setattr(command.ThreadPoolExecutor, "map", _map_and(interrupt))
    monkeypatch.setattr(command, "_num_at_once", lambda *_: 2)
    started = time.monotonic()
    assert run(folder, "gpt3_offload", "--platform", "cpu") == 130
    assert time.monotonic() - started < 40
    assert not launch._running
    assert capsys.readouterr().err == "stopped\n"


def _map_and(then: Callable[..., None]) -> Callable[..., None]:
    """``Executor.map`` that starts its work, and is interrupted while it waits."""

    def map_(pool: ThreadPoolExecutor, function: Callable[..., Any], items: Iterable[Any]) -> None:
        for item in items:
            pool.submit(function, item)
        then()

    return map_


def test_the_second_half_starts_from_the_checkpoint_in_the_middle(
    folder: Path, calls: Path
) -> None:
    training(folder).run()
    checkpoints = folder.parent / "out" / "on" / "checkpoints"
    assert (checkpoints / "iter_0000003").is_dir()
    launch_again = training(folder, run_number=2)
    launch_again._forget_second_half()
    assert not (checkpoints / "iter_0000003").exists()
    assert (checkpoints / "latest_checkpointed_iteration.txt").read_text() == "1\n"


# --- the command ----------------------------------------------------------------------------------


def test_recorded_values_are_what_a_case_is_compared_with(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run(folder, "gpt3_offload", "--platform", "cpu") == 1
    assert "not recorded" in capsys.readouterr().out
    assert run(folder, "gpt3_offload", "--platform", "cpu", "--record") == 0
    golden = folder / "gpt" / "gpt3_offload" / "golden_values_dev_cpu.json"
    assert read_golden(golden)["offloaded-bytes"] == {1: 10.0, 2: 10.0, 3: 10.0}
    assert run(folder, "gpt3_offload", "--platform", "cpu") == 0
    shown = capsys.readouterr().out
    assert "bit-equal" in shown
    assert "1 of 1 cases passed on cpu" in shown
    monkeypatch.setenv("LOSS", "4.5")
    assert run(folder, "gpt3_offload", "--platform", "cpu") == 1
    assert "differs in 3 of 3 steps" in capsys.readouterr().out


def test_nothing_is_recorded_of_a_case_that_differs_from_itself_without_offloading(
    folder: Path, calls: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = folder / "gpt" / "gpt3_offload" / "model_config.yaml"
    config.write_text(CASE.replace("${OUTPUT_PATH}/../turn", "<(basename ${OUTPUT_PATH})"))
    assert run(folder, "gpt3_offload", "--platform", "cpu", "--record") == 1
    assert "weights of rank 0 differ" in capsys.readouterr().out
    assert not list(folder.rglob("golden*"))


def test_a_case_that_fails_to_train_does_not_hide_the_next(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    other = folder / "gpt" / "gpt3_resume_offload"
    other.mkdir()
    (other / "model_config.yaml").write_text(CASE.replace("OF_THE_CASE", "STATUS"))
    run(folder, "gpt3_offload", "--platform", "cpu", "--record")
    assert run(folder, "gpt3_resume_offload", "gpt3_offload", "--platform", "cpu") == 1
    shown = capsys.readouterr().out
    assert "no luck" in shown
    assert "1 of 2 cases passed" in shown


@pytest.mark.parametrize("turn", ["0", "$(ls ${OUTPUT_PATH} | grep -c record)"])
def test_a_case_that_resumes_trains_again_and_fails_if_that_differs(
    folder: Path, calls: Path, turn: str, capsys: pytest.CaptureFixture[str]
) -> None:
    config = CASE.replace("TEST_TYPE: regular", "TEST_TYPE: ckpt-resume")
    config = config.replace("--bf16: true", "--save: x\n  --load: x\n  --save-interval: 1")
    config = config.replace("$(cat ${OUTPUT_PATH}/../turn 2>/dev/null || true)", turn)
    (folder / "gpt" / "gpt3_offload" / "model_config.yaml").write_text(config)
    is_same = turn == "0"
    assert run(folder, "gpt3_offload", "--platform", "cpu", "--record") == (0 if is_same else 1)
    shown = capsys.readouterr().out
    assert "iterations 1 to 3 again" in shown
    assert ("FAILED: weights of" in shown) != is_same
    assert calls.read_text().count("torch.distributed.run") == 3


def test_too_few_gpus_are_refused_by_name_and_skipped_otherwise(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "num_places", lambda: 0)
    assert run(folder, "gpt3_offload", "--platform", "h200") == 2
    assert "gpt3_offload needs 1 GPU(s), there are 0" in capsys.readouterr().err
    assert run(folder, "--platform", "h200") == 0
    assert "skipped: needs 1 GPU(s)" in capsys.readouterr().out
    assert not calls.exists()


def test_the_list_shows_every_case(capsys: pytest.CaptureFixture[str]) -> None:
    assert command.main(["--list"]) == 0
    shown = capsys.readouterr().out
    for case in find_cases():
        assert case.name in shown


def test_what_was_not_logged_is_not_recorded(
    folder: Path, calls: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("ZEROS", "")
    assert run(folder, "gpt3_offload", "--platform", "cpu", "--record") == 1
    assert "needs --log-num-zeros-in-grad" in " ".join(capsys.readouterr().out.split())
    assert not list(folder.rglob("golden*"))


def test_a_launch_of_several_ranks_shows_the_first_and_the_last(folder: Path) -> None:
    words = training(folder, num_ranks=4).command()
    assert words[words.index("--tee") + 1] == "0:3,3:3"
    assert words[words.index("--nproc_per_node") + 1] == "4"
    assert json.dumps(words)


def test_every_replaced_flag_is_of_a_gpu_only(folder: Path) -> None:
    used = {flag for case in find_cases() for flag in case.config.MODEL_ARGS}
    assert set(launch.CPU_ARGUMENTS) & used >= {"--transformer-impl", "--bf16"}
