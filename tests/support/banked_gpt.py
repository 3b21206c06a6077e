# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small models with a bank of graphs, whose context-parallel size changes per micro-batch."""

from __future__ import annotations

import dataclasses
import gc
import itertools
import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, Optional

import torch
from replayed_gpt import (
    LayersReplayed,
    Training,
    layers_and_eager,
    slots_of,
    start,
    timed_replays,
)
from shared_documents import (
    Setting,
    Sizes,
    changed_specs,
    inputs_of,
    micro_batch_of,
    share_of,
)
from tiny_gpt import ModelCase, build_chunks, first_difference, use_gpu

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.integration import install
from megatron.slipstream.options.fields import OffloadConfig

TOKENS_PER_RANK = 32
SHORT_LENGTHS = (100, 17, 61, 1, 29, 9, 32, 30, 20, 3)
FOUR = RankLimits(4, TOKENS_PER_RANK, 4)
TWO = RankLimits(2, TOKENS_PER_RANK, 4)
SMALL: dict[str, Any] = {"num_layers": 1, "seq_length": 128, "micro_batch_size": 1}
PER_TOKEN = {"calculate_per_token_loss": True}


def dropless(capacity_factor: float) -> dict[str, Any]:
    """Options of sync-free experts."""
    return {"sync_free_experts": True, "sync_free_capacity_factor": capacity_factor}


def on_four(case: ModelCase) -> Setting:
    """One kind of micro-batch has groups of different sizes."""
    return Setting(
        case,
        FOUR,
        SHORT_LENGTHS,
        {
            1: [(1, [4]), (1, [6]), (1, [7]), (1, [])],
            2: [(2, [2]), (1, [4]), (1, [6])],
            4: [(4, [0, 1])],
        },
    )


def on_two(case: ModelCase) -> Setting:
    """Two ranks share documents."""
    return Setting(case, TWO, SHORT_LENGTHS, {1: [(1, [4]), (1, [6])], 2: [(2, [2])]})


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
    expected = SizedTraining(setting, case, wrapper=wrapper).run(steps)
    if offload_modules:
        install.install(OffloadConfig(offload_backend=backend))
    banked = SizedTraining(setting, case, True, wrapper, offload_modules)
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


def compare_layer_bank(
    rank: int,
    num_ranks: int,
    port: int,
    setting: Setting,
    scope: Sequence[str],
    steps: Steps,
    offload_modules: Sequence[str] = (),
    backend: str = "auto",
) -> LayersReplayed:
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
    make_training = partial(SizedTraining, setting)
    return layers_and_eager(make_training, case, scope, steps, offload_modules, backend)


class SizedTraining(Training):
    """A training whose micro-batches have sizes.

    Args:
        setting: A micro-batch of each size, and the limits of ranks.
        case: The model; None for that of the setting.
        arguments: Further arguments of :class:`Training`.
    """

    evaluates_every = 5

    def __init__(
        self, setting: Setting, case: Optional[ModelCase] = None, *arguments: Any, **options: Any
    ) -> None:
        from megatron.slipstream.integration.packed.context_parallel_groups import (
            context_parallel_groups,
        )

        self.setting = setting
        self.groups = context_parallel_groups(setting.limits)
        super().__init__(case or setting.case, *arguments, **options)

    def build(self) -> list[Any]:
        """Build chunks that take micro-batches of all sizes."""
        from megatron.slipstream.integration.graphs.layers import take_packed_sequences
        from megatron.slipstream.integration.packed.dynamic_context_parallel import (
            with_dynamic_context_parallelism,
        )

        with changed_specs(with_dynamic_context_parallelism):
            chunks = build_chunks(self.case, self.config)
        if self.layers is not None:
            take_packed_sequences(chunks, self.setting.limits)
        return chunks

    def seed(self) -> None:
        """Seed all ranks alike."""
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        super().seed()
        model_parallel_cuda_manual_seed(11, te_rng_tracker=use_gpu(), force_reset_rng=True)

    def replay(self) -> Sequence[Any]:
        """Replay the chunks with a bank of graphs."""
        from megatron.slipstream.integration.graphs.chunks import replay_chunks

        return replay_chunks(self.chunks, 1, limits=self.setting.limits)

    def run(self, steps: Steps) -> list[list[torch.Tensor]]:
        """Run iterations. Returns the losses, gradients and state of each."""
        with _imports_frozen():
            results = super().run(steps)
        assert all(tensor.isfinite().all() for result in results for tensor in result)
        return results

    def passes(
        self, step: int, sizes: Sequence[int], forward_only: bool = False
    ) -> list[torch.Tensor]:
        """The losses of an iteration with micro-batches of these sizes."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        if not forward_only:
            forget_rotary_tables(self.chunks)

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
        is_interleaved = self.case.vpp is not None
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
