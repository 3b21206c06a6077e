# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Progress bars for long operations."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress, ProgressColumn, Task
    from rich.text import Text

BAR_WIDTH = 24
"""Width of a bar in columns, where the terminal has room for it."""


def columns(*measures: type[ProgressColumn], has_figures: bool = False) -> list[ProgressColumn]:
    """Return a bar's columns: description, bar, measures, and figures if a task has any.

    In a narrow terminal figures and bar become shorter; rich would cut the times to '0:00…'.

    Args:
        measures: Columns of counts and times.
        has_figures: Whether tasks have a field 'figures', a text.
    """
    from rich.progress import BarColumn, TextColumn
    from rich.table import Column

    class Figures(TextColumn):
        def render(self, task: Task) -> Text:
            text = super().render(task)
            # In the text, since a column that does not wrap does not become narrower either.
            text.no_wrap, text.overflow = True, "ellipsis"
            return text

    found: list[ProgressColumn] = [
        TextColumn("{task.description}"),
        BarColumn(bar_width=None, table_column=Column(max_width=BAR_WIDTH)),
    ]
    found += [measure(table_column=Column(no_wrap=True)) for measure in measures]
    if has_figures:
        found.append(Figures("{task.fields[figures]}", table_column=Column()))
    return found


def bar_on_stderr() -> Progress:
    """Return a progress bar that is cleared when done, and disabled if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TaskProgressColumn, TimeElapsedColumn, TimeRemainingColumn

    # Bind to this stream, since sys.stderr is replaced while megatron's flags are parsed.
    console = Console(file=sys.stderr)
    shown = columns(TaskProgressColumn, TimeRemainingColumn, TimeElapsedColumn)
    # Without a terminal, an enabled bar would still print an empty line at the end.
    return Progress(*shown, console=console, transient=True, disable=not console.is_terminal)
