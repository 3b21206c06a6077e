# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The training run that the options of the ``plan`` sub-command describe, and its limits."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Optional

from megatron.slipstream.cli_plan.options import AIMS, TRAINING, UNTIMED, flag_of, refuse
from megatron.slipstream.estimate.gpus import GPUS, Speed, find_speed
from megatron.slipstream.estimate.hugging_face import HubModel, load_hub_config
from megatron.slipstream.estimate.model_shapes import ModelShape, Parallelism
from megatron.slipstream.estimate.synthetic import Workplan
from megatron.slipstream.estimate.training_command import read_flags, split_command
from megatron.slipstream.estimate.training_setup import (
    ChunkCounts,
    Configured,
    default_micro_batches,
    fewest_data_parallel_ranks,
    parallelism_of_options,
    shape_of_options,
    usable_modules,
)
from megatron.slipstream.options.rules import as_flag

MAX_GROUPS = 100_000
"""Maximum groups of all planned ranks, each of which takes about a millisecond."""

MAX_BYTES = 1 << 60
"""Maximum bytes of activations or state: the planner adds sizes as 64-bit integers."""

_PLAN_ONLY = {as_flag(name) for name in (*UNTIMED, *AIMS, "hf_config")}


def configured_by(words: Sequence[str], options: argparse.Namespace) -> Configured:
    """Return the training that a config.json, a file of flags, or ``words`` after ``--`` describe.

    Raises ``ValueError`` if it cannot be planned, or a file cannot be read.
    """
    if options.hf_config is not None:
        return _by_hub_config(options)
    needing = "flags after -- need"
    if options.args_file is not None:
        needing = f"--args-file={options.args_file} needs"
        words = read_flags(options.args_file)
    for flag in (word.split("=")[0] for word in words):
        if flag in _PLAN_ONLY:
            raise ValueError(
                f"{flag} is an option of 'slipstream plan', not of a training; put it before the "
                "flags, ahead of '--'"
            )
    command = split_command(list(words))
    try:
        from megatron.slipstream.integration.entry.model_arguments import configured_by_flags
    except ImportError as error:
        raise ValueError(
            f"{needing} megatron-core, whose parser reads flags, and {error.name} cannot be "
            "imported; install megatron-core, or give --hf-config"
        ) from error
    num_processes = command.ranks_per_host and command.ranks_per_host * command.num_hosts
    configured = configured_by_flags(
        command.flags, num_processes, options.num_micro_batches, options.state_gib
    )
    return replace(configured, ranks_per_host=command.ranks_per_host, state_gib=options.state_gib)


def _by_hub_config(options: argparse.Namespace) -> Configured:
    model = load_hub_config(options.hf_config)
    if options.seq_length is None:
        raise ValueError(
            "--seq-length is not set, and the config.json does not say how long sequences are in "
            "training; set it"
        )
    _refuse_without_effect(model, options)
    count = options.num_micro_batches
    try:
        shape = _hub_shape(model, options)
        return Configured(
            f"{options.hf_config.name} ({model.model_type})",
            shape,
            tuple(options.offload_modules or usable_modules(shape)),
            default_micro_batches(shape.parallelism) if count is None else count,
            notes=model.notes,
            state_gib=options.state_gib,
        )
    except ValueError as error:
        raise ValueError(model.in_its_words(str(error))) from error


def _refuse_without_effect(model: HubModel, options: argparse.Namespace) -> None:
    if options.recompute_granularity == "full" and options.recompute_modules:
        why = "whole layers are recomputed then"
        refuse(options, ["recompute_modules"], "with recompute_granularity=full", why)
    if not model.options.get("num_moe_experts"):
        sizes = ("expert_model_parallel_size", "expert_tensor_parallel_size")
        names = [name for name in sizes if getattr(options, name) != 1]
        why = "there are no experts to divide"
        refuse(options, names, "with a model without experts", why)


def _hub_shape(model: HubModel, options: argparse.Namespace) -> ModelShape:
    given = {name: value for name in TRAINING if (value := getattr(options, name)) is not None}
    given.setdefault("recompute_granularity", "selective" if "recompute_modules" in given else None)
    given.setdefault("recompute_modules", ["core_attn"])  # megatron-core's default
    described = SimpleNamespace(**model.options, **given)
    parallelism = parallelism_of_options(described)
    if options.data_parallel_size is None:
        parallelism = replace(parallelism, dp=fewest_data_parallel_ranks(parallelism))
    return shape_of_options(
        described,
        **{name: given[name] for name in ("precision", "attention_backend") if name in given},
        cross_entropy=options.cross_entropy_fusion_impl or "unfused",
        parallelism=parallelism,
        layers_per_chunk=_layers_per_chunk(described.num_layers, parallelism, options),
    )


