# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tables of the bytes that a model's layers save and of the copies that compute can hide."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import IO, Optional, Union

from rich.console import Console
from rich.table import Table
from rich.text import Text

from megatron.slipstream.estimate.gpus import Speed
from megatron.slipstream.estimate.layer_costs import layer_costs
from megatron.slipstream.estimate.model_shapes import ModelShape, Parallelism
from megatron.slipstream.estimate.model_state import num_parameters
from megatron.slipstream.estimate.saved_tensors import marked_modules, saved_tensors, savers_of
from megatron.slipstream.estimate.schedules import most_in_flight
from megatron.slipstream.estimate.synthetic import Workplan
from megatron.slipstream.estimate.training_setup import Configured
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.settings import WHOLE, LayerSetting
from megatron.slipstream.plan.walk import Simulation

WIDTH = 110
"""Width in columns if the output is not a terminal."""


@dataclass(frozen=True)
class PartBytes:
    """Bytes that one part of a layer saves per micro-batch."""

    name: str
    nbytes: int
    """Bytes of storages that no earlier part saves."""
    movable_bytes: int
    """Portion of ``nbytes`` that is offloaded if all chosen modules are."""


def part_bytes(configured: Configured, layer: int) -> list[PartBytes]:
    """Return the parts of a layer that save tensors, in forward order."""
    shape = configured.shape
    chosen = [name for name in marked_modules(shape, layer) if name in configured.modules]
    saved = saved_tensors(shape, layer)
    own_bytes, movable_bytes = dict.fromkeys(saved, 0), dict.fromkeys(saved, 0)
    for tensor, savers in savers_of(saved).values():
        own_bytes[savers[0]] += tensor.nbytes
        is_large = tensor.numel >= configured.min_numel
        if is_large and not tensor.kept_by and {*savers} <= {*chosen}:
            movable_bytes[savers[0]] += tensor.nbytes
    return [PartBytes(part, own_bytes[part], movable_bytes[part]) for part in saved]


@dataclass(frozen=True)
class LayerWindow:
    """Compute time of a layer per micro-batch, in milliseconds."""

    forward_ms: float
    backward_ms: float


def layer_window(shape: ModelShape, speed: Speed, layer: int) -> LayerWindow:
    """Return the compute time that a layer's copies can overlap with."""
    costs = layer_costs(shape, layer).values()
    return LayerWindow(
        sum(cost.ms(speed, "forward") for cost in costs),
        sum(cost.backward_ms(speed) for cost in costs),
    )


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
    def layers(self) -> str:
        """The indices of its layers, or how many there are in more than two chunks."""
        chunks = [chunk.layers for chunk in self.work.shape.chunks_of(self.pp_rank)]
        if len(chunks) > 2:
            return f"{sum(map(len, chunks))} in {len(chunks)} chunks"
        texts = []
        for first, *others in ((layers or (None,)) for layers in chunks):
            texts.append(
                "-" if first is None else f"{first}-{others[-1]}" if others else f"{first}"
            )
        return ", ".join(texts)

    @property
    def num_in_flight(self) -> int:
        """The largest number of passes whose activations are held at once."""
        return most_in_flight(self.work.schedules[self.pp_rank])

    @property
    def saved_bytes(self) -> int:
        """Peak bytes saved by the passes in flight."""
        held = most = 0
        for item in self.work.schedules[self.pp_rank]:
            nbytes = self.work.chunks[self.pp_rank, item.vp_stage].saved_bytes
            held += nbytes if item.direction == "F" else -nbytes
            most = max(most, held)
        return most


Line = Union[Table, str]


def write(lines: Iterable[Line], stream: IO[str]) -> None:
    """Write tables and lines of text, in colour only to a terminal."""
    console = Console(file=stream, highlight=False, soft_wrap=False)
    if not console.is_terminal:
        console.width = WIDTH
    with console.capture() as drawn:
        for line in lines:
            console.print(Text(line) if isinstance(line, str) else line)
    # rich pads cells with blanks.
    stream.write("".join(line.rstrip() + "\n" for line in drawn.get().splitlines()))


