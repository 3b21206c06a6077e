# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Facts of the process are those that megatron-core will see."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest

from megatron.slipstream.options import preflight
from megatron.slipstream.options.preflight import (
    ProcessFacts,
    check_graphs,
    check_process,
    is_installed,
)
from megatron.slipstream.options.rules import Finding, Rule, require


def make_package(root: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)


# What is installed.


def test_a_module_is_installed_if_it_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(tmp_path, {"slip_whole/__init__.py": "", "slip_whole/part.py": "1 / 0"})
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("slip_whole")
    assert is_installed("slip_whole.part"), "it is not imported"
    assert not is_installed("slip_whole.other")
    assert not is_installed("slip_none")
    assert not is_installed("slip_none.part")


def test_a_folder_that_packages_share_does_not_stand_for_one_of_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make_package(tmp_path, {"slip_shared/other/__init__.py": ""})
    monkeypatch.syspath_prepend(tmp_path)
    assert is_installed("slip_shared")
    assert not is_installed("slip_shared.bindings")


def test_a_module_that_was_put_in_place_is_installed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sys.modules, "slip_placed", types.ModuleType("slip_placed"))
    assert is_installed("slip_placed")


# Transformer Engine.


@pytest.fixture
def failing_import(monkeypatch: pytest.MonkeyPatch) -> list[Exception]:
    """The error to raise on import of Transformer Engine."""
    errors: list[Exception] = []

    def fail(_: str) -> types.ModuleType:
        raise errors[0]

    monkeypatch.setattr(preflight, "is_installed", lambda _: True)
    monkeypatch.setattr(preflight.importlib, "import_module", fail)
    return errors


def test_a_transformer_engine_without_the_switch_is_all_right(
    failing_import: list[Exception],
) -> None:
    name = "transformer_engine.pytorch.cpu_offload"
    failing_import.append(ModuleNotFoundError(f"No module named {name!r}", name=name))
    assert preflight._transformer_engine_switch() == (None, None)


@pytest.mark.parametrize(
    "error, message",
    [
        (
            ModuleNotFoundError("No module named 'einops'", name="einops"),
            "ModuleNotFoundError: No module named 'einops'",
        ),
        (
            ModuleNotFoundError("No module named 'transformer_engine.pytorch'"),
            "ModuleNotFoundError: No module named 'transformer_engine.pytorch'",
        ),
        (OSError("libcudart.so.13\nmore"), "OSError: libcudart.so.13"),
        (AssertionError(), "AssertionError: "),
    ],
)
def test_whatever_keeps_transformer_engine_from_importing_is_told(
    failing_import: list[Exception], error: Exception, message: str
) -> None:
    # megatron-core imports it if it is installed, so it would fail with the same error.
    failing_import.append(error)
    assert preflight._transformer_engine_switch() == (None, message)


@pytest.mark.parametrize(
    "environment, shown, is_late",
    [("1", "=1", True), ("0", "=0", False), (None, " (not set)", False)],
)
def test_a_switch_is_called_late_only_if_it_is_set(
    environment: str | None, shown: str, is_late: bool
) -> None:
    facts = ProcessFacts("3.12", None, None, "2.20", None, False, environment, None)
    (finding,) = check_process(facts, offloading=True)
    assert finding.message.startswith(f"NVTE_CPU_OFFLOAD_V1{shown} is not supported")
    assert ("after Transformer Engine was imported" in finding.message) == is_late
    assert finding.cure.startswith("set NVTE_CPU_OFFLOAD_V1=1")


@pytest.mark.parametrize(
    "te, is_packed, is_wrong",
    [
        ("2.14.0", False, False),
        ("2.20.2", False, False),
        ("2.13.1", False, True),
        (None, False, False),
        ("2.17.9", True, True),
        ("2.18.0", True, False),
    ],
)
def test_graphs_need_newer_versions(te: str | None, is_packed: bool, is_wrong: bool) -> None:
    facts = ProcessFacts("3.12", None, None, te, None, True, "1", None)
    findings = check_graphs(facts, is_packed)
    assert [finding.severity for finding in findings] == ["error"] * is_wrong
    for finding in findings:
        assert f"transformer_engine {te}" in finding.message
        assert ("with packed sequences" in finding.message) == is_packed
        assert "cuda_graph_impl='transformer_engine' is not supported" in finding.message
        assert finding.cure.startswith("install")


# Handling of findings.


def test_a_finding_is_one_sentence_with_its_cure() -> None:
    rule = Rule("p", "warning", "{option}=1 is odd because {why}", "set {option}=2")
    finding = rule.found(option="a", why="it is")
    assert finding == Finding("warning", "a=1 is odd because it is", "set a=2", "p")
    assert finding.text == "a=1 is odd because it is; set a=2"
    assert Finding("note", "that is all").text == "that is all"


def test_the_first_error_is_raised_after_all_warnings_were_logged(
    caplog: pytest.LogCaptureFixture,
) -> None:
    findings = [Finding(severity, severity, "mend it") for severity in ("ok", "note", "error")]
    findings += [Finding("error", "another", ""), Finding("warning", "slow", "make it fast")]
    with pytest.raises(ValueError, match="^error; mend it$"):
        require(findings)
    assert caplog.messages == ["slow; make it fast"]
    require(findings[:2])
