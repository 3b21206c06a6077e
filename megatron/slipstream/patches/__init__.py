# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Run-time changes to megatron-core, Transformer Engine, Triton and torch.

:mod:`table` lists all of them, :mod:`patching` applies and undoes them, :mod:`releases` detects
the installed release, and the other files contain the replacements.
"""
