# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small models that train on documents shared among ranks, in groups chosen by a test."""

from __future__ import annotations

import itertools
import re
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, NamedTuple, Optional
from unittest.mock import patch

import megatron_models
import numpy as np
import torch
from megatron_models import shared_inputs
from tiny_gpt import (
    ModelCase,
    build_chunks,
    first_difference,
    initialize,
    make_config,
    use_gpu,
)

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.context_parallel.scheduler import Group, MicroBatch, Share
from megatron.slipstream.packed_sequences.packing import Piece

Sizes = Sequence[tuple[int, Sequence[int]]]
"""Groups of a micro-batch in the order of their ranks: number of ranks, and documents."""


class Result(NamedTuple):
    """The result of all ranks together."""

    loss: float
    """Mean over the labels that count."""
    gradients: list[torch.Tensor]
    """Gradients of the sum of the losses."""


def documents(lengths: Sequence[int], vocab_size: int) -> list[np.ndarray]:
    """Documents with these numbers of tokens that the model reads, and one more as last label."""
    pick = np.random.RandomState(11)
    return [pick.randint(1, vocab_size, length + 1) for length in lengths]


def share_of(micro_batch: MicroBatch, rank: int) -> Share:
    """Return a rank's part of a micro-batch; ``rank`` counts all data- and CP ranks."""
    first = 0
    for size, pack in micro_batch:
        if rank < first + size:
            return Share(size, rank - first, pack)
        first += size
    raise IndexError(f"rank {rank} is out of range: there are {first}")


def micro_batch_of(sizes: Sizes, texts: Sequence[np.ndarray]) -> MicroBatch:
    return tuple(
        Group(size, [Piece(number, 0, len(texts[number]) - 1) for number in numbers])
        for size, numbers in sizes
    )


@contextmanager
def changed_specs(change: Callable[[Any], Any]) -> Iterator[None]:
    """Context in which models are built from changed layer specs."""
    original = megatron_models.layer_spec

    def changed(*arguments: Any, **options: Any) -> Any:
        return change(original(*arguments, **options))

    with patch.object(megatron_models, "layer_spec", changed):
        yield


def build(case: ModelCase, change: Callable[[Any], Any], **overrides: Any) -> torch.nn.Module:
    """The model of a case with a changed layer spec, in training mode."""
    case = replace(case, overrides={**case.overrides, **overrides})
    with changed_specs(change):
        (model,) = build_chunks(case, make_config(case))
    return model.train()


def with_gathering_attention(spec: Any) -> Any:
    """Core attention that supports shared documents, inside megatron-core's own attention."""
    from megatron.slipstream.integration.cpu.cpu_modules import LatentCoreAttention
    from megatron.slipstream.integration.cpu.gathering_attention import GatheringCoreAttention
    from megatron.slipstream.integration.seam.specs import replace_classes

    return replace_classes(spec, {LatentCoreAttention: GatheringCoreAttention})


def inputs_of(
    share: Share, texts: Sequence[np.ndarray], limits: RankLimits, group: Optional[Any]
) -> tuple[dict[str, Any], torch.Tensor]:
    """:func:`shared_inputs` for the whole documents of the part."""
    mine = [texts[piece.document] for piece in share.pack]
    return shared_inputs(mine, share, limits, group)


