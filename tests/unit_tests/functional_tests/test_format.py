# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Cases and recipes are read as Megatron-LM's scripts read theirs, and all of ours can be."""

from __future__ import annotations

import dataclasses
import json
import shlex
import subprocess
from pathlib import Path

import pytest
from forked import run_script

from megatron.slipstream.config import OffloadConfig
from tools.functional_tests import recipes
from tools.functional_tests.cases import (
    Case,
    command_line,
    expand,
    find_cases,
    load_case,
    without_offloading,
)
from tools.functional_tests.checks import metrics_of
from tools.functional_tests.command import ENVIRONMENT, _parser
from tools.functional_tests.launch import Training
from tools.functional_tests.recipes import job_for, load_jobs

CONFIG = """\
MODEL_ARGS:
  --train-iters: 4
{arguments}TEST_TYPE: {kind}
{rest}"""


def write_case(
    folder: Path, arguments: str = "", kind: str = "regular", rest: str = "", name: str = "a_case"
) -> Path:
    case = folder / "gpt" / name
    case.mkdir(parents=True)
    lines = "".join(f"  {line}\n" for line in arguments.splitlines())
    content = CONFIG.format(arguments=lines, kind=kind, rest=rest)
    (case / "model_config.yaml").write_text(content)
    return case


def words(folder: Path, arguments: str, **variables: str) -> list[str]:
    """Flags of a case with these arguments, beside its length."""
    case = load_case(write_case(folder, arguments))
    assert case.config.MODEL_ARGS["--train-iters"] == "4"
    return command_line(case.arguments(), variables)[2:]


# --- MODEL_ARGS -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "line, expected",
    [
        ("--bf16: true", ["--bf16"]),
        ("--num-layers: 4", ["--num-layers", "4"]),
        ("--norm-epsilon: 1e-6", ["--norm-epsilon", "1e-6"]),
        ("--min-lr: 1.0e-5", ["--min-lr", "1.0e-5"]),
        ("--lr: .010", ["--lr", ".010"]),
        ("--split: 949,50,1", ["--split", "949,50,1"]),
        ('--modules: "[core_attn attn_proj]"', ["--modules", "core_attn", "attn_proj"]),
        ('--moe-layer-freq: "([0]*3+[1]*12)"', ["--moe-layer-freq", "([0]*3+[1]*12)"]),
        ('--moe-layer-freq: "([0] * 3)"', ["--moe-layer-freq", "([0] * 3)"]),
        ("--wandb-exp-name: two words", ["--wandb-exp-name", "two words"]),
        (r"--layout: Et*3\\|\\(tt\\|\\)*6mL # says why", ["--layout", "Et*3|(tt|)*6mL"]),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)  # fmt: skip
def test_a_value_becomes_words(tmp_path: Path, line: str, expected: list[str]) -> None:
    assert words(tmp_path, line) == expected


@pytest.mark.parametrize("text", [r"a\\|b", r"\\(x\\)", "plain", r"a\\\\b", "'it''s'"])
def test_other_values_are_what_a_shell_that_reads_them_twice_makes_of_them(
    tmp_path: Path, text: str
) -> None:
    script = (
        'value=$(printf "%s\\n" "$1" | xargs); eval "words=($value)"; printf "%s\\n" "${words[@]}"'
    )
    by_shell = subprocess.run(
        ["bash", "-c", script, "bash", text], capture_output=True, text=True, check=True
    ).stdout.splitlines()
    assert words(tmp_path, f"--flag: {json.dumps(text)}") == ["--flag", *by_shell]


def test_variables_are_put_in_and_others_left(tmp_path: Path) -> None:
    line = "--save: ${CHECKPOINT_SAVE_PATH}/$NAME/${UNKNOWN}"
    given = {"CHECKPOINT_SAVE_PATH": "/out put", "NAME": "x"}
    assert words(tmp_path, line, **given) == ["--save", "/out put/x/${UNKNOWN}"]
    assert expand("$A${A}$AB", {"A": "1"}) == "11$AB"


