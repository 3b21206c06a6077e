# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small models with a bank of graphs, whose context-parallel size changes per micro-batch."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Optional

import torch
from captured_layers import with_graphs
from imitated_layer_graphs import imitated_layer_graphs
from megatron_models import forget_expert_metrics, wrap
from replayed_gpt import (
    LayerGraphs,
    Poison,
    expert_metrics,
    gradients_and_state,
    moved_by_graphs,
    slots_of,
    start,
    timed_replays,
    update,
)
from shared_documents import (
    Setting,
    Sizes,
    changed_specs,
    inputs_of,
    micro_batch_of,
)
from tiny_gpt import build_chunks, first_difference, make_config, use_gpu

from megatron.slipstream.context_parallel.scheduler import share_of
from megatron.slipstream.integration import install
from megatron.slipstream.options.fields import OffloadConfig

Steps = Sequence[Sequence[int]]
"""The sizes of each iteration's micro-batches."""


@dataclasses.dataclass(frozen=True)
class Banked:
    """Result of :func:`compare_bank` on one rank."""

    difference: Optional[str]
    """The first difference between training with and without the bank; None if equal."""
    num_replays: dict[int, int]
    """Number of replays of all chunks, by size."""
    num_other: int
    """Number of eager micro-batches in iterations with graphs."""
    figures: tuple[str, ...]
    """Memory and time of the capture, for each size of each chunk."""
    num_poisoned: int
    moved_bytes: dict[int, int]
    """By size, the bytes of one forward replay of each chunk that offloads."""
    host_bytes: dict[int, int]
    """By size, from the largest, the host memory beyond that of the sizes before it."""
    allocated_bytes: tuple[int, ...]
    """Device memory of tensors after each iteration with graphs (GPU)."""
    num_timed: int
    """Number of replays whose times were read."""


def every_order(sizes: Sequence[int], num_iterations: int) -> list[tuple[int, ...]]:
    """The sizes of iterations: one with the smallest size only, then all orders repeatedly."""
    orders = itertools.cycle(itertools.permutations(sizes))
    return [(sizes[0],) * len(sizes), *itertools.islice(orders, num_iterations - 1)]


def random_sizes(sizes: Sequence[int], num_iterations: int, most: int = 4) -> list[tuple[int, ...]]:
    """Random sizes of iterations with 1 to ``most`` micro-batches."""
    draw = random.Random(7)
    return [
        tuple(draw.choice(sizes) for _ in range(draw.randint(1, most)))
        for _ in range(num_iterations)
    ]


def compare_bank(
    rank: int,
    num_ranks: int,
    port: int,
    setting: Setting,
    steps: Steps,
    wrapper: Optional[dict[str, Any]] = None,
    offload_modules: Sequence[str] = (),
    backend: str = "auto",
) -> Banked:
    """Train without and with a bank of graphs; to be run on every rank.

    Args:
        rank: This rank.
        num_ranks: Number of ranks.
        port: Port of their rendezvous.
        setting: The model, and a micro-batch of each size.
        steps: The iterations; the first runs eagerly.
        wrapper: Options of ``DistributedDataParallelConfig``.
        offload_modules: Modules that move with graphs; nothing moves without graphs.
        backend: Backend of the engine.
    """
    case = start(setting.case, rank, num_ranks, port)
    setting = dataclasses.replace(setting, case=case)
    expected = Training(setting, False, wrapper or {}).run(steps)
    if offload_modules:
        install.install(OffloadConfig(offload_backend=backend))
    banked = Training(setting, True, wrapper or {}, offload_modules)
    with timed_replays() as timed:
        actual = banked.run(steps)
    graphs = [(size, one) for bank in banked.graphs for size, one in bank.of_size.items()]
    num_passes = sum(map(len, steps[1:])) * len(banked.graphs)
    replays = dict.fromkeys(setting.limits.sizes, 0)
    for size, one in graphs:
        replays[size] += one.num_replays
    offloading = [(size, one.chunk.offloading) for size, one in graphs if one.chunk.offloading]
    found = Banked(
        difference=first_difference(expected, actual),
        num_replays=replays,
        num_other=num_passes - sum(replays.values()),
        figures=tuple(f"{one.chunk.name}: {one.figures.render()}" for _, one in graphs),
        num_poisoned=banked.poison.num_filled,
        moved_bytes={size: moves.moved_bytes for size, moves in offloading},
        host_bytes={size: moves.host_bytes for size, moves in offloading},
        allocated_bytes=tuple(banked.allocated_bytes),
        num_timed=timed.call_count,
    )
    memories = {id(slot.memory): slot.memory for bank in banked.graphs for slot in slots_of(bank)}
    pools = [memory.host_pool for memory in memories.values() if offload_modules]
    assert all(pool.allocated_bytes for pool in pools)
    for bank in banked.graphs:
        bank.delete()
    assert not any(pool.allocated_bytes for pool in pools)
    return found


