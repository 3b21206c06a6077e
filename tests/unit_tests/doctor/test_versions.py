# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Versions that the doctor supports are those that the package accepts."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.specifiers import SpecifierSet

from megatron.slipstream.doctor.versions import PACKAGES

ROOT = Path(__file__).resolve().parents[3]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_supported_versions_are_those_that_the_package_accepts() -> None:
    requirements = [*PROJECT["dependencies"], *PROJECT["optional-dependencies"]["te"]]
    accepted = {r.name: r.specifier for r in map(Requirement, requirements)}
    for name, distribution in (
        ("torch", "torch"),
        ("megatron-core", "megatron-core"),
        ("Transformer Engine", "transformer-engine"),
    ):
        assert SpecifierSet(PACKAGES[name].supported) == accepted[distribution]


def test_a_cure_installs_what_is_supported() -> None:
    for package in PACKAGES.values():
        (quoted,) = re.findall(r"'(.+)'", package.cure)
        assert Requirement(quoted).specifier == SpecifierSet(package.supported)