@pytest.mark.parametrize("value", ["false", "null", ""])
def test_a_flag_is_left_out_and_not_set_to_nothing(tmp_path: Path, value: str) -> None:
    case = write_case(tmp_path, f"--bf16: {value}")
    with pytest.raises(ValueError, match="MODEL_ARGS: --bf16: .* is not supported .*leave"):
        load_case(case)


@pytest.mark.parametrize(
    "arguments, kind, rest, message",
    [
        ("bf16: true", "regular", "", "'bf16' is no flag"),
        ("--x: [a, b]", "regular", "", r"MODEL_ARGS.--x: Input should be a valid string"),
        ("", "nightly", "", "TEST_TYPE: Input should be 'regular' or 'ckpt-resume'"),
        ("", "regular", "MODEL_ARG_2: {}\n", "MODEL_ARG_2: Extra inputs are not permitted"),
        ("", "regular", "MODEL_ARGS_2: {--bf16: true}\n", "MODEL_ARGS_2 has no --train-iters"),
        ("--load: x", "ckpt-resume", "", "has no --save"),
        ("--x: 'a", "regular", "", "is no YAML"),
    ],
)
def test_what_is_not_in_the_format_is_refused_by_file_and_field(
    tmp_path: Path, arguments: str, kind: str, rest: str, message: str
) -> None:
    case = write_case(tmp_path, arguments, kind, rest)
    with pytest.raises(ValueError, match=message) as refusal:
        load_case(case)
    assert str(case / "model_config.yaml") in str(refusal.value)


def test_the_second_training_has_its_own_flags_where_a_case_gives_some(tmp_path: Path) -> None:
    plain = load_case(write_case(tmp_path, "--bf16: true"))
    assert plain.arguments(2) == plain.arguments(1)
    rest = "MODEL_ARGS_2:\n  --train-iters: 4\n  --fp16: true\n"
    case = load_case(write_case(tmp_path, "--bf16: true", rest=rest, name="other"))
    assert "--bf16" in case.arguments(1)
    assert "--fp16" in case.arguments(2)
    assert "--bf16" not in case.arguments(2)


def test_without_offloading_a_case_is_otherwise_the_same() -> None:
    own = {f"--{field.name.replace('_', '-')}": "1" for field in dataclasses.fields(OffloadConfig)}
    kept = {"--bf16": "true", "--optimizer-cpu-offload": "true", "--train-iters": "4"}
    megatron = {
        "--fine-grained-activation-offloading": "true",
        "--offload-modules": "[core_attn]",
        "--min-offloaded-tensor-size": "1",
        "--activation-offload-fraction": "0.5",
        "--delta-offload-bytes-across-pp-ranks": "1",
        "--delay-offload-until-cuda-graph": "true",
    }
    assert without_offloading({**megatron, **kept, **own}) == kept


def test_an_unknown_case_is_refused_with_the_nearest(tmp_path: Path) -> None:
    write_case(tmp_path, name="gpt3_offload")
    with pytest.raises(ValueError, match="gpt3_ofload is not .* did you mean gpt3_offload?"):
        find_cases(["gpt3_ofload"], tmp_path)


# --- recipes --------------------------------------------------------------------------------------

RECIPE = """\
type: basic
format_version: 1
maintainers: [slipstream]
loggers: [stdout]
spec:
  name: "{test_case}_{environment}"
  model: gpt
  nodes: 1
  gpus: 1
  platforms: cpu
  script: |-
    ./run functional-tests {test_case} --platform {platforms}
products:
  - test_case: [one]
    products:
      - environment: [dev, lts]
        scope: [mr]
        platforms: [cpu, h200]
  - test_case: [two]
    products:
      - environment: [dev]
        scope: [nightly]
        platforms: [h200]
        gpus: [2]
"""


def write_recipe(folder: Path, text: str = RECIPE) -> Path:
    path = folder / "h200" / "gpt.yaml"
    path.parent.mkdir()
    path.write_text(text)
    return path