def describe(configured: Configured, speed: Speed) -> Iterator[Line]:
    """Describe the model and the GPU."""
    shape, par = configured.shape, configured.shape.parallelism
    whole = replace(shape, parallelism=Parallelism(), layers_per_chunk=())
    parts = [
        f"{shape.num_layers} layers, {num_parameters(whole, 0).total / 1e9:.3g}e9 parameters",
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
    memory = f", {speed.memory_gib:g} GiB" if speed.memory_gib else ""
    yield (
        f"{speed.name}{memory}: {speed.tflops:.0f} TFLOP/s, copies {link.d2h_gb_per_s:.1f} GB/s "
        f"out, {link.h2d_gb_per_s:.1f} back ({link.d2h_both_gb_per_s:.1f} and "
        f"{link.h2d_both_gb_per_s:.1f} at once{origin})"
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
    found = [rank.simulation for rank in ranks if rank.simulation is not None]
    peaks = [simulation.peak_bytes for simulation in found if simulation.peak_bytes is not None]
    if not peaks:
        return f"{title}: nothing moves"
    without, planned = (max(each) for each in zip(*peaks, strict=True))
    slowest = max(found, key=lambda simulation: simulation.total_ms)
    return (
        f"{title}: the highest peak falls from {format_bytes(without)} to {format_bytes(planned)}; "
        f"the step takes {slowest.total_ms:.0f} ms, {slowest.overhead_percent:.1f}% of it added"
    )


def layer_tables(configured: Configured, speed: Speed) -> Iterator[Line]:
    """Tabulate, for each kind of layer, the bytes of its parts and how many compute can hide."""
    shape = configured.shape
    layers = range(shape.num_layers)
    kinds = {layer: (shape.is_moe(layer), shape.setting_of(layer)) for layer in layers}
    shown: dict[tuple[bool, LayerSetting], int] = {}
    # Of layers that are recomputed together, the first saves something.
    for layer in sorted(layers, key=lambda layer: layer not in shape.checkpoint_starts):
        shown.setdefault(kinds[layer], layer)
    for (is_moe, setting), layer in shown.items():
        count = sum(kind == (is_moe, setting) for kind in kinds.values())
        kind = "a layer with experts" if is_moe else "a dense layer"
        kind += ", recomputed as a whole" if setting == WHOLE else ""
        yield ""
        yield _layer_table(f"Saved by {kind} ({count} of them) in one micro-batch", configured,
                           speed, layer)  # fmt: skip
        yield _what_hides(part_bytes(configured, layer), layer_window(shape, speed, layer), speed)


def _layer_table(title: str, configured: Configured, speed: Speed, layer: int) -> Table:
    parts = part_bytes(configured, layer)
    window = layer_window(configured.shape, speed, layer)
    total = sum(part.nbytes for part in parts)
    marked = marked_modules(configured.shape, layer)
    table = _table(title, "part", "saved", "share", "can move", "copy out", "of forward")
    for part in parts:
        name = part.name if part.name in marked else f"({part.name})"
        copy_ms = _copy_ms(part.movable_bytes, speed)
        moved = [format_bytes(part.movable_bytes), f"{copy_ms:.2f} ms",
                 f"{copy_ms / window.forward_ms:.0%}"]  # fmt: skip
        table.add_row(
            name,
            format_bytes(part.nbytes),
            f"{part.nbytes / total:.1%}",
            *(moved if part.movable_bytes else ["-", "", ""]),
        )
    movable = sum(part.movable_bytes for part in parts)
    copy_ms = _copy_ms(movable, speed)
    table.add_section()
    table.add_row(
        "all",
        format_bytes(total),
        "100%",
        format_bytes(movable),
        f"{copy_ms:.2f} ms",
        f"{copy_ms / window.forward_ms:.0%}",
    )
    return table


def _what_hides(parts: Sequence[PartBytes], window: LayerWindow, speed: Speed) -> str:
    movable = sum(part.movable_bytes for part in parts)
    out = 1e6 * speed.bandwidth.d2h_gb_per_s * window.forward_ms
    back = 1e6 * speed.bandwidth.h2d_gb_per_s * window.backward_ms
    hides = min(out, back)
    verdict = "all of it hides"
    if movable > hides:
        verdict = f"{hides / movable:.0%} of it hides behind the layer itself"
    return (
        f"It computes {window.forward_ms:.2f} ms in forward and {window.backward_ms:.2f} ms in "
        f"backward, in which the link carries {format_bytes(out)} out and {format_bytes(back)} "
        f"back: {verdict}.\nIn brackets: not marked by megatron-core, so it stays. 0 B: its "
        "tensors are counted with an earlier part."
    )


def rank_table(
    ranks: Sequence[RankPlan], memory_gib: Optional[float], num_ranks_of_host: int
) -> Iterator[Line]:
    """Tabulate the memory of each pipeline rank, without and with a plan.

    Args:
        ranks: The planned pipeline ranks.
        memory_gib: The GPU's memory; None if it is not known.
        num_ranks_of_host: Ranks that share a host's memory.
    """
    table = _table(
        "Pipeline ranks",
        *("rank", "layers", "in flight", "state", "saved", "peak", "planned peak", "moved"),
        *("step", "overhead"),
    )
    for rank in ranks:
        row = [str(rank.pp_rank), rank.layers, str(rank.num_in_flight)]
        row += [format_bytes(rank.state_bytes), format_bytes(rank.saved_bytes)]
        plan, simulation = rank.plan, rank.simulation
        if plan is not None and simulation is not None and simulation.peak_bytes is not None:
            row += [format_bytes(nbytes) for nbytes in simulation.peak_bytes]
            row += [format_bytes(plan.moved_nbytes), f"{simulation.total_ms:.0f} ms"]
            row.append(f"{simulation.overhead_percent:.1f}%")
        table.add_row(*row)
    yield ""
    yield table
    text = (
        "in flight: most passes through model chunks between forward and backward; saved: bytes "
        "that these keep;\nstate: weights, gradients, optimizer; moved: each way in an iteration."
    )
    yield text
    host_bytes = max(r.simulation.peak_host_bytes if r.simulation else 0 for r in ranks)
    if host_bytes:
        yield (
            f"host memory: {format_bytes(host_bytes)} per rank at most, "
            f"{format_bytes(host_bytes * num_ranks_of_host)} per node of {num_ranks_of_host}"
            f" rank{'s' if num_ranks_of_host > 1 else ''}"
        )
    if memory_gib:
        over = [
            str(rank.pp_rank)
            for rank in ranks
            if rank.simulation is not None
            and rank.simulation.peak_bytes is not None
            and rank.simulation.peak_bytes[1] > memory_gib * 2**30
        ]
        if over:
            yield (
                f"Even with the plan, rank {', '.join(over)} needs more than the GPU's "
                f"{memory_gib:g} GiB: divide the model further, or recompute"
            )


def _copy_ms(nbytes: int, speed: Speed) -> float:
    return nbytes / (1e6 * speed.bandwidth.d2h_gb_per_s)


def _table(title: str, *heads: str) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.padding = (0, 2, 0, 0)
    for place, head in enumerate(heads):
        table.add_column(head, justify="left" if place == 0 else "right", no_wrap=True)
    return table
