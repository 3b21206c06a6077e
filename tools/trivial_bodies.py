# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Functions with trivial bodies: the changes that ``find_unobserved`` makes to a source file."""

from __future__ import annotations

import ast
import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import CodeType
from typing import Optional, Union

Function = Union[ast.FunctionDef, ast.AsyncFunctionDef]
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

EMPTY = {
    "None": "None", "bool": "False", "int": "0", "float": "0.0", "str": "''", "bytes": "b''",
    "list": "[]", "dict": "{}", "set": "set()", "tuple": "()", "frozenset": "frozenset()",
    "Sequence": "()", "Collection": "()", "Iterable": "()", "Mapping": "{}",
    "Iterator": "iter(())",
}  # fmt: skip
"""Trivial values by the name of the annotation; None for other types."""


@dataclass(frozen=True)
class Change:
    """One function with a replaced body.

    Args:
        path: The source file.
        name: The function's name, with those of its classes and of the file.
        body: The new body, as source.
        line: First line of the function's code: of its first decorator, if it has one.
        digest: Digest of its source.
        why_not: Why it is not examined; empty if it is.
    """

    path: Path
    name: str
    body: str
    line: int
    digest: str
    why_not: str = ""

    @property
    def key(self) -> str:
        """Key of the change, stable as long as the function's source does not change."""
        return f"{self.name} {self.body} {self.digest}"

    @property
    def code_key(self) -> tuple[str, int]:
        """Key of the function's code object among all loaded ones."""
        return str(self.path.resolve()), self.line

    def new_code(self) -> CodeType:
        """Compile the function with the new body before the old one.

        The old one is never reached, but tells the compiler which variables belong to an enclosing
        function or class, and whether this is a generator.
        """
        tree = ast.parse(self.path.read_text())
        for node in ast.walk(tree):
            if isinstance(node, FUNCTIONS) and _line_of(node) == self.line:
                (added,) = ast.parse(f"def f():\n    {self.body}").body
                assert isinstance(added, ast.FunctionDef)
                node.body[:0] = added.body
        code = compile(ast.fix_missing_locations(tree), str(self.path.resolve()), "exec")
        return next(found for found in _codes_in(code) if found.co_firstlineno == self.line)


def changes_of(path: Path) -> list[Change]:
    """Return the changes to a file's functions and methods, except functions inside functions."""
    source = path.read_text()

    def walk(body: Sequence[ast.stmt], prefix: str) -> Iterator[Change]:
        for node in body:
            if isinstance(node, ast.ClassDef):
                yield from walk(node.body, f"{prefix}{node.name}.")
            elif isinstance(node, FUNCTIONS):
                text = ast.get_source_segment(source, node) or ""
                digest = hashlib.sha256(text.encode()).hexdigest()[:12]
                why_not = _why_not(node)
                for new_body in _bodies(node)[: 1 if why_not else None]:
                    name = prefix + node.name
                    yield Change(path, name, new_body, _line_of(node), digest, why_not)

    return list(walk(ast.parse(source).body, f"{path.parent.name}/{path.name}: "))


def _why_not(node: Function) -> str:
    decorators = {_last_name(item) for item in node.decorator_list}
    body = node.body[1:] if ast.get_docstring(node) is not None else node.body
    if node.name.startswith("__") and node.name.endswith("__"):
        return "a special method"
    if decorators & {"abstractmethod", "overload"}:
        return "abstract"
    if not body or all(isinstance(item, (ast.Pass, ast.Raise)) for item in body):
        return "no body"
    if len(body) == 1 and ast.unparse(body[0]) in (*_bodies(node), "..."):
        return "a trivial body"
    return ""


def _bodies(node: Function) -> list[str]:
    """Return the replacements of a body: two for a function that returns a bool, else one."""
    inside = [item for statement in node.body for item in ast.walk(statement)]
    if any(isinstance(item, (ast.Yield, ast.YieldFrom)) for item in inside):
        is_context = "contextmanager" in {_last_name(item) for item in node.decorator_list}
        return ["yield; return" if is_context else "return"]
    value = _trivial(node.returns)
    return ["return False", "return True"] if value == "False" else [f"return {value}"]


def _trivial(annotation: Optional[ast.expr]) -> str:
    if isinstance(annotation, ast.Subscript):
        name = _last_name(annotation.value)
        inner = annotation.slice
        if name == "tuple" and isinstance(inner, ast.Tuple):
            values = [_trivial(item) for item in inner.elts if not isinstance(item, ast.Constant)]
            return f"({', '.join(values)},)" if len(values) == len(inner.elts) else "()"
        return EMPTY.get(name, "None")
    return EMPTY.get("None" if annotation is None else _last_name(annotation), "None")


def _last_name(node: ast.expr) -> str:
    return ast.unparse(node).partition("(")[0].rpartition(".")[2]


def _line_of(node: Function) -> int:
    return min([node.lineno, *(item.lineno for item in node.decorator_list)])


def _codes_in(code: CodeType) -> Iterator[CodeType]:
    """Yield the code objects of functions in a module's or class's code."""
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            is_class = not constant.co_flags & 2  # CO_NEWLOCALS
            yield from _codes_in(constant) if is_class else (constant,)
