# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Dropless expert layers for megatron-core that do not block the host.

They replace megatron-core's layers in the model's spec:

    spec = with_sync_free_experts(get_gpt_decoder_block_spec(config, use_transformer_engine=True))

Router, permutation, activation function and offload marks are megatron-core's. Its dispatcher
copies the number of tokens per expert to the host, and its experts split their input by it; here
both keep it on the device, so all shapes depend only on the layer's number of tokens.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple, Optional

import torch
from megatron.core.dist_checkpointing import ShardedTensor
from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    get_expert_parallel_rng_tracker_name,
)
from megatron.core.transformer.mlp import apply_swiglu_sharded_factory
from megatron.core.transformer.moe.experts import GroupedMLPSubmodules, SequentialMLP, TEGroupedMLP
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.moe.moe_utils import get_default_pg_collection
from megatron.core.transformer.moe.token_dispatcher import MoEAlltoAllTokenDispatcher
from megatron.core.transformer.utils import make_sharded_object_for_checkpoint

from megatron.slipstream.experts.capacity import LayerCapacity, Slots, checks_capacity, step_check
from megatron.slipstream.experts.fixed_exchange import FixedExchange
from megatron.slipstream.experts.grouped_linear import grouped_linear
from megatron.slipstream.integration.seam.specs import replace_classes
from megatron.slipstream.options.experts import EXPERT_RULES
from megatron.slipstream.options.rules import check_rules, require


class RowsOfExperts(NamedTuple):
    """End of each expert's rows; replaces megatron-core's list of lengths."""

    offsets: torch.Tensor
    """int32 ``[num_local_experts]``: exclusive end row of each expert."""

    def tolist(self) -> RowsOfExperts:
        """Return self: ``TEGroupedMLP`` passes the result to its linear layers.

        It uses the lengths itself only for biases and quantised weights, which are refused.
        """
        return self


class SyncFreeGroupedLinear(torch.nn.Module):
    """One linear layer per local expert, as ``TEGroupedMLP`` builds and calls them.

    The weights are one parameter, ``[num_experts, out_features, in_features]``. Checkpoints name
    them as Transformer Engine's grouped linear layer does: ``weight0``, ``weight1``, ...
    """

    def __init__(
        self,
        num_local_experts: int,
        in_features: int,
        out_features: int,
        /,
        *,
        config: Any,
        init_method: Callable[[torch.Tensor], Any],
        pg_collection: Any,
        tp_comm_buffer_name: str,
        **_: Any,
    ) -> None:
        super().__init__()
        self.num_local_experts = num_local_experts
        self.save_original_input = True  # megatron-core requests it if expert_fc1 moves
        self._groups = pg_collection
        self._is_gated = tp_comm_buffer_name == "fc1" and config.gated_linear_unit
        on_cpu = config.use_cpu_initialization
        device = "cpu" if on_cpu else torch.cuda.current_device()
        shape = (num_local_experts, out_features, in_features)
        self.weight = torch.nn.Parameter(
            torch.empty(shape, dtype=config.params_dtype, device=device)
        )
        # False: reduced over the ranks that have the same experts.
        self.weight.allreduce = config.expert_model_parallel_size == 1  # type: ignore[attr-defined]
        self.weight.tensor_model_parallel = False  # type: ignore[attr-defined]
        self._fuses_accumulation = bool(config.gradient_accumulation_fusion)
        if config.perform_initialization:
            # megatron-core's random state for experts.
            name, tracker = get_expert_parallel_rng_tracker_name(), get_cuda_rng_tracker()
            has_state = not on_cpu and tracker.is_initialized()
            with tracker.fork(name) if has_state else contextlib.nullcontext():
                for weight in self.weight.detach():
                    init_method(weight)
        self.register_state_dict_post_hook(_name_by_expert)
        self.register_load_state_dict_pre_hook(_join_by_expert)

    def forward(self, tokens: torch.Tensor, rows: RowsOfExperts, /) -> tuple[torch.Tensor, None]:
        """Apply each expert to its rows.

        ``tokens`` ``[num_rows, in_features]`` are sorted by expert. Returns ``[num_rows,
        out_features]``, and no bias.
        """
        take_gradient = self._accumulate if self._fuses_accumulation else None
        return grouped_linear(tokens, self.weight, rows.offsets, take_gradient), None

    def _accumulate(self, gradient: torch.Tensor) -> Optional[torch.Tensor]:
        """Add to the main gradient, as megatron-core's own linear layers do with fusion.

        The gradient is rounded to the weights' dtype first, the only output dtype of torch's
        grouped GEMM.
        """
        weight: Any = self.weight
        weight.main_grad.add_(gradient)
        if not hasattr(weight, "grad_added_to_main_grad"):
            return None
        weight.grad_added_to_main_grad = True
        # DDP's hook, which reduces the bucket, needs a gradient but ignores its value.
        return gradient.zero_() if getattr(weight, "zero_out_wgrad", False) else gradient

    def backward_dw(self) -> None:
        """Do nothing: weight gradients are never delayed here."""

    def sharded_state_dict(
        self,
        prefix: str = "",
        sharded_offsets: tuple[tuple[int, int, int], ...] = (),
        metadata: Optional[dict[str, Any]] = None,
    ) -> dict[str, Any]:
        """Return a shard for each expert, named as by ``SequentialMLP`` and ``TEGroupedMLP``.

        Raises ``ValueError`` if each shard must have its own name (``singleton_local_shards``).
        """
        if (metadata or {}).get("singleton_local_shards"):
            raise ValueError(
                "singleton_local_shards=True is not supported with moe_sync_free_experts because "
                "the weights of all experts are one parameter; set singleton_local_shards=False"
            )
        group, number, axis = self._groups.ep, self.num_local_experts, len(sharded_offsets)
        first, total = group.rank() * number, group.size() * number
        # Axis, position and number of positions of each local expert.
        places = [(*sharded_offsets, (axis, first + index, total)) for index in range(number)]
        replica = (0, 0, self._groups.expt_dp.rank())
        key = f"{prefix}weight"
        build = partial(_shards, places=places, is_gated=self._is_gated)
        state: dict[str, Any] = {
            key: ShardedTensorFactory(key, self.weight, build, _join_shards, replica)
        }
        # Other expert classes have an entry for scales of quantised weights, even if empty.
        for index, place in enumerate(places):
            name = f"{prefix}_extra_state"
            state[f"{name}{index or ''}"] = make_sharded_object_for_checkpoint(
                None, name, place, replica_id=replica
            )
        return state


