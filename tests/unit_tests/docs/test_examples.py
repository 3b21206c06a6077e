# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The examples in the documentation work: Python runs, and commands and flags exist.

A page's ``python`` blocks run in order in one namespace, without a GPU. A block that cannot run has
the reason in the line before it: ``<!-- not run: needs a GPU -->``.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import NamedTuple

import pytest
from doc_pages import FLAG, PAGES, ROOT, blocks_of, commands_in, inline_code, name_of
from forked import run_script

from megatron.slipstream import cli

RUN_ELSEWHERE = {
    "docs/user-guide/any-pytorch-model.md": "tests/unit_tests/attached/test_attach_messages.py",
    "docs/user-guide/frameworks/megatron-bridge.md": "tests/frameworks/test_megatron_bridge.py",
}
"""Pages whose Python needs more than a namespace, and the test that runs it."""

PAGES_WITH_PYTHON = [
    page
    for page in PAGES
    if name_of(page) not in RUN_ELSEWHERE
    and any(block.language == "python" and not block.not_run for block in blocks_of(page))
]

GIVEN = {
    "docs/user-guide/frameworks/README.md": """
from megatron.core.transformer import TransformerConfig
config = TransformerConfig(num_layers=2, hidden_size=16, num_attention_heads=2)
""",
}
"""Names that exist when the first line of a page runs."""

OTHER_PROGRAMS = {
    *("bash", "cat", "cd", "conda", "docker", "echo", "exit", "export", "git", "kubectl", "ls"),
    *("megatron", "mkdir", "numactl", "nvidia-cuda-mps-control", "nvidia-smi", "pip", "py-spy"),
    *("pyenv", "ray", "sbatch", "source", "srun", "sudo", "true", "ulimit", "unset", "uv"),
}
OTHER_FLAGS = {
    *("--config", "--config-name", "--cpunodebind", "--cpuset-mems", "--custom-megatron-init-path"),
    *("--external_plugins", "--gpus", "--ipc", "--megatron_extra_kwargs", "--mem", "--mem-bind"),
    *("--membind", "--nnodes", "--no-build-isolation", "--no-deps", "--nproc-per-node", "--pid"),
    *("--rm", "--runtime-env-json", "--shm-size", "--standalone", "--stat", "--ulimit"),
    *("--locked", "--wheel-dir"),
}
"""Flags of other programs."""


# In a separate process: install() and the shims change the process.
_TRY = """
import argparse, json, os, pathlib, sys, tempfile, traceback
given = json.loads(pathlib.Path(sys.argv[1]).read_text())
os.chdir(tempfile.mkdtemp())

from megatron.slipstream.integration import install
from megatron.slipstream.integration.cpu import cpu_only
from megatron.slipstream.integration.entry import arguments
failures = {}
for page, blocks in given["pages"].items():
    scope = {"__name__": "__main__"}
    try:
        for line, text in blocks:
            exec(compile("\\n" * line + text, page, "exec"), scope)
    except BaseException:
        failures[page] = traceback.format_exc()
    install.uninstall()

cpu_only.install_training_shims()
from megatron.training.arguments import add_megatron_arguments
parser = argparse.ArgumentParser(allow_abbrev=False)
add_megatron_arguments(parser)
arguments.add_arguments(parser)
refused = {}
for where, flags in given["trainings"]:
    try:
        parser.parse_args(flags)
    except ValueError as error:
        refused[where] = str(error)
options = [option for action in parser._actions for option in action.option_strings]
print("\\n" + json.dumps({"failures": failures, "refused": refused, "options": options}))
"""


class Tried(NamedTuple):
    """Results of the examples."""

    failures: dict[str, str]
    """Pages whose Python blocks do not run, with the traceback."""
    refused: dict[str, str]
    """Examples whose flags the training script refuses, with its error."""
    options: list[str]
    """Flags of the training script."""


