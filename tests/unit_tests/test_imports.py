# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The packages import in one direction, no files import each other, and the namespace stays shared.

The rules are read from the source, so that an import inside a function, under TYPE_CHECKING or by
name counts as much as one at the top of a file. Every rule is also shown to fail on the package
with a violation planted in one of its texts.
"""

from __future__ import annotations

import ast
import functools
import graphlib
import importlib.util
import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import pytest

from megatron import slipstream

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "megatron.slipstream"

ROOMS = (
    "plan",
    "packed_sequences",
    "context_parallel",
    "options",
    "fine_grained_activation_offload",
    "estimate",
    "report_page",
    "experts",
    "tiles",
    "graphs",
    "patches",
    "attached",
    "integration",
)
"""Left to right: a room may import itself, the rooms to its left, and what is in `SHARED`."""

WITHIN_INTEGRATION = (
    *("cpu", "record", "seam", "packed", "experts", "graphs", "layers", "budget"),
    *("install", "entry", "frameworks"),
)
"""The rooms of ``integration/``, in the same order."""

SHARED = frozenset({"launcher", "version"})
"""Top-level modules that every file may import."""

OF_THE_MACHINE = tuple(
    f"{PACKAGE}.options.{name}" for name in ("preflight", "host_memory", "datasets")
)
"""Modules that read the process, the machine or files; pure rooms may not import them."""

MEGATRON_READERS = frozenset({"patches", "integration"})
"""Packages that may import megatron-core or megatron.training."""

PURE = frozenset({"plan", "estimate"})

FRONT = frozenset({"__init__", "cli", "cli_plan", "doctor"})
"""The public interface, the command line and its doctor may import every room."""

COPYRIGHT = (
    "# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0."
)


@functools.cache
def package() -> dict[str, str]:
    """The text of each file of the package, by its path in it."""
    folder = ROOT / "megatron" / "slipstream"
    return {
        str(path.relative_to(folder)): path.read_text() for path in sorted(folder.rglob("*.py"))
    }


def with_line(file: str, line: str) -> dict[str, str]:
    """The package with a line at the end of a file, which may be new."""
    return {**package(), file: f"{package().get(file, '')}\n{line}\n"}


def module_of(file: str) -> str:
    parts = Path(file).with_suffix("").parts
    return ".".join([PACKAGE, *(part for part in parts if part != "__init__")])


def imported_names(file: str, text: str) -> tuple[tuple[int, str], ...]:
    """Line and absolute dotted name of every import of the file."""
    module = module_of(file)
    is_package = Path(file).name == "__init__.py"
    return names_imported_by(text, module if is_package else module.rpartition(".")[0])


@functools.cache
def names_imported_by(source: str, package: str) -> tuple[tuple[int, str], ...]:
    """The same for a text; cached, since each test looks at the whole package."""
    return tuple(_names_imported_by(source, package))


def _names_imported_by(source: str, package: str) -> Iterator[tuple[int, str]]:
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Import():
                yield from ((node.lineno, alias.name) for alias in node.names)
            case ast.ImportFrom():
                base = node.module or ""
                if node.level:
                    base = importlib.util.resolve_name("." * node.level + base, package)
                yield from ((node.lineno, f"{base}.{alias.name}") for alias in node.names)
            case ast.Call(
                func=ast.Name(id="import_module" | "__import__" | "find_spec")
                | ast.Attribute(attr="import_module" | "find_spec"),
                args=[ast.Constant(value=str(name)), *_],
            ):
                yield node.lineno, name
            case ast.Attribute(value=ast.Name(id="torch"), attr="cuda"):
                yield node.lineno, "torch.cuda"


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def import_violations(texts: Mapping[str, str]) -> list[str]:
    """Return every import of the package's files against that direction."""
    found = []
    for file, text in texts.items():
        parts = Path(file).with_suffix("").parts
        for line, name in imported_names(file, text):
            reason = why_not(parts[0], name) or why_not_within(parts, name)
            if reason:
                found.append(f"{file}:{line} imports {name}: {reason}")
    return found