def test_a_recipe_combines_its_lists_and_its_products_override_its_spec(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    jobs = load_jobs(tmp_path)
    assert len(jobs) == 5
    assert {(job.environment, job.platform) for job in jobs if job.case == "one"} == {
        ("dev", "cpu"), ("dev", "h200"), ("lts", "cpu"), ("lts", "h200"),
    }  # fmt: skip
    (two,) = (job for job in jobs if job.case == "two")
    assert (two.num_ranks, two.scope) == (2, "nightly")
    assert two.script == "./run functional-tests two --platform h200"
    assert job_for(jobs, "one", "h200", "lts").num_ranks == 1


def test_a_case_on_a_platform_without_recipe_is_refused_with_those_it_has(tmp_path: Path) -> None:
    write_recipe(tmp_path)
    jobs = load_jobs(tmp_path)
    with pytest.raises(ValueError, match="two is not supported on platform cpu.* h200"):
        job_for(jobs, "two", "cpu", "dev")


def test_an_unknown_field_of_a_recipe_is_refused(tmp_path: Path) -> None:
    path = write_recipe(tmp_path, RECIPE.replace("  gpus: 1\n", "  gpus: 1\n  n_repeat: 5\n"))
    with pytest.raises(ValueError, match="spec.n_repeat: Extra inputs") as refusal:
        load_jobs(tmp_path)
    assert str(path) in str(refusal.value)


# --- those of this repository ---------------------------------------------------------------------


def our_cases() -> list[Case]:
    return find_cases()


def test_every_case_is_in_a_recipe_of_its_model_and_every_recipe_has_its_case() -> None:
    jobs, cases = load_jobs(), our_cases()
    assert {(job.model, job.case) for job in jobs} == {(case.model, case.name) for case in cases}
    assert {job.environment for job in jobs} == {ENVIRONMENT}
    paths = {path.parent.name for path in recipes.RECIPES.glob("*/*.yaml")}
    assert {job.platform for job in jobs} == paths


def test_a_recipe_starts_the_runner_with_arguments_that_it_takes() -> None:
    for job in load_jobs():
        run, command, *arguments = shlex.split(job.script)
        assert (run, command) == ("./run", "functional-tests")
        options = _parser().parse_args(arguments)
        assert (options.cases, options.platform) == ([job.case], job.platform)


def test_every_case_is_deterministic_and_asks_for_what_is_measured() -> None:
    for case in our_cases():
        assert case.offloads
        assert case.config.ENV_VARS["NVTE_ALLOW_NONDETERMINISTIC_ALGO"] == "0"
        assert metrics_of(case, "h200") == ("lm loss", "num-zeros")


def test_every_case_that_runs_without_a_gpu_has_golden_values_for_that() -> None:
    names = {job.case for job in load_jobs() if job.platform == "cpu"}
    assert len(names) >= 6
    for case in find_cases(sorted(names)):
        assert case.golden_path(ENVIRONMENT, "cpu").exists(), case.name


_PARSE = """
import argparse, json, pathlib, sys
from megatron.slipstream.integration import cpu_only
cpu_only.install_training_shims()
from megatron.training.arguments import add_megatron_arguments
from megatron.slipstream.integration.arguments import add_arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
add_arguments(parser)
for words in json.loads(pathlib.Path(sys.argv[1]).read_text()):
    parser.parse_args(words)
"""


def test_the_training_script_knows_every_flag_of_every_case(tmp_path: Path) -> None:
    """Those for a GPU too, which may not have been tried yet."""
    lines = []
    for case in our_cases():
        for platform in ("cpu", "h200"):
            training = Training(case, True, platform, 1, tmp_path, tmp_path)
            lines.append(command_line(training.arguments(), {}))
    script, words = tmp_path / "parse.py", tmp_path / "words.json"
    script.write_text(_PARSE)
    words.write_text(json.dumps(lines))
    result = run_script(script, str(words))
    assert result.returncode == 0, result.stderr[-1000:]
