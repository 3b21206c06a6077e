# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small models of megatron-core, with the tensors that they saved and their computed shapes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Optional

import torch
from megatron_models import _causal_mask
from tiny_gpt import ModelCase, build_chunks, initialize, make_config, micro_batches, train

from megatron.slipstream.estimate.layers import (
    CHECKPOINT_INPUTS,
)
from megatron.slipstream.estimate.model_shapes import ModelShape
from megatron.slipstream.plan.trace import Trace


class Recording(NamedTuple):
    """The recording of one model."""

    shape: ModelShape
    trace: Optional[Trace]
    """Trace of an iteration that followed a plan; None if nothing moves."""
    d2h_bytes: int
    """Bytes offloaded in this iteration."""
    saved_bytes: int
    """Bytes of all storages that autograd saves in one micro-batch, without weights and masks."""


def record_all(
    rank: int,
    world_size: int,
    port: int,
    cases: Mapping[str, tuple[ModelCase, Sequence[str]]],
    num_micro_batches: int,
) -> dict[str, Recording]:
    """Record every case in order, those with modules while these move; to be run on one rank."""
    return {
        name: _record(rank, world_size, port, case, modules, num_micro_batches)
        for name, (case, modules) in cases.items()
    }


def _record(
    rank: int, world_size: int, port: int, case: ModelCase, modules: Sequence[str], count: int
) -> Recording:
    from megatron.slipstream.integration import install
    from megatron.slipstream.integration.entry.model_arguments import shape_of_config
    from megatron.slipstream.options.fields import OffloadConfig

    initialize(case, rank, world_size, port)
    config = make_config(case)
    shape = shape_of_config(
        config,
        case.hybrid_layer_pattern if case.kind == "hybrid" else None,
        vocab_size=case.vocab_size,
        seq_length=case.seq_length,
        micro_batch_size=case.micro_batch_size,
        attention_backend="local",
    )
    saved_bytes = _saved_bytes(case, build_chunks(case, config)[0])
    if not modules:
        return Recording(shape, None, 0, saved_bytes)
    install.uninstall()
    moves_inputs = CHECKPOINT_INPUTS in modules
    options = OffloadConfig(offload_backend="cpu", offload_checkpoint_inputs=moves_inputs)
    manager: Any = install.install(options)
    config = make_config(case, [name for name in modules if name != CHECKPOINT_INPUTS])
    train(case, config, build_chunks(case, config), (count, count))
    trace, d2h_bytes = manager.plan.trace, manager.report.d2h_bytes
    install.uninstall()
    return Recording(shape, trace, d2h_bytes, saved_bytes)


def _saved_bytes(case: ModelCase, model: torch.nn.Module) -> int:
    """Bytes that a forward pass of one micro-batch saves for backward."""
    mask = _causal_mask(case.seq_length)
    left_out = {item.untyped_storage()._cdata for item in (*model.parameters(), mask)}
    storages: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage._cdata not in left_out:
            storages[storage._cdata] = storage
        return tensor

    batch = next(micro_batches(case, 0, 1))
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        model(batch["tokens"], batch["position_ids"], mask, labels=batch["labels"])
    return sum(storage.nbytes() for storage in storages.values())
