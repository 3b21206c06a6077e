# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A misspelt flag is refused before torch is imported, and no right one is."""

from __future__ import annotations

import argparse
import subprocess
import sys
from pathlib import Path

import pytest

from megatron.slipstream.integration.entry import flag_names

ROOT = Path(__file__).resolve().parents[3]


@pytest.fixture(scope="module")
def flags_of_the_parser() -> set[str]:
    from megatron.slipstream.integration.cpu import cpu_only

    cpu_only.install_training_shims()
    from megatron.training.arguments import add_megatron_arguments

    from megatron.slipstream.integration.entry.arguments import add_arguments

    parser = argparse.ArgumentParser(allow_abbrev=False)
    add_megatron_arguments(parser)
    add_arguments(parser)
    flags = {flag for action in parser._actions for flag in action.option_strings}
    assert len(flags) > 700
    return {flag for flag in flags if flag.startswith("--")}


@pytest.mark.releases
def test_no_flag_of_the_parser_is_refused(flags_of_the_parser: set[str]) -> None:
    flag_names.refuse_misspelt_flags(sorted(flags_of_the_parser))


@pytest.mark.releases
def test_what_is_suggested_is_a_flag_of_the_parser(flags_of_the_parser: set[str]) -> None:
    known = sorted(flags_of_the_parser)
    for flag in [flag for flag in known if len(flag) > 12][::20]:
        typo = flag[:-3] + flag[-2:]
        with pytest.raises(ValueError, match=f"^unrecognized arguments: {typo}; did you") as caught:
            flag_names.refuse_misspelt_flags([typo, "value"])
        assert str(caught.value).rpartition("mean ")[2].rstrip("?") in known


def test_values_and_strange_flags_are_left_to_the_parser() -> None:
    flag_names.refuse_misspelt_flags(["--lr=1e-3", "value", "-x", "--", "--qqqqqqqqqqqqqqqq", "1"])


def test_a_flag_of_a_later_release_keeps_its_own_message() -> None:
    flag_names.refuse_misspelt_flags(["--activation-offload-fraction", "0.5"])


def test_the_script_refuses_without_importing_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise SystemExit('torch is imported')")
    done = subprocess.run(
        [sys.executable, str(ROOT / "pretrain_gpt.py"), "--lr", "1", "--offlod-modules", "x"],
        capture_output=True, text=True, timeout=60, check=False, cwd=tmp_path,
        env={"PYTHONPATH": f"{tmp_path}:{ROOT}"},
    )  # fmt: skip
    assert done.returncode == 2
    assert done.stderr == (
        "error: unrecognized arguments: --offlod-modules; did you mean --offload-modules?\n"
    )
