# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Output files of training: report, trace and run record.

They are written whenever training ends under Python's control, and between iterations, so that a
killed run leaves the figures of an earlier iteration.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Optional

from megatron.slipstream.estimate.file_errors import cure_of, wrong_with
from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.integration.record.monitor import Monitor
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.whole_files import is_stream
from megatron.slipstream.report_page import PAGE_SUFFIXES

logger = logging.getLogger(__name__)

DEFAULT_INTERVAL = 100


@dataclass
class RunFiles:
    """Writes the files of one rank."""

    config: OffloadConfig
    """Names report and trace."""
    rank: int
    engine: Any
    """The module ``install``; None to write the run record only, which a monitor writes."""
    record_path: Optional[str] = None
    interval: int = DEFAULT_INTERVAL
    """Iterations between two writings; 0 to write only at the end."""
    _written: list[str] = field(default_factory=list, init=False)

    def write_between(self, monitor: Optional[Monitor], num_done: int) -> None:
        """Write this rank's files if ``num_done`` completes an interval. Not a collective.

        The report page is not written, since that takes long.
        """
        if self.interval and num_done % self.interval == 0:
            self._write_own(monitor, is_end=False)

    def write(self, monitor: Monitor) -> None:
        """Log the report and write the files after all ranks end normally. A collective."""
        report = None if self.engine is None else self.engine.gather_report()
        if report is not None and self.rank == 0:
            logger.info("%s", report.render())
        self._write_own(monitor, is_end=True, report=report)
        self._log_written()

    def write_alone(self, monitor: Optional[Monitor] = None) -> None:
        """Write this rank's figures when the other ranks may be missing, as after a failure.

        Raises nothing, so that the exception that ends training is shown.
        """
        try:
            report = None if self.engine is None else self.engine.report()
            self._write_own(monitor, is_end=False, report=report)
        except Exception:
            logger.exception("the files of the training are incomplete")
        self._log_written()

    def _write_own(
        self, monitor: Optional[Monitor], is_end: bool, report: Optional[Report] = None
    ) -> None:
        self._written.clear()
        config, engine = self.config, self.engine
        if engine is not None and config.offload_report_path is not None:
            self._save_report(config.offload_report_path, report)
        if engine is not None and config.offload_trace_path is not None:
            with self._writing("offload_trace_path", config.offload_trace_path) as path:
                engine.save_trace(path)
        if self.record_path is not None and monitor is not None:
            with self._writing("run_record_path", self.record_path) as path:
                monitor.save(path, is_end)

    def _save_report(self, given: str, report: Optional[Report]) -> None:
        """Write each rank's own figures as JSON, or on the first rank a page of all known ones."""
        option = "offload_report_path"
        if Path(given).suffix not in PAGE_SUFFIXES:
            with self._writing(option, given) as path:
                self.engine.report().save(path)
        elif self.rank == 0 and report is not None:
            from megatron.slipstream.report_page.page import save_page

            with self._writing(option, given):
                save_page(given, report, self.engine.plans())

    @contextlib.contextmanager
    def _writing(self, option: str, given: str) -> Iterator[str]:
        """Yield the path of a file to write, for this rank; log errors."""
        path = rank_path(given, self.rank)
        try:
            yield path
        except OSError as error:
            logger.error("%s=%s %s; %s", option, path, wrong_with(error), cure_of(error))
        except RuntimeError as error:  # No iteration has been recorded.
            logger.error("%s: nothing is written, since %s", option, error)
        else:
            self._written.append(f"{option}={path}")

    def _log_written(self) -> None:
        if self._written and self.rank == 0:
            logger.info("written: %s", ", ".join(self._written))


def rank_path(path: str, rank: int) -> str:
    """Return the path of one rank: '{rank}' is replaced; without it ranks above 0 add '.rank<N>'.

    A device or pipe is shared by all ranks.
    """
    if "{rank}" in path:
        return path.replace("{rank}", str(rank))
    plain = Path(path)
    if rank == 0 or is_stream(plain):
        return path
    return str(plain.with_name(f"{plain.stem}.rank{rank}{plain.suffix}"))
