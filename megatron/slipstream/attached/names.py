# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Finds sub-modules by pattern.

A name is the attribute path to a module without the attributes of wrappers, so a pattern matches a
model before and after it is compiled, checkpointed or distributed.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple, Union

import torch
from torch.nn.parallel import DataParallel, DistributedDataParallel

Pattern = Union[str, type[torch.nn.Module]]

_WRAPPED_NAMES = frozenset({"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"})
"""Attributes of torch's wrappers that hold the module: compiled, fully sharded, checkpointed."""

NUM_NEAR = 8


class Match(NamedTuple):
    """A sub-module that a pattern matches."""

    name: str
    label: str
    """The pattern or the type's name, which names the module's groups in reports."""
    module: torch.nn.Module


class _Named(NamedTuple):
    name: str
    """The path without wrappers; empty for the model itself."""
    path: str
    module: torch.nn.Module


def find_modules(model: torch.nn.Module, patterns: Iterable[Pattern]) -> list[Match]:
    """Return the sub-modules that ``patterns`` match, each once, in the model's order.

    A match inside another match is ignored, since the outer group covers its operations. For a
    wrapped module, the outermost wrapper is returned. The model itself never matches.

    Raises:
        ValueError: There is no pattern, one is neither a string nor a module type, or one adds no
            module: it matches none (the error lists similar names), only containers, which never
            run, or only modules inside other matches.
    """
    patterns = list(patterns)
    if not patterns:
        raise ValueError("patterns=[] chooses nothing to move; give at least one name or type")
    named = _named_modules(model)
    outermost = {entry.name: entry for entry in reversed(named)}
    label_of: dict[str, str] = {}
    names_of: list[list[str]] = []
    for pattern in patterns:
        names = _matching(model, pattern, named)
        names_of.append(names)
        for name in names:
            label_of.setdefault(name, _text(pattern))
    covering = {
        name: min((each for each in label_of if name.startswith(f"{each}.")), key=len, default="")
        for name in label_of
    }
    for pattern, names in zip(patterns, names_of, strict=True):
        if all(covering[name] for name in names):
            outer = covering[names[0]]
            raise ValueError(
                f"patterns contains {_text(pattern)!r}, which adds nothing because all it matches "
                f"lies in other matches ({names[0]!r} in {outer!r}, by {label_of[outer]!r}); "
                "leave one of the two out"
            )
    # A shared module has several names; use one of them.
    found: dict[int, Match] = {}
    for entry in named:
        if entry.name in label_of and not covering[entry.name] and outermost[entry.name] is entry:
            match = Match(entry.name, label_of[entry.name], entry.module)
            found.setdefault(id(entry.module), match)
    return list(found.values())


def _named_modules(model: torch.nn.Module) -> list[_Named]:
    """Return every path to every sub-module, the model itself first."""
    by_path: dict[str, _Named] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        parent_path, _, attribute = path.rpartition(".")
        parent = by_path.get(parent_path)
        if parent is None or not path:
            name = ""
        elif attribute in _WRAPPED_NAMES or (
            attribute == "module"
            and isinstance(parent.module, (DataParallel, DistributedDataParallel))
        ):
            name = parent.name
        else:
            name = f"{parent.name}.{attribute}" if parent.name else attribute
        by_path[path] = _Named(name, path, module)
    return list(by_path.values())


def _matching(model: torch.nn.Module, pattern: Pattern, named: Sequence[_Named]) -> list[str]:
    if isinstance(pattern, str):
        parts = pattern.split(".")
        hits = [entry for entry in named if _fits(entry.name.split("."), parts)]
    elif isinstance(pattern, type) and issubclass(pattern, torch.nn.Module):
        hits = [entry for entry in named if isinstance(entry.module, pattern)]
    else:
        shown, cure = repr(pattern), ""
        if isinstance(pattern, torch.nn.Module):
            shown = f"a {type(pattern).__name__} itself"
            names = [repr(entry.name) for entry in named if entry.module is pattern]
            cure = f"its name, {names[0]}, or " if names else ""
        raise ValueError(
            f"patterns contains {shown}, which is neither a name pattern nor a module type; "
            f"give {cure}text such as 'layers.*.mlp' or a type such as torch.nn.Linear"
        )
    hits = [entry for entry in hits if entry.name]
    able = [entry.name for entry in hits if _can_run(entry.module)]
    if able:
        return list(dict.fromkeys(able))
    if hits:
        first = hits[0]
        raise ValueError(
            f"patterns contains {_text(pattern)!r}, which matches only containers that never run "
            f"({first.name!r} is a {type(first.module).__name__}); name what they hold: "
            f"'{first.name}.*'"
        )
    near = ", ".join(_near(pattern, named))
    raise ValueError(
        f"patterns contains {_text(pattern)!r}, which matches no sub-module of "
        f"{type(model).__name__}; set it to one that is there, such as: {near or 'none'} ('*' "
        "stands for one part of a name, '**' for any number of parts)"
    )


def _can_run(module: torch.nn.Module) -> bool:
    """Whether the module defines a forward, unlike a ``ModuleList``."""
    return type(module).forward is not torch.nn.Module.forward or "forward" in vars(module)


def _fits(name: Sequence[str], pattern: Sequence[str]) -> bool:
    if not pattern:
        return not name
    if pattern[0] == "**":
        return any(_fits(name[skipped:], pattern[1:]) for skipped in range(len(name) + 1))
    return bool(name) and fnmatchcase(name[0], pattern[0]) and _fits(name[1:], pattern[1:])


def _near(pattern: Pattern, named: Sequence[_Named]) -> list[str]:
    """Return patterns or types that match modules of the model, most similar first."""
    able = [entry for entry in named if entry.name and _can_run(entry.module)]
    if not isinstance(pattern, str):
        types = list(dict.fromkeys(type(entry.module).__name__ for entry in able))
        return difflib.get_close_matches(pattern.__name__, types, NUM_NEAR, cutoff=0.0)
    parts = pattern.split(".")

    def similarity(name: str) -> tuple[bool, int, bool, float]:
        """Sort key: the same last name, then siblings, then similar spelling."""
        own = name.split(".")
        same = [a == b for a, b in zip(own, parts, strict=False)]
        num_shared = (*same, False).index(False)
        ratio = difflib.SequenceMatcher(None, name, pattern).ratio()
        return own[-1] == parts[-1], num_shared, len(own) == len(parts), ratio

    # One pattern for all layers: a user does not mistype numbers.
    names = dict.fromkeys(re.sub(r"(?<![^.])\d+(?![^.])", "*", entry.name) for entry in able)
    return sorted(names, key=similarity, reverse=True)[:NUM_NEAR]


def _text(pattern: Pattern) -> str:
    return pattern if isinstance(pattern, str) else pattern.__name__
