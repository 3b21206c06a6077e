# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Configuration of a training run that is planned before it starts, from any source."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Optional

from megatron.slipstream.estimate.layers import (
    CHECKPOINT_INPUTS,
    MEGATRON_MODULES,
    MODULES,
    marked_modules,
)
from megatron.slipstream.estimate.model_shapes import ModelShape, Parallelism
from megatron.slipstream.estimate.synthetic import DEFAULT_MIN_NUMEL
from megatron.slipstream.options.model import check_model_options
from megatron.slipstream.options.rules import require
from megatron.slipstream.plan.candidates import PolicyOptions


@dataclass(frozen=True)
class Configured:
    """A model, its schedule, and the modules that may be offloaded."""

    title: str
    """A description for the user."""
    shape: ModelShape
    modules: tuple[str, ...]
    num_micro_batches: int
    min_numel: int = DEFAULT_MIN_NUMEL
    policy: PolicyOptions = field(default_factory=PolicyOptions)
    notes: tuple[str, ...] = ()
    ranks_per_host: Optional[int] = None
    """Ranks that share a host's memory; None for 8, or all if there are fewer."""

    @property
    def num_ranks_of_host(self) -> int:
        return self.ranks_per_host or min(8, self.shape.parallelism.num_gpus)

    def __post_init__(self) -> None:
        if self.num_micro_batches < 1:
            raise ValueError(
                f"--num-micro-batches={self.num_micro_batches} must be positive; set 1 or more"
            )
        par = self.shape.parallelism
        ranks = par.dp * par.tp * par.cp
        if ranks % (par.ep * par.etp):
            raise ValueError(
                f"data_parallel_size={par.dp} is not supported with "
                f"expert_model_parallel_size={par.ep} because experts are divided among "
                f"{par.ep * par.etp} ranks, and a pipeline stage has {ranks}; set "
                f"data_parallel_size={fewest_data_parallel_ranks(par)}, or a multiple of it"
            )
        check_modules(self.shape, self.modules)


def usable_modules(shape: ModelShape) -> tuple[str, ...]:
    """Return the modules that may move unless others are named, in layer order.

    These are those that megatron-core marks in any layer of the model; of state-space layers, which
    it does not mark, those that Slipstream does. 'core_attn' is included even if not marked, since
    megatron-core requires it with 'attn_proj'. The inputs of recomputed layers are included.
    """
    found = {name for layer in range(shape.num_layers) for name in marked_modules(shape, layer)}
    found.add("core_attn")
    return tuple(name for name in (CHECKPOINT_INPUTS, *MEGATRON_MODULES) if name in found)


def default_micro_batches(parallelism: Parallelism) -> int:
    """Return enough micro-batches to reach a steady state: two rounds of the pipeline."""
    if parallelism.pp == 1:
        return 2
    return 2 * max(parallelism.pp, parallelism.group_size or 0)


def fewest_data_parallel_ranks(parallelism: Parallelism) -> int:
    """Return the smallest ``dp`` with which both dense and expert group sizes divide the ranks."""
    dense, experts = parallelism.tp * parallelism.cp, parallelism.ep * parallelism.etp
    return max(1, math.lcm(dense, experts) // max(1, dense))


def check_modules(shape: ModelShape, modules: tuple[str, ...]) -> None:
    """Raise ``ValueError`` if modules are unknown here or to megatron-core, or save nothing."""
    # Only the rules about modules and experts apply here.
    experts = shape.experts
    facts = SimpleNamespace(
        fine_grained_activation_offloading=True,
        offload_modules=[name for name in modules if name != CHECKPOINT_INPUTS],
        num_moe_experts=experts and experts.num_experts,
        moe_shared_expert_intermediate_size=experts and experts.shared_ffn_hidden_size,
        activation_offload_fraction=1.0,
        min_offloaded_tensor_size=0,
        delta_offload_bytes_across_pp_ranks=0,
        cpu_offloading=False,
    )
    require(check_model_options(facts))
    for name in modules:
        if name not in (CHECKPOINT_INPUTS, *MODULES):
            raise ValueError(
                f"offload_modules contains {name!r}, whose sizes are not modelled; "
                f"use {', '.join(MODULES)}, or plan a recorded trace"
            )
    if shape.recomputes("moe") and {"expert_fc1", "moe_act"} & set(modules):
        raise ValueError(
            "offload_modules contains expert modules, which is not supported with 'moe' in "
            "recompute_modules because experts then save no tensors; remove one of them"
        )
