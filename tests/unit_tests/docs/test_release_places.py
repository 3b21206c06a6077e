# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One table names the supported releases of megatron-core; each other place follows it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from megatron.slipstream.patches.releases import TESTED_RELEASES, following, supported
from tools import release_places
from tools.release_places import PLACES, Place

ROOT = Path(__file__).resolve().parents[3]

OLD = TESTED_RELEASES
ADDED = (*OLD, f"{following()}.1")
"""With a release that does not exist yet."""
DROPPED = ADDED[1:]

MEASURED = {
    "README.md": 1,  # the figures' own release
    "docs/user-guide/compatibility.md": len(OLD),  # columns, held by test_generated.py
    "docs/user-guide/cuda-graphs.md": 1,
    "docs/user-guide/sync-free-experts.md": 1,
    "examples/flags/deepseek_v3_gb200.txt": 1,
    "examples/flags/qwen3_235b_gb200.txt": 1,
    "megatron/slipstream/options/model.py": 1,
}
"""Numbers of lines and examples about one release, which stay when another is added."""


def test_ranges_follow_the_table() -> None:
    assert supported(("0.18.2", "0.19.2")) == ">=0.18.2,<0.21", "commits of 0.20 are tested"
    assert supported(("0.19.2", "0.21.1")) == ">=0.19.2,<0.22"


@pytest.mark.parametrize("place", PLACES, ids=lambda place: f"{place.file}: {place.text.strip()}")
def test_another_release_changes_each_place(place: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(release_places, "PLACES", (place,))
    (now,) = release_places.rewritten(ROOT)
    assert now.text == (ROOT / place.file).read_text(), "run tools/generate_docs.py"
    (dropped,) = release_places.rewritten(ROOT, DROPPED, "7.18")
    assert place.text.format(**release_places.names(DROPPED, "7.18")) in dropped.text
    assert place.text.format(**release_places.names(OLD)) not in dropped.text


def test_no_other_place_names_a_tested_release() -> None:
    # Releases that no text has.
    texts = {p.file: p.text for p in release_places.rewritten(ROOT, ("7.17.1", "7.18.1"))}
    for folder in ("megatron", "docs", "tools", "examples"):
        for path in (ROOT / folder).rglob("*"):
            if path.suffix in (".md", ".py", ".txt", ".html", ".js"):
                file = str(path.relative_to(ROOT))
                texts.setdefault(file, path.read_text(encoding="utf-8"))
    tested = re.compile("|".join(rf"(?<![\w.]){re.escape(release)}(?![\w.]\d)" for release in OLD))
    del texts["megatron/slipstream/patches/releases.py"]  # the table
    found = {file: len(tested.findall(text)) for file, text in texts.items()}
    assert {file: count for file, count in found.items() if count} == MEASURED


def test_a_place_that_is_gone_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "page.md").write_text("With 0.19.2.")
    monkeypatch.setattr(release_places, "PLACES", (Place("page.md", "megatron-core {newest}"),))
    with pytest.raises(ValueError, match=r"page\.md has no 'megatron-core \{newest\}'"):
        list(release_places.rewritten(tmp_path))
