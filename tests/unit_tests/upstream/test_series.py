# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The series applies to the installed megatron-core, and its tests pass in the patched tree."""

from __future__ import annotations

import importlib.util
import re
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch
from forked import run_script
from patched_tree import run_tests

from megatron.slipstream.patches import table
from tools.upstream import __main__ as command
from tools.upstream.anchors import MovedError, Source, at_end, at_start, before_call, decorate
from tools.upstream.commits import COMMITS
from tools.upstream.edits import IN_PLACE, key_of, version_of
from tools.upstream.modules import NEW_TEXT, ROOT, SUPPORT, TESTS
from tools.upstream.packed_edits import SCRIPTS
from tools.upstream.series import TEST_PLACES, Made, git, make

GUIDE = ROOT / "docs" / "design" / "upstream.md"
TRAINS = ROOT / "tests" / "support" / "planned_models.py"
FAST = (
    *("test_padded_routing.py", "test_config_fields.py", "test_bit_equality.py"),
    *("test_layer_graphs.py", "test_packed_sequences.py", "test_dynamic_context_parallel.py"),
    *("test_chunk_graphs.py", "test_packed_layer_graphs.py"),
    *("test_memory_budget.py", "test_sync_free_experts.py"),
)
SCRIPT = '''\
"""Has the functions of a training script that are edited; the wheel lacks it."""

from functools import partial

from megatron.training import get_args


def loss_func(loss_mask, output_tensor, model=None):
    return (output_tensor * loss_mask).sum()


def forward_step(data_iterator, model):
    """It has a description."""
    return model(next(data_iterator)), partial(loss_func, None, model=model)


def core_gpt_dataset_config_from_args(args):
    return args.seq_length


def train_valid_test_datasets_provider(train_val_test_num_samples, vp_stage=None):
    config = core_gpt_dataset_config_from_args(get_args())
    return config, train_val_test_num_samples
'''


