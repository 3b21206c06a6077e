# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The site is built from the unchanged pages, and a broken link fails the build.

The whole site is built by ``./run docs``; here it is one of two pages, with the same settings.
"""

from __future__ import annotations

import html
import re
import runpy
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
from doc_pages import PAGES, ROOT
from forked import Done, run_module

pytest.importorskip("sphinx")
pytest.importorskip("furo")

VERSION = '"""The version."""\n\n__version__ = "1.2.3"\n'
MODULE = '''"""A module."""

LIMIT: int = 3
"""What it is: not a type."""


def twice(number):
    """Double it.

    Args:
        number: What to double. See :data:`LIMIT`.
    """
    return 2 * number
'''
FIRST = """# First

[Second](docs/second.md), [its part](docs/second.md#a-part-of-it), [the script](tool.py),
[a folder](docs/folder), [again](docs/folder/)

![A picture](docs/picture.png)
"""
SECOND = """# Second

[First](../README.md#first)

## A part: of it

| a |
| --- |
| `--flag` |

Say 'so' -- twice.

```{eval-rst}
.. autoapidata:: megatron.slipstream.module.LIMIT

.. autoapifunction:: megatron.slipstream.module.twice
```
"""
NAVIGATION = 'NAVIGATION = {"Pages": ["docs/first", "docs/*", "docs/folder/*"]}\n'


def build(folder: Path, changes: Mapping[str, str] | None = None) -> Done:
    """Build a small site with our settings; ``changes`` are other files, or other texts of them."""
    settings = (ROOT / "docs" / "conf.py").read_text(encoding="utf-8")
    files = {
        "README.md": FIRST,
        "docs/second.md": SECOND,
        "docs/folder/README.md": "# A folder\n",
        "tool.py": "print(1)\n",
        "docs/conf.py": re.sub(
            r"^NAVIGATION = \{.*?^\}\n", NAVIGATION, settings, flags=re.M | re.S
        ),
        "megatron/slipstream/__init__.py": '"""A package."""\n',
        "megatron/slipstream/version.py": VERSION,
        "megatron/slipstream/module.py": MODULE,
        **(changes or {}),
    }
    assert NAVIGATION in files["docs/conf.py"]
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    shutil.copy(ROOT / "docs/user-guide/images/peak.png", folder / "docs/picture.png")
    for name in ("_static", "_templates"):
        shutil.copytree(ROOT / "docs" / name, folder / "docs" / name, dirs_exist_ok=True)
    return run_module("sphinx", *_options_of_run_docs(), ".", "site", folder=folder)


def _options_of_run_docs() -> list[str]:
    """The options that ``./run docs`` passes to Sphinx, so that this build is as strict."""
    found = re.search(r"-m sphinx (.*?) \. ", (ROOT / "run").read_text(), re.S)
    assert found is not None
    return found[1].replace("\\\n", " ").split()


def test_a_site_without_faults_is_built_and_needs_no_other_host(tmp_path: Path) -> None:
    result = build(tmp_path)
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    site = tmp_path / "site"
    first, second = ((site / n).read_text() for n in ("README.html", "docs/second.html"))
    assert 'href="docs/second.html#a-part-of-it"' in first
    assert first.count('href="docs/folder/README.html"><span') == 2
    assert 'class="toctree-l1"' in first
    assert (site / "_downloads").is_dir(), "a file that is no page is given as it is"
    assert "README.html" in (site / "index.html").read_text()
    assert "Say 'so' -- twice." in html.unescape(second), "quotes and dashes are as written"
    assert "What it is: not a type." in second
    for page in site.rglob("*.html"):
        loaded = re.findall(r"<(?:link|script|img)[^>]*(?:href|src)=\"([^\"]*)", page.read_text())
        assert [link for link in loaded if "://" in link or link.startswith("//")] == []
    for sheet in site.rglob("*.css"):
        assert not re.search(r"url\(\s*['\"]?(?:https?:)?//", sheet.read_text())


FAULTS = {
    "[Page](docs/secnd.md)": "docs/secnd.md",
    "[Anchor](docs/second.md#b-part)": "b-part",
    "[Own anchor](#frist)": "frist",
    "[File](tol.py)": "tol.py",
    "[Folder](megatron/slipstream)": "megatron/slipstream",
    "![Picture](docs/pictre.png)": "docs/pictre.png",
    "```{eval-rst}\n.. autoapifunction:: megatron.slipstream.module.thrice\n```": "thrice",
}
"""Faults in a page, and the text of the build's complaint."""


def test_what_leads_nowhere_ends_the_build(tmp_path: Path) -> None:
    page = FIRST + "\n" + "\n\n".join(FAULTS) + "\n"
    result = build(tmp_path, {"README.md": page, "docs/deep/lost.md": "# Lost\n"})
    assert result.returncode != 0
    complaints = result.stderr.splitlines()
    for complaint in (*FAULTS.values(), "lost.md: WARNING: document isn't included in any toctree"):
        assert sum(complaint in line for line in complaints) == 1, (complaint, result.stderr)


def settings() -> dict[str, Any]:
    return runpy.run_path(str(ROOT / "docs" / "conf.py"))


def test_every_page_has_one_place_in_the_navigation() -> None:
    listed = [page for pages in settings()["pages_of_navigation"]().values() for page in pages]
    assert len(set(listed)) == len(listed)
    pages = {str(page.relative_to(ROOT).with_suffix("")) for page in PAGES}
    assert pages - set(listed) == {"README"}


def test_a_page_that_is_named_nowhere_comes_after_those_that_are() -> None:
    features = settings()["pages_of_navigation"]()["Features"]
    assert features.index("docs/user-guide/planning") == 0
    assert "docs/user-guide/getting-started" not in features


def test_the_reference_shows_every_public_name() -> None:
    from megatron import slipstream

    shown = (ROOT / "docs" / "api-guide" / "reference.md").read_text(encoding="utf-8")
    for name, home in slipstream._HOMES.items():
        assert re.search(
            rf"^\.\. autoapi\w+:: megatron\.slipstream\.{re.escape(home)}\.{name}$", shown, re.M
        ), name


def test_the_site_has_the_version_of_the_package() -> None:
    from megatron import slipstream

    assert settings()["release"] == slipstream.__version__


def test_no_two_pages_have_the_same_title_in_the_side_bar() -> None:
    settings = runpy.run_path(str(ROOT / "docs" / "conf.py"))
    pages = [page for pages in settings["pages_of_navigation"]().values() for page in pages]
    assert len(pages) > 40
    titles: dict[str, list[str]] = {}
    for page in pages:
        text = (ROOT / f"{page}.md").read_text(encoding="utf-8")
        found = re.search("^# (.+)", text, re.M)
        assert found is not None, page
        titles.setdefault(found[1], []).append(page)
    assert [pages for pages in titles.values() if len(pages) > 1] == []


def test_the_first_page_says_where_the_output_of_megatron_is() -> None:
    from megatron.slipstream.integration.entry.output import DEFAULT_PATH, FLAG

    text = (ROOT / "docs/user-guide/getting-started.md").read_text(encoding="utf-8")
    assert f"`{DEFAULT_PATH}`" in text
    assert f"`{FLAG} -`" in text
