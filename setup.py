# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Build entry for tools that still call setup.py; everything is declared in pyproject.toml."""

from setuptools import setup

setup()
