# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Megatron-LM with the patch series, and without the plugin, on CPUs.

Its ``pretrain_gpt.py`` trains the cases of ``test_cases`` whose flags the series has, bitwise as
ours does with the plugin and the same Megatron. Needs a checkout, which stays as it is:
``./run upstream --megatron DIR --test``.
"""

from __future__ import annotations

import importlib.util
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple, Optional

import pytest
from functional_cases import (
    ROOT,
    TIMEOUT_S,
    Job,
    arguments_of,
    command_line,
    environment_of,
    expand,
    load_jobs,
    return_to_half_way,
)
from patched_tree import run_tests

from megatron.slipstream.integration.entry.arguments import defaults_of_machine
from megatron.slipstream.launcher import free_port
from megatron.slipstream.options.datasets import read_tokenizer
from megatron.slipstream.options.fields import GROUPS
from megatron.slipstream.patches.releases import is_within
from tools.run_builtin_tests import TESTS as BUILTIN_TESTS
from tools.upstream.__main__ import copy_of_head
from tools.upstream.edits import version_of
from tools.upstream.modules import SUPPORT, TESTS
from tools.upstream.series import TEST_PLACES, make

SCRIPT = ROOT / "tests" / "support" / "trained_case.py"
SETTINGS = {
    "--offload-engine": "slipstream",
    "--offload-native": "off",
    # A plan has the limit, whose default is a part of what is free.
    "--offload-host-memory-limit-bytes": str(1 << 30),
}
TOKENIZER = "--tokenizer-json"
"""Our flag for the sizes of a tokenizer, which Megatron has flags for."""
OWN_FLAGS = {f"--{field.name.replace('_', '-')}" for group, _ in GROUPS for field in fields(group)}
CASES = [job for job in load_jobs() if job.platform == "cpu"]
pytestmark = pytest.mark.timeout(3600)


class Tree(NamedTuple):
    """A Megatron-LM, and how its ``pretrain_gpt.py`` is started."""

    script: Path
    paths: list[Path]
    """Where Python looks for modules first."""


@pytest.fixture(scope="module")
def trees(
    request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[dict[str, Tree]]:
    """The checkout with the series, and its packages with the plugin."""
    checkout = request.config.getoption("--megatron")
    if checkout is None:
        pytest.skip("needs a checkout: ./run upstream --megatron DIR --test")
    plain = tmp_path_factory.mktemp("plain")
    with copy_of_head(checkout.resolve()) as patched:
        _put_helpers(patched / "megatron")
        shutil.copytree(patched / "megatron", plain / "megatron")
        list(make(patched))
        yield {
            "plugin": Tree(ROOT / "pretrain_gpt.py", [plain, ROOT]),
            "patched": Tree(patched / "pretrain_gpt.py", [patched, patched / SUPPORT]),
        }


def _put_helpers(package: Path) -> None:
    """Use the compiled helpers of the installed release, and compile none at each start."""
    folder = package / "core" / "datasets"
    (folder / "Makefile").unlink()
    spec = importlib.util.find_spec("megatron.core.datasets.helpers_cpp")
    if spec is None or spec.origin is None:
        pytest.skip("needs the wheel of megatron-core, which has compiled helpers")
    shutil.copy(spec.origin, folder)


def test_tests_of_the_series_and_of_the_builtin_engine_pass(
    trees: dict[str, Tree], capsys: pytest.CaptureFixture[str]
) -> None:
    root = trees["patched"].script.parent
    new = (f"{folder}/{name}" for name, folder in TEST_PLACES.items())
    ours = (f"{TESTS}/offload_{room}" for room in ("engine", "plan"))
    done = run_tests(root, BUILTIN_TESTS, *new, *ours)
    with capsys.disabled():
        print(*done.stdout.splitlines()[-1:])
    assert done.returncode == 0, done.stdout[-5000:] + done.stderr[-1000:]


@pytest.mark.parametrize("job", CASES, ids=lambda job: job.case)
def test_a_case_computes_what_it_does_with_the_plugin(
    job: Job, trees: dict[str, Tree], tmp_path: Path
) -> None:
    lacking = _lacking(job, trees["patched"])
    if lacking:
        pytest.skip(f"{', '.join(sorted(lacking))} is not part of the series yet")
    is_old = not is_within(version_of(trees["patched"].script.parent), "0.19", "")
    if is_old and arguments_of(job).get("--cuda-graph-granularity") == "chunk":
        pytest.skip("the plugin refuses it, whose loop in 0.18 has no hook for built models")
    for run_number in range(1, 3 if job.config.TEST_TYPE == "ckpt-resume" else 2):
        plugin, patched = _train(job, trees, tmp_path, run_number)
        for ours, theirs in zip(plugin, patched, strict=True):
            for step, results in enumerate(ours["iterations"]):
                assert theirs["iterations"][step] == results, f"iteration {step + 1}"
            assert theirs == ours
            assert ours["moved_bytes"] > 0
        assert any(step["losses"] for step in patched[-1]["iterations"])


def _lacking(job: Job, tree: Tree) -> set[str]:
    """The flags of a case that are our own and that the tree has no field for."""
    config = tree.script.parent / "megatron/core/transformer/transformer_config.py"
    text = config.read_text()
    own = arguments_of(job).keys() & OWN_FLAGS - {TOKENIZER}
    return {flag for flag in own if f"    {flag[2:].replace('-', '_')}:" not in text}


def _tokenizer(file: Optional[str], variables: dict[str, str]) -> dict[str, str]:
    """Megatron's flags for the sizes of a tokenizer."""
    if file is None:
        return {}
    vocab_size, end_of_document = read_tokenizer(Path(expand(file, variables)))
    return {
        "--tokenizer-type": "NullTokenizer",
        "--vocab-size": str(vocab_size),
        "--null-tokenizer-eod-id": str(end_of_document),
    }


def _train(
    job: Job, trees: dict[str, Tree], folder: Path, run_number: int
) -> list[list[dict[str, Any]]]:
    """The results of each rank, with the plugin and in the patched tree."""
    started = {}
    for name, tree in trees.items():
        place = folder / name
        place.mkdir(exist_ok=True)
        if run_number == 2:
            return_to_half_way(job, place)
        environment = environment_of(job, place)
        subprocess.run(
            ["bash", "-ec", job.config.BEFORE_SCRIPT], check=True, cwd=ROOT, env=environment
        )
        arguments = arguments_of(job) | SETTINGS
        arguments |= _tokenizer(arguments.pop(TOKENIZER, None), environment)
        flags = command_line(arguments, environment)
        flags += defaults_of_machine(flags)
        environment |= {
            "PYTHONPATH": os.pathsep.join(map(str, tree.paths)),
            "WORLD_SIZE": str(job.num_ranks),
            "MASTER_ADDR": "localhost",
            "MASTER_PORT": str(free_port()),
        }
        for rank in range(job.num_ranks):
            file = place / f"result{run_number}.{rank}.json"
            with file.with_suffix(".log").open("w") as log:
                started[file] = subprocess.Popen(
                    [sys.executable, str(SCRIPT), str(tree.script), str(file), *flags],
                    cwd=tree.script.parent,
                    env={**environment, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
    try:
        for file, process in started.items():
            status = process.wait(TIMEOUT_S)
            assert status == 0, file.with_suffix(".log").read_text(errors="replace")[-5000:]
    finally:
        for process in started.values():
            process.kill()
    results = [json.loads(file.read_text()) for file in started]
    return [results[: job.num_ranks], results[job.num_ranks :]]
