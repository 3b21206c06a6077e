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
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Optional, TextIO

from megatron.slipstream.estimate.file_errors import cure_of, writing, wrong_with
from megatron.slipstream.integration.record.run_files import rank_path
from megatron.slipstream.options.fields import EntryOptions
from megatron.slipstream.patches.attributes import replace_on

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
        parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
        parser.add_argument(FLAG, dest="path", nargs="?")
        self._given = parser.parse_known_args(arguments)[0].path
        self._path = Path(rank_path(self._given or DEFAULT_PATH, rank))
        self._rank = rank
        self._command = " ".join([Path(sys.argv[0]).name, *arguments])
        self._held = io.StringIO()
        self._stream = _Stream(self._held)
        self._stdout = sys.stdout
        self._stack = contextlib.ExitStack()

    def __enter__(self) -> MegatronOutput:
        if self._given == SHOWN:
            return self
        self._stdout = sys.stdout
        self._stack.callback(setattr, self._stream, "target", self._stdout)
        self._stack.enter_context(contextlib.redirect_stdout(self._stream))
        handler = logging.StreamHandler(self._stream)
        handler.setFormatter(logging.Formatter("%(levelname)s:%(name)s:%(message)s"))
        self._stack.callback(replace_on(logging, "lastResort", handler))
        # If the logger has no handler, captureWarnings() adds one that drops everything.
        of_python = logging.getLogger("py.warnings")
        of_python.addHandler(handler)
        self._stack.callback(of_python.removeHandler, handler)
        self._stack.callback(replace_on(of_python, "propagate", False))
        logging.captureWarnings(True)
        self._stack.callback(logging.captureWarnings, False)
        return self

    def keep(self) -> None:
        """Open the file, or raise ``ValueError``; write the buffered text first."""
        if self._given == SHOWN:
            return
        try:
            with writing(FLAG, self._path):
                self._path.parent.mkdir(parents=True, exist_ok=True)
                file = self._path.open("a", buffering=1, encoding="utf-8", errors="replace")
        except ValueError as error:
            if self._given is not None:
                raise
            logger.warning("%s; megatron's output is shown", error)
            self._stream.target = self._stdout
        else:
            # A failed write has already been logged.
            self._stack.push(contextlib.suppress(OSError))
            self._stack.callback(file.close)
            self._stream.target = file
            self._stream.write(_HEADER.format(time=time.strftime("%F %T"), command=self._command))
            if self._rank == 0:
                message = "megatron's own output is appended to %s (%s %s shows it)"
                logger.info(message, self._path, FLAG, SHOWN)
        self._stream.write(self._held.getvalue())

    def __exit__(self, kind: Optional[type[BaseException]], *_: Any) -> None:
        if kind is not None and not issubclass(kind, (SystemExit, ValueError)):
            if self._stream.target is not self._held:
                logger.error("megatron's own output before the error is in %s", self._path)
            else:
                self._stdout.write(self._held.getvalue())
        self._stack.close()


class _Stream(io.TextIOBase):
    """Writes to a replaceable target, since megatron's handlers keep the stream after training.

    Equal warnings, such as those of every layer in every iteration, are written once.
    """

    def __init__(self, target: TextIO) -> None:
        self.target = target
        self._has_failed = False
        self._warnings: set[str] = set()

    def writable(self) -> bool:
        return True

    def write(self, text: str) -> int:
        """Write text. A full disk does not end training."""
        # A handler writes each record in one call.
        if self._has_failed or text in self._warnings:
            return len(text)
        if text.startswith("WARNING:"):
            self._warnings.add(text)
        try:
            return self.target.write(text)
        except OSError as error:
            self._has_failed = True
            logger.warning(
                "megatron's own output is lost from here on, because %s=%s %s; %s",
                *(FLAG, getattr(self.target, "name", "the file")),
                *(wrong_with(error), cure_of(error)),
            )
            return len(text)

    def flush(self) -> None:
        if not self._has_failed:
            self.target.flush()

    def fileno(self) -> int:
        return self.target.fileno()
