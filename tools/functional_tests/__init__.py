# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs the cases of tests/functional_tests/test_cases: ``./run functional-tests --help``."""
