# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A flag that models set while code runs in a group's region."""

from __future__ import annotations

from typing import Any, NamedTuple


class RegionFlag(NamedTuple):
    """A flag that is set while code runs in a group's region."""

    owner: Any
    name: str
    """Name of a bool attribute of ``owner``."""
    without: frozenset[str]
    """Names of groups in whose regions it is not set."""

    @property
    def is_set(self) -> bool:
        """Whether the flag is set."""
        return bool(getattr(self.owner, self.name))

    def set(self, is_set: bool) -> None:
        """Set or clear the flag."""
        setattr(self.owner, self.name, is_set)
