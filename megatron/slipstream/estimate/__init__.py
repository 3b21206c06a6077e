# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Traces of models that have not run: shapes, saved bytes and times on a GPU. And frontiers."""
