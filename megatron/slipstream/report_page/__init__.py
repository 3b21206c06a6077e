# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The report of a training run as one HTML file that needs no network."""

PAGE_SUFFIXES = (".html", ".htm")
"""Suffixes of files that are pages."""
