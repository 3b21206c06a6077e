# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""docs/user-guide/messages.md: every error and warning of the library, found in its source.

Nothing is run or imported but the rule tables. A text is followed from where it is raised or logged
back to the strings it is put together from: through names, functions of the same module and their
arguments. What only a run knows becomes an ellipsis.
"""

from __future__ import annotations

import ast
import contextlib
import itertools
import re
from collections.abc import Iterator, Mapping
from functools import cached_property
from pathlib import Path
from typing import NamedTuple

from docs_parts import PACKAGE, as_text, generated_from, message_with_gaps, option_groups

GAP = "…"
MAX_VARIANTS = 6
"""Of one message, where parts of it depend on conditions."""

# Programming errors, and the proof of plans, whose rules are in the design pages.
_NOT_FOR_USERS = {"AssertionError", "AttributeError", "PlanError", "StopIteration"}
_LOG_METHODS = {"warning", "error", "exception", "critical", "log", "warn", "_tell"}
_Arguments = Mapping[str, list[str]]


class Message(NamedTuple):
    """A text that users may see, with gaps."""

    text: str
    kind: str
    """'error' for what a setting or a file causes, 'failure' for what goes wrong in training,
    'warning', or 'note' for what is only to be known."""


class Module:
    """One source file, in which texts are followed to the strings they are made of."""

    def __init__(self, path: Path) -> None:
        self.tree = ast.parse(path.read_text(encoding="utf-8"))
        self._on_the_way: list[str] = []

    @cached_property
    def functions(self) -> dict[str, ast.FunctionDef]:
        return {n.name: n for n in ast.walk(self.tree) if isinstance(n, ast.FunctionDef)}

    def messages(self) -> Iterator[Message]:
        scopes = [self.tree, *self.functions.values()]
        inner = {id(n): scope for scope in scopes for n in ast.walk(scope)}
        for node in ast.walk(self.tree):
            for kind, expression, is_format in _said_by(node):
                for text in self.texts(expression, inner[id(node)], {}):
                    if is_format:
                        text = message_with_gaps(text)
                    # Without a few words of its own it cannot be searched for.
                    if len(re.findall(r"[a-z]{2,}", text)) > 3:
                        yield Message(_tidy(text), kind)

    def texts(self, node: ast.expr, scope: ast.AST, arguments: _Arguments) -> list[str]:
        """What an expression may read as."""
        match node:
            case ast.Constant(value=str(text)):
                return [text]
            case ast.JoinedStr(values=parts):
                return self._joined(parts, scope, arguments)
            case ast.FormattedValue(value=value, format_spec=None, conversion=-1):
                return self.texts(value, scope, arguments)
            case ast.BinOp(left=left, op=ast.Add(), right=right):
                return self._joined([left, right], scope, arguments)
            case ast.IfExp(body=body, orelse=orelse):
                both = [self.texts(part, scope, arguments) for part in (body, orelse)]
                return list(dict.fromkeys(both[0] + both[1]))
            case ast.Name(id=name) if name in arguments:
                return arguments[name]
            case ast.Name(id=name):
                return self._assigned(name, scope, arguments)
            # Without arguments it tells a fact, such as the version of a package.
            case ast.Call(func=ast.Name(id=name), args=[_, *_]) if name in self.functions:
                return self._returned(node, self.functions[name], scope, arguments)
            case ast.Call(func=ast.Name(id=name), args=[first, *_]) if name.endswith("Error"):
                return self.texts(first, scope, arguments)
        return [GAP]

    def _joined(self, parts: list[ast.expr], scope: ast.AST, arguments: _Arguments) -> list[str]:
        choices = [self.texts(part, scope, arguments) for part in parts]
        combinations = itertools.islice(itertools.product(*choices), MAX_VARIANTS)
        return ["".join(combination) for combination in combinations]

    def _assigned(self, name: str, scope: ast.AST, arguments: _Arguments) -> list[str]:
        found = []
        for node in (*ast.walk(scope), *ast.iter_child_nodes(self.tree)):
            match node:
                case ast.Assign(targets=[ast.Name(id=target)], value=value) if target == name:
                    with self._following(name) as is_new:
                        found += self.texts(value, scope, arguments) if is_new else []
        return list(dict.fromkeys(found)) or [GAP]

    def _returned(
        self, call: ast.Call, function: ast.FunctionDef, scope: ast.AST, arguments: _Arguments
    ) -> list[str]:
        names = [argument.arg for argument in function.args.args]
        given = dict(zip(names, call.args, strict=False))
        given |= {keyword.arg: keyword.value for keyword in call.keywords if keyword.arg}
        inner = {name: self.texts(value, scope, arguments) for name, value in given.items()}
        inner = {name: [GAP] for name in names} | inner
        found = []
        for node in ast.walk(function):
            if isinstance(node, ast.Return) and node.value is not None:
                with self._following(function.name) as is_new:
                    found += self.texts(node.value, function, inner) if is_new else []
        return list(dict.fromkeys(found)) or [GAP]

    @contextlib.contextmanager
    def _following(self, name: str) -> Iterator[bool]:
        """Whether a name is followed for the first time on this way: ends circles."""
        is_new = name not in self._on_the_way
        self._on_the_way.append(name)
        yield is_new
        self._on_the_way.pop()


def _said_by(node: ast.AST) -> Iterator[tuple[str, ast.expr, bool]]:
    """The texts that a statement or call shows to users: kind, expression, and whether the text is
    a format string."""
    match node:
        case ast.Raise(exc=ast.Call(func=ast.Name(id=name), args=[first, *_]) as call):
            if name.endswith("Error") and name not in _NOT_FOR_USERS:
                yield ("failure" if name == "RuntimeError" else "error"), first, False
            elif not name.endswith("Error"):
                yield "error", call, False
        case ast.Call(func=ast.Name(id="Rule"), args=[_, _, _, text]):
            yield "error", text, True
        case ast.Call(func=ast.Name(id="Problem"), args=[_, ast.Constant(value=kind), what, cure]):
            both = ast.BinOp(what, ast.Add(), ast.BinOp(ast.Constant("; "), ast.Add(), cure))
            yield str(kind), both, True
        case ast.Call(func=ast.Attribute(attr=name), args=[first, *rest]) if name in _LOG_METHODS:
            yield "warning", (rest[0] if name == "log" and rest else first), False
        case ast.Assign(targets=[ast.Name(id="notes")], value=ast.Tuple(elts=notes)):
            yield from (("warning", note, False) for note in notes)


def _tidy(text: str) -> str:
    text = re.sub(r"%(?:[-+.\d]*[a-z]|%)", lambda m: "%" if m[0] == "%%" else GAP, text)
    # What stands between two gaps only may be a part of either.
    return re.sub(rf"{GAP}(\s*{GAP})+", GAP, " ".join(text.split()))


def all_messages() -> list[Message]:
    """Every message, each once, in the order of the alphabet."""
    paths = sorted(PACKAGE.rglob("*.py"))
    found = {message for path in paths for message in Module(path).messages()}
    for rule in (rule for group in option_groups() for rule in group.rules):
        found.add(Message(_tidy(message_with_gaps(rule.message)), "error"))
    # Those that begin with a gap come last: nobody looks for them by their first letter.
    return sorted(found, key=lambda message: (message.text.startswith(GAP), message.text.lower()))


def reasons_to_stay() -> list[str]:
    """What the plan's grid may say behind 'stays:'."""
    return [
        ast.literal_eval(statement.value)
        for statement in ast.parse((PACKAGE / "plan" / "policy.py").read_text("utf-8")).body
        if isinstance(statement, ast.Assign) and isinstance(statement.value, ast.Constant)
    ]