def passes(
    model: torch.nn.Module,
    limits: RankLimits,
    micro_batches: Sequence[Sizes],
    texts: Sequence[np.ndarray],
    groups: Optional[Any] = None,
    in_flight: int = 1,
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield this rank's summed loss and number of labels after each micro-batch's backward.

    Gradients accumulate between two items of the generator.

    Args:
        model: This rank's model.
        limits: Limits of the ranks.
        micro_batches: The micro-batches.
        texts: The documents.
        groups: This rank's process groups; None for the model's static one.
        in_flight: Number of micro-batches between forward and backward, as on an early pipeline
            stage.
    """
    rank = 0 if limits.num_ranks == 1 else torch.distributed.get_rank()
    waiting: list[tuple[torch.Tensor, torch.Tensor]] = []
    for sizes in micro_batches:
        share = share_of(micro_batch_of(sizes, texts), rank)
        group = None if groups is None else groups.of_size[share.size]
        inputs, counts = inputs_of(share, texts, limits, group)
        waiting.append(((model(**inputs).float() * counts).sum(), counts.sum()))
        if len(waiting) == in_flight:
            waiting[0][0].backward()
            yield waiting.pop(0)
    for loss, count in waiting:
        loss.backward()
        yield loss, count


def gradients_of(model: torch.nn.Module) -> list[torch.Tensor]:
    return [torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in model.parameters()]


def train(
    model: torch.nn.Module,
    limits: RankLimits,
    micro_batches: Sequence[Sizes],
    texts: Sequence[np.ndarray],
    groups: Optional[Any] = None,
    in_flight: int = 1,
) -> Result:
    """Run all of :func:`passes`, and sum over all ranks."""
    model.zero_grad(set_to_none=True)
    total = torch.zeros(2, dtype=torch.float64, device="cuda" if use_gpu() else "cpu")
    for loss, count in passes(model, limits, micro_batches, texts, groups, in_flight):
        total += torch.stack([loss.detach(), count])
    gradients = gradients_of(model)
    if limits.num_ranks > 1:
        for tensor in (total, *gradients):
            torch.distributed.all_reduce(tensor)
    return Result(float(total[0] / total[1]), [gradient.float().cpu() for gradient in gradients])


def separately(
    model: torch.nn.Module,
    limits: RankLimits,
    micro_batches: Sequence[Sizes],
    texts: Sequence[np.ndarray],
    groups: Optional[Any] = None,
    in_flight: int = 1,
) -> list[list[torch.Tensor]]:
    """This rank's loss and gradients of each micro-batch."""
    results = []
    model.zero_grad(set_to_none=True)
    for loss, _ in passes(model, limits, micro_batches, texts, groups, in_flight):
        results.append([loss.detach().clone(), *gradients_of(model)])
        model.zero_grad(set_to_none=True)
    return results


def difference(expected: Result, actual: Result) -> float:
    """The larger of the losses' difference and the gradients', relative to the largest gradient."""
    scale = max(gradient.abs().max() for gradient in expected.gradients)
    pairs = zip(expected.gradients, actual.gradients, strict=True)
    worst = max(float((a - b).abs().max() / scale) for a, b in pairs)
    return max(worst, abs(expected.loss - actual.loss))


# Functions that ranks run. On GPUs ranks are spawned, so they must import them from a module.


@dataclass(frozen=True)
class Setting:
    """A model, the ranks, and documents that are shared in groups of each size."""

    case: ModelCase
    limits: RankLimits
    lengths: Sequence[int]
    micro_batches: Mapping[int, Sizes]
    """A micro-batch for each size: all its groups have that size; all have the same documents."""

    @property
    def texts(self) -> list[np.ndarray]:
        return documents(self.lengths, self.case.vocab_size)


def with_changing_groups(spec: Any) -> Any:
    """Attention whose context-parallel group may change between micro-batches."""
    from megatron.slipstream.integration.packed.dynamic_context_parallel import (
        with_dynamic_context_parallelism,
    )

    return with_dynamic_context_parallelism(spec)


def _start(setting: Setting, rank: int, num_ranks: int, port: int) -> Any:
    """Create process groups with a static size of 1."""
    from megatron.slipstream.integration.packed.context_parallel_groups import (
        context_parallel_groups,
    )

    initialize(setting.case, rank, num_ranks, port)
    return context_parallel_groups(setting.limits)


def _of_static_sizes(
    rank: int, num_ranks: int, port: int, setting: Setting
) -> dict[int, list[list[torch.Tensor]]]:
    """For each size, two micro-batches of a megatron-core model with that static size."""
    found = {}
    for size in setting.limits.sizes:
        initialize(setting.case, rank, num_ranks, port, size)
        change = (lambda spec: spec) if use_gpu() else with_gathering_attention
        static = build(setting.case, change, context_parallel_size=size)
        twice = [setting.micro_batches[size]] * 2
        found[size] = separately(static, setting.limits, twice, setting.texts)
    return found


def _change_from_static(
    static: Mapping[int, list[list[torch.Tensor]]],
    setting: Setting,
    groups: Any,
    model: torch.nn.Module,
) -> dict[int, Optional[str]]:
    """For each size, the bitwise differences from a megatron-core model with that static size."""
    found = {}
    for size, expected in static.items():
        twice = [setting.micro_batches[size]] * 2
        actual = separately(model, setting.limits, twice, setting.texts, groups)
        found[size] = first_difference(expected, actual)
    return found


def _change_by_order(
    setting: Setting, groups: Any, model: torch.nn.Module
) -> dict[tuple[int, ...], Optional[str]]:
    """For each order of sizes, the bitwise differences of micro-batches from runs of them alone."""
    run = partial(separately, model, setting.limits, texts=setting.texts, groups=groups)
    alone = {size: run([setting.micro_batches[size]])[0] for size in setting.limits.sizes}
    assert all(tensor.isfinite().all() for result in alone.values() for tensor in result)
    found = {}
    for order in itertools.permutations(setting.limits.sizes):
        sizes = [*order, order[0]]
        for in_flight in (1, len(sizes)):
            expected = [alone[size] for size in sizes]
            actual = run([setting.micro_batches[size] for size in sizes], in_flight=in_flight)
            found[(*sizes, in_flight)] = first_difference(expected, actual)
    return found


def _difference_by_size(
    setting: Setting, groups: Any, model: torch.nn.Module
) -> dict[int, tuple[float, float]]:
    """For each size, the difference of loss and gradients from those of the smallest.

    For gradients it is the norm of the difference relative to that of the gradient.
    """
    results = {
        size: train(model, setting.limits, [setting.micro_batches[size]], setting.texts, groups)
        for size in setting.limits.sizes
    }
    expected = results[setting.limits.sizes[0]]
    whole = torch.cat([gradient.flatten() for gradient in expected.gradients])
    found = {}
    for size, result in results.items():
        gradients = torch.cat([gradient.flatten() for gradient in result.gradients])
        apart = float((gradients - whole).norm() / whole.norm())
        found[size] = (abs(result.loss - expected.loss), apart)
    return found


class Found(NamedTuple):
    """Result of :func:`compare_sizes`."""

    change_from_static: dict[int, Optional[str]]
    change_by_order: dict[tuple[int, ...], Optional[str]]
    difference_by_size: dict[int, tuple[float, float]]


def compare_sizes(rank: int, num_ranks: int, port: int, setting: Setting) -> Found:
    """All three comparisons of a setting, in the same processes and groups."""
    static = _of_static_sizes(rank, num_ranks, port, setting)
    groups = _start(setting, rank, num_ranks, port)
    model = build(setting.case, with_changing_groups)
    return Found(
        _change_from_static(static, setting, groups, model),
        _change_by_order(setting, groups, model),
        _difference_by_size(setting, groups, model),
    )


def losses_of_stages(
    rank: int, num_ranks: int, port: int, setting: Setting, sizes: Sequence[int]
) -> list[float]:
    """The loss of each micro-batch through megatron's schedule; empty except on the last stage."""
    from megatron.core import mpu
    from megatron.core.pipeline_parallel import get_forward_backward_func

    groups = _start(setting, rank, num_ranks, port)
    model = build(setting.case, with_changing_groups)
    fill_weights(model)

    def forward_step(data: Iterator[Sizes], model: torch.nn.Module) -> Any:
        share = share_of(micro_batch_of(next(data), setting.texts), groups.everyone.rank())
        group = groups.of_size[share.size]
        inputs, counts = inputs_of(share, setting.texts, setting.limits, group)
        output = model(**inputs)

        def loss(per_token: torch.Tensor) -> Any:
            total = (per_token.float() * counts).sum()
            return total, counts.sum().int(), {"loss": total.item()}

        return output, loss

    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=iter([setting.micro_batches[size] for size in sizes]),
        model=model,
        num_microbatches=len(sizes),
        seq_length=setting.limits.tokens_per_rank,
        micro_batch_size=1,
    )
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())
    assert (len(results) > 0) == mpu.is_pipeline_last_stage()
    return [result["loss"] for result in results]


def layer_name(chunk: torch.nn.Module, name: str) -> str:
    """A parameter's name with the number of its layer in the whole model."""
    place = re.match(r"decoder\.layers\.(\d+)\.(.*)", name)
    if not place:
        return name
    number = chunk.decoder.layers[int(place[1])].layer_number
    return f"{number} {place[2]}"


def fill_weights(chunk: torch.nn.Module) -> None:
    """Set weights that depend only on the layer, not on its stage."""
    for name, parameter in chunk.named_parameters():
        generator = torch.Generator().manual_seed(zlib.crc32(layer_name(chunk, name).encode()))
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data.copy_(noise * 0.05 + ("norm" in name))
