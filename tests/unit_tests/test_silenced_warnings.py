# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``./run`` silences only warnings of other packages that a user cannot act on."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.slipstream.notices import NOTICES, VARIABLE, WARNINGS, silence_if_asked

ROOT = Path(__file__).resolve().parents[2]

SAYS = """
import logging, sys, warnings
import megatron.slipstream
from megatron.slipstream.notices import NOTICES
for text in sys.argv[1:]:
    warnings.warn(text + " and more")
warnings.warn("Slipstream: " + sys.argv[1])
for name, text in NOTICES.items():
    logging.getLogger(name).warning(text + " and more")
    logging.getLogger(name).warning("another message of " + name)
    logging.getLogger("megatron.slipstream").warning(text)
"""


def said(shows: str | None, **environment: str) -> str:
    """Output under ``./run python`` of a script that prints all silenced warnings, and others."""
    kept = {name: value for name, value in os.environ.items() if name != VARIABLE}
    kept |= {"SLIPSTREAM_USE_CURRENT_ENV": "1", "PYTHON": sys.executable} | environment
    if shows is not None:
        kept[VARIABLE] = shows
    command = ["bash", str(ROOT / "run"), "python", "-c", SAYS, *WARNINGS]
    done = subprocess.run(command, env=kept, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stderr


@pytest.mark.parametrize("shows", [None, "0", "1"])
def test_named_warnings_of_others_are_silenced_unless_asked_for(shows: str | None) -> None:
    stderr = said(shows)
    for text in [*WARNINGS, *NOTICES.values()]:
        assert (f"{text} and more" in stderr) == (shows == "1"), text
    assert f"Slipstream: {WARNINGS[0]}" in stderr
    for name, text in NOTICES.items():
        assert f"another message of {name}" in stderr
        assert f"\n{text}\n" in stderr, "Slipstream's own messages are never silenced"


def test_a_filter_of_the_user_wins() -> None:
    stderr = said(None, PYTHONWARNINGS=f"default:{WARNINGS[0]}")
    assert f"{WARNINGS[0]} and more" in stderr
    assert f"{WARNINGS[1]} and more" not in stderr


def test_without_run_nothing_is_silenced(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(VARIABLE, raising=False)
    before = {name: list(logging.getLogger(name).filters) for name in NOTICES}
    silence_if_asked()
    assert {name: logging.getLogger(name).filters for name in NOTICES} == before


def test_help_names_the_switch() -> None:
    done = subprocess.run(["bash", str(ROOT / "run"), "help"], capture_output=True, text=True)
    assert f"{VARIABLE}=1" in done.stdout


def folder_of(package: str) -> Path:
    """The folder of a package, found without importing it."""
    found = importlib.util.find_spec(package)
    assert found is not None
    assert found.submodule_search_locations is not None
    return Path(found.submodule_search_locations[0])


@pytest.mark.parametrize("text", WARNINGS)
def test_a_silenced_warning_is_one_that_megatron_core_has(text: str) -> None:
    """A warning that no longer exists, or has another text, must be removed from the list."""
    files = folder_of("megatron.core").rglob("*.py")
    assert any(text in file.read_text(encoding="utf-8") for file in files)


@pytest.mark.parametrize("name, text", NOTICES.items())
def test_a_silenced_message_is_one_that_its_logger_has(name: str, text: str) -> None:
    package = "torch" if name.startswith("torch.") else "megatron.core"
    path = name.removeprefix(package + ".").replace(".", "/") + ".py"
    source = (folder_of(package) / path).read_text(encoding="utf-8")
    assert text in source
    assert "getLogger(__name__)" in source
