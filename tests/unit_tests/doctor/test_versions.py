# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The matrix of versions is what the package accepts and what its tests run with."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron.slipstream.doctor.versions import MATRIX
from megatron.slipstream.patches import releases

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
PINNED = dict(
    line.split("==")
    for line in (ROOT / "constraints.txt").read_text().splitlines()
    if line and not line.startswith("#")
)


def test_supported_versions_are_those_that_the_package_accepts() -> None:
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["te"]]
    accepted = {r.name: r.specifier for r in map(Requirement, requirements)}
    for name, distribution in (
        ("torch", "torch"),
        ("megatron-core", "megatron-core"),
        ("Transformer Engine", "transformer-engine"),
    ):
        assert SpecifierSet(MATRIX[name].supported) == accepted[distribution]
    assert MATRIX["Python"].supported == PROJECT["requires-python"]


def test_tested_versions_are_those_that_the_tests_run_with() -> None:
    assert MATRIX["megatron-core"].tested == releases.TESTED_RELEASES
    assert PINNED["torch"] in MATRIX["torch"].tested
    assert PINNED["megatron-core"] in MATRIX["megatron-core"].tested


def test_a_cure_installs_what_is_supported() -> None:
    for package in MATRIX.values():
        quoted = re.search(r"'(.+)'", package.cure)
        if quoted:
            assert Requirement(quoted[1]).specifier == SpecifierSet(package.supported)


def test_every_range_has_a_cure_and_holds_what_was_tested() -> None:
    for package in MATRIX.values():
        assert bool(package.supported) == bool(package.cure)
        assert all(SpecifierSet(package.supported).contains(v) for v in package.tested)
