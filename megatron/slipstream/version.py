# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The version of the package, in a file that every room may import."""

__version__ = "0.1.0"