@pytest.fixture(scope="module")
def tried(tmp_path_factory: pytest.TempPathFactory) -> Tried:
    pages = {
        name_of(page): [
            (0, GIVEN.get(name_of(page), "")),
            *(
                (block.line, block.text)
                for block in blocks_of(page)
                if block.language == "python" and not block.not_run
            ),
        ]
        for page in PAGES_WITH_PYTHON
    }
    folder = tmp_path_factory.mktemp("tried")
    script, given = folder / "try.py", folder / "given.json"
    script.write_text(_TRY)
    given.write_text(json.dumps({"pages": pages, "trainings": trainings()}))
    result = run_script(script, str(given), environment={"CUDA_VISIBLE_DEVICES": ""})
    assert result.returncode == 0, result.stderr[-4000:]
    return Tried(**json.loads(result.stdout.splitlines()[-1]))


# --- Python ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("page", PAGES_WITH_PYTHON, ids=name_of)
def test_the_python_of_a_page_runs(page: Path, tried: Tried) -> None:
    assert name_of(page) not in tried.failures, tried.failures[name_of(page)]


@pytest.mark.parametrize("page", RUN_ELSEWHERE)
def test_python_that_runs_elsewhere_does(page: str) -> None:
    assert Path(page).stem in (ROOT / RUN_ELSEWHERE[page]).read_text(encoding="utf-8")


# --- commands -------------------------------------------------------------------------------------


class Example(NamedTuple):
    """One command of a page."""

    where: str
    words: list[str]


def examples() -> list[Example]:
    return [
        Example(f"{name_of(page)}:{block.line}", words)
        for page in PAGES
        for block in blocks_of(page)
        if block.language == "bash" and not block.not_run
        for words in commands_in(block.text)
    ]


def training_flags(words: Sequence[str]) -> list[str] | None:
    """The flags that a command gives to the training script; None if it does not train."""
    if words[0].startswith("--"):
        return list(words)
    if words[:2] == ["./run", "train"]:
        return list(words[2:])
    if "pretrain_gpt.py" in words and words[0] in ("python", "torchrun"):
        return list(words[words.index("pretrain_gpt.py") + 1 :])
    return None


def trainings() -> list[tuple[str, list[str]]]:
    found = [(example.where, training_flags(example.words)) for example in examples()]
    return [(where, flags) for where, flags in found if flags]


def test_the_flags_of_trainings_are_accepted(tried: Tried) -> None:
    assert len(trainings()) > 5
    assert tried.refused == {}


@cache
def sub_commands() -> set[str]:
    cases = (ROOT / "run").read_text().partition("\ncase $command in\n")[2]
    return set(re.findall(r"^  ([a-z-]+)(?: \|[^)]*)?\)", cases, re.M))


@cache
def flags_in(*patterns: str) -> set[str]:
    """The flags that the source of scripts names."""
    paths = [path for pattern in patterns for path in ROOT.glob(pattern) if path.is_file()]
    assert paths, patterns
    return {flag for path in paths for flag in FLAG.findall(path.read_text(encoding="utf-8"))}


def problem_of(words: Sequence[str]) -> str:
    """The error in a command; empty if there is none."""
    match ["python" if word == "python3" else word for word in words]:
        case ["./run", name, *_] if name not in sub_commands():
            return f"./run has no sub-command {name}"
        case ["./run", "slipstream", *rest] | ["slipstream", *rest]:
            return problem_of_cli(rest)
        case ["./run", "report", *rest]:
            return problem_of_cli(["report", *rest])
        case ["./run", "python", *rest]:
            return problem_of(["python", *rest])
        case ["./run", "functional-tests", *rest]:
            return unknown(rest, {"--collect-only", *flags_in("tests/conftest.py")})
        case ["./run", "demo", *rest]:
            return unknown(rest, flags_in("examples/demo.py"))
        case ["./run", "docs" | "lint", *rest]:
            return unknown(rest, flags_in("run"))
        case ["python", "-m", module, *rest] if module.startswith(("benchmarks", "tools")):
            path = module.replace(".", "/")
            if not any((ROOT / f"{path}{end}").exists() for end in (".py", "/__main__.py")):
                return f"there is no module {module}"
            return unknown(rest, flags_in(f"{path}*.py", f"{path}/*.py", "benchmarks/run.py"))
        case ["python", "-m", "pytest", *rest] | ["pytest", *rest] | ["./run", "test", *rest]:
            missing = [w for w in rest if w.startswith("tests/") and not (ROOT / w).exists()]
            return f"there is no {missing[0]}" if missing else ""
        case ["python", script, *rest] if script.endswith(".py") and "/" in script:
            if not (ROOT / script).exists():
                return f"there is no {script}"
            return unknown(rest, flags_in(script))
        case ["pip", "install", *wanted] | ["uv", "pip", "install", *wanted]:
            return problem_of_extras(wanted)
        case [program, *_]:
            known = {"./run", "python", "torchrun", *OTHER_PROGRAMS}
            is_known = program in known or program.startswith("--")
            return "" if is_known else f"{program} is no program of ours"
    return "nothing is called"


