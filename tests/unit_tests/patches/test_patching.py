# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Patches are applied all or none, once, and undone with their last user."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from megatron.core import package_info

from megatron.slipstream.patches import patching
from megatron.slipstream.patches.attributes import replace_on
from megatron.slipstream.patches.patching import Patch
from megatron.slipstream.patches.releases import TESTED_RELEASES, installed_version, release


def double(original: Any) -> Any:
    return lambda value: 2 * original(value)


class Base:
    def inherited(self) -> str:
        return "original"


class Owner(Base):
    pass


@pytest.fixture(autouse=True)
def target(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    module: Any = ModuleType("patch_target")
    module.there = lambda value: value
    module.Owner = Owner
    monkeypatch.setitem(sys.modules, "patch_target", module)
    before = patching.active()
    yield module
    assert patching.active() == before


THERE = Patch("patch_target.there", double, "a function that exists")
GONE = Patch("patch_target.gone", double, "a function that does not")


def test_a_patch_is_applied_once_and_stays_until_its_last_user_is_done(target: Any) -> None:
    original = target.there
    patching.apply([THERE], "one")
    patching.apply([THERE], "one")
    patching.apply([THERE], "another")
    assert target.there(3) == 6
    patching.undo("one")
    assert target.there(3) == 6
    patching.undo("another")
    assert target.there is original


def test_a_missing_target_is_named_and_nothing_changes(target: Any) -> None:
    original = target.there
    with pytest.raises(RuntimeError, match="patch_target.gone does not exist") as error:
        patching.apply([THERE, GONE], "one")
    assert target.there is original
    message = str(error.value)
    assert release() in message
    assert GONE.reason in message
    assert all(tested in message for tested in TESTED_RELEASES)


def test_the_release_that_is_imported_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    # A source tree that comes before the installed wheel.
    monkeypatch.setattr(package_info, "VERSION", (0, 20, 0, "rc1"))
    monkeypatch.setattr(package_info, "PRE_RELEASE", "rc1")
    monkeypatch.setattr(package_info, "MINOR", 20)
    assert installed_version() == "0.20"
    with pytest.raises(RuntimeError, match=r"does not exist in megatron-core 0[.]20[.]0rc1 with"):
        patching.apply([GONE], "one")


def test_without_megatron_core_a_missing_target_is_named_too(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "megatron.core", None)
    with pytest.raises(RuntimeError, match="gone does not exist in torch "):
        patching.apply([GONE], "one")


def test_a_target_with_other_parameters_is_an_error(target: Any) -> None:
    patching.apply([Patch("patch_target.there", double, "", parameters=("value",))], "one")
    patching.undo("one")
    with pytest.raises(RuntimeError, match=r"takes \(value\) in .* expects \(tensor, name\)"):
        patching.apply([Patch("patch_target.there", double, "", parameters=("tensor", "name"))], 1)


def test_what_is_not_needed_is_left_alone(target: Any) -> None:
    original = target.there
    patching.apply([Patch("patch_target.there", double, "", condition=lambda: False)], "one")
    patching.apply([Patch("patch_target.gone", double, "", condition=lambda: False)], "one")
    assert target.there is original


def test_an_inherited_method_is_inherited_again() -> None:
    patch = Patch("patch_target.Owner.inherited", lambda _: lambda self: "patched", "")
    with patching.applied([patch]):
        assert (Owner().inherited(), Base().inherited()) == ("patched", "original")
    assert "inherited" not in vars(Owner)


def test_two_patches_of_one_target_are_undone_in_reverse(target: Any) -> None:
    original = target.there
    other = Patch("patch_target.there", lambda f: lambda value: f(value) + 1, "")
    with patching.applied([THERE, other]):
        assert target.there(3) == 7
    assert target.there is original


def test_what_others_have_replaced_since_stays(target: Any, caplog: Any) -> None:
    patching.apply([THERE], "one")
    theirs = target.there = lambda value: None
    patching.logger.propagate, before = True, patching.logger.propagate
    patching.undo("one")
    patching.logger.propagate = before
    assert target.there is theirs
    assert "patch_target.there has been replaced again" in caplog.text


@pytest.mark.parametrize("has_own", [True, False])
def test_a_method_of_one_object_is_replaced_and_given_back(has_own: bool) -> None:
    owner = Owner()
    if has_own:
        owner.inherited = lambda: "its own"
    undo = replace_on(owner, "inherited", lambda: "replaced")
    assert (owner.inherited(), Owner().inherited()) == ("replaced", "original")
    undo()
    assert owner.inherited() == ("its own" if has_own else "original")
    assert ("inherited" in vars(owner)) is has_own


def test_an_error_inside_undoes_the_patches(target: Any) -> None:
    original = target.there
    with pytest.raises(ZeroDivisionError), patching.applied([THERE]):
        raise ZeroDivisionError
    assert target.there is original


def test_modules_that_are_no_real_modules_can_be_targets(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = SimpleNamespace(there=1)
    monkeypatch.setitem(sys.modules, "patch_target", owner)
    with patching.applied([Patch("patch_target.there", lambda _: 2, "")]):
        assert owner.there == 2
    assert owner.there == 1