def why_not(room: str, name: str) -> str:
    """The reason why a file of ``room`` may not import ``name``; empty if it may."""
    if within(name, PACKAGE):
        target = name.removeprefix(PACKAGE).strip(".").partition(".")[0]
        if room in FRONT or target in SHARED:
            return ""
        if room in PURE and any(within(name, module) for module in OF_THE_MACHINE):
            return f"{room} is pure: it reads no facts of the machine"
        if room not in ROOMS:
            return f"{room}.py may import no room"
        if target not in ROOMS:
            return "only the rooms are there for a room to import"
        if ROOMS.index(target) > ROOMS.index(room):
            return f"{target} lies to the right of {room}"
    elif within(name, "megatron"):
        if room not in MEGATRON_READERS:
            return "only patches and integration may import megatron-core or megatron.training"
    elif room in PURE and within(name, "torch.cuda"):
        return f"{room} is pure: it never touches a device"
    return ""


def why_not_within(parts: Sequence[str], name: str) -> str:
    """The reason why a file of ``integration/`` may not import another; empty if it may."""
    target = name.removeprefix(f"{PACKAGE}.").split(".")
    if parts[0] != "integration" or target[0] != "integration" or len(target) == 1:
        return ""
    room, other = parts[1], target[1]
    order = WITHIN_INTEGRATION
    if room not in order or other not in order:
        return "" if room == "__init__" else "only rooms in that order are in integration/"
    if order.index(other) > order.index(room):
        return f"integration/{other} lies to the right of integration/{room}"
    return ""


def circle_of_files(texts: Mapping[str, str]) -> list[str]:
    """Return modules of which each imports the one before it, the first one also as the last;
    empty if no files import each other."""
    modules = {module_of(file) for file in texts}
    imports: dict[str, set[str]] = {}
    for file, text in texts.items():
        names = (name for _, name in imported_names(file, text))
        # The last part of a name may be what a file defines.
        used = {name if name in modules else name.rpartition(".")[0] for name in names}
        imports[module_of(file)] = used & modules - {module_of(file)}
    try:
        graphlib.TopologicalSorter(imports).prepare()
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


# --- one-way imports ------------------------------------------------------------------------------


def test_rooms_import_one_way() -> None:
    assert import_violations(package()) == []


@pytest.mark.parametrize(
    "file, line",
    [
        ("plan/x.py", "from megatron.slipstream.fine_grained_activation_offload import engine"),
        ("plan/x.py", "from .. import graphs"),
        ("plan/x.py", "import torch.cuda"),
        ("plan/x.py", "from torch import cuda"),
        ("plan/x.py", "import torch\ntorch.cuda.Event()"),
        ("plan/x.py", "from megatron.core import parallel_state"),
        ("plan/__init__.py", "from ..graphs import slots"),
        ("plan/deep/x.py", "from ...integration import install"),
        ("fine_grained_activation_offload/x.py", "def f():\n    from megatron import core"),
        ("fine_grained_activation_offload/x.py", "import_module('megatron.training')"),
        ("launcher.py", "from megatron.slipstream import plan"),
        ("estimate/x.py", "from ..options import preflight"),
        ("attached/x.py", "from ..integration.seam import compat"),
        ("integration/seam/x.py", "from ..budget import rescue"),
        ("integration/budget/x.py", "from .. import install"),
        ("cli.py", "import megatron.training"),
    ],
    ids=lambda text: text.replace("\n", " "),
)
def test_an_import_against_the_way_is_found(file: str, line: str) -> None:
    (violation,) = import_violations(with_line(file, line))
    assert violation.startswith(f"{file}:")


@pytest.mark.parametrize(
    "file, line",
    [
        ("plan/x.py", "from . import trace\nfrom ..launcher import rank\nimport torch"),
        ("integration/seam/x.py", "import megatron.core\nfrom ...graphs import slots"),
        (
            "patches/x.py",
            "import megatron.core\nfrom ..plan import trace\nfrom ..options import preflight",
        ),
        ("integration/entry/x.py", "from ...options import preflight\nfrom .. import install"),
        ("cli.py", "from megatron.slipstream.integration import install"),
    ],
    ids=lambda text: text.replace("\n", " "),
)
def test_an_import_along_the_way_is_allowed(file: str, line: str) -> None:
    assert import_violations(with_line(file, line)) == []


