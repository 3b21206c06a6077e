# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The report of a training run as a single HTML file that needs no network."""

PAGE_SUFFIXES = (".html", ".htm")
"""File suffixes of a page."""
