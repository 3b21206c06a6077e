# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Settings from a file: unknown settings and wrong types are refused."""

from __future__ import annotations

import argparse
import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from megatron.slipstream.attached.handle import Attached, attach
from megatron.slipstream.integration import install
from megatron.slipstream.options import config_file
from megatron.slipstream.options.fields import OffloadConfig

Write = Callable[[str], Path]


@pytest.fixture
def write(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Write:
    """Writes the file and sets the variable to its path."""

    def write(text: str) -> Path:
        path = tmp_path / "slipstream.yaml"
        path.write_text(text)
        monkeypatch.setenv(config_file.VARIABLE, str(path))
        return path

    return write


def test_the_file_that_the_variable_names_is_read(write: Write) -> None:
    write(
        "offload_backend: cpu\noffload_max_overhead_percent: auto\noffload_nvtx_ranges: true\n"
        "offload_host_memory_limit_bytes: 64_000\n# a comment\noffload_prefetch_depth: 3\n"
    )
    assert config_file.config_from_environment() == OffloadConfig(
        offload_backend="cpu",
        offload_max_overhead_percent="auto",
        offload_nvtx_ranges=True,
        offload_host_memory_limit_bytes=64000,
        offload_prefetch_depth=3,
    )


@pytest.mark.parametrize("text", ["", "# nothing\n", "{}"], ids=repr)
def test_an_empty_file_and_none_are_the_defaults(
    write: Write, monkeypatch: pytest.MonkeyPatch, text: str
) -> None:
    write(text)
    assert config_file.config_from_environment() == OffloadConfig()
    monkeypatch.delenv(config_file.VARIABLE)
    assert config_file.config_from_environment() == OffloadConfig()


@pytest.mark.parametrize(
    "text, message",
    [
        ("offload_prefetch_dept: 2", "'offload_prefetch_dept' is not.*'offload_prefetch_depth'"),
        ("prefetch_depth: 2", "'prefetch_depth' is not a setting; did you mean 'offload_prefetch"),
        ("offload_modules: [core_attn]", "it is an option of megatron-core's: give it to the mod"),
        ("Zebra: 2", "'Zebra' is not a setting; Settings: offload_engine, "),
        ("offload_prefetch_depth: '2'", "offload_prefetch_depth='2' has the wrong type; set a val"),
        ("offload_prefetch_depth: 2.5", "offload_prefetch_depth=2.5 has the wrong type"),
        ("offload_prefetch_depth: true", "offload_prefetch_depth=True has the wrong type"),
        ("offload_nvtx_ranges: 1", "offload_nvtx_ranges=1 has the wrong type"),
        ("offload_backend: gpu", "offload_backend='gpu' is not a choice; set 'auto', 'cuda'"),
        (
            "offload_max_overhead_percent: high",
            "offload_max_overhead_percent='high' is no limit",
        ),
        ("offload_prefetch_depth: -1", "is negative; set how many"),
        ("offload_prefetch_depth: 1\noffload_prefetch_depth: 2", "is set twice"),
        ("- offload_prefetch_depth", "holds no settings; write one 'name: value' a line"),
        ("offload_prefetch_depth: [", "is not YAML"),
        ("offload_report_path: !!python/object:os.system {}", "is not YAML"),
    ],
)
def test_what_is_no_setting_is_refused_by_file_and_name(
    write: Write, text: str, message: str
) -> None:
    path = write(text)
    with pytest.raises(ValueError, match=message) as caught:
        config_file.config_from_environment()
    assert str(path) in str(caught.value)


def test_a_file_that_is_not_there_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(config_file.VARIABLE, "/nowhere/slipstream.yaml")
    with pytest.raises(ValueError, match=r"SLIPSTREAM_CONFIG=/nowhere.* cannot be read \(No such"):
        config_file.config_from_environment()


@pytest.mark.parametrize("config", [{}, {"offload_verify": 1}, "slipstream", 0])
@pytest.mark.parametrize("take", [install.install, install.install_at_first_call])
def test_what_is_no_configuration_is_refused(take: Callable[[Any], Any], config: Any) -> None:
    with pytest.raises(ValueError, match=f"^config={re.escape(repr(config))} is no OffloadConfig"):
        take(config)
    assert install.installed() is None


def test_installing_takes_the_file_and_says_once_what_is_in_effect(
    write: Write, caplog: pytest.LogCaptureFixture
) -> None:
    path = write("offload_backend: cpu\noffload_release_lag: 4\n")
    with caplog.at_level(logging.INFO):
        manager = install.install()
        assert install.install() is manager
    assert manager.config == OffloadConfig(offload_backend="cpu", offload_release_lag=4)
    (line,) = [text for text in caplog.messages if text.startswith("settings (")]
    assert f"SLIPSTREAM_CONFIG={path}" in line
    given, defaults = line.split("; by default ")
    assert given.endswith("offload_backend='cpu', offload_release_lag=4")
    assert "offload_prefetch_depth=1" in defaults


def attach_to(model: torch.nn.Module, config: OffloadConfig | None = None) -> Attached:
    return attach(model, "0", config, min_offloaded_tensor_size=1)


def test_attaching_takes_the_file_too(write: Write, caplog: pytest.LogCaptureFixture) -> None:
    path = write("offload_backend: cpu-lazy\noffload_release_lag: 4\n")
    with caplog.at_level(logging.INFO):
        handle = attach_to(torch.nn.Sequential(torch.nn.Linear(2, 2)))
    assert handle.engine.store.backend.name == "cpu-lazy"
    assert handle.engine.options.release_lag == 4
    assert any(f"SLIPSTREAM_CONFIG={path}" in text for text in caplog.messages)
    given = OffloadConfig(offload_backend="cpu")
    handle = attach_to(torch.nn.Sequential(torch.nn.Linear(2, 2)), given)
    assert handle.engine.options.release_lag == 1


@pytest.mark.parametrize("line", ["offload_checkpoint_inputs: true", "offload_prefetch_dept: 2"])
def test_attaching_refuses_what_the_file_cannot_set(write: Write, line: str) -> None:
    write(line)
    with pytest.raises(ValueError, match=line.partition(":")[0]):
        attach_to(torch.nn.Sequential(torch.nn.Linear(2, 2)))


def test_settings_that_are_passed_win_over_the_file(write: Write) -> None:
    write("offload_backend: cpu\noffload_release_lag: 4\n")
    manager = install.install(OffloadConfig(offload_backend="cpu"))
    assert manager.config.offload_release_lag == 1


def test_other_ranks_keep_quiet(
    write: Write, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    write("offload_release_lag: 4\n")
    monkeypatch.setenv("RANK", "3")
    with caplog.at_level(logging.INFO):
        config_file.log_settings(config_file.config_from_environment())
    assert caplog.messages == []


@pytest.mark.releases
def test_making_the_flags_prints_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    from megatron.slipstream.integration.entry.arguments import add_offload_arguments

    parser = add_offload_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--offload-max-overhead-percent", "auto"])
    assert args.offload_max_overhead_percent == 1
    assert capsys.readouterr() == ("", "")


@pytest.mark.releases
def test_flags_win_over_the_file_and_the_file_over_the_defaults(write: Write) -> None:
    from megatron.slipstream.integration.entry.arguments import add_offload_arguments

    write("offload_release_lag: 4\noffload_prefetch_depth: 5\n")
    parser = add_offload_arguments(argparse.ArgumentParser())
    args = parser.parse_args(["--offload-prefetch-depth", "6"])
    assert OffloadConfig.of(args) == OffloadConfig(offload_release_lag=4, offload_prefetch_depth=6)
