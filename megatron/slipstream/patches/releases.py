# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The installed megatron-core, and how its releases differ.

Only the version says what a release has: a name that is not there has moved, and is an error, not
an older release. Only the functions import megatron-core, since without a GPU the shims must be
installed first.
"""

from __future__ import annotations

from collections.abc import Sequence

TESTED_RELEASES = ("0.18.2", "0.19.2")
"""The releases of megatron-core that the tests run with, the oldest first. To add one, add it here
and run ``tools/generate_docs.py``; tests name the places that need a decision."""

UPCOMING_RELEASE = "0.20.0"
"""The release after those, of which only commits exist: the tests pass with them."""

OLDEST_TORCH = "2.10"
"""The oldest torch that the tests run with: it tells whose hooks took a saved tensor, and has a
grouped GEMM. To change it, change it here and run ``tools/generate_docs.py``."""


def supported(tested: Sequence[str] = TESTED_RELEASES) -> str:
    """Return the range of versions that a user may install, such as '>=0.18.2,<0.21'."""
    newest = max(tested[-1], UPCOMING_RELEASE, key=_two_numbers)
    return f">={tested[0]},<{following((newest,))}"


def following(tested: Sequence[str] = TESTED_RELEASES) -> str:
    """Return the first version that is too new, such as '0.20'."""
    major, minor = _two_numbers(tested[-1])
    return f"{major}.{minor + 1}"


def release() -> str:
    """Return the installed megatron-core's name for messages, such as 'megatron-core 0.19.2'."""
    from megatron.core import package_info

    return (
        "megatron-core " + ".".join(map(str, package_info.VERSION[:3])) + package_info.PRE_RELEASE
    )


def installed_version() -> str:
    """Return the first two numbers of megatron-core's version, such as '0.19'.

    Read from its own file: what pip installed may not be what is imported.
    """
    from megatron.core import package_info

    return f"{package_info.MAJOR}.{package_info.MINOR}"


def is_within(version: str, since: str = "", until: str = "") -> bool:
    """Return whether a version, by its first two numbers, is in a range, both ends included."""
    number = _two_numbers(version)
    return (not since or number >= _two_numbers(since)) and (
        not until or number <= _two_numbers(until)
    )


def is_since(version: str) -> bool:
    """Return whether the installed megatron-core is ``version``, such as '0.18', or newer."""
    return is_within(installed_version(), since=version)


def _two_numbers(version: str) -> tuple[int, int]:
    major, minor, *_ = version.split(".")
    return int(major), int(minor)
