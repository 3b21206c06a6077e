# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Redirect megatron's prints, logs and warnings during training to a file.

Of its 1,250 lines for 20 iterations, 830 list its arguments. Slipstream's own messages, progress
and errors go to stderr, which is unchanged.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Optional, TextIO

from megatron.slipstream.estimate.file_errors import cure_of, writing, wrong_with
from megatron.slipstream.integration.record.run_files import rank_path
from megatron.slipstream.options.fields import EntryOptions

FLAG = "--megatron-output-path"
DEFAULT_PATH = EntryOptions.megatron_output_path
SHOWN = "-"

_HEADER = """\
# {time}: {command}
# Megatron's own output. Its second 'lm loss' is the mean since the start: it does not begin again
# after the first iteration, which it always logs.
"""

logger = logging.getLogger(__name__)


class MegatronOutput(contextlib.AbstractContextManager["MegatronOutput"]):
    """Replaces stdout, and captures warnings and logs without a handler.

    Text is buffered until :meth:`keep`, so a refused command shows one line. Flags are taken
    unparsed, because parsing prints.
    """

    def __init__(self, arguments: Sequence[str], rank: int) -> None:
        given = _value_of(FLAG, arguments)
        self._is_default = given is None
        self._path = rank_path(given or DEFAULT_PATH, rank)
        self._rank = rank
        self._command = " ".join([Path(sys.argv[0]).name, *arguments])
        self._held = io.StringIO()
        self._stream = _Stream(self._held)
        self._stack = contextlib.ExitStack()
        self._stdout = sys.stdout
        self._is_kept = given == SHOWN

    def __enter__(self) -> MegatronOutput:
        if self._is_kept:
            return self
        self._stdout = sys.stdout
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
        self._stack.callback(setattr, self._stream, "target", self._stdout)
        self._stack.enter_context(contextlib.redirect_stdout(self._stream))
        self._stack.callback(setattr, logging, "lastResort", logging.lastResort)
        logging.lastResort = handler
        # If the logger has no handler, captureWarnings() adds one that drops everything.
        of_python = logging.getLogger("py.warnings")
        of_python.addHandler(handler)
        self._stack.callback(of_python.removeHandler, handler)
        self._stack.callback(setattr, of_python, "propagate", of_python.propagate)
        of_python.propagate = False
        logging.captureWarnings(True)
        self._stack.callback(logging.captureWarnings, False)
        return self

    def keep(self) -> None:
        """Open the file; write the buffered text first.

        Raises:
            ValueError: The file that the user named cannot be opened.
        """
        if self._is_kept:
            return
        self._is_kept = True
        try:
            with writing(FLAG, Path(self._path)):
                target = self._stack.enter_context(_appending(self._path))
        except ValueError as error:
            if not self._is_default:
                raise
            logger.warning("%s; megatron's output is shown", error)
            target = self._stdout
        self._stream.target = target
        if target is not self._stdout:
            header = _HEADER.format(time=time.strftime("%F %T"), command=self._command)
            self._stream.write_as_is(header)
            if self._rank == 0:
                logger.info(
                    "megatron's own output is appended to %s (%s %s shows it)",
                    *(self._path, FLAG, SHOWN),
                )
        self._stream.write_as_is(self._held.getvalue())

    def __exit__(self, kind: Optional[type[BaseException]], *_: Any) -> None:
        failed = kind is not None and not issubclass(kind, (SystemExit, ValueError))
        if failed and self._is_kept and self._stream.target is not self._held:
            logger.error("megatron's own output before the error is in %s", self._path)
        elif failed:
            self._stdout.write(self._held.getvalue())
        self._stream.write_repeat_counts()
        self._stack.close()


class _Stream(io.TextIOBase):
    """Writes to a replaceable target, since megatron's handlers keep the stream after training.

    Identical warnings, e.g. from every layer of every iteration, are written only once.
    """

    def __init__(self, target: TextIO) -> None:
        self.target = target
        self._warnings: Counter[str] = Counter()
        self._has_failed = False

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        # A handler writes each record in one call.
        if text.startswith("WARNING:"):
            self._warnings[text] += 1
            if self._warnings[text] > 1:
                return len(text)
        return self.write_as_is(text)

    def write_as_is(self, text: str) -> int:
        """Write text, including repeated warnings. A full disk does not end training."""
        if self._has_failed:
            return len(text)
        try:
            return self.target.write(text)
        except OSError as error:
            self._has_failed = True
            logger.warning(
                "megatron's own output is lost from here on, because %s=%s %s; %s",
                FLAG,
                getattr(self.target, "name", "the file"),
                wrong_with(error),
                cure_of(error),
            )
            return len(text)

    def write_repeat_counts(self) -> None:
        """Write how often each warning was repeated."""
        for text, count in self._warnings.items():
            if count > 1:
                self.write_as_is(f"# {count} times: {text}")
        self._warnings.clear()

    def flush(self) -> None:
        if not self._has_failed:
            self.target.flush()

    def fileno(self) -> int:
        return self.target.fileno()


@contextlib.contextmanager
def _appending(path: str) -> Iterator[TextIO]:
    Path(path).parent.mkdir(parents=True, exist_ok=True)
    stream = Path(path).open("a", buffering=1, encoding="utf-8", errors="replace")  # noqa: SIM115
    try:
        yield stream
    finally:
        # A failed write has already been logged.
        with contextlib.suppress(OSError):
            stream.close()


def _value_of(flag: str, arguments: Sequence[str]) -> Optional[str]:
    """Return the last value of a flag, or None."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument(flag, dest="value", nargs="?")
    return parser.parse_known_args(arguments)[0].value
