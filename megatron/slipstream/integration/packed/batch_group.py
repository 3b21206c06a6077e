# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Decorators by which attention uses the context-parallel group of its micro-batch.

[Note: The group travels with the micro-batch]

``PackedSeqParams.cp_group`` holds the ranks that share a micro-batch. It is set for every
micro-batch and every size (size 1 is a group of one rank); ``local_cp_size``, which multi-latent
attention refuses, never is. There is no global current group: layers are recomputed in backward,
after other micro-batches, and megatron-core passes them the same ``PackedSeqParams`` again.

megatron-core uses the field in core attention only. Rotary embeddings use the group that the layer
was built with (0.18, 0.19), so positions are wrong if a micro-batch has another one; and core
attention keeps the last group that it was passed. The decorators correct both:

- Attention runs its forward pass as a *twin* of itself, with the same parameters, buffers and
  submodules, but another group (and its size in the configuration, which unfused rotary embeddings
  of multi-latent attention read). The layer is never changed, so nothing has to be restored, and
  recomputation keeps the twin and its group.
- Core attention restores its static group after every call, including one that raised.

Nothing of megatron-core is imported here, whose attention imports this in a patched tree.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch

Forward = Callable[..., Any]


def uses_batch_group(forward: Forward) -> Forward:
    """Decorate an attention's ``forward``: the micro-batch's group is used everywhere."""

    @functools.wraps(forward)
    def run(layer: Any, *arguments: Any, **options: Any) -> Any:
        group = _group_of(options)
        return forward(layer if group is None else _twin(layer, group), *arguments, **options)

    return run


def restores_group(forward: Forward) -> Forward:
    """Decorate the ``forward`` of Transformer Engine's core attention: the static group stays."""

    @functools.wraps(forward)
    def run(layer: Any, *arguments: Any, **options: Any) -> Any:
        if _group_of(options) is None:
            return forward(layer, *arguments, **options)
        # megatron-core creates the stream for half of the exchange only for a static size above 1;
        # the class keeps it for all layers.
        owner: Any = next(base for base in type(layer).__mro__ if "cp_stream" in vars(base))
        if owner.cp_stream is None:
            owner.cp_stream = torch.cuda.Stream()
        static = (layer.cp_group, layer.cp_global_ranks, layer.cp_stream, layer.cp_comm_type)
        try:
            return forward(layer, *arguments, **options)
        finally:
            layer.set_context_parallel_group(*static)

    return run


def _group_of(options: Mapping[str, Any]) -> Optional[torch.distributed.ProcessGroup]:
    """Return the micro-batch's group, which layers pass by keyword; None: the static one."""
    params = options.get("packed_seq_params")
    # megatron-core's hybrid context parallelism sets a size beside the group.
    return None if params is None or params.local_cp_size is not None else params.cp_group


def _twin(layer: Any, group: torch.distributed.ProcessGroup) -> Any:
    """Return a layer's twin with another group; created for each pass in microseconds."""
    twin = object.__new__(type(layer))
    twin.__dict__.update(layer.__dict__)
    twin.pg_collection = copy.copy(layer.pg_collection)
    twin.pg_collection.cp = group
    twin.config = copy.copy(layer.config)
    twin.config.context_parallel_size = group.size()
    return twin
