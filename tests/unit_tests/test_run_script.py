# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``./run`` finds a working Python 3.12, and creates its environment once and completely."""

from __future__ import annotations

import os
import re
import shutil
import stat
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from megatron.slipstream.patches.releases import TESTED_RELEASES

ROOT = Path(__file__).resolve().parents[2]

TOOLS = "bash cat cut dirname flock grep mv readlink rm sha256sum sort".split()
"""Programs that the script calls. A folder of links to these is a machine without any Python."""

BROKEN_SHIM = "#!/bin/sh\necho 'pyenv: python3.12: command not found' >&2\nexit 127\n"

FAKE_PYTHON = """#!/bin/sh
# Stands for Python 3.12. Every call is noted; `-m venv` makes a folder with a copy of this file,
# pip the folder that it installs into.
(IFS='|'; echo "$*" >>"$CALLS")
case "$*" in
  "-m venv --clear "*) rm -rf "$4"; mkdir -p "$4/bin"; cp "$0" "$4/bin/python" ;;
  "-m pip config list") printf '%s\\n' "$PIP_SETTINGS" ;;
  "-m uv "*)
    [ ! -e "$FAIL_UV" ] || exit 1
    echo "$UV_DEFAULT_INDEX|$UV_INDEX|$UV_FIND_LINKS|$SSL_CERT_FILE|$UV_HTTP_TIMEOUT" ;;
  "-m pip "*)
    [ ! -e "$FAIL_PIP" ] || exit 1
    while [ $# -gt 0 ]; do [ "$1" != --target ] || mkdir -p "$2"; shift; done ;;
  "-c import sys; print(sys.executable)") echo "$0" ;;
esac
"""


def make_script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def machine(tmp_path: Path) -> dict[str, str]:
    """The environment variables of a machine whose only python3.12 is a broken shim."""
    make_script(tmp_path / "shims" / "python3.12", BROKEN_SHIM)
    tools = tmp_path / "tools"
    tools.mkdir()
    for name in [*TOOLS, "cp", "mkdir", "sh"]:
        found = shutil.which(name)
        if found:
            (tools / name).symlink_to(found)
    return {
        "PATH": f"{tmp_path / 'shims'}:{tools}",
        "HOME": str(tmp_path / "home"),
        "PYENV_ROOT": str(tmp_path / "pyenv"),
        "SLIPSTREAM_PYTHON_DIRS": "",
        "CALLS": str(tmp_path / "calls"),
        "FAIL_PIP": str(tmp_path / "fail-pip"),
        "FAIL_UV": str(tmp_path / "fail-uv"),
        "PIP_SETTINGS": "",
    }


def run(
    *arguments: str, env: dict[str, str], script: Path = ROOT / "run", cwd: str | Path = "/"
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        ["bash", script, *arguments],
        env=env,
        cwd=cwd,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
        stdin=subprocess.DEVNULL,
    )


# --- which Python ---------------------------------------------------------------------------------


