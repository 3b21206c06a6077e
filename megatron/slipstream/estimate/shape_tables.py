# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tables of the bytes that a model's layers save and of the copies that compute can hide."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Optional

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.layers import (
    layer_parts,
    marked_modules,
    saved_tensors,
    savers_of,
)
from megatron.slipstream.estimate.model_shapes import LayerKind, Parallelism
from megatron.slipstream.estimate.model_state import num_parameters
from megatron.slipstream.estimate.schedules import most_in_flight
from megatron.slipstream.estimate.synthetic import Workplan
from megatron.slipstream.estimate.training_setup import Configured
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.settings import WHOLE
from megatron.slipstream.plan.walk import Simulation


def table(rows: Sequence[Sequence[str]], left: Sequence[int] = (0,)) -> Iterator[str]:
    """Yield rows as lines, headings first; the columns ``left`` are aligned to the left."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    places = {place % len(widths) for place in left}
    for row in rows:
        cells = (
            cell.ljust(width) if place in places else cell.rjust(width)
            for place, (cell, width) in enumerate(zip(row, widths, strict=True))
        )
        yield "  ".join(cells).rstrip()


@dataclass(frozen=True)
class RankPlan:
    """Sizes and plan of one pipeline rank."""

    work: Workplan
    pp_rank: int
    state_bytes: int
    plan: Optional[Plan] = None
    """None if nothing can be offloaded."""
    simulation: Optional[Simulation] = None

    @property
    def peaks(self) -> Optional[tuple[int, int]]:
        return None if self.simulation is None else self.simulation.peak_bytes

    @property
    def layers(self) -> str:
        """The indices of its layers, or how many there are in more than two chunks."""
        chunks = [chunk.layers for chunk in self.work.shape.chunks_of(self.pp_rank)]
        if len(chunks) > 2:
            return f"{sum(map(len, chunks))} in {len(chunks)} chunks"
        spans = ({each[0], each[-1]} if each else {"-"} for each in chunks)
        return ", ".join("-".join(map(str, sorted(span))) for span in spans)

    @property
    def saved_bytes(self) -> int:
        chunks, rank = self.work.chunks, self.pp_rank
        return most_in_flight(
            self.work.schedules[rank], lambda item: chunks[rank, item.vp_stage].saved_bytes
        )


def describe(configured: Configured, speed: Speed) -> Iterator[str]:
    """Describe the model and the GPU."""
    shape, par = configured.shape, configured.shape.parallelism
    whole = replace(shape, parallelism=Parallelism(), layers_per_chunk=())
    num_layers = shape.num_layers - shape.num_further_tokens
    parts = [
        f"{num_layers} layers, {num_parameters(whole, 0).total / 1e9:.3g}e9 parameters",
        f"sequence {shape.seq_length}, micro-batch {shape.micro_batch_size}",
        f"{configured.num_micro_batches} micro-batches",
        f"{shape.precision}, {shape.attention_backend} attention",
    ]
    sizes = {"TP": par.tp, "CP": par.cp, "PP": par.pp, "VPP": par.vpp, "EP": par.ep}
    sizes["ETP"] = par.etp if shape.experts else 1
    divided = [f"{name}{size}" for name, size in sizes.items() if size and size > 1]
    if par.sequence_parallel:
        divided.insert(1, "SP")
    if divided:
        parts.append(" ".join(divided))
    whole_layers = sum(shape.setting_of(layer) == WHOLE for layer in range(shape.num_layers))
    if whole_layers:
        parts.append(f"recomputing {whole_layers} whole layers")
    elif shape.recompute_modules:
        parts.append("recomputing " + " ".join(sorted(shape.recompute_modules)))
    gpus = f"{par.num_gpus} GPU{'s' if par.num_gpus > 1 else ''}"
    yield f"{configured.title} on {gpus}: {', '.join(parts)}"
    link = speed.bandwidth
    origin = "" if speed.is_link_measured else ", assumed"
    yield (
        f"{speed.name}, {speed.memory_gib:g} GiB: {speed.tflops:.0f} TFLOP/s, "
        f"copies {link.d2h_gb_per_s:.1f} GB/s out, {link.h2d_gb_per_s:.1f} back "
        f"({link.d2h_both_gb_per_s:.1f} and {link.h2d_both_gb_per_s:.1f} at once{origin})"
    )
    yield from (f"Note: {note}" for note in configured.notes)
    marked = {name for layer in range(shape.num_layers) for name in marked_modules(shape, layer)}
    # 'core_attn' is named for 'attn_proj', too.
    absent = sorted({*configured.modules} - marked - {"core_attn"})
    if absent:
        yield (
            f"Note: no layer has {', '.join(absent)} to move: its tensors are counted with the "
            "part that includes it, or it is recomputed"
        )


def answer(ranks: Sequence[RankPlan], title: str) -> str:
    """Return in one sentence what the plans reach on the ranks with the highest peaks."""
    simulations = [rank.simulation for rank in ranks if rank.simulation is not None]
    peaks = [each.peak_bytes for each in simulations if each.peak_bytes is not None]
    if not peaks:
        return f"{title}: nothing moves"
    without, planned = (max(each) for each in zip(*peaks, strict=True))
    slowest = max(simulations, key=lambda simulation: simulation.total_ms)
    return (
        f"{title}: the highest peak falls from {format_bytes(without)} to {format_bytes(planned)}; "
        f"the step takes {slowest.total_ms:.0f} ms, {slowest.overhead_percent:.1f}% of it added"
    )


def layer_tables(configured: Configured, speed: Speed) -> Iterator[str]:
    """Tabulate, for each kind of layer, the bytes of its parts and how many compute can hide."""
    shape = configured.shape
    # Of layers that are recomputed together, the first saves something.
    layers = sorted(range(shape.num_layers), key=lambda layer: layer not in shape.checkpoint_starts)
    counts = Counter(map(shape.kind_and_setting, layers))
    first = {shape.kind_and_setting(layer): layer for layer in reversed(layers)}
    for (letters, setting), count in counts.items():
        kind = _NAMES[letters] + ", recomputed as a whole" * (setting == WHOLE)
        yield ""
        yield f"Saved by {kind} ({count} of them) in one micro-batch"
        yield from _layer_table(configured, speed, first[letters, setting])


_NAMES: Mapping[LayerKind, str] = {
    **{"*-": "a dense layer", "*E": "a layer with experts"},
    **{"*": "an attention layer", "-": "an MLP layer", "E": "an experts layer"},
    **{"M": "a Mamba layer", "G": "a gated delta net"},
    "/": "what joins hidden states with the next token's embedding",
}


def part_bytes(configured: Configured, layer: int) -> dict[str, tuple[int, int]]:
    """Return what the parts of a layer save per micro-batch, in forward order.

    These are the bytes of storages that no earlier part saves, and how many of them are offloaded
    if all chosen modules are.
    """
    shape = configured.shape
    chosen = {name for name in marked_modules(shape, layer) if name in configured.modules}
    saved = saved_tensors(shape, layer)
    found = dict.fromkeys(saved, (0, 0))
    for tensor, savers in savers_of(saved).values():
        is_large = tensor.numel >= configured.min_numel
        moves = is_large and not tensor.is_kept and chosen.issuperset(savers)
        own, movable = found[savers[0]]
        found[savers[0]] = own + tensor.nbytes, movable + tensor.nbytes * moves
    return found


def _layer_table(configured: Configured, speed: Speed, layer: int) -> Iterator[str]:
    costs = [part.cost for part in layer_parts(configured.shape, layer)]
    forward_ms = sum(cost.ms(speed, "forward") for cost in costs)
    backward_ms = sum(cost.backward_ms(speed) for cost in costs)

    def moved(nbytes: int) -> list[str]:
        copy_ms = nbytes / (1e6 * speed.bandwidth.d2h_gb_per_s)
        return [format_bytes(nbytes), f"{copy_ms:.2f} ms", f"{copy_ms / forward_ms:.0%}"]

    parts = part_bytes(configured, layer)
    total, movable = (sum(each) for each in zip(*parts.values(), strict=True))
    marked = marked_modules(configured.shape, layer)
    rows = [["part", "saved", "share", "can move", "copy out", "of forward"]]
    for part, (own, of_part) in parts.items():
        name = part if part in marked else f"({part})"
        cells = moved(of_part) if of_part else ["-", "", ""]
        rows.append([name, format_bytes(own), f"{own / total:.1%}", *cells])
    rows.append(["all", format_bytes(total), "100%", *moved(movable)])
    yield from table(rows)
    out = 1e6 * speed.bandwidth.d2h_gb_per_s * forward_ms
    back = 1e6 * speed.bandwidth.h2d_gb_per_s * backward_ms
    hides, verdict = min(out, back), "all of it hides"
    if movable > hides:
        verdict = f"{hides / movable:.0%} of it hides behind the layer itself"
    yield (
        f"It computes {forward_ms:.2f} ms in forward and {backward_ms:.2f} ms in backward, in "
        f"which the link carries {format_bytes(out)} out and {format_bytes(back)} back: {verdict}."
    )
    yield (
        "In brackets: not marked by megatron-core, so it stays. 0 B: its tensors are counted with "
        "an earlier part."
    )


def rank_table(
    ranks: Sequence[RankPlan], memory_gib: float, num_ranks_of_host: int
) -> Iterator[str]:
    """Tabulate the memory of each pipeline rank, without and with a plan."""
    rows = [
        ["rank", "layers", "in flight", "state", "saved", "peak", "planned peak", "moved", "step",
         "overhead"]
    ]  # fmt: skip
    for rank in ranks:
        row = [str(rank.pp_rank), rank.layers]
        row += [str(most_in_flight(rank.work.schedules[rank.pp_rank]))]
        row += [format_bytes(rank.state_bytes), format_bytes(rank.saved_bytes)]
        if rank.plan is not None and rank.simulation is not None and rank.peaks is not None:
            row += map(format_bytes, (*rank.peaks, rank.plan.moved_nbytes))
            row.append(f"{rank.simulation.total_ms:.0f} ms")
            row.append(f"{rank.simulation.overhead_percent:.1f}%")
        rows.append(row + [""] * (len(rows[0]) - len(row)))
    yield from ("", "Pipeline ranks", *table(rows))
    yield (
        "in flight: most passes through model chunks between forward and backward; saved: bytes "
        "that these keep; state: weights, gradients, optimizer; moved: each way in an iteration."
    )
    host_bytes = max(r.simulation.peak_host_bytes if r.simulation else 0 for r in ranks)
    if host_bytes:
        yield (
            f"host memory: {format_bytes(host_bytes)} per rank at most, "
            f"{format_bytes(host_bytes * num_ranks_of_host)} per node of {num_ranks_of_host}"
            f" rank{'s' if num_ranks_of_host > 1 else ''}"
        )
    limit_bytes = memory_gib * 2**30
    over = [str(rank.pp_rank) for rank in ranks if rank.peaks and rank.peaks[1] > limit_bytes]
    if over:
        yield (
            f"Even with the plan, rank {', '.join(over)} needs more than the GPU's "
            f"{memory_gib:g} GiB: divide the model further, or recompute"
        )
