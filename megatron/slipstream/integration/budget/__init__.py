# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Keeps a training within a memory budget."""
