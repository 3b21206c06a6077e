# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Contents of a release: the wheel has the package and nothing else, the sdist everything.

Both are built from a copy of this repository without a network, by the installed setuptools.
"""

from __future__ import annotations

import functools
import importlib.util
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from email.message import Message
from email.parser import Parser
from pathlib import Path

import pytest
from forked import forget_megatron, run_function

from megatron.slipstream import __version__

pytest.importorskip("setuptools", "77", reason="a build needs setuptools 77 or newer")

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".ci", ".github", "benchmarks", "docs", "examples", "megatron", "tests", "tools")
FILES = (
    *("CHANGELOG.md", "CODEOWNERS", "CONTRIBUTING.md", "LICENSE", "MANIFEST.in", "README.md"),
    *("constraints.txt", "pretrain_gpt.py", "pyproject.toml", "run", "setup.py"),
)
MADE_BY_SETUPTOOLS = ("PKG-INFO", "setup.cfg", "megatron_slipstream.egg-info")
PLANTED = (
    *("tests/__init__.py", "examples/__init__.py", "megatron/other/__init__.py"),
    *("megatron/slipstream/plan/__pycache__/stale.py", "tests/__pycache__/stale.pyc"),
)
"""Files that must not get into a wheel; caches not into an sdist either."""

START = "megatron_slipstream.pth"
"""What Python runs when it starts."""


def build(source: Path, kind: str, compiler: str = "") -> Path:
    """Build a 'wheel' or an 'sdist' of the project in ``source``.

    Without a compiler there is no torch either, as where pip hides it from a build.
    """
    # In a copy: setuptools leaves folders that the next build would find.
    copy = shutil.copytree(source, source.with_name(f"{source.name} {kind} {compiler}"))
    out = source.with_name(f"{source.name} {kind} {compiler} built")
    out.mkdir()
    result = run_function(
        functools.partial(_build, kind, out, bool(compiler)),
        folder=copy,
        environment={"CXX": compiler},
        timeout_s=60,
    )
    assert result.returncode == 0, result.stderr[-2000:]
    (built,) = out.iterdir()
    return built


def _build(kind: str, out: Path, has_torch: bool) -> int:
    """In a forked process: a new one would import torch."""
    forget_megatron()
    sys.path.insert(0, "")
    if not has_torch:
        sys.modules["torch"] = None  # type: ignore[assignment]
    from setuptools import build_meta

    getattr(build_meta, f"build_{kind}")(str(out))
    return 0


def files_in(folder: Path) -> set[str]:
    """Every file below a folder, without Python's caches."""
    paths = (path.relative_to(folder) for path in folder.rglob("*") if path.is_file())
    return {str(path) for path in paths if "__pycache__" not in path.parts}


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the repository, with planted files that must not ship."""
    folder = tmp_path_factory.mktemp("packaging") / "source"
    for name in FOLDERS:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for name in FILES:
        shutil.copy(ROOT / name, folder / name)
    for planted in PLANTED:
        (folder / planted).parent.mkdir(exist_ok=True)
        (folder / planted).touch()
    return folder


@pytest.fixture(scope="module")
def wheel(source: Path) -> zipfile.ZipFile:
    return zipfile.ZipFile(build(source, "wheel", "no-such-compiler"))


@pytest.fixture(scope="module")
def sdist(source: Path) -> Path:
    """The unpacked source distribution."""
    folder = source.with_name("unpacked")
    with tarfile.open(build(source, "sdist")) as archive:
        archive.extractall(folder, filter="data")
    (project,) = folder.iterdir()
    return project


@pytest.fixture(scope="module")
def site(wheel: zipfile.ZipFile, source: Path) -> Path:
    """The folder of the installed wheel, for the path."""
    folder = source.with_name("site")
    wheel.extractall(folder)
    return folder


def metadata_of(wheel: zipfile.ZipFile) -> Message:
    (name,) = (name for name in wheel.namelist() if name.endswith(".dist-info/METADATA"))
    return Parser().parsestr(wheel.read(name).decode())


def python(*arguments: str, site: Path, cwd: Path) -> str:
    return subprocess.run(
        [sys.executable, *arguments],
        env=os.environ | {"PYTHONPATH": str(site)},
        cwd=cwd,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout


# --- the wheel ------------------------------------------------------------------------------------


def test_the_wheel_holds_all_of_the_package_and_nothing_else(
    wheel: zipfile.ZipFile, source: Path
) -> None:
    names = {name for name in wheel.namelist() if ".dist-info/" not in name}
    package = source / "megatron" / "slipstream"
    assert names - {START} == {f"megatron/slipstream/{name}" for name in files_in(package)}
    assert {START, "megatron/slipstream/py.typed"} <= names


def test_the_wheel_has_no_other_top_level_name_than_megatron(wheel: zipfile.ZipFile) -> None:
    tops = {name.partition("/")[0] for name in wheel.namelist()}
    assert tops == {"megatron", START, f"megatron_slipstream-{__version__}.dist-info"}


def test_a_wheel_that_is_built_beside_torch_and_a_compiler_has_the_compiled_module(
    source: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    compiler = tmp_path / "compiler"
    script = f'while [ "$1" != -o ]; do shift; done\ncp {sys.executable} "$2"\n'
    compiler.write_text(f"#!/bin/sh\n{script}")
    compiler.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    path = build(source, "wheel", compiler.name)
    assert not path.name.endswith("-none-any.whl"), "it serves one platform"
    wheel = zipfile.ZipFile(path)
    native = "megatron/slipstream/fine_grained_activation_offload/native"
    (made,) = (name for name in wheel.namelist() if name.endswith(".so"))
    assert re.fullmatch(rf"{native}/[0-9a-f]{{16}}/slipstream_native[.].*[.]so", made)
    assert not [name for name in wheel.namelist() if name.endswith(".lock")]
    wheel.extractall(tmp_path / "site")
    found = run_function(
        functools.partial(_import_native, tmp_path / "site"),
        folder=tmp_path,
        environment={"XDG_CACHE_HOME": str(tmp_path / "cache")},
    )
    assert found.returncode == 0, found.stderr


def _import_native(site: Path) -> int:
    """In a forked process: import the installed wheel."""
    forget_megatron()
    sys.path.insert(0, str(site))
    from megatron.slipstream.fine_grained_activation_offload.native import build

    assert Path(build.__file__).is_relative_to(site)
    return int(build._find() is None)


def test_the_metadata_is_that_of_pyproject_and_the_version_that_of_the_package(
    wheel: zipfile.ZipFile,
) -> None:
    metadata = metadata_of(wheel)
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert "version" not in project
    assert metadata["Version"] == __version__
    assert metadata["Name"] == project["name"]
    assert metadata["License-Expression"] == "Apache-2.0"
    assert set(metadata.get_all("Provides-Extra", [])) == set(project["optional-dependencies"])
    required = [text for text in metadata.get_all("Requires-Dist", []) if "extra ==" not in text]
    names = [re.split(r"[<>=!~]", text)[0] for text in project["dependencies"]]
    assert [re.split(r"[<>=!~]", text)[0] for text in required] == names
    files = wheel.namelist()
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in files)


def test_the_command_of_the_wheel_starts(
    wheel: zipfile.ZipFile, site: Path, tmp_path: Path
) -> None:
    (points,) = (name for name in wheel.namelist() if name.endswith("entry_points.txt"))
    assert "slipstream = megatron.slipstream.cli:main" in wheel.read(points).decode()
    help_text = python("-m", "megatron.slipstream.cli", "--help", site=site, cwd=tmp_path)
    assert help_text.startswith("usage: slipstream")


def test_an_installed_wheel_and_megatron_core_resolve_together(site: Path, tmp_path: Path) -> None:
    # Not importorskip: importing megatron-core takes ten seconds, finding it takes none.
    if importlib.util.find_spec("megatron.core") is None:
        pytest.skip("needs megatron-core installed")
    code = (
        "import importlib.util as u\n"
        "print(u.find_spec('megatron.slipstream').origin)\n"
        "print(u.find_spec('megatron.core').origin)"
    )
    slipstream, core = python("-c", code, site=site, cwd=tmp_path).splitlines()
    assert Path(slipstream) == site / "megatron" / "slipstream" / "__init__.py"
    assert core.endswith(os.path.join("megatron", "core", "__init__.py"))


WATCHED = """
import sys
before = set(sys.modules)
import site
site.addsitedir(sys.argv[1])
print(*(name for name in sorted(set(sys.modules) - before) if "slipstream" in name))
try:
    import megatron.core
