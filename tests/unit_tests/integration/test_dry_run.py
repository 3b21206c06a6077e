# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A dry run finds all flags that training would refuse one after the other.

The shims stay in the forked process that each case runs in.
"""

from __future__ import annotations

import dataclasses
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_function
from ranks import import_training

from megatron.slipstream.integration.entry import checks
from megatron.slipstream.integration.entry.checks import parse_and_validate
from megatron.slipstream.integration.entry.model_arguments import configured_by_flags
from megatron.slipstream.options import rules
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.options.rules import Rule
from megatron.slipstream.patches import releases

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the messages are those of a machine without a GPU"
)

MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 8 --lr 1e-3
    --train-iters 1 --eval-interval 1
""".split()
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 64".split()
OFFLOAD = "--fine-grained-activation-offloading --offload-modules".split()


def in_child(folder: Path, work: Callable[[], dict[str, Any]], **variables: str) -> dict[str, Any]:
    """The result of ``work`` in a forked process, its output, and whether variables and arguments
    are unchanged.

    Warnings and logs of the modules that are imported there count as printed.
    """
    answer = folder / "answer.json"

    def call() -> int:
        os.environ.pop("NVTE_CPU_OFFLOAD_V1", None)
        before, argv = dict(os.environ), list(sys.argv)
        result = work()
        result["is_clean"] = dict(os.environ) == before and sys.argv == argv
        answer.write_text(json.dumps(result))
        return 0

    import_training()
    done = run_function(call, environment=variables)
    assert done.returncode == 0, done.stderr
    return {**json.loads(answer.read_text()), "printed": done.stdout + done.stderr}


def check(
    folder: Path, flags: Sequence[str], num_processes: int | None = None, **variables: str
) -> dict[str, Any]:
    """``check_flags`` in a forked process."""

    def work() -> dict[str, Any]:
        args, number, findings = checks.check_flags(flags, num_processes)
        assert {f.severity for f in findings} <= {"error", "warning"}
        return {
            "args": args is not None,
            "num_processes": number,
            "errors": [f.text for f in findings if f.severity == "error"],
            "warnings": [f.text for f in findings if f.severity == "warning"],
            "rules": [f.rule for f in findings],
        }

    return in_child(folder, work, **variables)


@pytest.mark.releases
def test_flags_that_train_are_all_right(tmp_path: Path) -> None:
    result = check(tmp_path, [*MODEL, *MOCK, *OFFLOAD, "core_attn", "attn_proj"])
    assert result == {
        "args": True,
        "num_processes": 1,
        "errors": [],
        "warnings": [],
        "rules": [],
        "is_clean": True,
        "printed": "",
    }


def test_every_broken_rule_is_found_at_once(tmp_path: Path) -> None:
    if not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has no activation_offload_fraction")
    flags = [*OFFLOAD, "core_atn", "attn_proj", "moe_act", "mlp_nrm"]
    flags += "--offload-release-lag -1 --activation-offload-fraction 2".split()
    flags += "--offload-target-memory-gib 0 --cpu-offloading-num-layers 1".split()
    flags += "--transformer-impl transformer_engine --offload-backend cuda".split()
    flags += "--num-attention-heads 5 --thd-max-tokens 7".split()
    result = check(tmp_path, [*MODEL, *flags])
    # One finding for each flag; the last one is about missing data.
    beginnings = (
        "offload_modules contains 'core_atn'",
        "offload_modules contains 'mlp_nrm'",
        "offload_modules contains 'attn_proj' without 'core_attn'",
        "offload_modules=['core_atn', 'attn_proj', 'moe_act', 'mlp_nrm'] names expert modules",
        "activation_offload_fraction=2.0",
        "cpu_offloading=True is not supported with offloading",
        "offload_release_lag=-1",
        "offload_target_memory_gib=0.0",
        "thd_max_tokens=7",
        "offload_backend=cuda",
        "transformer_impl=transformer_engine",
        "data_path is not set",
    )
    *errors, of_megatron = result["errors"]
    assert [e for e, text in zip(errors, beginnings, strict=True) if not e.startswith(text)] == []
    assert all("; " in error for error in errors), "each says what to do"
    assert "num_attention_heads" in of_megatron
    assert result["rules"] == [
        *["offload_modules"] * 4,
        *("activation_offload_fraction", "cpu_offloading", "offload_release_lag"),
        *("offload_target_memory_gib", "thd_max_tokens", "offload_backend", "transformer_impl"),
        *("data_path", "refused-by-megatron"),
    ]
    assert (result["printed"], result["is_clean"]) == ("", True)