@dataclasses.dataclass(frozen=True)
class LayersBanked:
    """Result of :func:`compare_layer_bank` on one rank."""

    difference: Optional[str]
    """The first difference between training with and without the bank; None if equal."""
    num_poisoned: int
    moved_bytes: int
    """Bytes that one replay of the graphs of a size copies out."""
    graph_bytes: dict[int, int]
    """Device memory of all graphs after the capture of each size, from the largest (GPU)."""
    allocated_bytes: tuple[int, ...]
    """Device memory of tensors after each iteration with graphs (GPU)."""


def compare_layer_bank(
    rank: int,
    num_ranks: int,
    port: int,
    setting: Setting,
    scope: Sequence[str],
    steps: Steps,
    offload_modules: Sequence[str] = (),
    backend: str = "auto",
) -> LayersBanked:
    """Train without graphs and with graphs of layers for each size; to be run on every rank.

    Args:
        rank: This rank.
        num_ranks: Number of ranks.
        port: Port of their rendezvous.
        setting: The model, and a micro-batch of each size.
        scope: The parts of each layer that are captured; the whole layer if empty.
        steps: The iterations; the first runs eagerly.
        offload_modules: Modules that move with graphs; nothing moves without graphs.
        backend: Backend of the engine.
    """
    case = start(setting.case, rank, num_ranks, port)
    setting = dataclasses.replace(setting, case=case)
    expected = Training(setting, False, {}).run(steps)
    engine = None
    if offload_modules:
        engine = install.install(OffloadConfig(offload_backend=backend))
    poison, graphed = Poison(), with_graphs(case, scope, 1)
    with imitated_layer_graphs():
        layers = LayerGraphs(graphed, poison)
        graphed_setting = dataclasses.replace(setting, case=graphed)
        banked = Training(graphed_setting, False, {}, offload_modules, layers)
        actual = banked.run(steps)
        found = LayersBanked(
            difference=first_difference(expected, actual),
            num_poisoned=poison.num_filled,
            moved_bytes=moved_by_graphs(engine),
            graph_bytes=layers.graph_bytes,
            allocated_bytes=tuple(layers.allocated_bytes),
        )
        layers.helper.delete_cuda_graphs()
    install.uninstall()
    return found


