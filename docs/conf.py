# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How ``./run docs`` makes the site out of the Markdown files of this repository.

The source folder is the root of the repository, so that a link between two files means on the site
what it means on GitHub: to a page it leads there, to any other file it gives that file. What is not
there is an error. The order of the pages is :data:`NAVIGATION`, here and not in the pages, which
stay plain Markdown.
"""

from __future__ import annotations

import ast
import re
import sys
from fnmatch import fnmatch
from pathlib import Path
from typing import Any

from astroid.manager import AstroidManager
from sphinx.application import Sphinx

ROOT = Path(__file__).resolve().parents[1]

NAVIGATION = {
    "Start here": [
        "docs/user-guide/fit-it",
        "docs/user-guide/getting-started",
        "docs/user-guide/concepts",
    ],
    "Features": [
        "docs/user-guide/planning",
        "docs/user-guide/report",
        "docs/user-guide/doctor",
        "docs/user-guide/cuda-graphs",
        "docs/user-guide/chunk-cuda-graphs",
        "docs/user-guide/sequence-tiles",
        "docs/user-guide/packed-sequences",
        "docs/user-guide/dynamic-context-parallel",
        "docs/user-guide/any-pytorch-model",
        "docs/user-guide/*",
    ],
    "Frameworks": ["docs/user-guide/frameworks/README", "docs/user-guide/frameworks/*"],
    "Look it up": [
        "docs/user-guide/options",
        "docs/user-guide/compatibility",
        "docs/user-guide/patches",
        "docs/user-guide/troubleshooting",
        "docs/api-guide/README",
        "docs/api-guide/*",
    ],
    "Design": ["docs/design/README", "docs/design/*"],
    "Project": ["CONTRIBUTING", "CHANGELOG"],
    "Measurements": ["benchmarks/README", "benchmarks/results/*", "benchmarks/results/*/README"],
}
"""Pages by heading, in order; a pattern stands for what is there and named nowhere else. A name of
a page that is not there is passed over. A page that nothing names is an error of the build."""


def pages_of_navigation() -> dict[str, list[str]]:
    """The pages that are there, by heading, without '.md'."""
    folders = (ROOT / "docs", ROOT / "benchmarks")
    paths = [*ROOT.glob("*.md"), *(path for folder in folders for path in folder.rglob("*.md"))]
    found = [str(path.relative_to(ROOT).with_suffix("")) for path in sorted(paths)]
    named = {entry for entries in NAVIGATION.values() for entry in entries}
    return {
        heading: [
            page
            for entry in entries
            for page in found
            # A pattern's '*' is one part of a path.
            if page == entry
            or (page not in named and page.count("/") == entry.count("/") and fnmatch(page, entry))
        ]
        for heading, entries in NAVIGATION.items()
    }


def _append_navigation(app: Sphinx, docname: str, source: list[str]) -> None:
    """Give the first page the table of contents that the side bar shows."""
    if docname != root_doc:
        return
    for heading, pages in pages_of_navigation().items():
        entries = "\n".join(f"/{page}" for page in pages)
        source[0] += f"\n\n```{{toctree}}\n:caption: {heading}\n:hidden:\n\n{entries}\n```\n"


class _OthersModules(set[str]):
    """All modules but ours and Python's own.

    AutoAPI's parser follows imports, and would read torch for half a minute if it is installed.
    """

    def __contains__(self, name: object) -> bool:
        top = str(name).partition(".")[0]
        return top not in sys.stdlib_module_names and not str(name).startswith(
            "megatron.slipstream"
        )


def _version() -> str:
    """Read from the source: importing the package is not needed for anything else."""
    package = (ROOT / "megatron" / "slipstream" / "version.py").read_text(encoding="utf-8")
    for statement in ast.parse(package).body:
        match statement:
            case ast.Assign(targets=[ast.Name(id="__version__")], value=ast.Constant(value=found)):
                return str(found)
    raise ValueError("megatron/slipstream/version.py has no __version__")


_LINK = re.compile(r"\]\(([^)\s:#]+?)/?\)")


def _open_folders(app: Sphinx, docname: str, source: list[str]) -> None:
    """Let a link to a folder lead to its README, as GitHub does."""
    here = (ROOT / docname).parent

    def opened(link: re.Match[str]) -> str:
        return f"]({link[1]}/README.md)" if (here / link[1] / "README.md").is_file() else link[0]

    source[0] = _LINK.sub(opened, source[0])


def _keep_colons(
    app: Sphinx, what: str, name: str, obj: Any, options: Any, lines: list[str]
) -> None:
    """Napoleon takes what stands before a colon in an attribute's first line for its type."""
    if what in ("attribute", "data", "property"):
        lines[:0] = ["..", ""]  # A comment without a text.


def setup(app: Sphinx) -> None:
    """Called by Sphinx."""
    app.connect("source-read", _append_navigation)
    app.connect("source-read", _open_folders)
    app.connect("autodoc-process-docstring", _keep_colons, priority=400)


project = "Slipstream"
project_copyright = "2026, The Slipstream authors. Apache License 2.0"
version = release = _version()
root_doc = "README"
include_patterns = ["*.md", "docs/**.md", "benchmarks/README.md", "benchmarks/results/**.md"]
exclude_patterns = [".*", "build"]
templates_path = ["_templates"]
highlight_language = "none"
# Quotes and dashes are those of options and code.
smartquotes = False
default_role = "code"
pygments_style = "friendly"
pygments_dark_style = "github-dark"

extensions = ["myst_parser", "sphinx.ext.napoleon", "autoapi.extension"]
# Headings have the anchors that GitHub gives them; a link to one that is not there is an error.
myst_heading_anchors = 4

# The API reference is read from the source: neither torch nor megatron-core is imported. Only what
# docs/api-guide/reference.md names is shown.
autoapi_dirs = [str(ROOT / "megatron")]
AstroidManager.brain["module_denylist"] = _OthersModules()
autoapi_python_use_implicit_namespaces = True
autoapi_generate_api_docs = False
autoapi_add_toctree_entry = False
add_module_names = False
autodoc_member_order = "bysource"
python_use_unqualified_type_names = True
# megatron-core need not be installed.
suppress_warnings = ["autoapi.python_import_resolution"]

html_theme = "furo"
html_title = f"Slipstream {release}"
html_static_path = ["_static"]
html_css_files = ["site.css"]
html_additional_pages = {"index": "to_first_page.html"}
html_copy_source = False
html_show_sphinx = False
