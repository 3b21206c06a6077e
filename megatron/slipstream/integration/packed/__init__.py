# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed (THD) sequences and a context-parallel size that changes by micro-batch."""