class Training:
    """A model and its training."""

    def __init__(
        self,
        setting: Setting,
        replays: bool,
        wrapper: dict[str, Any],
        offload_modules: Sequence[str] = (),
        layers: Optional[LayerGraphs] = None,
    ) -> None:
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from megatron.slipstream.integration.graphs.chunks import replay_chunks
        from megatron.slipstream.integration.packed.context_parallel_groups import (
            context_parallel_groups,
        )
        from megatron.slipstream.integration.packed.dynamic_context_parallel import (
            with_dynamic_context_parallelism,
        )

        forget_expert_metrics()
        self.setting = setting
        self.groups = context_parallel_groups(setting.limits)
        self.config = make_config(setting.case, offload_modules)
        with changed_specs(with_dynamic_context_parallelism):
            chunks = build_chunks(setting.case, self.config)
        self.layers = layers
        if layers is not None:
            from megatron.slipstream.integration.graphs.packed_layers import (
                take_packed_sequences,
            )

            take_packed_sequences(chunks, setting.limits)
        self.chunks: list[Any] = wrap(self.config, chunks, **wrapper)
        torch.manual_seed(11)
        model_parallel_cuda_manual_seed(11, te_rng_tracker=use_gpu(), force_reset_rng=True)
        if wrapper.get("overlap_grad_reduce"):
            self.config.no_sync_func = self.chunks[0].no_sync
        self.poison = Poison()
        self.graphs: list[Any] = []
        self.allocated_bytes: list[int] = []
        if replays:
            self.graphs = list(replay_chunks(self.chunks, 1, limits=setting.limits))
            for chunk, bank in zip(self.chunks, self.graphs, strict=True):
                self.poison.fill_before_forward(chunk, bank)

    def run(self, steps: Steps) -> list[list[torch.Tensor]]:
        """Run iterations. Returns the losses, gradients and state of each."""
        with _imports_frozen():
            return [self._iterate(step, sizes) for step, sizes in enumerate(steps)]

    def _iterate(self, step: int, sizes: Sequence[int]) -> list[torch.Tensor]:
        if self.layers is not None and step == 1:
            self.layers.capture(self.config, self.chunks, len(sizes))
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        forget_rotary_tables(self.chunks)
        result = self._pass(sizes)
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        result += gradients_and_state(self.chunks)
        update(self.chunks)
        if step % 5 == 1:
            with torch.no_grad():
                result += self._pass(sizes, forward_only=True)
        assert all(tensor.isfinite().all() for tensor in result)
        kept = [tensor.cpu() for tensor in result]
        if use_gpu() and self.graphs and step:
            del result
            self.allocated_bytes.append(torch.cuda.memory_allocated())
        if self.layers is not None:
            result = []
            self.layers.end_iteration()
        return kept

    def _pass(self, sizes: Sequence[int], forward_only: bool = False) -> list[torch.Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        setting, texts = self.setting, self.setting.texts

        def forward_step(data: Iterator[Sizes], model: torch.nn.Module) -> Any:
            share = share_of(micro_batch_of(next(data), texts), self.groups.everyone.rank())
            group = self.groups.of_size[share.size]
            inputs, counts = inputs_of(share, texts, setting.limits, group)
            output = model(**inputs)

            def loss(per_token: torch.Tensor) -> Any:
                # About the mean; otherwise weights would diverge.
                total = (per_token.float() * counts).sum() / sum(setting.lengths)
                return total, counts.sum().int(), {"loss": total.detach().clone()}

            return output, loss

        micro_batches = [setting.micro_batches[size] for size in sizes]
        is_interleaved = setting.case.vpp is not None
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(micro_batches) for _ in self.chunks]
            if is_interleaved
            else iter(micro_batches),
            model=self.chunks if is_interleaved else self.chunks[0],
            num_microbatches=len(micro_batches),
            seq_length=setting.limits.tokens_per_rank,
            micro_batch_size=1,
            forward_only=forward_only,
        )
        return [result["loss"] for result in results]


@contextmanager
def _imports_frozen() -> Iterator[None]:
    """Exclude imported objects from the garbage collection of each iteration."""
    if not use_gpu():  # The ranks are forked from a process that has imported it.
        yield
        return
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


def forget_rotary_tables(chunks: Sequence[torch.nn.Module]) -> None:
    """Clear megatron-core's cached rotary embeddings, and reuse their memory for other tensors."""
    from megatron.core.models.common.embeddings.rotary_pos_embedding import RotaryEmbedding
    from megatron.core.models.common.embeddings.yarn_rotary_pos_embedding import (
        YarnRotaryEmbedding,
    )

    nbytes = set()
    for part in itertools.chain.from_iterable(chunk.modules() for chunk in chunks):
        if isinstance(part, YarnRotaryEmbedding):
            nbytes |= {part.cos_cached.numel() * part.cos_cached.element_size()}
            part._set_cos_sin_cache(part.max_seq_len_cached, 0, torch.float32)
    for kind in (RotaryEmbedding, YarnRotaryEmbedding):
        kind.forward.cache_clear()
    gc.collect()
    if use_gpu():
        # All bits set is NaN.
        for size in nbytes:
            _ = [torch.full((size,), 255, dtype=torch.uint8, device="cuda") for _ in range(8)]


__all__ = ["Banked", "Setting", "compare_bank", "every_order", "expert_metrics", "random_sizes"]
