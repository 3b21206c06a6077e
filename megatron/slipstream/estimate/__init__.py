# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Estimates for models that have not run: shapes, saved bytes, times, traces, frontiers."""