def test_every_third_party_import_of_the_library_is_a_declared_dependency() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    # Code of the library that needs one of these is optional, and says so if it is missing.
    optional = project["optional-dependencies"]
    requirements = project["dependencies"] + optional["te"] + optional["plot"]
    declared = {re.split(r"[\[<>=!~ ]", text)[0].replace("-", "_") for text in requirements}
    declared = {"yaml" if name == "pyyaml" else name for name in declared}
    imported = {
        name.partition(".")[0]
        for file, text in package().items()
        for _, name in imported_names(file, text)
    }
    assert imported - sys.stdlib_module_names - declared - {"megatron"} == set()


# --- circles --------------------------------------------------------------------------------------


def test_no_files_import_each_other() -> None:
    assert circle_of_files(package()) == []


@pytest.mark.parametrize(
    "file, line",
    [
        ("plan/trace.py", "from .check import check_plan"),
        ("plan/trace.py", "def f():\n    import megatron.slipstream.plan.check"),
        ("plan/trace.py", "if TYPE_CHECKING:\n    from .check import check_plan"),
        ("plan/trace.py", "from megatron.slipstream import OffloadConfig"),
    ],
    ids=lambda text: text.replace("\n", " "),
)
def test_a_circle_of_files_is_found(file: str, line: str) -> None:
    circle = circle_of_files(with_line(file, line))
    assert module_of(file) in circle
    assert circle[0] == circle[-1]


# --- importing is cheap ---------------------------------------------------------------------------


def loaded_by_import(root: Path) -> set[str]:
    """Import the package from ``root`` in a new process. Returns the loaded modules."""
    code = (
        f"import sys, {PACKAGE}\nprint(sys.modules[{PACKAGE!r}].__file__, *sys.modules, sep='\\n')"
    )
    output = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | {"PYTHONPATH": str(root)},
        cwd=root,
        capture_output=True,
        text=True,
        check=True,
        timeout=60,
    ).stdout.splitlines()
    assert Path(output[0]) == root / "megatron" / "slipstream" / "__init__.py"
    return set(output[1:])


def test_importing_the_package_loads_neither_torch_nor_megatron_core() -> None:
    assert loaded_by_import(ROOT) & {"torch", "numpy", "megatron.core"} == set()


def test_every_public_name_is_defined_where_the_package_says() -> None:
    tree = ast.parse((ROOT / "megatron" / "slipstream" / "__init__.py").read_text())
    (homes,) = (
        ast.literal_eval(node.value)
        for node in tree.body
        if isinstance(node, ast.Assign) and ast.unparse(node.targets[0]) == "_HOMES"
    )
    homes = {name: f"{PACKAGE}.{home}" for name, home in homes.items()}
    for name, home in homes.items():
        path = ROOT.joinpath(*home.split(".")).with_suffix(".py")
        defined = {
            node.name
            for node in ast.parse(path.read_text()).body
            if isinstance(node, ast.FunctionDef | ast.ClassDef)
        }
        assert name in defined, f"{name} is not defined in {home}"
    for_type_checkers = {
        alias.asname: node.module
        for block in tree.body
        if isinstance(block, ast.If) and ast.unparse(block.test) == "TYPE_CHECKING"
        for node in block.body
        if isinstance(node, ast.ImportFrom)
        for alias in node.names
    }
    assert for_type_checkers == homes


def test_dir_lists_the_public_names() -> None:
    assert set(slipstream.__all__) <= set(dir(slipstream))


# --- the namespace --------------------------------------------------------------------------------


def test_megatron_is_a_namespace() -> None:
    assert not (ROOT / "megatron" / "__init__.py").exists()
    assert [path.name for path in (ROOT / "megatron").iterdir() if path.suffix == ".py"] == []


def test_every_folder_of_the_package_is_a_package() -> None:
    package_dir = ROOT / "megatron" / "slipstream"
    folders = {path.parent for path in package_dir.rglob("*.py")}
    assert [folder for folder in folders if not (folder / "__init__.py").exists()] == []


# --- every file -----------------------------------------------------------------------------------


def test_every_python_file_opens_with_the_copyright_line() -> None:
    ours = ("megatron", "tests", "tools", "examples", "benchmarks")
    files = [*ROOT.glob("*.py")]
    files += [path for folder in ours for path in (ROOT / folder).rglob("*.py")]
    filled = [path for path in files if path.read_text().strip()]
    assert len(filled) > 5
    without = [path for path in filled if path.read_text().splitlines()[0] != COPYRIGHT]
    assert [str(path.relative_to(ROOT)) for path in without] == []