except ValueError as error:
    print(error)
print("torch" in sys.modules, megatron.core.__file__)
"""
STAND_IN = """
import sys
print("core", "megatron.slipstream.integration.frameworks.on_import" in sys.modules)
"""


@pytest.mark.parametrize("value", ["", "0", "1"])
def test_a_variable_alone_prepares_the_engine_when_megatron_core_is_imported(
    value: str, site: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SLIPSTREAM_START", value)
    installed = shutil.copytree(site, tmp_path / "site")
    core = tmp_path / "other" / "megatron" / "core" / "__init__.py"
    core.parent.mkdir(parents=True)
    core.write_text(STAND_IN)
    ready = installed / "megatron/slipstream/integration/frameworks/on_import.py"
    ready.write_text("import megatron.core\nprint('ready')\n")
    # From here on, the path has the package only by the folder of the .pth file.
    said = python("-c", WATCHED, str(installed), site=tmp_path / "other", cwd=tmp_path).splitlines()
    frameworks = "megatron.slipstream.integration.frameworks"
    assert (f"{frameworks}.start" in said[0].split()) == bool(value)
    assert "on_import" not in said[0]
    assert said[1:-1] == ["core False", "ready"] if value == "1" else ["core False"]
    assert said[-1] == f"False {core}"


# --- the source distribution ----------------------------------------------------------------------


def test_the_sdist_holds_all_of_the_repository_and_nothing_stale(sdist: Path, source: Path) -> None:
    names = {name for name in files_in(sdist) if not name.startswith(MADE_BY_SETUPTOOLS)}
    # Only this package of the namespace is ours.
    assert names == files_in(source) - {"megatron/other/__init__.py"}
    assert not list(sdist.rglob("__pycache__"))


def test_the_wheel_of_the_sdist_is_the_wheel(sdist: Path, wheel: zipfile.ZipFile) -> None:
    again = zipfile.ZipFile(build(sdist, "wheel"))
    contents = [
        {name: one.read(name) for name in one.namelist() if not name.endswith("/RECORD")}
        for one in (wheel, again)
    ]
    assert contents[0] == contents[1]


def test_what_is_new_in_the_repository_is_to_be_shipped() -> None:
    if not (ROOT / ".git").exists():
        pytest.skip("needs the repository")
    command = ["git", "-C", str(ROOT), "ls-tree", "--name-only", "HEAD"]
    tracked = subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()
    assert set(tracked) - {".gitignore"} <= {*FOLDERS, *FILES}