def _layers_per_chunk(
    num_layers: int, parallelism: Parallelism, options: argparse.Namespace
) -> ChunkCounts:
    """Return each chunk's layers if the first or last rank has its own count; else empty."""
    pp, num_stages = parallelism.pp, parallelism.vpp or 1
    ends = ("decoder_first_pipeline_num_layers", "decoder_last_pipeline_num_layers")
    of_ends = {name: getattr(options, name) for name in ends}
    pairs = zip((0, pp - 1), of_ends.values(), strict=True)
    given = {rank: count for rank, count in pairs if count is not None}
    if not given:
        return ()
    named = [f"{name}={count}" for name, count in of_ends.items() if count is not None]
    for name, count in of_ends.items():
        if count is not None and count < 1:
            raise ValueError(f"{name}={count} must be positive; set 1 or more")
    num_others = pp - len(given)
    rest = num_layers - sum(given.values())
    each, left = divmod(rest, num_others) if num_others else (0, rest)
    if pp == 1 or pp > num_layers or rest < 0 or left:
        raise ValueError(
            f"{' and '.join(named)} leave{'s' * (len(named) == 1)} {rest} layers for {num_others} "
            f"pipeline ranks, which cannot be divided evenly; change {named[0].split('=')[0]} or "
            "pipeline_model_parallel_size"
        )
    counts = [given.get(rank, each) for rank in range(pp)]
    if any(count % num_stages for count in counts):
        raise ValueError(
            f"layers of the pipeline ranks, {counts}, are not multiples of "
            f"virtual_pipeline_model_parallel_size={num_stages}; change one of them"
        )
    return tuple((count // num_stages,) * num_stages for count in counts)


def limit_bytes(flag: str, gib: Optional[float]) -> Optional[int]:
    """Return a limit in bytes, None for none; ``ValueError`` if no plan can have it."""
    if gib is None:
        return None
    if not 0 < gib <= MAX_BYTES >> 30:
        raise ValueError(f"{flag}={gib} must be above 0 GiB, to {MAX_BYTES >> 30}")
    return int(gib * 2**30)


def speed_for(configured: Configured, options: argparse.Namespace) -> Speed:
    """Return the speed and memory of the GPU that the options name, or ``ValueError``."""
    if configured.shape.precision == "fp32" and options.tflops is None:
        raise ValueError(
            "precision=fp32 is not supported without --tflops because the table has only 16-bit "
            "rates; set --tflops to the rate of matrix products"
        )
    speed = find_speed(options.gpu or "h200", options.tflops, options.gb_per_s)
    recipe = configured.shape.fp8_recipe
    if recipe is not None and recipe not in speed.fp8_recipes:
        able = [name for name, facts in GPUS.items() if recipe in facts.fp8_recipes]
        raise ValueError(
            f"fp8_recipe={recipe} is not supported with --gpu={speed.name} because Transformer "
            f"Engine has no such products there; set --gpu to {' or '.join(able)}"
        )
    return speed if options.memory is None else replace(speed, memory_gib=options.memory)


def check_sizes(work: Workplan, ranks: Sequence[int], options: argparse.Namespace) -> None:
    """Raise ``ValueError`` for a plan that would take too long, or whose sizes would overflow."""
    count, par, chunks = work.num_micro_batches, work.shape.parallelism, work.chunks.items()
    each = max(1, sum(chunk.num_groups for (rank, _), chunk in chunks if rank in ranks))
    if each * count > MAX_GROUPS:
        smallest = 1 if par.vpp is None else max(par.group_size or 0, par.pp)
        largest = MAX_GROUPS // each // smallest * smallest
        shrink = [f"set --num-micro-batches to {largest} or less"] if largest else []
        if len(ranks) > 1:
            shrink.append("plan one pipeline rank with --rank")
        if not largest:
            shrink.append(f"name fewer modules ({flag_of('offload_modules', options)})")
            shrink.append(f"fewer layers (num_layers={work.shape.num_layers})")
        raise ValueError(
            f"--num-micro-batches={count} is not supported with this model because {count} "
            f"times {each} groups would be planned and the limit is {MAX_GROUPS}; "
            f"{', or '.join(shrink)}"
        )
    most = max(sum(c.saved_bytes for (rank, _), c in chunks if rank == one) for one in ranks)
    if most * count > MAX_BYTES:
        raise ValueError(
            f"{flag_of('seq_length', options)}={work.shape.seq_length}, "
            f"{flag_of('micro_batch_size', options)}={work.shape.micro_batch_size}, "
            f"--num-micro-batches={count}: the activations of a rank are "
            f"{most * count / 2**30:.3g} GiB per iteration, but a plan supports up to "
            f"{MAX_BYTES >> 30}; reduce one of them"
        )