@pytest.fixture(scope="module")
def checkout(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A repository with the files of the installed megatron-core."""
    spec = importlib.util.find_spec("megatron.core")
    if spec is None or spec.origin is None:
        pytest.skip("needs megatron-core installed")
    root = tmp_path_factory.mktemp("megatron")
    ignored = shutil.ignore_patterns("__pycache__", "*.so")
    installed = Path(spec.origin).parents[1]
    for part in ("core", "training"):
        shutil.copytree(installed / part, root / "megatron" / part, ignore=ignored)
    for script in SCRIPTS:
        (root / script).write_text(SCRIPT)
    # Packages there, which the wheel lacks.
    for folder in ("tests", "tests/unit_tests", TESTS, *TEST_PLACES.values()):
        (root / folder).mkdir(parents=True, exist_ok=True)
        (root / folder / "__init__.py").touch()
    git(root, "init", "--quiet")
    git(root, "add", "--all", "--force")
    git(root, "commit", "--quiet", "--no-verify", "--message", "installed")
    return root


@pytest.fixture(scope="module")
def series(checkout: Path) -> list[Made]:
    """The commits of the series, made in the checkout."""
    return list(make(checkout))


@pytest.mark.releases
def test_each_commit_is_made_and_few_lines_of_megatron_change(
    checkout: Path, series: list[Made]
) -> None:
    assert [made.title for made in series] == [commit.title for commit in COMMITS]
    assert not git(checkout, "status", "--porcelain")
    changed = git(checkout, "diff", "--numstat", "--diff-filter=M", f"HEAD~{len(series)}")
    lines = sum(max(map(int, row.split()[:2])) for row in changed.splitlines())
    assert 0 < lines <= command.MAX_EDITED_LINES


class InTree(NamedTuple):
    """What one process has done in the patched tree: it takes seconds to import it."""

    tests: subprocess.CompletedProcess[str]
    trained: Path


@pytest.fixture(scope="module")
def in_tree(checkout: Path, series: list[Made], tmp_path_factory: pytest.TempPathFactory) -> InTree:
    """Models are trained there, then tests run."""
    del series
    trained = tmp_path_factory.mktemp("trained") / "tree"
    train = (
        f"sys.path.insert(0, {str(TRAINS.parent)!r})\n"
        "import planned_models\n"
        f"planned_models.main({str(checkout / SUPPORT)!r}, {str(trained)!r})"
    )
    tests = [f"{TEST_PLACES.get(name, f'{TESTS}/offload_engine')}/{name}" for name in FAST]
    return InTree(run_tests(checkout, "-k", "not auto", *tests, first=train), trained)


@pytest.mark.timeout(600)  # Half a minute of processors that are its own.
def test_the_tests_of_the_series_pass_in_the_patched_tree(in_tree: InTree) -> None:
    done = in_tree.tests
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-1000:]


def test_fixtures_of_all_tests_go_along(checkout: Path, series: list[Made]) -> None:
    """Also those of tests that need a GPU, which are skipped before fixtures are looked up."""
    del series
    ours = (ROOT / "tests" / "conftest.py").read_text()
    fixtures = re.findall(r"^@pytest\.fixture(?:\(.*\))?\ndef (\w+)\(", ours, re.MULTILINE)
    assert "record_row" in fixtures
    theirs = (checkout / TESTS / "offload_engine" / "conftest.py").read_text()
    for file in (checkout / TESTS).glob("offload_*/test_*.py"):
        text = file.read_text()
        for name in fixtures:
            if re.search(rf"\b{name}\b", text):
                assert f"def {name}(" in text + theirs, f"{file.name}: {name}"


@pytest.mark.timeout(600)
def test_losses_gradients_and_plans_are_those_of_the_plugin(
    in_tree: InTree, tmp_path: Path
) -> None:
    # Neither here nor there torch compiles anything, so that results can be equal.
    with_plugin = run_script(TRAINS, str(NEW_TEXT), str(tmp_path / "plugin"))
    assert with_plugin.returncode == 0, with_plugin.stderr
    plugin, tree = torch.load(tmp_path / "plugin"), torch.load(in_tree.trained)
    assert (
        list(plugin)
        == list(tree)
        == ["dense", "moe", "hybrid", "packed", "chunk graphs", "layer graphs"]
    )
    for kind, (tensors, plan, moved) in plugin.items():
        assert all(map(torch.equal, tensors, tree[kind][0]))
        assert plan == tree[kind][1]
        assert moved == tree[kind][2] > 0


def test_the_page_lists_each_edit_with_its_size(checkout: Path, series: list[Made]) -> None:
    assert version_of(checkout) in GUIDE.read_text()
    found = re.findall(r"^\| (\d+) \| `([^`]+)` \| `([^`]+)` \| (\d+) \|", GUIDE.read_text(), re.M)
    made = [
        (str(number), path.removeprefix("megatron/core/"), name, str(lines))
        for number, one in enumerate(series, 1)
        for path, name, lines, _ in one.edits
    ]
    assert found == made


def test_each_row_of_the_table_of_patches_has_an_edit_or_a_reason() -> None:
    keys = {key_of(patch) for patch, _ in table.rows()}
    assert keys == set(IN_PLACE)


MODULE = '''\
class A(Base):
    """It has a description."""

    def f(self, x):
        """It has one, too."""
        y = drop(x)
        return y
'''


@pytest.fixture
def source(tmp_path: Path) -> Source:
    (tmp_path / "module.py").write_text(MODULE)
    return Source(tmp_path, "module.py")


@pytest.mark.parametrize(
    ("change", "line", "text"),
    [
        (decorate("mark"), 3, "    @mark"),
        (at_start("x += 1\n", "x"), 5, "        x += 1"),
        (at_end("y += 1\n", "y"), 6, "        y += 1"),
        (before_call("drop", "x += 1\n"), 5, "        x += 1"),
    ],
)
def test_an_edit_finds_its_place_by_name(source, change, line, text) -> None:
    change(source, "A.f")
    lines = source.text.splitlines()
    assert lines[line] == text
    assert lines[:line] + lines[line + 1 :] == MODULE.splitlines()


@pytest.mark.parametrize(
    ("change", "name"),
    [
        (decorate("mark"), "A.g"),
        (at_start("pass\n", "z"), "A.f"),
        (before_call("keep", "pass\n"), "A.f"),
    ],
)
def test_a_place_that_has_moved_is_an_error_that_names_it(source, change, name) -> None:
    with pytest.raises(MovedError, match=rf"module\.py: {re.escape(name)} "):
        change(source, name)
    assert source.text == MODULE


def test_imports_of_one_module_are_one_line(source: Source) -> None:
    source.text = f"import torch\n\n{MODULE}"
    for name in ("b", "a", "b"):
        source.add_import("megatron.core.c", name)
    assert source.text.splitlines()[:3] == ["import torch", "", "from megatron.core.c import a, b"]


def test_patches_are_written_and_apply(
    checkout: Path, tmp_path: Path, series: list[Made], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made_before(copy: Path) -> Iterator[Made]:
        git(copy, "reset", "--quiet", "--hard", made)
        yield from series

    clone, made = tmp_path / "clone", git(checkout, "rev-parse", "HEAD").strip()
    monkeypatch.setattr(command, "make", made_before)
    git(checkout, "clone", "--quiet", "--shared", str(checkout), str(clone))
    git(clone, "reset", "--quiet", "--hard", f"HEAD~{len(series)}")
    assert command.main(["--megatron", str(clone), "--patches", str(tmp_path / "out")]) == 0
    files = sorted(map(str, (tmp_path / "out").iterdir()))
    assert len(files) == len(series)
    git(clone, "am", "--quiet", *files)
    assert git(clone, "rev-parse", "HEAD^{tree}") == git(checkout, "rev-parse", "HEAD^{tree}")
