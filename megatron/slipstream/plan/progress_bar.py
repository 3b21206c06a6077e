# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A progress bar for long operations."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from rich.progress import Progress


def bar_on_stderr() -> Progress:
    """Return a progress bar that is cleared when done, and disabled if stderr is not a terminal."""
    from rich.console import Console
    from rich.progress import Progress, TimeElapsedColumn

    # Bind to this stream, since sys.stderr is replaced while megatron's flags are parsed.
    console = Console(file=sys.stderr)
    # Without a terminal, an enabled bar would still print an empty line at the end.
    columns = (*Progress.get_default_columns(), TimeElapsedColumn())
    return Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