def link_to_this_python(path: Path) -> Path:
    """Put this process's Python at ``path``; a link would search its library next to itself."""
    return make_script(path, f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')


needs_312 = pytest.mark.skipif(
    sys.version_info[:2] != (3, 12), reason="these tests give the script their own Python 3.12"
)


def test_without_a_python_the_error_says_what_was_tried_and_what_to_install(
    machine: dict[str, str],
) -> None:
    result = run("which-python", env=machine)
    assert result.returncode == 1
    assert result.stdout == ""
    assert "shims/python3.12: does not run" in result.stderr
    for cure in ("apt install python3.12", "uv python install 3.12", "pyenv install 3.12"):
        assert cure in result.stderr


@needs_312
@pytest.mark.parametrize(
    "place",
    [
        "pyenv/versions/3.12.1/bin",
        "versions/3.12.1/bin",  # of the pyenv whose shims are in PATH, which nothing else names
        "home/.local/share/uv/python/cpython-3.12.9-x/bin",
    ],
)
def test_a_broken_shim_first_in_path_does_not_hide_a_working_python(
    machine: dict[str, str], tmp_path: Path, place: str
) -> None:
    link_to_this_python(tmp_path / place / "python3.12")
    del machine["SLIPSTREAM_PYTHON_DIRS"]
    result = run("which-python", env=machine)
    assert result.returncode == 0, result.stderr
    assert Path(result.stdout.strip()).samefile(sys.executable)


@needs_312
def test_named_folders_are_searched_instead_of_the_usual_places(
    machine: dict[str, str], tmp_path: Path
) -> None:
    link_to_this_python(tmp_path / "some where" / "python3.12")
    env = machine | {"SLIPSTREAM_PYTHON_DIRS": f"/nonexistent:{tmp_path / 'some where'}"}
    assert Path(run("which-python", env=env).stdout.strip()).samefile(sys.executable)


@needs_312
@pytest.mark.parametrize("version", [(3, 11), (3, 13)])
def test_a_python_of_another_version_is_not_taken(
    machine: dict[str, str], tmp_path: Path, version: tuple[int, int]
) -> None:
    python = link_to_this_python(tmp_path / "shims" / "python3")
    (tmp_path / "lie").mkdir()
    (tmp_path / "lie" / "sitecustomize.py").write_text(f"import sys; sys.version_info = {version}")
    result = run("which-python", env=machine | {"PYTHONPATH": str(tmp_path / "lie")})
    assert result.returncode == 1
    assert f"{python}: is Python {version[0]}.{version[1]}" in result.stderr


def test_a_named_python_that_does_not_work_is_an_error_and_never_replaced(
    machine: dict[str, str], tmp_path: Path
) -> None:
    make_script(tmp_path / "pyenv" / "versions" / "3.12.1" / "bin" / "python3.12", FAKE_PYTHON)
    named = tmp_path / "shims" / "python3.12"
    del machine["SLIPSTREAM_PYTHON_DIRS"]
    result = run("which-python", env=machine | {"PYTHON": str(named)})
    assert result.returncode == 1
    assert f"PYTHON={named} does not run" in result.stderr


# --- the environment ------------------------------------------------------------------------------


@pytest.fixture
def clone(machine: dict[str, str], tmp_path: Path) -> Path:
    """The script of a clean clone, on a machine with a (fake) Python 3.12."""
    make_script(tmp_path / "shims" / "python3.12", FAKE_PYTHON)
    folder = tmp_path / "a clone"
    folder.mkdir()
    for name in ("run", "pyproject.toml", "constraints.txt"):
        shutil.copy(ROOT / name, folder / name)
    return folder / "run"


def installs(env: dict[str, str]) -> int:
    """Count the editable installs since the last call."""
    calls = Path(env["CALLS"])
    count = calls.read_text().count("|--no-build-isolation|-e|") if calls.exists() else 0
    calls.unlink(missing_ok=True)
    return count


def test_the_environment_is_made_once(machine: dict[str, str], clone: Path) -> None:
    for expected in (1, 0):
        result = run("python", "-c", "", env=machine, script=clone)
        assert result.returncode == 0, result.stderr
        assert installs(machine) == expected


def test_everything_is_installed_in_the_tested_version(
    machine: dict[str, str], clone: Path
) -> None:
    run("python", env=machine, script=clone)
    calls = Path(machine["CALLS"]).read_text().splitlines()
    made_by = [call for call in calls if re.match(r"-m\|(uv\|)?pip\|install\|", call)]
    assert len(made_by) == 3
    assert all(f"|-c|{clone.parent / 'constraints.txt'}|" in call for call in made_by)


def test_uv_installs_from_the_places_that_pip_knows(machine: dict[str, str], clone: Path) -> None:
    machine["PIP_SETTINGS"] = "\n".join(
        [
            ":env:.default-timeout='180'",
            ":env:.find-links='/first'",
            "global.cert='/bundle.crt'",
            r"global.extra-index-url='\nfile:///a\nfile:///b'",
            "global.find-links='/second'",
            "global.index-url='http://here/simple?a=b'",
        ]
    )
    result = run("python", env=machine, script=clone)
    places = "http://here/simple?a=b| file:///a file:///b|/first|/bundle.crt|180"
    assert result.stderr.splitlines().count(places) == 2
    mine = machine | {"UV_DEFAULT_INDEX": "http://mine"}
    (clone.parent / ".venv" / ".ready").unlink()
    assert "http://mine| file:///a" in run("python", env=mine, script=clone).stderr


@pytest.mark.parametrize("failing", ["", "its install", "its work"])
def test_pip_installs_what_uv_does_not(
    machine: dict[str, str], clone: Path, tmp_path: Path, failing: str
) -> None:
    if failing == "its install":
        no_uv = 'case "$*" in *" uv") exit 1 ;; esac\n'
        make_script(tmp_path / "shims" / "python3.12", FAKE_PYTHON.replace("\n", f"\n{no_uv}", 1))
    elif failing == "its work":
        Path(machine["FAIL_UV"]).touch()
    result = run("python", env=machine, script=clone)
    assert result.returncode == 0, result.stderr
    assert ("run: uv cannot be installed or failed" in result.stderr) == bool(failing)
    calls = Path(machine["CALLS"]).read_text().splitlines()
    (made_by,) = (call for call in calls if "|-e|" in call)
    assert made_by.startswith("-m|pip|install|" if failing else "-m|uv|pip|install|")


@pytest.mark.parametrize("keeps_byte_code", [True, False])
def test_byte_code_is_made_at_once_where_python_must_not_keep_it(
    machine: dict[str, str], clone: Path, keeps_byte_code: bool
) -> None:
    forbidden = {} if keeps_byte_code else {"PYTHONDONTWRITEBYTECODE": "1"}
    assert run("python", env=machine | forbidden, script=clone).returncode == 0
    calls = Path(machine["CALLS"]).read_text().splitlines()
    by_pip = [call for call in calls if call.startswith("-m|pip|install|")]
    by_uv = [call for call in calls if call.startswith("-m|uv|pip|install|")]
    assert ["|--no-compile|" in call for call in by_pip] == [keeps_byte_code]
    assert ["|--compile-bytecode|" in call for call in by_uv] == [not keeps_byte_code] * 2


@pytest.mark.parametrize("changed", ["pyproject.toml", "constraints.txt"])
def test_the_environment_is_refreshed_when_its_description_changes(
    machine: dict[str, str], clone: Path, changed: str
) -> None:
    run("python", env=machine, script=clone)
    assert installs(machine) == 1
    with (clone.parent / changed).open("a") as stream:
        stream.write("# changed\n")
    # Also if the folder has moved, too.
    moved = clone.parent.rename(clone.parent.with_name("moved")) / "run"
    said = run("python", env=machine, script=moved).stderr
    assert f"run: pyproject.toml or constraints.txt changed; refreshing {moved.parent}" in said
    assert "--no-deps" not in Path(machine["CALLS"]).read_text()
    assert installs(machine) == 1


def test_an_environment_moved_with_its_clone_is_refreshed(
    machine: dict[str, str], clone: Path
) -> None:
    run("python", env=machine, script=clone)
    calls = Path(machine["CALLS"])
    assert "--quiet" not in calls.read_text()  # the first time, uv shows how far it is
    moved = clone.parent.rename(clone.parent.with_name("moved"))
    calls.unlink()
    said = run("python", env=machine, script=moved / "run").stderr
    assert f"run: this folder was {clone.parent}, or was copied from there; " in said
    assert "changed" not in said
    (install,) = (call for call in calls.read_text().splitlines() if "|-e|" in call)
    assert f"|--quiet|--no-deps|--no-build-isolation|-e|{moved}[" in install
    assert installs(machine) == 1
    assert run("python", env=machine, script=moved / "run").stderr == ""


@pytest.mark.parametrize("ready_before", [False, True], ids=["first", "refresh"])
def test_an_interrupted_install_is_started_afresh(
    machine: dict[str, str], clone: Path, ready_before: bool
) -> None:
    if ready_before:
        run("python", env=machine, script=clone)
        (clone.parent / "constraints.txt").write_text("# changed\n")
    fail = Path(machine["FAIL_PIP"])
    fail.touch()
    assert run("python", "-c", "the command", env=machine, script=clone).returncode != 0
    assert "the command" not in Path(machine["CALLS"]).read_text()
    half_installed = clone.parent / ".venv" / "half-installed"
    half_installed.touch()
    fail.unlink()
    installs(machine)
    result = run("python", env=machine, script=clone)
    assert result.returncode == 0, result.stderr
    assert installs(machine) == 1
    assert not half_installed.exists()


def test_an_environment_whose_python_is_gone_is_made_again(
    machine: dict[str, str], clone: Path
) -> None:
    run("python", env=machine, script=clone)
    installs(machine)
    make_script(clone.parent / ".venv" / "bin" / "python", BROKEN_SHIM)
    assert run("python", env=machine, script=clone).returncode == 0
    assert installs(machine) == 1


# --- sub-commands ---------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "arguments, called",
    [
        (["demo", "--fast"], "{root}/examples/demo.py|--fast"),
        (["train", "--seed", "1"], "{root}/pretrain_gpt.py|--seed|1"),
        (["test", "-k", "two words"], "-m|pytest|-k|two words"),
        (["test-release", "0.18.2", "-x"], "-m|pytest|-m|releases|-x"),
        (
            ["functional-tests", "--record"],
            "-m|pytest|tests/functional_tests/test_cases.py|--all-cases|--record",
        ),
        (["report", "r.json"], "-m|megatron.slipstream.cli|report|r.json"),
        (["slipstream", "plan", "t.json"], "-m|megatron.slipstream.cli|plan|t.json"),
        (["docs", "--serve"], "-m|http.server|--bind|127.0.0.1|--directory|build/site|8000"),
        (["lint"], "-m|mypy"),
        (["lint", "--fix"], "-m|ruff|check|--fix"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_a_sub_command_passes_its_arguments_on(
    machine: dict[str, str], clone: Path, arguments: list[str], called: str
) -> None:
    result = run(*arguments, env=machine, script=clone)
    assert result.returncode == 0, result.stderr
    assert called.format(root=clone.parent) in Path(machine["CALLS"]).read_text().splitlines()


def test_a_release_is_tested_in_the_files_that_have_tests_for_it(
    machine: dict[str, str], clone: Path
) -> None:
    folder = clone.parent / "tests"
    folder.mkdir()
    (folder / "test_of_all.py").write_text("pytestmark = pytest.mark.releases\n")
    (folder / "test_of_the_newest.py").write_text("def test_it() -> None: ...\n")
    run("test-release", "0.18.2", "-q", env=machine, script=clone)
    run("test-release", "0.18.2", "tests/test_of_the_newest.py::test_it", env=machine, script=clone)
    calls = Path(machine["CALLS"]).read_text().splitlines()
    assert [call for call in calls if "|releases|" in call] == [
        "-m|pytest|-m|releases|-q|tests/test_of_all.py",
        "-m|pytest|-m|releases|tests/test_of_the_newest.py::test_it",
    ]


def test_a_checkout_is_copied_without_what_would_come_before_ours(
    machine: dict[str, str], clone: Path, tmp_path: Path
) -> None:
    checkout = tmp_path / "Megatron-LM"
    datasets = checkout / "megatron" / "core" / "datasets"
    datasets.mkdir(parents=True)
    for name in ("../package_info.py", "Makefile", "helpers_cpp.so"):
        (datasets / name).touch()
    (checkout / "tools").mkdir()
    result = run("test-release", "--source", str(checkout), "-q", env=machine, script=clone)
    assert result.returncode == 0, result.stderr
    copy = clone.parent / ".releases" / "source"
    assert not (copy / "tools").exists()
    assert [path.name for path in (copy / "megatron/core/datasets").iterdir()] == ["helpers_cpp.so"]
    calls = Path(machine["CALLS"]).read_text().splitlines()
    assert any(call.startswith("-m|pytest|-m|releases|-q") for call in calls)
    refused = run("test-release", "--source", str(tmp_path), env=machine, script=clone)
    assert refused.returncode != 0
    assert "--source needs a checkout of Megatron-LM" in refused.stderr


@pytest.mark.parametrize(
    "versions, pins",
    [
        ("2.10", ["numpy==2.5.5", "torch==2.10.*"]),
        ("pinned", ["torch==2.11.0", "triton==3.6.0", "cuda-bindings==13.5.0", "numpy==2.5.5"]),
        ("newest", []),
    ],
)
def test_other_versions_get_an_environment_of_their_own(
    machine: dict[str, str], clone: Path, tmp_path: Path, versions: str, pins: list[str]
) -> None:
    (clone.parent / "constraints.txt").write_text(
        "torch==2.11.0\ntriton==3.6.0\ncuda-bindings==13.5.0\nnumpy==2.5.5\n"
    )
    says = 'case "$*" in *version_info*) echo 3.13 ;; esac\n'
    python = make_script(tmp_path / "python3.13", FAKE_PYTHON + says)
    env = machine | {"PYTHON": str(python)}
    result = run("test-versions", versions, "-x", env=env, script=clone)
    assert result.returncode == 0, result.stderr
    folder = clone.parent / ".versions" / f"{versions}-3.13"
    assert (folder / "constraints.txt").read_text().split() == pins
    calls = Path(machine["CALLS"]).read_text().splitlines()
    assert "-m|pytest|-m|releases|-x" in calls
    (install,) = (call for call in calls if "|-e|" in call)
    assert f"|-c|{folder / 'constraints.txt'}|" in install
    assert not (clone.parent / ".venv").exists()


def test_other_versions_must_be_named(machine: dict[str, str], clone: Path) -> None:
    result = run("test-versions", "torch", env=machine, script=clone)
    assert result.returncode == 1
    assert "pinned, newest or a version of torch, such as 2.10, not 'torch'" in result.stderr


@pytest.mark.parametrize("status, fails", [(0, False), (1, True), (5, True)])
def test_a_framework_of_which_nothing_was_tested_fails(
    machine: dict[str, str], clone: Path, status: int, fails: bool
) -> None:
    run("python", env=machine, script=clone)
    requirements = clone.parent / "tests" / "frameworks" / "requirements" / "verl.txt"
    requirements.parent.mkdir(parents=True)
    requirements.touch()
    python = clone.parent / ".venv" / "bin" / "python"
    paths = f'case "$*" in *purelib*) echo "{clone.parent}" ;; esac\n'
    make_script(
        python, FAKE_PYTHON + paths + f'case "$*" in *test_verl.py) exit {status} ;; esac\n'
    )
    result = run("test-frameworks", "verl", env=machine, script=clone)
    assert result.returncode == int(fails), result.stderr
    assert ("nothing of verl was tested" in result.stderr) == (status == 5)


def release_installs(env: dict[str, str], release: str) -> list[str]:
    calls = Path(env["CALLS"]).read_text().splitlines()
    return [call for call in calls if call.endswith(f"|megatron-core=={release}")]


def test_a_release_is_installed_once_and_alone(machine: dict[str, str], clone: Path) -> None:
    for _ in range(2):
        result = run("test-release", "0.18.2", env=machine, script=clone)
        assert result.returncode == 0, result.stderr
    run("test-release", "0.19.1", env=machine, script=clone)
    (call,) = release_installs(machine, "0.18.2")
    assert "|--no-deps|" in call
    assert f"|--target|{clone.parent / '.releases' / '0.18.2'}" in call
    assert len(release_installs(machine, "0.19.1")) == 1
    assert len(list((clone.parent / ".releases").iterdir())) == 2


def test_an_interrupted_install_of_a_release_is_started_afresh(
    machine: dict[str, str], clone: Path
) -> None:
    run("python", env=machine, script=clone)
    half = clone.parent / ".releases" / "0.18.2.part" / "half-installed"
    half.parent.mkdir(parents=True)
    half.touch()
    fail = Path(machine["FAIL_PIP"])
    fail.touch()
    assert run("test-release", "0.18.2", env=machine, script=clone).returncode != 0
    assert "-m|pytest" not in Path(machine["CALLS"]).read_text()
    half.parent.mkdir(exist_ok=True)
    half.touch()
    fail.unlink()
    assert run("test-release", "0.18.2", env=machine, script=clone).returncode == 0
    assert list((clone.parent / ".releases").rglob("half-installed")) == []


def test_a_release_comes_before_the_one_of_the_environment(
    machine: dict[str, str], clone: Path
) -> None:
    run("python", env=machine, script=clone)
    python = clone.parent / ".venv" / "bin" / "python"
    make_script(python, FAKE_PYTHON + 'case "$*" in *pytest*) echo "$PYTHONPATH" ;; esac\n')
    result = run("test-release", "0.18.2", env=machine | {"PYTHONPATH": "/mine"}, script=clone)
    root = clone.parent
    assert result.stdout.splitlines() == [f"{root / '.releases' / '0.18.2'}:{root}:/mine"]


def test_tests_of_another_release_than_asked_for_do_not_run(
    machine: dict[str, str], clone: Path
) -> None:
    run("python", env=machine, script=clone)
    python = clone.parent / ".venv" / "bin" / "python"
    make_script(python, FAKE_PYTHON + 'case "$*" in *importlib.metadata*) exit 1 ;; esac\n')
    result = run("test-release", "0.18.2", env=machine, script=clone)
    assert result.returncode == 1
    assert "megatron-core 0.18.2 is not what" in result.stderr
    assert "-m|pytest" not in Path(machine["CALLS"]).read_text()


@pytest.mark.parametrize("arguments", [[], ["-k", "mla"], ["../0.18.2"]], ids=str)
def test_a_release_must_be_named(
    machine: dict[str, str], clone: Path, arguments: list[str]
) -> None:
    result = run("test-release", *arguments, env=machine, script=clone)
    assert result.returncode == 1
    assert (
        f"test-release needs a release of megatron-core, such as {TESTED_RELEASES[0]}"
        in result.stderr
    )


def test_lint_fails_when_any_of_its_checks_fails(machine: dict[str, str], clone: Path) -> None:
    run("python", env=machine, script=clone)
    python = clone.parent / ".venv" / "bin" / "python"
    for check in ("ruff check", "ruff format --check", "mypy"):
        failing = f'case "$*" in "-m {check}") exit 1 ;; esac\n'
        make_script(python, FAKE_PYTHON + failing)
        assert run("lint", env=machine, script=clone).returncode == 1, check


def test_the_documentation_is_built_afresh_and_as_strictly_as_can_be(
    machine: dict[str, str], clone: Path
) -> None:
    stale = clone.parent / "build" / "site" / "gone.html"
    stale.parent.mkdir(parents=True)
    stale.touch()
    result = run("docs", env=machine, script=clone)
    assert result.returncode == 0, result.stderr
    (call,) = (c for c in Path(machine["CALLS"]).read_text().splitlines() if "|sphinx|" in c)
    assert "|--fresh-env|--fail-on-warning|" in call
    assert not stale.exists()


def test_a_documentation_with_faults_fails_and_is_not_shown(
    machine: dict[str, str], clone: Path
) -> None:
    run("python", env=machine, script=clone)
    python = clone.parent / ".venv" / "bin" / "python"
    make_script(python, FAKE_PYTHON + 'case "$*" in *sphinx*) exit 3 ;; esac\n')
    assert run("docs", "--serve", env=machine, script=clone).returncode == 3
    assert "http.server" not in Path(machine["CALLS"]).read_text()


@pytest.mark.parametrize("arguments", [["--sever"], ["--serve", "here"]], ids=str)
def test_what_docs_does_not_know_is_an_error(
    machine: dict[str, str], clone: Path, arguments: list[str]
) -> None:
    result = run("docs", *arguments, env=machine, script=clone)
    assert result.returncode == 1
    assert f"not '{arguments[-1]}'" in result.stderr


def test_without_a_sub_command_the_script_explains_itself(machine: dict[str, str]) -> None:
    result = run(env=machine)
    assert result.returncode == 0
    assert "./run demo" in result.stdout
    assert "./run test" in result.stdout


def test_an_unknown_sub_command_is_an_error(machine: dict[str, str]) -> None:
    result = run("tset", env=machine)
    assert result.returncode == 2
    assert "no sub-command 'tset'" in result.stderr


def test_the_current_environment_is_used_as_it_is(
    machine: dict[str, str], clone: Path, tmp_path: Path
) -> None:
    env = machine | {"SLIPSTREAM_USE_CURRENT_ENV": "1"}
    make_script(tmp_path / "shims" / "python3", FAKE_PYTHON)
    assert run("train", "--seed", "1", env=env, script=clone).returncode == 0
    assert installs(env) == 0
    assert not (clone.parent / ".venv").exists()


@pytest.mark.parametrize("module", ["megatron.core", "rich"])
def test_what_the_current_environment_lacks_is_named_with_the_cure(
    module: str, machine: dict[str, str], clone: Path, tmp_path: Path
) -> None:
    env = machine | {"SLIPSTREAM_USE_CURRENT_ENV": "1"}
    lacking = FAKE_PYTHON + f'case "$*" in *" {module}") exit 1 ;; esac\n'
    make_script(tmp_path / "shims" / "python3", lacking)
    result = run("slipstream", "plan", env=env, script=clone)
    assert result.returncode == 1
    assert f"has no module '{module}'; install there what pyproject.toml lists" in result.stderr


def test_the_script_looks_for_every_dependency_of_the_package() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    names = [re.split(r"[<>=~\[ ]", line)[0] for line in project["dependencies"]]
    modules = {
        {"pyyaml": "yaml", "megatron-core": "megatron.core"}.get(name, name) for name in names
    }
    (line,) = re.findall(r"for module in (torch .*?) \"\$@\"; do", (ROOT / "run").read_text())
    assert set(line.split()) == modules


@pytest.mark.parametrize("script", ["run", ".ci/run"])
def test_scripts_can_be_executed(script: str) -> None:
    assert os.access(ROOT / script, os.X_OK)


@pytest.mark.parametrize(
    "failing", ["", "lint", "docs", "python", "test", "test-release", "install-browser"]
)
def test_ci_runs_lint_docs_and_tests_and_fails_with_any(tmp_path: Path, failing: str) -> None:
    ci = tmp_path / ".ci" / "run"
    ci.parent.mkdir()
    shutil.copy(ROOT / ".ci" / "run", ci)
    make_script(tmp_path / "run", f'#!/bin/sh\necho "ran $1 $2"\n[ "$1" != "{failing}" ]\n')
    result = run(env=dict(os.environ), script=ci)
    ran = [line.split()[1:] for line in result.stdout.splitlines() if line.startswith("ran ")]
    releases = [release for command, *release in ran if command == "test-release"]
    # The browser is installed beside lint and docs.
    commands = [command for command, *_ in ran]
    commands.remove("install-browser")
    assert commands == ["lint", "docs", "python", "test", "test-release"]
    assert releases == [[release] for release in TESTED_RELEASES[:-1]]
    assert result.returncode == (0 if failing in ("", "install-browser") else 1)
