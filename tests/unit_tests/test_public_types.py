# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Type checkers know the public names: a user's misspelt name, option or value is an error."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from megatron import slipstream

pytest.importorskip("mypy", reason="checks a user's file with mypy")

ROOT = Path(__file__).resolve().parents[2]
CONFIG = f"""
[mypy]
strict = true
mypy_path = {ROOT}
namespace_packages = true
explicit_package_bases = true
cache_dir = {ROOT / ".mypy_cache" / "of_a_user"}

[mypy-megatron.slipstream.*]
follow_imports = silent

[mypy-torch.*,numpy.*,pydantic.*,rich.*,jinja2.*,yaml.*,packaging.*,megatron.core.*]
# Analysing these takes a minute.
follow_imports = skip
ignore_missing_imports = true

[mypy-megatron.training.*,transformer_engine.*,scipy.*,psutil.*,matplotlib.*,tokenizers.*]
follow_imports = skip
ignore_missing_imports = true
"""
USERS_FILE = """\
import torch

import megatron.slipstream as slipstream
from megatron.slipstream import OffloadConfig, attach, install, report, suspended, uninstall

config = OffloadConfig(offload_backend="cpu", offload_release_lag=2, offload_native="off")
engine = install(config)
install()
with suspended():
    print(report().ranks[0].modules["core_attn"].num_late)
uninstall()
model = torch.nn.Linear(2, 2)
handle = attach(model, ["layers.*", torch.nn.Linear], config, activation_offload_fraction=0.5)
handle.save_trace("trace.json")
handle.detach()
slipstream.with_sync_free_experts(None, capacity_factor=1.5)
print(slipstream.__version__.split("."))

OffloadConfig(offload_releaselag=2)  # Unexpected keyword argument "offload_releaselag"
OffloadConfig(offload_release_lag="2")  # has incompatible type "str"; expected "int"
OffloadConfig(offload_backend="gpu")  # incompatible type "Literal['gpu']"
config.offload_verify = 2  # is read-only
install({"offload_release_lag": 2})  # Argument 1 to "install" has incompatible type
install(offload_release_lag=2)  # Unexpected keyword argument "offload_release_lag"
attach(model, 3)  # Argument 2 to "attach" has incompatible type "int"
attach(model, "*", fraction=0.5)  # Unexpected keyword argument "fraction"
handle.detatch()  # has no attribute "detatch"
report().rank  # has no attribute "rank"
slipstream.instal()  # Module has no attribute "instal"
slipstream.to_cli(1)  # Argument 1 to "to_cli" has incompatible type
"""


@pytest.fixture(scope="module")
def messages(tmp_path_factory: pytest.TempPathFactory) -> dict[int, list[str]]:
    """mypy's messages by line, of :data:`USERS_FILE` and one line for each public name."""
    folder = tmp_path_factory.mktemp("user")
    revealed = [f"reveal_type(slipstream.{name})" for name in slipstream.__all__]
    (folder / "user.py").write_text(USERS_FILE + "\n".join(revealed) + "\n")
    (folder / "mypy.ini").write_text(CONFIG)
    done = subprocess.run(
        [sys.executable, "-m", "mypy", "--config-file", "mypy.ini", "user.py"],
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=120,
    )
    found: dict[int, list[str]] = {}
    for path, line, text in re.findall(r"^(\S+):(\d+): (.*)$", done.stdout, re.M):
        assert path == "user.py", done.stdout
        found.setdefault(int(line), []).append(text)
    assert found, done.stdout + done.stderr
    return found


def test_right_lines_pass_and_each_mistake_is_an_error(messages: dict[int, list[str]]) -> None:
    for number, line in enumerate(USERS_FILE.splitlines(), start=1):
        _, _, expected = line.partition("  # ")
        errors = [text for text in messages.get(number, []) if text.startswith("error: ")]
        assert len(errors) == bool(expected), (line, errors)
        assert all(expected in text for text in errors), (line, errors)


@pytest.mark.parametrize("name", slipstream.__all__)
def test_the_type_of_a_public_name_is_known(name: str, messages: dict[int, list[str]]) -> None:
    first = len(USERS_FILE.splitlines()) + 1
    (text,) = messages[first + slipstream.__all__.index(name)]
    kind = text.removeprefix('note: Revealed type is "').removesuffix('"')
    assert kind == "str" if name == "__version__" else kind.startswith("def "), text
