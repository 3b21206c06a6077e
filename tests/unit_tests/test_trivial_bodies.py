# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The bodies with which ``find_unobserved`` replaces a function's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tools.trivial_bodies import Change, changes_of

SOURCE = '''
from contextlib import contextmanager
class Base:
    """A class."""
    def __init__(self): self.value = 1
    def bare(self):
        """No body."""
    def unset(self): raise NotImplementedError
    def none(self) -> None: self.value = 2
    def trivial(self) -> list[int]: return []
    @property
    def wide(self) -> bool:
        return self.value > 0
    def pair(self) -> tuple[int, str]: return 3, "x"
    def many(self) -> tuple[int, ...]: return 3, 4
    def other(self) -> "Base": return self
    def items(self):
        yield self.value
class Derived(Base):
    def none(self) -> None:
        super().none()
@contextmanager
def entered():
    raise KeyError
    yield
'''


@pytest.fixture
def changes(tmp_path: Path) -> dict[tuple[str, str], Change]:
    path = tmp_path / "module.py"
    path.write_text(SOURCE)
    found = changes_of(path)
    prefix = f"{tmp_path.name}/module.py: "
    assert all(change.name.startswith(prefix) for change in found)
    return {(change.name.removeprefix(prefix), change.body): change for change in found}


def test_values_are_the_trivial_ones_of_annotations(
    changes: dict[tuple[str, str], Change],
) -> None:
    examined = {name: body for (name, body), change in changes.items() if not change.why_not}
    assert ("Base.wide", "return False") in changes
    assert examined == {
        "Base.none": "return None",
        "Base.wide": "return True",
        "Base.pair": "return (0, '',)",
        "Base.many": "return ()",
        "Base.other": "return None",
        "Base.items": "return",
        "Derived.none": "return None",
        "entered": "yield; return",
    }


def test_what_is_not_examined_says_why(changes: dict[tuple[str, str], Change]) -> None:
    reasons = {name: change.why_not for (name, _), change in changes.items() if change.why_not}
    assert reasons == {
        "Base.__init__": "a special method",
        "Base.bare": "no body",
        "Base.unset": "no body",
        "Base.trivial": "a trivial body",
    }


def test_new_code_fits_into_the_function_that_there_is(
    changes: dict[tuple[str, str], Change],
) -> None:
    names: dict[str, Any] = {}
    exec(SOURCE, names)
    derived = names["Derived"]()

    def put(name: str, body: str, function: Callable[..., Any]) -> None:
        function.__code__ = changes[name, body].new_code()

    put("Derived.none", "return None", names["Derived"].none)  # It has a variable of its class.
    derived.none()
    assert derived.value == 1
    put("Base.items", "return", names["Base"].items)
    assert list(derived.items()) == []
    put("Base.pair", "return (0, '',)", names["Base"].pair)
    assert derived.pair() == (0, "")
    put("Base.wide", "return False", names["Base"].wide.fget)
    assert derived.wide is False
    put("entered", "yield; return", names["entered"].__wrapped__)
    with names["entered"]():
        pass


def test_a_change_is_another_one_when_its_function_changes(tmp_path: Path) -> None:
    path = tmp_path / "module.py"
    path.write_text("def f() -> int: return 1\ndef g() -> int: return 1\n")
    first, second = changes_of(path)
    path.write_text("def f() -> int: return 2\ndef g() -> int: return 1\n")
    again = changes_of(path)
    assert again[0].key != first.key
    assert again[1].key == second.key
