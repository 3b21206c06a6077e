# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Run-time changes to megatron-core, Transformer Engine, Triton and torch: see :mod:`table`."""