def problem_of_cli(words: list[str]) -> str:
    try:
        cli._parser().parse_args(words)
    except SystemExit as end:
        return f"slipstream refuses it (status {end.code})" if end.code else ""
    return ""


def problem_of_extras(wanted: Sequence[str]) -> str:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for word in wanted:
        named = re.fullmatch(r"(?:megatron-slipstream|\.)\[([\w,]+)\]", word)
        for extra in named[1].split(",") if named else ():
            if extra not in project["optional-dependencies"]:
                return f"there is no extra {extra}"
    return ""


def unknown(words: Sequence[str], known: set[str]) -> str:
    strange = [w for w in words if w.startswith("--") and w.partition("=")[0] not in known]
    return f"there is no {strange[0]}" if strange else ""


def test_the_commands_of_the_pages_exist(capsys: pytest.CaptureFixture[str]) -> None:
    found = examples()
    assert len(found) > 20
    problems = [(example.where, problem_of(example.words)) for example in found]
    assert [f"{where}: {problem}" for where, problem in problems if problem] == []


def test_every_flag_that_a_page_names_exists(tried: Tried) -> None:
    known = {*tried.options, *OTHER_FLAGS} | flags_in(
        *("run", ".ci/run", "tools/**/*.py", "examples/*.py", "benchmarks/*.py"),
        *("tests/conftest.py", "megatron/slipstream/cli.py", "megatron/slipstream/*/*.py"),
    )

    def is_known(flag: str) -> bool:
        # '--reset-...' stands for several.
        return flag in known or (flag[-1] == "-" and any(k.startswith(flag) for k in known))

    strange = {
        name_of(page): {f for code in inline_code(page) for f in FLAG.findall(code)} - known
        for page in PAGES
    }
    strange = {page: {f for f in flags if not is_known(f)} for page, flags in strange.items()}
    assert {page: flags for page, flags in strange.items() if flags} == {}


_PATH = re.compile(r"(?:docs|tools|examples|benchmarks|tests|megatron/slipstream)/[\w./-]*\w")


@pytest.mark.parametrize("page", PAGES, ids=name_of)
def test_files_that_a_page_names_exist(page: Path) -> None:
    named = [code for code in inline_code(page) if _PATH.fullmatch(code)]
    assert [path for path in named if not (ROOT / path).exists()] == []


def test_questions_and_ways_name_modules_and_what_they_define() -> None:
    page = (ROOT / "docs" / "design" / "README.md").read_text(encoding="utf-8")
    section = page.partition("## Ten questions")[2].partition("\n## ")[0]
    rows = [line.split(" | ")[1] for line in section.splitlines() if line.endswith("|")]
    answers = [row for row in rows if row not in ("answer |", "--- |")]
    assert len(answers) >= 10
    section = page.partition("## The way of the data")[2].partition("\n## ")[0]
    ways = re.findall(r"^\d+\. (.*(?:\n  .*)*)", section, re.M)
    assert len(ways) == 10 + 8
    answers += ways
    package = ROOT / "megatron" / "slipstream"
    engine = package / "fine_grained_activation_offload"
    for answer in answers:
        codes = re.findall(r"`([^`]+)`", answer)
        paths = [code for code in codes if code.endswith((".py", ".h"))]
        assert paths, answer
        places = [[folder / path for folder in (engine, package)] for path in paths]
        files = [next((place for place in at if place.is_file()), at[-1]) for at in places]
        assert [str(file) for file in files if not file.is_file()] == []
        text = "".join(file.read_text(encoding="utf-8") for file in files)
        named = [code for code in codes if not code.endswith((".py", ".h"))]
        named = [re.split(r"[.:]", code.removesuffix("()"))[-1] for code in named]
        named += re.findall(r"\[(Note: [^]]+)\]", answer)
        assert [name for name in named if name not in text] == [], answer
