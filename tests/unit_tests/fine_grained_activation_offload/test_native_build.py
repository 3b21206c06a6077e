# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""If the C++ module cannot be compiled or loaded, one warning says why, and Python runs."""

from __future__ import annotations

import fcntl
import inspect
import logging
import multiprocessing
import os
import pwd
import re
import shlex
import shutil
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from hand_driven import LAZY_NATIVE
from toy_model import SCHEDULES, all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload import native
from megatron.slipstream.fine_grained_activation_offload.native import build, native_module

SMALL = """
#include <Python.h>
static PyModuleDef def = {PyModuleDef_HEAD_INIT, "slipstream_native"};
PyMODINIT_FUNC PyInit_slipstream_native() { return PyModule_Create(&def); }
"""


REAL = shutil.which("c++") or "no-such-compiler"


def make_compiler(folder: Path, script: str, name: str = "compiler") -> Path:
    folder.mkdir(exist_ok=True)
    path = folder / name
    path.write_text(f"#!/bin/sh\n{script}\n")
    path.chmod(0o755)
    return path


OUT = 'for x; do test "$last" = -o && out=$x; last=$x; done'
"""Shell that sets ``$out`` to the file to write."""


@pytest.fixture(scope="module")
def compiler_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a ``c++`` that compiles each source once, since that takes half a second."""
    folder = tmp_path_factory.mktemp("compiler")
    script = f"""{OUT}
for x; do case $x in *.cpp) made={folder}/$(md5sum <"$x" | cut -c1-32) ;; esac; done
if test -e "$made"; then cp "$made" "$out"; exit; fi
{REAL} "$@" && cp "$out" "$made\""""
    return make_compiler(folder, script, "c++").parent


