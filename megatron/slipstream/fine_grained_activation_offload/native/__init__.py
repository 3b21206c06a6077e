# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The saved-tensor hooks and their storages in C++.

The Python code of ``activation_store`` and ``storage`` is the reference, and does the same where
there is no compiler. Storages of either kind have the same attributes and methods, so the rest of
the engine does not tell them apart.
"""

from __future__ import annotations

import functools
import logging
from typing import Any, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.backend import Bytes
from megatron.slipstream.fine_grained_activation_offload.group import GroupState
from megatron.slipstream.fine_grained_activation_offload.hidden_leaves import (
    empty_if_hidden,
    refill,
)
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostMemoryFull
from megatron.slipstream.fine_grained_activation_offload.native.build import BuildError, load
from megatron.slipstream.fine_grained_activation_offload.storage import Residence
from megatron.slipstream.plan.host_layout import size_class_bytes

logger = logging.getLogger(__name__)


@functools.cache
def native_module() -> Optional[Any]:
    """The compiled module, or None after a warning where it cannot be compiled."""
    try:
        module = load()
    except BuildError as error:
        logger.warning(
            "offload_native='auto' is not possible here: %s. The Python hooks run instead, which "
            "take the host about a sixth longer for each group",
            error,
        )
        return None
    module.configure(
        list(Residence),
        list(GroupState),
        Bytes,
        empty_if_hidden,
        refill,
        torch.nn.Parameter,
        size_class_bytes,
        HostMemoryFull,
    )
    return module
