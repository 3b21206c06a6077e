# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The table of patches holds for the installed megatron-core, and uninstall() undoes all of it."""

from __future__ import annotations

import ast
import re
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from megatron.slipstream.integration import install
from megatron.slipstream.integration.cpu import cpu_only
from megatron.slipstream.options import preflight
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import patching, table
from megatron.slipstream.patches.patching import Patch
from megatron.slipstream.patches.releases import TESTED_RELEASES, following, is_within
from megatron.slipstream.patches.table import Feature

pytestmark = pytest.mark.releases

ROWS = [patch for patch, _ in table.rows()]


def value_of(patch: Patch) -> Any:
    """The target's own value at its owner; None if it is inherited."""
    owner, name = patching.resolve(patch.target)
    return vars(owner).get(name)


@pytest.mark.parametrize("patch", ROWS, ids=lambda patch: patch.target)
def test_every_target_is_there_as_its_patch_expects_it(patch: Patch) -> None:
    if not patch.is_needed():
        pytest.skip("the installed packages do not need it")
    patch.check()
    assert len(patch.reason) > 5


def test_no_target_has_two_rows() -> None:
    targets = [patch.target for patch in ROWS]
    assert len(targets) == len(set(targets))


def test_install_applies_its_patches_and_uninstall_undoes_them() -> None:
    features = [f for f in Feature if "install" in f.value]
    patches = {p for feature in features for p in table.TABLE[feature] if p.is_needed()}
    assert len(patches) >= 10
    before = {patch: value_of(patch) for patch in patches}
    was_active = set(patching.active())
    install.install_at_first_call(OffloadConfig(offload_backend="cpu"))
    install.install(OffloadConfig(offload_backend="cpu", offload_checkpoint_inputs=True))
    table.apply(Feature.ENGINE_ON_GPU, Feature.PEAK_MEMORY)  # as on a GPU
    assert patches <= set(patching.active())
    for patch in patches - was_active:
        assert value_of(patch) is not before[patch], patch.target
    install.uninstall()
    for patch in patches:
        assert value_of(patch) is before[patch], patch.target
    assert set(patching.active()) == was_active


# --- targets that have moved ----------------------------------------------------------------------

SHIMS = (*cpu_only.CORE_SHIMS, *cpu_only.TRAINING_SHIMS)


def release_that_needs(patch: Patch) -> str:
    releases = (following(), *reversed(TESTED_RELEASES))
    return next(r for r in releases if is_within(r, patch.since, patch.until))


def move(path: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Take a name away, or where it is inherited or another package's, what has it."""
    try:
        owner, name = patching.resolve(path)
    except RuntimeError:  # The installed packages do not have it.
        return
    if name in vars(owner):
        monkeypatch.delattr(owner, name)
    if hasattr(owner, name):
        move(path.rpartition(".")[0], monkeypatch)


@pytest.mark.parametrize("patch", [*ROWS, *SHIMS], ids=lambda patch: patch.target)
def test_a_target_that_has_moved_is_an_error_and_not_one_that_needs_no_patch(
    patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    if patch in table.PEAKS and not patch.condition():
        pytest.skip("this torch has no such statistics")
    fresh = replace(patch, unless="")  # The row itself may be applied.
    monkeypatch.setattr(patching, "installed_version", lambda: release_that_needs(patch))
    monkeypatch.setattr(preflight, "is_installed", lambda _: True)
    was_active = patching.active()
    with monkeypatch.context() as moved:
        move(patch.target, moved)
        with pytest.raises(RuntimeError, match=f"^{re.escape(patch.target)} does not exist in .*"):
            patching.apply([fresh], "a test")
    assert patching.active() == was_active


@pytest.mark.parametrize("patch", ROWS, ids=lambda patch: patch.target)
@pytest.mark.parametrize("version", [*TESTED_RELEASES, following()])
def test_the_version_alone_says_which_release_needs_a_patch(
    version: str, patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(patching, "installed_version", lambda: version)
    plain = replace(patch, condition=lambda: True, unless="")
    if version in TESTED_RELEASES:
        is_listed = patch.releases == "all" or version.rpartition(".")[0] in patch.releases
        assert plain.is_needed() == is_listed
    else:  # What the newest release needs, a later one needs until it is known not to.
        assert plain.is_needed() == is_within(version, until=patch.until)


@pytest.mark.parametrize("patch", table.PEAKS, ids=lambda patch: patch.target)
def test_patches_that_attach_applies_need_no_megatron_core(
    patch: Patch, monkeypatch: pytest.MonkeyPatch
) -> None:
    def not_installed() -> str:
        raise ModuleNotFoundError("megatron.core")

    monkeypatch.setattr(patching, "installed_version", not_installed)
    assert patch.is_needed() in (True, False)


@pytest.mark.parametrize(
    "path",
    [
        table.GROUPS[0].target,
        "megatron.core.models.gpt.gpt_model.GPTModel.preprocess_for_fine_grained_offloading",
    ],
)
def test_a_name_that_has_moved_stops_the_installation(
    path: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    move(path, monkeypatch)
    was_active = patching.active()
    with pytest.raises(RuntimeError, match=f"^{re.escape(path)} does not exist"):
        install.install(OffloadConfig(offload_backend="cpu"))
    assert patching.active() == was_active
    assert install.installed() is None


def test_the_flag_of_transformer_engine_is_looked_for_where_it_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.extensions import transformer_engine

    assert (install._region_flag() is None) == (transformer_engine.cpu_offload is None)
    monkeypatch.setattr(preflight, "is_installed", lambda _: True)
    monkeypatch.setattr(transformer_engine, "cpu_offload", SimpleNamespace())
    with pytest.raises(RuntimeError, match="CPUOffloadEnabled does not exist"):
        install.install(OffloadConfig(offload_backend="cpu"))
    transformer_engine.cpu_offload.CPUOffloadEnabled = False
    flag = install._region_flag()
    assert flag is not None


# --- no name decides by its absence ---------------------------------------------------------------

PACKAGE = Path(patching.__file__).parents[1]
OTHERS = ("megatron.core", "megatron.training", "transformer_engine")


def questions(source: str) -> list[str]:
    """Calls that take a missing name of another package for one that is not needed."""
    tree = ast.parse(source)
    imported = {
        (alias.asname or alias.name).partition(".")[0]
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and (node.module or "").startswith(OTHERS)
        for alias in node.names
    }
    return [
        ast.unparse(node)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and (
            node.func.id == "hasattr"
            or (node.func.id == "getattr" and ast.unparse(node.args[-1]) == "None")
        )
        and any(isinstance(x, ast.Name) and x.id in imported for x in ast.walk(node.args[0]))
    ]


@pytest.mark.parametrize("folder", ["patches", "integration"])
def test_a_missing_name_of_another_package_is_never_one_that_is_not_needed(folder: str) -> None:
    found = {
        str(path.relative_to(PACKAGE)): asked
        for path in sorted((PACKAGE / folder).rglob("*.py"))
        if (asked := questions(path.read_text(encoding="utf-8")))
    }
    assert found == {}
    where = "from megatron.core import fused\n"
    assert questions(where + "getattr(getattr(fused, 'a', None), 'b', None)")
    assert questions(where + "hasattr(fused.Kernel, 'a')")
