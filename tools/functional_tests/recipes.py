# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Which cases run where: the recipes below tests/test_utils/recipes, in Megatron-LM's format.

A recipe is for the cases of one model on one kind of machine. Its ``spec`` has what all of them
share; an entry of ``products`` names cases and, in lists, what is combined with each other:
environments, scopes, platforms, and whatever of ``spec`` is another for these cases.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from tools.functional_tests.cases import ROOT, Strict, read_yaml

RECIPES = ROOT / "tests" / "test_utils" / "recipes"


class Spec(Strict):
    """What starts a case: ``script``, in which ``{field}`` stands for any of the others."""

    name: str
    model: str
    nodes: Literal["1"] = "1"
    gpus: int
    platforms: str
    script: str


class _Combination(Strict):
    environment: tuple[str, ...]
    scope: tuple[str, ...]
    platforms: tuple[str, ...]
    gpus: tuple[int, ...] = ()


class _Product(Strict):
    test_case: tuple[str, ...]
    products: tuple[_Combination, ...]


class _Recipe(Strict):
    type: Literal["basic"]
    format_version: Literal["1"]
    maintainers: tuple[str, ...]
    loggers: tuple[str, ...]
    spec: Spec
    products: tuple[_Product, ...]


@dataclass(frozen=True)
class Job:
    """One case on one platform."""

    model: str
    case: str
    environment: str
    scope: str
    platform: str
    num_ranks: int
    """GPUs, and where there are none, processes all the same."""
    script: str
    """The command that a CI system runs from the repository's root."""


def load_jobs(folder: Path = RECIPES) -> list[Job]:
    """Everything that the recipes ask for.

    Raises:
        ValueError: One is not in the format; names file and field.
    """
    paths = sorted(folder.glob("*/*.yaml"))
    return [job for path in paths for job in _jobs(read_yaml(path, _Recipe))]


def _jobs(recipe: _Recipe) -> Iterator[Job]:
    spec = recipe.spec
    for product in recipe.products:
        for case, one in itertools.product(product.test_case, product.products):
            combinations = itertools.product(
                one.environment, one.scope, one.platforms, one.gpus or (spec.gpus,)
            )
            for environment, scope, platform, gpus in combinations:
                script = spec.script.format(
                    **{
                        **spec.model_dump(exclude={"script", "name"}),
                        "test_case": case,
                        "environment": environment,
                        "platforms": platform,
                        "gpus": gpus,
                    }
                )
                yield Job(spec.model, case, environment, scope, platform, gpus, script)


def job_for(jobs: list[Job], case: str, platform: str, environment: str) -> Job:
    """The job of a case on a platform.

    Raises:
        ValueError: No recipe asks for it.
    """
    platforms = []
    for job in jobs:
        if job.case == case and job.environment == environment:
            if job.platform == platform:
                return job
            platforms.append(job.platform)
    where = f"it runs on {', '.join(platforms)}" if platforms else "add it to a recipe"
    raise ValueError(f"{case} is not supported on platform {platform}; {where}")