@pytest.mark.parametrize(
    "flags, words",
    [
        (["--offload-moduls", "core_attn"], ["--offload-moduls", "did you mean --offload-modules"]),
        (["--yaml-cfg", "no.yaml"], ["yaml_cfg", "give the settings as flags"]),
        (["--hidden-size", "big"], ["--hidden-size", "'big'"]),
        (["--help"], ["leave --help out"]),
    ],
)
def test_flags_that_cannot_be_parsed_are_one_refusal(
    tmp_path: Path, flags: list[str], words: list[str]
) -> None:
    result = check(tmp_path, [*MODEL, *MOCK, *flags])
    assert not result["args"]
    (error,) = result["errors"]
    for word in words:
        assert word in error
    assert result["is_clean"]


def test_what_megatrons_configuration_refuses_is_found_too(tmp_path: Path) -> None:
    # A rule of its TransformerConfig, not of its arguments.
    flags = "--recompute-granularity selective --recompute-modules no_module".split()
    result = check(tmp_path, [*MODEL, *MOCK, *flags])
    assert result["rules"] == ["refused-by-megatron"]
    assert "no_module" in result["errors"][0]


@pytest.mark.parametrize(
    "flags, given, number",
    [
        ("--tensor-model-parallel-size 2 --pipeline-model-parallel-size 2", None, 4),
        ("--num-experts 4 --expert-model-parallel-size 4", None, 4),
        ("--context-parallel-size 2", None, 2),
        ("--tensor-model-parallel-size 2", 8, 8),
    ],
)
def test_flags_are_checked_for_as_many_processes_as_they_need(
    tmp_path: Path, flags: str, given: int | None, number: int
) -> None:
    result = check(tmp_path, [*MODEL, *MOCK, *flags.split()], given)
    assert (result["num_processes"], result["errors"]) == (number, [])


def test_a_launcher_tells_the_number_of_processes(tmp_path: Path) -> None:
    flags = [*MODEL, *MOCK, "--tensor-model-parallel-size", "2"]
    assert check(tmp_path, flags, RANK="3", WORLD_SIZE="4")["num_processes"] == 4
    assert check(tmp_path, flags, 8, RANK="3", WORLD_SIZE="4")["num_processes"] == 8


def test_a_number_of_processes_that_does_not_fit_is_refused_by_megatron(tmp_path: Path) -> None:
    result = check(tmp_path, [*MODEL, *MOCK, "--tensor-model-parallel-size", "2"], 3)
    assert result["rules"] == ["refused-by-megatron"]
    assert "3" in result["errors"][0]


def test_a_flag_that_megatron_misses_is_named_as_a_flag(tmp_path: Path) -> None:
    at = MODEL.index("--micro-batch-size")
    result = check(tmp_path, [*MODEL[:at], *MODEL[at + 2 :], *MOCK])
    (error,) = (e for e in result["errors"] if e.startswith("megatron-core's own validation"))
    assert "is not None; set --micro-batch-size" in error