def _shards(
    key: str, weight: torch.Tensor, replica_id: Any, _: Any, *, places: list[Any], is_gated: bool
) -> list[Any]:
    """Return shards of a weight or of its optimizer state: one or two for each expert."""
    shards: list[Any] = []
    with torch.no_grad():
        for expert, place in zip(weight, places, strict=True):
            shard = ShardedTensor.from_rank_offsets(
                key, expert, *place, replica_id=replica_id, prepend_axis_num=len(place)
            )
            halves = apply_swiglu_sharded_factory(shard, place).build() if is_gated else [shard]
            shards.append(halves)
    return shards


def _join_shards(shards: list[list[torch.Tensor]]) -> torch.Tensor:
    return torch.stack([torch.cat(parts) for parts in shards])


def _name_by_expert(
    module: torch.nn.Module, state: dict[str, Any], prefix: str, metadata: Any
) -> None:
    weight = state.pop(f"{prefix}weight")
    for index, expert in enumerate(weight.unbind()):
        state[f"{prefix}weight{index}"] = expert


def _join_by_expert(module: Any, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Accept a checkpoint's weights by expert, or the whole parameter as joined from shards."""
    count = module.num_local_experts
    for index in range(count):
        state.pop(f"{prefix}_extra_state{index or ''}", None)
    names = [f"{prefix}weight{index}" for index in range(count)]
    if all(name in state for name in names):
        state[f"{prefix}weight"] = torch.stack([state.pop(name) for name in names])


class SyncFreeGroupedMLP(TEGroupedMLP):
    """Grouped experts that do not read token counts on the host."""

    def __init__(
        self,
        num_local_experts: int,
        config: Any,
        submodules: Any = None,
        pg_collection: Any = None,
        name: Optional[str] = None,
    ) -> None:
        linears = GroupedMLPSubmodules(SyncFreeGroupedLinear, SyncFreeGroupedLinear)
        super().__init__(num_local_experts, config, linears, pg_collection, name)

    def forward(
        self,
        permuted_local_hidden_states: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        *rest: Any,
    ) -> Any:
        """Apply the experts to ``[num_rows, hidden_size]``, sorted by expert.

        ``tokens_per_expert`` is int64 ``[num_local_experts]`` on the device; rows beyond their sum
        are unused. ``rest`` has the rows' probabilities, float ``[num_rows]``.
        """
        rows = RowsOfExperts(tokens_per_expert.cumsum(0, dtype=torch.int32))
        return super().forward(permuted_local_hidden_states, rows, *rest)


class SyncFreeDispatcher(MoEAlltoAllTokenDispatcher):
    """Dropless dispatcher that sorts tokens by expert at a static shape.

    Between expert-parallel ranks, rows are exchanged at a fixed capacity. A slot has
    ``capacity_factor`` times the rows of an even share; None: the maximum possible.
    """

    tokens_per_expert: Any
    input_splits: Any
    output_splits: Any
    num_out_tokens: Any

    def __init__(self, *arguments: Any, capacity_factor: Optional[float], **options: Any) -> None:
        super().__init__(*arguments, **options)
        self._capacity_factor = capacity_factor
        self._exchange: Optional[FixedExchange] = None
        """The exchange of the running pass; None on one rank."""
        device = "cpu" if self.config.use_cpu_initialization else torch.cuda.current_device()
        self.capacity_use = LayerCapacity(self.ep_group.rank(), torch.device(device))
        """Usage of the slots."""
        if self.ep_size > 1:
            step_check.layers.add(self.capacity_use)

    def _maybe_dtoh_and_synchronize(self, point: str, tokens_per_expert: Any = None) -> Any:
        return tokens_per_expert

    def preprocess(self, routing_map: torch.Tensor) -> torch.Tensor:
        """Compute the destination of each row, from bool ``[num_tokens, num_experts]``.

        Returns int64 ``[num_local_experts]``: the number of rows for each local expert.
        """
        self.num_out_tokens = routing_map.shape[0] * self.config.moe_router_topk
        counts = routing_map.sum(0)
        if self.ep_size == 1:
            return counts
        # Equal parts: all_to_all() needs no sizes.
        self.input_splits = self.output_splits = None
        sent = counts.view(self.ep_size, self.num_local_experts)
        received = torch.empty_like(sent)
        torch.distributed.all_to_all_single(received, sent, group=self.ep_group)
        slots = Slots.of(self.num_out_tokens, self.ep_size, self._capacity_factor)
        self._exchange = FixedExchange(sent, received, self.num_out_tokens, slots.capacity)
        self.capacity_use.note(self._exchange.rows_by_rank, slots)
        return self._exchange.rows_of_experts

    def token_dispatch(
        self, permutated_local_input_tokens: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        rows = permutated_local_input_tokens, permuted_probs
        if self._exchange is not None:
            rows = self._exchange.to_slots(rows[0]), self._exchange.to_slots(rows[1])
        received: tuple[torch.Tensor, torch.Tensor] = super().token_dispatch(*rows)
        return received

    def dispatch_postprocess(
        self, global_input_tokens: torch.Tensor, global_probs: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Sort received rows by expert. On one rank they are sorted already."""
        counts = self.tokens_per_expert
        self.tokens_per_expert = None
        if self._exchange is None:
            return global_input_tokens, counts, global_probs
        sort = self._exchange.sort
        return sort(global_input_tokens), counts, sort(global_probs)

    def combine_preprocess(self, hidden_states: torch.Tensor) -> torch.Tensor:
        return hidden_states if self._exchange is None else self._exchange.unsort(hidden_states)

    def token_combine(self, hidden_states: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        returned = super().token_combine(hidden_states, *arguments, **options)
        exchange, self._exchange = self._exchange, None
        return returned if exchange is None else exchange.from_slots(returned)


def check_experts(config: Any, capacity_factor: Optional[float]) -> None:
    """Raise ``ValueError`` if sync-free experts do not support the configuration or the GPU."""
    has_gpu = torch.cuda.is_available()
    own: dict[str, Any] = {
        "moe_sync_free_experts": True,
        "moe_sync_free_capacity_factor": capacity_factor,
        "capability": torch.cuda.get_device_capability() if has_gpu else None,
    }
    require(check_rules(EXPERT_RULES, config, **own))


def use_sync_free_dispatch(
    layer: Any, pg_collection: Any, capacity_factor: Optional[float]
) -> None:
    """Give an expert layer with these process groups a dispatcher that does not block the host."""
    layer.is_sync_free = True  # Chunk graphs ask for it.
    layer.token_dispatcher = SyncFreeDispatcher(
        layer.num_local_experts,
        layer.local_expert_indices,
        config=layer.config,
        pg_collection=pg_collection,
        capacity_factor=capacity_factor,
    )


class SyncFreeExpertsLayer(MoELayer):
    """A ``MoELayer`` that does not block the host; raises as :func:`check_experts`."""

    capacity_factor: Optional[float] = None
    """See :func:`with_sync_free_experts`."""

    def __init__(
        self, config: Any, *arguments: Any, pg_collection: Any = None, **options: Any
    ) -> None:
        check_experts(config, self.capacity_factor)
        if pg_collection is None:
            pg_collection = get_default_pg_collection()
        super().__init__(config, *arguments, pg_collection=pg_collection, **options)
        use_sync_free_dispatch(self, pg_collection, self.capacity_factor)
        if self.use_shared_expert and self.shared_expert_overlap:
            self.token_dispatcher.set_shared_experts(self.shared_experts)

    forward = checks_capacity(MoELayer.forward)


def with_sync_free_experts(spec: Any, capacity_factor: Optional[float] = None) -> Any:
    """Return a copy of a layer or block spec whose expert layers do not block the host.

    Args:
        spec: See :func:`~megatron.slipstream.integration.seam.specs.replace_classes`.
        capacity_factor: With several expert-parallel ranks: rows that a rank can send to another,
            relative to an even share. None: the maximum possible, which is safe and takes as much
            memory as a factor of ``expert_model_parallel_size``.

    Example:
        spec = with_sync_free_experts(get_gpt_decoder_block_spec(config, use_te))
    """
    layer: Any = SyncFreeExpertsLayer
    if capacity_factor is not None:
        layer = type(layer.__name__, (layer,), {"capacity_factor": capacity_factor})
    return replace_classes(
        spec, {MoELayer: layer, TEGroupedMLP: SyncFreeGroupedMLP, SequentialMLP: SyncFreeGroupedMLP}
    )
