# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""C++ implementation of per-group work: saved-tensor hooks, marks, copies, waits and host buffers.

The Python classes of the same names are the reference, and are used if there is no compiler.
Objects of both kinds have the same attributes and methods, so the rest of the engine treats them
alike. C++ handles the common cases, and leaves all others to the Python method, which works on the
same objects: timing, graph capture, verification, memory with other references.
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
from megatron.slipstream.fine_grained_activation_offload.storage import GroupLabel, Residence
from megatron.slipstream.plan.host_layout import size_class_bytes
from megatron.slipstream.plan.trace import BACKWARD, OUTPUT_LAYER, GroupKey, Step, StepKind

logger = logging.getLogger(__name__)


@functools.cache
def native_module() -> Optional[Any]:
    """Return the compiled module; if it cannot be compiled or loaded, warn and return None."""
    try:
        return load(_configure)
    except BuildError as error:
        logger.warning(
            "offload_native='auto' is not possible here: %s. Python does the work of each group, "
            "which takes the host several times as long",
            error,
        )
        return None


def _configure(module: Any) -> None:
    module.configure(
        residences=Residence,
        group_states=GroupState,
        bytes=Bytes,
        empty_if_hidden=empty_if_hidden,
        refill=refill,
        parameter=torch.nn.Parameter,
        size_class_bytes=size_class_bytes,
        host_memory_full=HostMemoryFull,
        group_key=GroupKey,
        group_label=GroupLabel,
        step=Step,
        forward_start=StepKind.FORWARD_START,
        forward_commit=StepKind.FORWARD_COMMIT,
        backward_use=StepKind.BACKWARD_USE,
        backward_end=StepKind.BACKWARD_END,
        output_start=StepKind.OUTPUT_START,
        backward_start=StepKind.BACKWARD_START,
        output_layer=OUTPUT_LAYER,
        backward=BACKWARD,
    )
