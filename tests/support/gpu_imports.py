# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Imports what ranks on a GPU need, in the process from which they are forked.

That takes them a fourth of a minute each on a slow host. CUDA does not survive a fork, so nothing
here may initialize it.
"""

from __future__ import annotations

import os

# Otherwise the question whether there is a GPU initializes CUDA.
os.environ["PYTORCH_NVML_BASED_CUDA_CHECK"] = "1"

import torch
from ranks import import_megatron

import_megatron()
try:
    import megatron.core.extensions.transformer_engine  # noqa: F401
    import transformer_engine.pytorch  # noqa: F401
except ImportError:  # Tests that need it are skipped.
    pass
if torch.cuda.is_initialized():
    raise RuntimeError("an import initializes CUDA, so ranks cannot be forked after it")