def test_files_that_cannot_be_written_are_found(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / "file" / "record.json"
    result = check(tmp_path, [*MODEL, *MOCK, "--run-record-path", str(path)])
    (error,) = result["errors"]
    assert error.startswith(f"run_record_path={path} is not in a folder")


def test_every_dataset_is_looked_at(tmp_path: Path) -> None:
    flags = ["--data-path", "no/one", "no/two", *MOCK[1:]]
    errors = check(tmp_path, [*MODEL, *flags])["errors"]
    beginnings = [f"data_path=no/{name} does not exist" for name in ("one", "two")]
    assert [e[: len(b)] for e, b in zip(errors, beginnings, strict=True)] == beginnings


@pytest.mark.parametrize("table", ["EXPERT_RULES", "MACHINE_RULES"])
def test_a_rule_in_a_table_is_one_of_training_doctor_and_plan(
    table: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    always_broken = Rule("tomorrow", "error", "a check of tomorrow", "cure")
    monkeypatch.setattr(checks, table, (*getattr(checks, table), always_broken))
    result = check(tmp_path, [*MODEL, *MOCK])
    assert result["errors"] == ["a check of tomorrow; cure"]

    def error_of(use: Callable[[list[str]], object]) -> str:
        def work() -> dict[str, Any]:
            try:
                use([*MODEL, *MOCK])
            except ValueError as error:
                return {"error": str(error)}
            return {"error": ""}

        return str(in_child(tmp_path, work)["error"])

    assert error_of(parse_and_validate) == "a check of tomorrow; cure"
    # A plan is made for another machine.
    is_of_plan = table == "EXPERT_RULES"
    assert error_of(configured_by_flags) == ("a check of tomorrow; cure" if is_of_plan else "")


def test_settings_of_the_engine_do_not_matter_where_none_is_asked_for(tmp_path: Path) -> None:
    flags = [*MODEL, *MOCK, "--offload-backend", "cuda", "--offload-modules=core_attn"]
    result = check(tmp_path, flags)
    assert result["errors"] == []
    (warning,) = result["warnings"]
    assert warning.startswith("offload_modules, offload_backend: no effect without fine_grained")
    result = check(tmp_path, [*MODEL, *MOCK, *OFFLOAD, "core_attn", "attn_proj"])
    assert result["warnings"] == []


OWN = [
    "--offload-backend=cpu",
    *"--offload-release-lag 3 --offload-prefetch-depth 3 --offload-target-memory-gib 3".split(),
    *"--offload-host-memory-limit-bytes 1000 --offload-native off --offload-verify 5".split(),
    *"--offload-trace-path trace.json --offload-report-path report.json".split(),
    *"--offload-nvtx-ranges --offload-checkpoint-inputs".split(),
]
"""All of our engine's options but those that exclude one of them."""


def test_settings_of_the_engine_do_not_matter_to_another_one(tmp_path: Path) -> None:
    flags = [*MODEL, *MOCK, *OFFLOAD, "core_attn", "--offload-engine", "megatron", *OWN]
    warnings = check(tmp_path, flags)["warnings"]
    (warning,) = [text for text in warnings if "no effect" in text]
    names, rest = warning.split(": ")
    assert rest.startswith("no effect with offload_engine=megatron")
    assert rest.endswith("set offload_engine=slipstream, or leave them out")
    options = {field.name for field in dataclasses.fields(OffloadConfig)}
    # The target is given, and other goals are refused beside it.
    other_goals = {"offload_max_overhead_percent", "activation_memory_budget"}
    assert set(names.split(", ")) == options - {"offload_engine"} - other_goals


def former_flags() -> list[str]:
    """Graphs of layers by the flag of earlier releases, which megatron translates."""
    modules = [*OFFLOAD, "attn_norm", "core_attn"]
    return [*MODEL, *MOCK, *modules, "--external-cuda-graph", "--multi-latent-attention"]


def has_gpu_and_te(monkeypatch: pytest.MonkeyPatch) -> None:
    """Leave out the checks of a machine, which refuse CUDA graphs."""
    monkeypatch.setattr(checks, "check_run", lambda _: [])


def test_a_warning_is_the_same_for_an_option_by_a_former_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    has_gpu_and_te(monkeypatch)
    expected = "offload_modules: attn_norm of the layers that CUDA graphs capture"
    result = check(tmp_path, former_flags())
    assert [text for text in result["warnings"] if text.startswith(expected)], result

    def work() -> dict[str, Any]:
        said: list[str] = []
        monkeypatch.setattr(rules.logger, "warning", lambda form, *of: said.append(form % of))
        parse_and_validate(former_flags())
        return {"said": said}

    said = in_child(tmp_path, work, NVTE_CPU_OFFLOAD_V1="1")["said"]
    assert len([text for text in said if text.startswith(expected)]) == 1


def test_what_is_refused_with_its_cure_is_not_refused_again_by_megatron(tmp_path: Path) -> None:
    result = check(tmp_path, [*MODEL, *MOCK, *OFFLOAD, "core_atn"])
    (error,) = result["errors"]
    assert "did you mean 'core_attn'" in error


def test_variables_are_as_before_whatever_was_done_to_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("GIVEN", "1")
    monkeypatch.delenv("DEFAULT", raising=False)
    before = dict(os.environ)
    with checks.as_in_training(GIVEN="2", DEFAULT="3"):
        assert (os.environ["GIVEN"], os.environ["DEFAULT"]) == ("1", "3")
        os.environ.update({"GIVEN": "4", "NEW": "5"})
    assert dict(os.environ) == before


def test_nothing_is_heard_of_what_megatron_says(
    capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    with checks.as_in_training():
        print("a table")
        print("a complaint", file=sys.stderr)
        warnings.warn("a warning", stacklevel=1)
        logging.getLogger("megatron").error("an error")
    assert capsys.readouterr() == ("", "")
    assert caplog.messages == []
    logging.getLogger("megatron").error("heard again")
    assert caplog.messages == ["heard again"]
