# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The table of patches holds for the installed megatron-core, and uninstall() undoes all of it."""

from __future__ import annotations

from typing import Any

import pytest

from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.integration import install
from megatron.slipstream.patches import patching, table
from megatron.slipstream.patches.patching import Patch
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


def test_a_target_that_has_moved_stops_the_installation(monkeypatch: pytest.MonkeyPatch) -> None:
    owner, name = patching.resolve(table.GROUPS[0].target)
    monkeypatch.delattr(owner, name)
    was_active = patching.active()
    with pytest.raises(RuntimeError, match=f"{name} does not exist"):
        install.install(OffloadConfig(offload_backend="cpu"))
    assert patching.active() == was_active
    assert install.installed() is None