@pytest.fixture(autouse=True)
def cache(compiler_folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """An empty cache folder, and a source that compiles fast."""
    monkeypatch.setenv("PATH", str(compiler_folder), prepend=os.pathsep)
    source = tmp_path / "small.cpp"
    source.write_text(SMALL)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(build, "SOURCE", source)
    native_module.cache_clear()
    yield tmp_path / "cache"
    native_module.cache_clear()


def compiled_in(folder: Path) -> Path:
    (path,) = folder.rglob("*.so")
    return path


# --- compiled once --------------------------------------------------------------------------------


def is_compiled() -> bool:
    return build._find() is not None


def test_it_is_compiled_once(monkeypatch: pytest.MonkeyPatch) -> None:
    build.load()
    monkeypatch.setattr(build.subprocess, "run", lambda *_, **__: pytest.fail("compiled again"))
    build.load()
    monkeypatch.setenv("CXX", "no-such-compiler")  # nor is one needed any more
    build.load()
    # Another source is another module.
    build.SOURCE.write_text(SMALL + "\n")
    with pytest.raises(build.BuildError, match="no C[+][+] compiler"):
        build.load()


def _load(barrier: Any, counts: Any) -> None:
    run = build.subprocess.run

    def counted(*arguments: Any, **options: Any) -> Any:
        counts.put(1)
        return run(*arguments, **options)

    build.subprocess.run = counted
    barrier.wait()
    build.load()


def test_processes_that_need_it_at_once_compile_it_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", REAL)  # It takes long enough for all of them to begin.
    fork = multiprocessing.get_context("fork")
    barrier, counts = fork.Barrier(3), fork.Queue()
    processes = [fork.Process(target=_load, args=(barrier, counts)) for _ in range(3)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(60)
    assert [process.exitcode for process in processes] == [0, 0, 0]
    assert counts.get(timeout=10) == 1
    assert counts.empty()


@pytest.mark.parametrize("text", ["", " ", "env c++", "env LANG=C c++ -O1", "{spaced}"])
def test_the_compiler_is_a_command_with_its_arguments(
    text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spaced = make_compiler(tmp_path / "a folder", 'exec c++ "$@"')
    monkeypatch.setenv("CXX", text.format(spaced=shlex.quote(str(spaced))))
    build.load()


def test_a_user_without_a_home_needs_the_cache_folder_only(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_a_home(monkeypatch)
    monkeypatch.setenv("XDG_CACHE_HOME", str(cache))
    build.load()
    assert is_compiled()


# --- damaged files --------------------------------------------------------------------------------

DAMAGES: dict[str, Callable[[bytes], bytes]] = {
    "empty": lambda _: b"",
    "half of it": lambda whole: whole[: len(whole) // 2],
    "its last byte": lambda whole: whole[:-1],
    "one byte": lambda whole: whole[:5000] + bytes([whole[5000] ^ 1]) + whole[5001:],
    "other contents": lambda _: b"no module",
}


@pytest.mark.parametrize(
    "damage, is_in_package",
    [(name, False) for name in DAMAGES] + [("half of it", True)],
)
def test_a_damaged_file_is_not_loaded_but_compiled_again(
    damage: str,
    is_in_package: bool,
    cache: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    folder = build.SOURCE.parent if is_in_package else cache / "slipstream"
    build.compile_into(folder)
    path = compiled_in(tmp_path)
    whole = path.read_bytes()
    path.write_bytes(DAMAGES[damage](whole))
    assert not is_compiled()
    with monkeypatch.context() as without:
        without.setenv("CXX", "no-such-compiler")
        with pytest.raises(build.BuildError, match="no C[+][+] compiler"):
            build.load()
    build.load()
    assert is_compiled()
    assert compiled_in(cache).read_bytes() == whole


# --- faults ---------------------------------------------------------------------------------------


class Fault(NamedTuple):
    cause: str
    cure: str
    make: Callable[[Path, pytest.MonkeyPatch], None]


def compiler(script: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    """A compiler that is a shell script; ``$out`` is the file to write."""

    def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = make_compiler(folder, f"{OUT}\n{script}")
        monkeypatch.setenv("CXX", shlex.quote(str(path)))

    return make


def not_runnable(contents: bytes) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def make(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        path = make_compiler(folder, "")
        path.write_bytes(contents)
        monkeypatch.setenv("CXX", str(path))

    return make


def variable(name: str, value: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    return lambda _, monkeypatch: monkeypatch.setenv(name, value)


def source(text: str) -> Callable[[Path, pytest.MonkeyPatch], None]:
    def make(_: Path, __: pytest.MonkeyPatch) -> None:
        build.SOURCE.write_text(text)

    return make


def raising(owner: Any, name: str, error: BaseException) -> Callable[..., None]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return lambda _, monkeypatch: monkeypatch.setattr(owner, name, fail)


def without_a_home(monkeypatch: pytest.MonkeyPatch) -> None:
    """As after ``docker run --user 54321``."""
    monkeypatch.delenv("HOME", raising=False)
    monkeypatch.delenv("XDG_CACHE_HOME")
    raising(pwd, "getpwuid", KeyError("uid not found"))(None, monkeypatch)


def a_file_for_a_folder(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / "file"
    path.touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(path))


def a_folder_for_the_file(_: Path, __: pytest.MonkeyPatch) -> None:
    (build._path_in(build._cache_folder()) / "full").mkdir(parents=True)


def slow(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "MAX_COMPILE_S", 0.2)
    compiler("exec sleep 20")(folder, monkeypatch)


COMPILER, FOLDER = "install g[+][+], or set CXX", "set XDG_CACHE_HOME to a folder"
AGAIN = "delete .*, so that it is compiled again, and set CXX"
FAULTS = {
    "no compiler": Fault(
        "there is no C[+][+] compiler [(]no-such is not found[)]",
        COMPILER,
        variable("CXX", "no-such -O1"),
    ),
    "an open quote": Fault(
        "CXX=.* is no command [(]No closing quotation[)]", COMPILER, variable("CXX", "g++ '")
    ),
    "a compiler for other machines": Fault(
        "compiler cannot be run [(]Exec format error[)]", COMPILER, not_runnable(b"\x7fELF\0")
    ),
    "a compiler that cannot be read": Fault(
        "c[+][+] cannot be run [(]Permission denied[)]",
        COMPILER,
        raising(build.subprocess, "run", PermissionError(13, "Permission denied")),
    ),
    "source that does not compile": Fault(
        "c[+][+] failed: .*error: .*no_type", COMPILER, source("no_type x;\n")
    ),
    "a message without the word": Fault(
        "compiler failed: all is lost", COMPILER, compiler("echo all is lost >&2; exit 1")
    ),
    "a message on the other stream": Fault(
        "compiler failed: an error", COMPILER, compiler("echo some; echo an error; exit 1")
    ),
    "a message in another encoding": Fault(
        "compiler failed: .*error", COMPILER, compiler("printf '\\377 error' >&2; exit 1")
    ),
    "a silent compiler": Fault(
        "compiler failed: exit status 3 without a message", COMPILER, compiler("exit 3")
    ),
    "a killed compiler": Fault(
        "compiler was killed by SIGKILL: no output", "free host memory", compiler("kill -9 $$")
    ),
    "a compiler that aborts": Fault(
        "compiler was killed by SIGABRT: cannot create",
        "free host memory",
        compiler("echo cannot create a file >&2; kill -6 $$"),
    ),
    "a compiler killed by another signal": Fault(
        "compiler was killed by signal 40", "free host memory", compiler("kill -40 $$")
    ),
    "a compiler that does not end": Fault("compiler took longer than 0 s", COMPILER, slow),
    "a compiler that writes nothing": Fault(
        "compiler reported success, but wrote no file", COMPILER, compiler("exit 0")
    ),
    "a compiler that writes text": Fault(
        "wrote 5 bytes that are no shared library", COMPILER, compiler("echo text > $out")
    ),
    "a compiler that writes half a file": Fault(
        "wrote 4000 bytes that are no shared library",
        COMPILER,
        compiler(f"head -c 4000 {sys.executable} > $out"),
    ),
    "a folder that is a file": Fault("cannot be kept", FOLDER, a_file_for_a_folder),
    "a folder that cannot be written": Fault(
        "cannot be kept [(].*Permission denied",
        FOLDER,
        raising(Path, "mkdir", PermissionError(13, "Permission denied")),
    ),
    "a full disk": Fault(
        "cannot be kept [(].*No space left",
        FOLDER,
        raising(build.tempfile, "TemporaryDirectory", OSError(28, "No space left on device")),
    ),
    "a folder in place of the file": Fault("cannot be kept", FOLDER, a_folder_for_the_file),
    "no home": Fault(
        "no home directory", FOLDER, lambda _, monkeypatch: without_a_home(monkeypatch)
    ),
    "no module": Fault("does not load [(]ImportError: .*PyInit", AGAIN, source("int x;\n")),
    "a module of another torch": Fault(
        "does not load [(]ImportError: .*undefined symbol: missing",
        AGAIN,
        source("extern int missing; int* there = &missing;\n"),
    ),
    "a module that refuses": Fault(
        "does not load [(]ValueError: not here[)]",
        AGAIN,
        source(
            SMALL.replace(
                "return PyModule_Create(&def)",
                'PyErr_SetString(PyExc_ValueError, "not here"); return nullptr',
            )
        ),
    ),
    "another module": Fault("does not load [(]AttributeError: .*configure", AGAIN, source(SMALL)),
}


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_a_fault_is_one_warning_with_its_cause_and_cure(
    fault: Fault,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    with monkeypatch.context() as patched:
        fault.make(tmp_path, patched)
        with caplog.at_level(logging.WARNING, logger=native.__name__):
            assert [native_module() for _ in range(2)] == [None, None]
    (record,) = caplog.records
    message = record.getMessage()
    assert "\n" not in message
    start = "offload_native='auto' is not possible here: "
    assert re.match(f"{start}.*{fault.cause}.*; {fault.cure}.*[.] Python does", message), message
    assert not list(tmp_path.rglob("tmp*")), "temporary files stay"


def test_a_fault_leaves_training_as_it_is(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    manager = make_manager(LAZY_NATIVE)
    assert not manager.store.is_native
    chunks = make_chunks(1)
    expected = run_schedule(chunks, SCHEDULES["accumulation"], None)
    assert all_equal(expected, run_schedule(chunks, SCHEDULES["accumulation"], manager))


STEPS = [
    name
    for name, value in vars(build).items()
    if inspect.isfunction(value)
    and value.__module__ == build.__name__
    and name not in ("load", "compile_into")
    and name not in ("_only_build_errors", "_signal_name")
]
"""What happens on the way to a loaded module."""
ERRORS = (OSError("x"), IndexError("x"))


@pytest.mark.parametrize("step", STEPS)
@pytest.mark.parametrize("error", ERRORS, ids=repr)
def test_an_error_at_any_step_is_a_build_error(
    step: str, error: Exception, monkeypatch: pytest.MonkeyPatch
) -> None:
    raising(build, step, error)(None, monkeypatch)
    with pytest.raises(build.BuildError, match="x.*; set "):
        build.load()


# --- waiting --------------------------------------------------------------------------------------


def test_waiting_for_another_process_is_said_and_has_a_limit(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(build, "MAX_WAIT_S", 0.3)
    lock = build._path_in(cache / "slipstream").with_suffix(".lock")
    lock.parent.mkdir(parents=True)
    with lock.open("w") as other, caplog.at_level(logging.INFO, logger=build.__name__):
        fcntl.flock(other, fcntl.LOCK_EX)
        with pytest.raises(build.BuildError, match=f"has held {lock} for more than .*; end that"):
            build.load()
        assert caplog.text.count("waiting for another process that compiles") == 1
        caplog.clear()
        # Closing it is not enough while a process exists that some thread forked meanwhile.
        fcntl.flock(other, fcntl.LOCK_UN)
        build.load()
        assert "waiting for another process" not in caplog.text


def test_a_process_that_is_forked_meanwhile_does_not_keep_the_lock(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    fork = multiprocessing.get_context("fork")
    end, run = fork.Event(), build.subprocess.run
    forked = fork.Process(target=end.wait, args=(60,))

    def forking(*arguments: Any, **options: Any) -> Any:
        forked.start()
        return run(*arguments, **options)

    monkeypatch.setattr(build, "MAX_WAIT_S", 0.3)
    with monkeypatch.context() as patched:
        patched.setattr(build.subprocess, "run", forking)
        build.load()
    compiled_in(cache).unlink()
    try:
        with caplog.at_level(logging.INFO, logger=build.__name__):
            build.load()
        assert "waiting for another process" not in caplog.text
    finally:
        end.set()
        forked.join()


def _fail(counts: Any) -> None:
    """Load in a process of its own; puts a line when the compiler starts, and the error."""
    run = build.subprocess.run

    def counted(*arguments: Any, **options: Any) -> Any:
        counts.put("compiler")
        return run(*arguments, **options)

    build.subprocess.run = counted
    try:
        build.load()
    except build.BuildError as error:
        counts.put(str(error))


@pytest.mark.parametrize("is_killed", [False, True], ids=["failed", "killed"])
def test_those_that_wait_share_the_error_and_compile_if_there_is_none(
    is_killed: bool, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    go = tmp_path / "go"
    script = f"until test -e {go}; do sleep 0.05; done; echo an error by {{}} >&2; exit 1"
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path, script.format("the first"))))
    fork = multiprocessing.get_context("fork")
    first, later = fork.SimpleQueue(), fork.SimpleQueue()
    owner = fork.Process(target=_fail, args=(first,))
    owner.start()
    assert first.get() == "compiler"
    monkeypatch.setenv("CXX", str(make_compiler(tmp_path / "2", script.format("the second"))))
    monkeypatch.setattr(build.logger, "info", lambda *_: later.put("waits"))
    waiting = [fork.Process(target=_fail, args=(later,)) for _ in range(2)]
    for process in waiting:
        process.start()
    assert [later.get(), later.get()] == ["waits", "waits"]
    if is_killed:
        owner.kill()
        owner.join()
    go.touch()
    for process in (owner, *waiting):
        process.join(60)
    said = []
    while not later.empty():
        said.append(later.get())
    number = "second" if is_killed else "first"
    message = f"failed: an error by the {number}; install g"
    assert sum(message in text for text in said) == 2, said
    assert said.count("compiler") == is_killed


def test_what_fails_leaves_no_file_in_the_package(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CXX", "false")
    with pytest.raises(build.BuildError, match="exit status 1"):
        build.compile_into(tmp_path / "package")
    assert not [path for path in (tmp_path / "package").rglob("*") if path.is_file()]


@pytest.mark.skipif(os.geteuid() == 0, reason="root may write everywhere")
def test_a_folder_that_cannot_be_written_is_an_error(cache: Path) -> None:
    cache.mkdir(0o500)
    with pytest.raises(build.BuildError, match="cannot be kept"):
        build.load()
