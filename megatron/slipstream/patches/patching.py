# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Apply monkey-patches and undo them: all of a call, or none if a target has moved."""

from __future__ import annotations

import contextlib
import functools
import inspect
import logging
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from importlib import import_module
from typing import Any, NamedTuple, Optional

import torch

from megatron.slipstream.patches.attributes import replace_on
from megatron.slipstream.patches.releases import (
    TESTED_RELEASES,
    installed_version,
    is_within,
    release,
)

logger = logging.getLogger(__name__)

_MISSING = object()


@dataclass(frozen=True, eq=False)
class Patch:
    """A change to one name of another package."""

    target: str
    """Dotted path of the replaced object."""
    replace: Callable[[Any], Any]
    """Creates the replacement from the original."""
    reason: str
    """Reason, for users: what goes wrong without the patch."""
    upstream: tuple[int, ...] = ()
    """Issues and pull requests of NVIDIA/Megatron-LM that would make the patch unnecessary."""
    since: str = ""
    """First release of megatron-core that needs it, such as '0.18'; empty: the oldest."""
    until: str = ""
    """Last one; empty: the newest and, until that is known to need it no more, what follows."""
    unless: str = ""
    """Dotted path of a name whose presence says that the patch is not needed: commits of a
    development branch share a version. Absence of a name says nothing."""
    parameters: Optional[tuple[str, ...]] = None
    """First parameters of the original that the replacement relies on; None: any."""
    attributes: tuple[str, ...] = ()
    """Attributes of the original that the replacement relies on."""
    condition: Callable[[], bool] = lambda: True
    """What else it depends on, such as another package. Must not ask whether the target exists: one
    that has moved would pass for one that needs no patch."""

    @property
    def releases(self) -> str:
        """Tested releases that need it, for users."""
        need = [r for r in TESTED_RELEASES if is_within(r, self.since, self.until)]
        if len(need) == len(TESTED_RELEASES):
            return "all"
        return ", ".join(tested.rpartition(".")[0] for tested in need)

    def is_needed(self) -> bool:
        """Return whether the installed packages need it."""
        # attach() works without megatron-core, so only rows of some releases ask for its version.
        has_range = bool(self.since or self.until)
        if has_range and not is_within(installed_version(), self.since, self.until):
            return False
        return self.condition() and not (self.unless and _exists(self.unless))

    def check(self) -> tuple[Any, str]:
        """Return the target's owner and attribute; ``RuntimeError`` if it is not as expected."""
        owner, name = resolve(self.target, self.reason)
        if self in _applied:
            return owner, name
        original = getattr(owner, name)
        if self.parameters is not None:
            found = tuple(inspect.signature(original).parameters)
            if found[: len(self.parameters)] != self.parameters:
                raise RuntimeError(
                    f"{self.target} takes ({', '.join(found)}) in {_installed()}, where its patch "
                    f"expects ({', '.join(self.parameters)}); {_cure()}"
                )
        missing = [attribute for attribute in self.attributes if not hasattr(original, attribute)]
        if missing:
            raise RuntimeError(
                f"{self.target} is a {type(original).__name__} without {', '.join(missing)} in "
                f"{_installed()}, which its patch needs; {_cure()}"
            )
        return owner, name


def _exists(path: str) -> bool:
    try:
        resolve(path)
    except RuntimeError:
        return False
    return True


def replacing(replacement: Callable[..., Any]) -> Callable[..., Callable[..., Any]]:
    """Decorate a patch, which gets what it is bound to and the original before its arguments."""

    @functools.wraps(replacement)
    def replace(*bound: Any) -> Callable[..., Any]:
        @functools.wraps(bound[-1])
        def call(*arguments: Any, **options: Any) -> Any:
            return replacement(*bound, *arguments, **options)

        return call

    return replace


class _Applied(NamedTuple):
    owner: Any
    name: str
    after: Any
    undo: Callable[[], None]
    users: set[Hashable]


_applied: dict[Patch, _Applied] = {}


def apply(patches: Iterable[Patch], user: Hashable) -> None:
    """Apply the patches of one user; see :func:`apply_all`."""
    apply_all({user: patches})


def apply_all(wanted: Mapping[Hashable, Iterable[Patch]]) -> None:
    """Apply the patches that the installed packages need, by user. Idempotent.

    A patch stays until all its users have called :func:`undo`. All are resolved before the first is
    applied. Raises ``RuntimeError``, and changes nothing, if a target is not as its patch expects.
    """
    needed = {user: [p for p in patches if p.is_needed()] for user, patches in wanted.items()}
    each = dict.fromkeys(patch for patches in needed.values() for patch in patches)
    targets = {patch: patch.check() for patch in each if patch not in _applied}
    for patch, (owner, name) in targets.items():
        after = patch.replace(getattr(owner, name))
        _applied[patch] = _Applied(owner, name, after, replace_on(owner, name, after), set())
    for user, patches in needed.items():
        for patch in patches:
            _applied[patch].users.add(user)


def undo(user: Hashable) -> None:
    """Undo patches that only this user needs, in reverse order of application."""
    for patch, change in reversed(list(_applied.items())):
        change.users.discard(user)
        if change.users:
            continue
        del _applied[patch]
        if vars(change.owner).get(change.name) is change.after:
            change.undo()
        else:
            logger.warning(
                "%s has been replaced again since Slipstream patched it, and stays as it is",
                patch.target,
            )


@contextlib.contextmanager
def applied(patches: Iterable[Patch]) -> Iterator[None]:
    """Apply patches inside this context."""
    user = object()
    apply(patches, user)
    try:
        yield
    finally:
        undo(user)


def active() -> list[Patch]:
    """Return the patches that are applied."""
    return list(_applied)


def resolve(path: str, reason: str = "") -> tuple[Any, str]:
    """Return the object that owns the last name of a dotted path, and that name.

    If it does not exist, a ``RuntimeError`` names it, and the installed and tested releases.
    """
    owner_path, _, name = path.rpartition(".")
    owner: Any = _MISSING
    parts = owner_path.split(".")
    for length in range(len(parts), 0, -1):  # the longest importable prefix is the module
        try:
            owner = import_module(".".join(parts[:length]))
        except ModuleNotFoundError as error:
            if error.name is None or not owner_path.startswith(error.name):
                raise
            continue
        for attribute in parts[length:]:
            owner = getattr(owner, attribute, _MISSING)
        break
    if owner is _MISSING or not hasattr(owner, name):
        raise RuntimeError(
            f"{path} does not exist in {_installed()}, so it cannot be patched"
            + (f" ({reason})" if reason else "")
            + f"; {_cure()}"
        )
    return owner, name


def _installed() -> str:
    found = f"torch {torch.__version__}"
    try:
        return f"{release()} with {found}"
    except ImportError:  # attach() needs no megatron-core.
        return found


def _cure() -> str:
    return f"install one of the tested releases of megatron-core: {', '.join(TESTED_RELEASES)}"