_SECTIONS = {
    "warning": (
        "Warnings",
        "Of trainings, which go on and whose results are right, and of `slipstream doctor`. What "
        "each means for memory or time, and what to do, is in "
        "[Troubleshooting](troubleshooting.md#what-warnings-mean).",
    ),
    "note": ("Notes", "Nothing is wrong; `slipstream doctor` says these so that they are known."),
    "error": (
        "Errors: settings and files",
        "Each is a `ValueError` and names the option, the reason and what to set instead.",
    ),
    "failure": (
        "Errors while training",
        "Where the text names no option and nothing to change, it is a defect of Slipstream, which "
        "stops rather than compute something wrong: please report it with the log.",
    ),
}


def messages_page() -> str:
    """Give the whole text of docs/user-guide/messages.md."""
    lines = [
        "# Messages",
        "",
        generated_from("the source of megatron/slipstream"),
        "",
        "Every warning and error of Slipstream, to be found by searching for a part of its text; "
        f"`{GAP}` stands for what depends on your run. By symptom, with what to do: "
        "[Troubleshooting](troubleshooting.md).",
    ]
    messages = all_messages()
    for kind, (title, about) in _SECTIONS.items():
        texts = [f"- {as_text(message.text)}" for message in messages if message.kind == kind]
        if not texts:
            continue
        lines += ["", f"## {title}", "", about, "", *texts]
    lines += [
        "",
        "## Why a group stays",
        "",
        "Behind `stays:` in the plan that `slipstream report` and `slipstream plan` show:",
        "",
        *(f"- {as_text(reason)}" for reason in reasons_to_stay()),
    ]
    return "\n".join(lines) + "\n"
