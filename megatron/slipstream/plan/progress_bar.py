# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The progress bar for long operations."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def bar_on_stderr() -> Progress:
    """A progress bar that disappears when it ends; disabled if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    # Bound to this stream, since sys.stderr is replaced while megatron's flags are parsed.
    console = Console(file=sys.stderr)
    # Without a terminal, a bar that is not disabled still ends in an empty line.
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
