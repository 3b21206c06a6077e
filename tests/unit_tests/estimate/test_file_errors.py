# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A file that cannot be read or written: the error names what the user gave, and a cure."""

from __future__ import annotations

import errno
import os
import re
import tempfile
from pathlib import Path
from typing import IO

import pytest

from megatron.slipstream.estimate.file_errors import (
    cure_of,
    require_distinct,
    require_writable,
    writing,
    wrong_with,
)

CURE = "; name a file in a folder that can be written"


def error_of(path: Path) -> OSError:
    with pytest.raises(OSError) as caught:
        path.read_bytes()
    return caught.value


def test_what_is_wrong_is_said_without_numbers(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    assert wrong_with(error_of(tmp_path)) == "is a folder"
    assert wrong_with(error_of(tmp_path / "none")) == "does not exist"
    assert wrong_with(error_of(tmp_path / "file" / "x")) == (
        "is not in a folder: a part of its path is a file"
    )
    denied = PermissionError(errno.EACCES, os.strerror(errno.EACCES), "elsewhere")
    assert wrong_with(denied) == "cannot be opened: permission denied"
    assert wrong_with(OSError("no space")) == "cannot be opened: no space"


def test_a_failed_write_names_the_option_and_the_path_that_was_given(tmp_path: Path) -> None:
    path = tmp_path / "plan.json"
    message = f"--output={path} cannot be opened: permission denied{CURE}"
    with (
        pytest.raises(ValueError, match=f"^{re.escape(message)}$"),
        writing("--output", path),
    ):
        raise OSError(errno.EACCES, os.strerror(errno.EACCES), "plan.json.1.tmp")


FULL = "no space left on device; free space there, or name a file on another disk"


def test_a_full_disk_needs_space() -> None:
    with (
        pytest.raises(ValueError, match=f"^--output=/dev/full cannot be written: {FULL}$"),
        writing("--output", Path("/dev/full")),
    ):
        Path("/dev/full").write_bytes(b"plan")
    over = OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
    assert cure_of(over) == "free space there, or name a file on another disk"


def test_a_full_disk_is_found_early(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def on_full_disk(dir: Path) -> IO[bytes]:
        assert dir == tmp_path
        return open("/dev/full", "wb")

    # An empty file can be made on a full disk.
    monkeypatch.setattr(tempfile, "TemporaryFile", on_full_disk)
    path = tmp_path / "plan.json"
    with pytest.raises(ValueError, match=f"^--output={path} cannot be written: {FULL}$"):
        require_writable("--output", path)


def test_what_can_be_written_is_not_refused_and_nothing_is_made(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("before")
    for name in ("old", "new", "folder/inside/new"):
        require_writable("--output", tmp_path / name)
    assert os.listdir(tmp_path) == ["old"]
    assert (tmp_path / "old").read_text() == "before"


def test_a_path_from_here_is_writable_where_here_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    require_writable("--output", Path("plan.json"))
    require_writable("--output", Path("new/plan.json"))


@pytest.mark.parametrize(
    "name, wrong",
    [
        (".", "is a folder"),
        ("file/x", "is not in a folder: a part of its path is a file"),
        ("file/x/y", "is not in a folder: a part of its path is a file"),
    ],
)
def test_what_cannot_be_written_is_refused_early(tmp_path: Path, name: str, wrong: str) -> None:
    (tmp_path / "file").touch()
    path = tmp_path / name
    with pytest.raises(ValueError, match=f"^{re.escape(f'--html={path} {wrong}{CURE}')}$"):
        require_writable("--html", path)


def test_a_folder_in_which_no_file_can_be_made_is_refused_early() -> None:
    # Also for root: it has the permission, but the file system refuses.
    with pytest.raises(ValueError, match="cannot be opened: permission denied; name a file in"):
        require_writable("--html", Path("/proc/new/page.html"))


def test_two_options_may_not_name_one_file(tmp_path: Path) -> None:
    file, link = tmp_path / "file.json", tmp_path / "link.json"
    link.symlink_to(file)
    for other in (file, tmp_path / "new" / ".." / "file.json", link):
        with pytest.raises(ValueError) as caught:
            require_distinct({"first": file, "between": tmp_path / "b.json", "second": other})
        assert str(caught.value) == (
            f"second={other} is not supported with first={file} because each would replace the "
            "other's file; set second to another file"
        )
    require_distinct({"first": file, "second": tmp_path / "other.json"})
    require_distinct({"first": Path("/dev/null"), "second": Path("/dev/null")})
    require_distinct({})
