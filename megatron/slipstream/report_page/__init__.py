# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A training run as one HTML file, to look at in a browser without a network."""

PAGE_SUFFIXES = (".html", ".htm")
"""Names of files that end so are pages."""
