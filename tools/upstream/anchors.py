# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Edits of a Megatron-LM checkout at places that are found by name.

No edit knows a line number or repeats text of Megatron: a function, a class or a call inside of one
is found in the syntax tree, and what an edit relies on is asserted. A place that has moved is an
error that names it.
"""

from __future__ import annotations

import ast
import textwrap
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import lru_cache
from pathlib import Path
from typing import Union

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
Place = Union[Function, ast.ClassDef]


class MovedError(RuntimeError):
    """A place of Megatron-LM is not where, or not as, an edit expects it."""


@lru_cache(maxsize=8)
def _parsed(text: str) -> ast.Module:
    return ast.parse(text)


class Source:
    """A Python file of the checkout, edited in memory.

    Args:
        root: The checkout.
        path: The file, relative to it.
    """

    def __init__(self, root: Path, path: str) -> None:
        self.path = path
        self._file = root / path
        if not self._file.is_file():
            raise MovedError(f"{path} does not exist in this checkout; {_CURE}")
        self.text = self._file.read_text()

    def write(self) -> None:
        """Write the edited text."""
        _parsed(self.text)
        self._file.write_text(self.text)

    def has(self, name: str) -> bool:
        """Whether the file defines a function, class or method of this dotted name."""
        try:
            self.find(name)
        except MovedError:
            return False
        return True

    def find(self, name: str) -> Place:
        """Return the function, class or method of a dotted name.

        Raises:
            MovedError: There is none.
        """
        body: list[ast.stmt] = _parsed(self.text).body
        found: Place | None = None
        for part in name.split("."):
            named = [s for s in _definitions(body) if s.name == part]
            if not named:
                raise self.moved(name, "is not defined there")
            found = named[-1]
            body = found.body
        assert found is not None
        return found

    def function(self, name: str, *uses: str) -> Function:
        """Return a function; assert that it has parameters or variables called ``uses``."""
        found = self.find(name)
        if isinstance(found, ast.ClassDef):
            raise self.moved(name, "is a class, not a function")
        names = {node.id for node in ast.walk(found) if isinstance(node, ast.Name)}
        names |= {node.arg for node in ast.walk(found) if isinstance(node, ast.arg)}
        missing = sorted(set(uses) - names)
        if missing:
            raise self.moved(name, f"has no {', '.join(missing)}")
        return found

    def calling(self, name: str, callee: str, *uses: str) -> ast.stmt:
        """Return the only statement of a function that calls ``callee``."""
        function = self.function(name, *uses)
        calls = [s for s in ast.walk(function) if isinstance(s, ast.stmt) and _calls(s, callee)]
        if len(calls) != 1:
            raise self.moved(name, f"calls {callee} {len(calls)} times, not once")
        return calls[0]

    def moved(self, name: str, fault: str) -> MovedError:
        """Return the error that a place is not as expected."""
        return MovedError(f"{self.path}: {name} {fault}; {_CURE}")

    def insert(self, line: int, code: str, indent: int) -> None:
        """Insert code before a line, counted from 1."""
        lines = self.text.splitlines(keepends=True)
        lines[line - 1 : line - 1] = [textwrap.indent(textwrap.dedent(code), " " * indent)]
        self.text = "".join(lines)

    def replace(self, first: ast.AST, last: ast.AST, code: str) -> None:
        """Replace statements, from the first to the last."""
        indent = first.col_offset  # type: ignore[attr-defined]
        start, end = first.lineno, last.end_lineno  # type: ignore[attr-defined]
        lines = self.text.splitlines(keepends=True)
        lines[start - 1 : end] = [textwrap.indent(textwrap.dedent(code), " " * indent)]
        self.text = "".join(lines)

    def add_import(self, module: str, names: str) -> None:
        """Add ``from module import names`` at its place among those of megatron, if any."""
        line = f"from {module} import {names}\n"
        if line in self.text:
            return
        body = _parsed(self.text).body
        imports = [s for s in body if isinstance(s, (ast.Import, ast.ImportFrom))]
        for node in imports:
            # isort gives a name with another one a line of its own.
            is_renamed = " as " in names
            if isinstance(node, ast.ImportFrom) and node.module == module and not is_renamed:
                there = {ast.unparse(alias) for alias in node.names} | {names}
                self.replace(node, node, f"from {module} import {', '.join(sorted(there))}\n")
                return
        own = [s for s in imports if (getattr(s, "module", None) or "").startswith("megatron.")]
        later = [s for s in own if str(getattr(s, "module", "")) > module]
        if later:
            self.insert(later[0].lineno, line, 0)
        elif imports:
            # Behind a block of its own kind no line is left empty, behind another's one is.
            last = (own or imports)[-1]
            self.insert((last.end_lineno or 0) + 1, line if own else f"\n{line}", 0)
        else:
            raise self.moved("the first import", "is missing")


_CURE = "adapt tools/upstream to this branch"


def _definitions(body: list[ast.stmt]) -> Iterator[Place]:
    """Yield definitions of a body, also those under a condition."""
    for statement in body:
        if isinstance(statement, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            yield statement
        elif isinstance(statement, (ast.If, ast.Try)):
            yield from _definitions(statement.body)
            yield from _definitions(statement.orelse)


Change = Callable[[Source, str], None]
"""Edits the place of a name in a file."""


@dataclass(frozen=True)
class Edit:
    """An edit of one place."""

    path: str
    name: str
    change: Change
    why: str
    """For the list of edits."""
    imports: tuple[tuple[str, str], ...] = field(default=())
    """Modules and names that the file must import."""

    def apply(self, root: Path) -> None:
        """Edit the checkout.

        Raises:
            MovedError: The place is not as expected.
        """
        source = Source(root, self.path)
        self.change(source, self.name)
        for module, names in self.imports:
            source.add_import(module, names)
        source.write()


def decorated(
    path: str, name: str, decorator: str, module: str, why: str, is_inner: bool = False
) -> Edit:
    """Return the edit that puts a decorator of a module above a function."""
    return Edit(path, name, decorate(decorator, is_inner), why, ((module, decorator),))


# Kinds of changes.


def decorate(decorator: str, is_inner: bool = False) -> Change:
    """Put a decorator above those of a function, or below them."""

    def change(source: Source, name: str) -> None:
        found = source.function(name)
        others = [] if is_inner else found.decorator_list
        first = min([found.lineno, *(d.lineno for d in others)])
        source.insert(first, f"@{decorator}\n", found.col_offset)

    return change


def override(call: str) -> Change:
    """Define a method, which its class inherits, as ``call`` of the inherited one."""

    def change(source: Source, name: str) -> None:
        owner, _, method = name.rpartition(".")
        found = source.find(owner)
        if not isinstance(found, ast.ClassDef) or not found.bases:
            raise source.moved(owner, "is no class with a base")
        if source.has(name):
            raise source.moved(name, "is no longer inherited")
        base = ast.unparse(found.bases[0])
        before = _after_docstring(found)
        source.insert(before.lineno, f"{method} = {call}({base}.{method})\n\n", before.col_offset)

    return change


def in_class(code: str) -> Change:
    """Put code first in a class."""

    def change(source: Source, name: str) -> None:
        found = source.find(name)
        if not isinstance(found, ast.ClassDef):
            raise source.moved(name, "is no class")
        before = _after_docstring(found)
        source.insert(before.lineno, f"{code}\n", before.col_offset)

    return change


def at_start(code: str, *uses: str) -> Change:
    """Run code first in a function."""

    def change(source: Source, name: str) -> None:
        before = _after_docstring(source.function(name, *uses))
        source.insert(before.lineno, code, before.col_offset)

    return change


def at_end(code: str, *uses: str) -> Change:
    """Run code last in a function that returns nothing, or before its last ``return``."""

    def change(source: Source, name: str) -> None:
        last = source.function(name, *uses).body[-1]
        is_return = isinstance(last, ast.Return)
        line = last.lineno if is_return else (last.end_lineno or last.lineno) + 1
        source.insert(line, code, last.col_offset)

    return change


def before_call(callee: str, code: str, *uses: str) -> Change:
    """Run code before the only statement of a function that calls ``callee``."""

    def change(source: Source, name: str) -> None:
        call = source.calling(name, callee, *uses)
        source.insert(call.lineno, code, call.col_offset)

    return change


def instead_of_call(callee: str, other: str, code: str = "") -> Change:
    """Call ``other`` where a function calls ``callee``, with code before."""

    def change(source: Source, name: str) -> None:
        call = source.calling(name, callee)
        lines = source.text.splitlines()[call.lineno - 1 : call.end_lineno]
        text = textwrap.dedent("\n".join(lines)).replace(callee, other, 1)
        source.replace(call, call, f"{code}{text}\n")

    return change


def new_body(code: str, *uses: str) -> Change:
    """Replace all that a function does; its docstring stays."""

    def change(source: Source, name: str) -> None:
        function = source.function(name, *uses)
        source.replace(_after_docstring(function), function.body[-1], code)

    return change


def _after_docstring(found: Place) -> ast.stmt:
    is_documented = ast.get_docstring(found) is not None and len(found.body) > 1
    return found.body[1 if is_documented else 0]


def _calls(statement: ast.stmt, callee: str) -> bool:
    """Whether a simple statement calls a function of this name."""
    if any(isinstance(node, ast.stmt) for node in ast.iter_child_nodes(statement)):
        return False
    calls = (node for node in ast.walk(statement) if isinstance(node, ast.Call))
    return any(ast.unparse(call.func) == callee for call in calls)
