# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Output files are written atomically. Links, devices and pipes at their paths are kept."""

from __future__ import annotations

import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from make_trace import Model, one_pass
from reported_runs import make_run, make_trace

from megatron.slipstream.cli import main
from megatron.slipstream.estimate.file_errors import require_writable, writing
from megatron.slipstream.integration.record.monitor import Monitor
from megatron.slipstream.integration.record.run_files import rank_path
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.files import save_plan, save_trace
from megatron.slipstream.plan.whole_files import write_whole
from megatron.slipstream.report_page.page import save_page

TRACE = one_pass(Model())
RUN = make_run(make_trace(), 0, PolicyOptions())


def save_record(path: Path) -> None:
    Monitor(num_iterations=1, iteration=lambda: 1, shows=False, record=True).save(str(path))


def plan_to(option: str) -> Callable[[Path], None]:
    def write(path: Path) -> None:
        trace = path.with_name("trace.json")
        save_trace(make_trace(), trace)
        assert main(["plan", str(trace), option, str(path)]) == 0
        trace.unlink()

    return write


WRITERS: dict[str, Callable[[Path], None]] = {
    "plan --output": plan_to("--output"),
    "plan --timeline": plan_to("--timeline"),
    "plan --frontier": plan_to("--frontier"),
    "trace": lambda path: save_trace(TRACE, path),
    "plan": lambda path: save_plan(build_plan(TRACE, PolicyOptions()), path),
    "report": RUN.report.save,
    "page": lambda path: save_page(path, RUN.report),
    "run record": save_record,
}


@pytest.fixture(params=WRITERS)
def write(request: pytest.FixtureRequest) -> Callable[[Path], None]:
    return WRITERS[request.param]


def test_a_link_stays_and_its_target_is_written(
    tmp_path: Path, write: Callable[[Path], None]
) -> None:
    target, link = tmp_path / "elsewhere" / "target.json", tmp_path / "link.json"
    target.parent.mkdir()
    target.write_text("before")
    link.symlink_to(target)
    write(link)
    assert link.is_symlink()
    assert target.read_text() not in ("", "before")
    assert os.listdir(target.parent) == ["target.json"]


def test_a_pipe_stays_and_is_written(tmp_path: Path, write: Callable[[Path], None]) -> None:
    pipe = tmp_path / "pipe.json"
    os.mkfifo(pipe)
    read: list[bytes] = []
    reader = threading.Thread(target=lambda: read.append(pipe.read_bytes()), daemon=True)
    reader.start()
    write(pipe)
    assert stat.S_ISFIFO(pipe.lstat().st_mode)
    reader.join(timeout=60)
    assert read[0]


def test_a_link_to_nothing_makes_its_target(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to("new/target")
    require_writable("--output", link)
    write_whole(link, b"after")
    assert link.is_symlink()
    assert (tmp_path / "new" / "target").read_bytes() == b"after"


def test_links_in_a_circle_are_refused(tmp_path: Path) -> None:
    link = tmp_path / "link"
    link.symlink_to(link)
    with pytest.raises(ValueError, match="--output=.*link cannot be opened: too many levels"):
        require_writable("--output", link)


def test_a_socket_stays_and_the_error_names_the_option(tmp_path: Path) -> None:
    path = tmp_path / "socket"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        with (
            pytest.raises(ValueError, match="^--output=.*socket cannot be opened: no such device"),
            writing("--output", path),
        ):
            write_whole(path, b"data")
    assert stat.S_ISSOCK(path.lstat().st_mode)


def test_a_device_that_may_not_be_written_is_refused_early(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    monkeypatch.setattr(os, "access", lambda path, mode: False)  # root may write everything
    with pytest.raises(ValueError, match="^--output=.*pipe cannot be opened: permission denied"):
        require_writable("--output", pipe)


def test_the_file_that_output_goes_to_is_added_to(tmp_path: Path) -> None:
    code = (
        "import sys\n"
        "from megatron.slipstream.plan.whole_files import write_whole\n"
        "print('first')\n"
        "write_whole('/dev/stdout', b'second\\n')\n"
        "print('third')\n"
    )
    path = tmp_path / "output"
    with path.open("wb") as output:
        subprocess.run([sys.executable, "-c", code], stdout=output, check=True)
    assert path.read_text() == "first\nsecond\nthird\n"


def test_all_ranks_write_to_one_device(tmp_path: Path) -> None:
    assert rank_path("/dev/null", 3) == "/dev/null"
    assert rank_path(str(tmp_path / "trace.json"), 3) == str(tmp_path / "trace.rank3.json")


def test_a_failed_write_leaves_what_was_there(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "plan.json"
    path.write_bytes(b"before")

    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_whole(path, b"after")
    assert path.read_bytes() == b"before"
    assert os.listdir(tmp_path) == ["plan.json"]


def test_a_write_that_fails_names_the_file_that_was_given(tmp_path: Path) -> None:
    with pytest.raises(IsADirectoryError) as failed:
        write_whole(tmp_path, b"")
    assert str(failed.value) == f"[Errno 21] Is a directory: '{tmp_path}'"
