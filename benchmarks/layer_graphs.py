# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares graphs of layers with and without offloading: ``python -m benchmarks.layer_graphs``."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import io
import logging
import os
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn, Optional

import torch
from captured_layers import capture_layers, prepare_unwrapped, with_graphs
from garbage import without_garbage_collection
from megatron_models import initialize, use_gpu
from model_case import ModelCase
from rich.console import Console
from rich.progress import Progress
from rich.table import Table

from benchmarks import cases
from benchmarks.cases import find_case
from benchmarks.copies import profile_copies
from benchmarks.engines import (
    BaseModel,
    Engine,
    behind_the_seam,
    build_twin,
    make_engine,
    release_host_memory,
)
from benchmarks.figures import Pace, loss_difference
from benchmarks.measure import Step, backend_of, timed_step
from benchmarks.rows import RowWriter
from benchmarks.variant import LOSS_TOLERANCE, describe, report_fields
from benchmarks.ways import in_turn, parser_of
from benchmarks.worker import machine_facts
from megatron.slipstream.chunk_graphs.backend import graph_pool_bytes
from megatron.slipstream.plan.render import format_bytes

DESCRIPTION = """\
Measure training steps with and without CUDA graphs of layers (Transformer Engine's, as
megatron-core captures them), and with and without offloading inside them:

  eager                     neither
  eager+offload             Slipstream moves activations
  graph                     parts of each layer are replayed as CUDA graphs
  graph+offload             Slipstream moves activations inside the graphs and around them
  graph+offload+delayed     the same with --delay-offload-until-cuda-graph, which matters where
                            something moves outside of graphs: cases without leave it out
  megatron graph+offload    the engine that is built into megatron-core, in its own layers

All share one process, weights, gradients and data, and take turns step by step, so that drift of
clocks cancels. A step is forward and backward of some micro-batches without an optimizer. Needs a
GPU; '--case smoke' tries out on any machine what runs there.
"""

EPILOG = """\
examples:
  python -m benchmarks.layer_graphs --case smoke                     try it
  python -m benchmarks.layer_graphs --output rows.jsonl              every case that needs a GPU
  python -m benchmarks.layer_graphs --case dense --ways graph graph+offload --steps 40

what is written, to --output FILE: a row about the machine, a row per step and way ('ms'), and a
summary row per case and way; a way that cannot run leaves a row with its error. What fails while it
is captured or run takes the process with it: the rest of the case is then measured in a new one,
without it. What the table says:

  ms         median of a step, with its interquartile range
  slower     by how much than 'graph' (without a GPU: 'eager'): median of neighbouring steps, with
             its standard error
  held       device memory taken right after the capture, beside weights: pools of graphs, and
             tensors outside of them
  graphs     of that, what lies in the memory pools of graphs
  step       the most that a step allocates on top
  moved      bytes copied out in a step, as the profiler saw them (if it saw none: as engines say)
  planned    by how much the plan of the steps before the capture lowers the peak of a step
"""

EAGER, GRAPH = "eager", "graph"
OFFLOAD, DELAYED = "offload", "delayed"
MEGATRON = f"megatron {GRAPH}+{OFFLOAD}"
WAYS = (
    EAGER,
    f"{EAGER}+{OFFLOAD}",
    GRAPH,
    f"{GRAPH}+{OFFLOAD}",
    f"{GRAPH}+{OFFLOAD}+{DELAYED}",
    MEGATRON,
)
"""In the order in which they are captured: the engine that is not ours comes last."""


@dataclasses.dataclass(frozen=True)
class Case(cases.Case):
    """A model, the parts of its layers that are captured, and what moves."""

    captured: tuple[str, ...] = ()
    """The whole layer if empty."""
    captured_by_megatron: tuple[str, ...] = ()
    """The same kernels in other words for megatron-core's own engine, which never joins its copies
    to the end of a graph of whole layers."""

    @property
    def modules(self) -> tuple[str, ...]:
        """What moves."""
        return self.variants[0].modules

    @property
    def ways(self) -> tuple[str, ...]:
        """Those that differ from each other."""
        moves_outside = bool(set(self.modules) - {"qkv_linear", "core_attn", "attn_proj"})
        return tuple(way for way in WAYS if DELAYED not in way or moves_outside)


def _case(
    name: str, about: str, model: ModelCase, captured: str, moved: str, **options: Any
) -> Case:
    model = dataclasses.replace(model, te_rng_tracker=True)
    parts = tuple(captured.split())
    options = {"captured": parts, "captured_by_megatron": parts or ("attn", "mlp"), **options}
    return Case(name, about, model, (cases.Variant(tuple(moved.split())),), **options)


_DENSE, _MOE = find_case("dense").model, find_case("moe").model
_LAUNCH_BOUND = dataclasses.replace(find_case("small").model, seq_length=4096, micro_batch_size=1)
_ATTENTION = "core_attn attn_proj qkv_linear"
CASES: Mapping[str, Case] = {
    case.name: case
    for case in (
        _case("dense", "8 layers of hidden 4096, 8192 tokens", _DENSE, "attn mlp", _ATTENTION),
        _case(
            "moe",
            "8 layers of hidden 2048 with 16 experts, 8192 tokens; what moves is in graphs",
            _MOE,
            "attn moe_router",
            "core_attn",
        ),
        _case(
            "moe_experts",
            "the same; what experts save moves too, outside of graphs",
            _MOE,
            "attn moe_router",
            "core_attn attn_proj expert_fc1 moe_act",
        ),
        _case(
            "launch_bound",
            "16 layers of hidden 1024, 4096 tokens: the GPU waits for launches; whole layers",
            _LAUNCH_BOUND,
            "",
            _ATTENTION,
        ),
        _case(
            "smoke",
            "three tiny layers, for machines without a GPU",
            dataclasses.replace(find_case("smoke").model, bf16=True),
            "attn mlp",
            _ATTENTION,
            offload={"min_offloaded_tensor_size": 1},
            needs_gpu=False,
        ),
    )
}


class Counts(NamedTuple):
    """How many steps of each way."""

    eager_steps: int
    """Before the capture."""
    warmups: int
    """After it."""
    steps: int
    """That are measured."""


class WayFailed(Exception):
    """A way failed while it was captured or run, and this process is not fit to go on."""


class Way:
    """The model as it is trained in one of the ways.

    Args:
        name: One of :data:`WAYS`.
        base: The model without graphs and without offloading, whose parameters all share.
        num_eager_steps: Before the capture.

    Raises:
        ValueError: megatron-core refuses it.
    """

    def __init__(self, name: str, base: BaseModel, num_eager_steps: int) -> None:
        assert isinstance(base.case, Case)
        self.name = name
        self.case = base.case
        self.held_bytes = self.pool_bytes = self.planned_saved_bytes = 0
        self.peaks: list[int] = []
        """The most that each step allocated beside what there was."""
        _forget_gradients(base.chunks)  # which all share, so that they count nowhere
        self._held_before, self._pool_before = _held_bytes(), graph_pool_bytes()
        self._graphs: Any = None
        is_megatrons = name == MEGATRON
        modules = self.case.modules if OFFLOAD in name else ()
        self._model = self.case.model
        if name == EAGER:
            self._chunks = list(base.chunks)
        else:
            offload: dict[str, Any] = {}
            if GRAPH in name:
                parts = self.case.captured_by_megatron if is_megatrons else self.case.captured
                self._model = with_graphs(self._model, parts, num_eager_steps)
                self._model = dataclasses.replace(self._model, keeps_layers=is_megatrons)
            if DELAYED in name:
                offload["delay_offload_until_cuda_graph"] = True
            self._chunks, self._config = build_twin(base, self._model, modules, **offload)
        self._accumulators = prepare_unwrapped(self._chunks)
        label = "megatron" if is_megatrons else "slipstream"
        self._engine = (
            make_engine(base, label, self._chunks, {})
            if modules
            else Engine(name, base, self._chunks)
        )

    def capture(self) -> None:
        """What follows the eager steps: a plan has been made, and graphs are captured."""
        if self._engine.is_ours:
            self.planned_saved_bytes = report_fields(self._engine.manager)["planned_saved_bytes"]
        _forget_gradients(self._chunks)
        if GRAPH in self.name:
            with behind_the_seam(self._engine.manager):
                self._graphs = capture_layers(
                    self._model, self._config, self._chunks, self.case.num_micro_batches
                )
        self.held_bytes = _held_bytes() - self._held_before
        self.pool_bytes = graph_pool_bytes() - self._pool_before

    def step(self, number: int) -> Step:
        """Run one step and wait for it."""
        if not use_gpu():
            return timed_step(self._engine.run, number)
        backend = backend_of(self._engine.manager if self._engine.is_ours else None)
        before = backend.begin_peak()
        step = timed_step(self._engine.run, number)
        self.peaks.append(backend.peak_bytes() - before)
        return step

    def copied_bytes(self) -> Optional[int]:
        """Bytes that one more step copies out, by the profiler; None where it sees no copies."""
        copies = profile_copies(self._engine.run, 0)
        return None if copies is None else copies.d2h.bulk_bytes

    def claimed_bytes(self) -> Optional[int]:
        """The same as the engine says; None without one."""
        manager = self._engine.manager
        if manager is None:
            return None
        if not self._engine.is_ours:
            return int(manager.offload_summary_total_bytes)
        in_graphs = sum(counters.d2h_bytes for counters in manager.graphs.modules.values())
        before = manager.report.num_iterations
        self._engine.run(0)
        # Where all is replayed no iteration is seen, and the report is that of an earlier one.
        is_seen = manager.report.num_iterations > before
        outside = report_fields(manager)["moved_bytes"] if is_seen else 0
        return int(in_graphs * self.case.num_micro_batches + outside)

    def close(self) -> None:
        """Delete the graphs and give the host memory back."""
        if self._graphs is not None:
            self._graphs.delete_cuda_graphs()
            self._graphs = None
        self._engine.close()
        self._chunks.clear()
        self._accumulators.clear()


def can_capture() -> bool:
    """Whether there are CUDA graphs."""
    return use_gpu()


def _held_bytes() -> int:
    """Device memory of graphs, used or not, and of tensors outside of them; 0 without a GPU."""
    if not use_gpu():
        return 0
    return graph_pool_bytes() + sum(
        segment["allocated_size"]
        for segment in torch.cuda.memory_snapshot()
        if tuple(segment["segment_pool_id"]) == (0, 0)
    )


def _forget_gradients(chunks: Sequence[torch.nn.Module]) -> None:
    for chunk in chunks:
        chunk.zero_grad()


# Measuring


class Measurement:
    """The ways of one case.

    Args:
        case: The case.
        counts: How many steps.
        write: Takes a row's kind and its fields.
        console: Where progress is shown.
    """

    def __init__(
        self, case: Case, counts: Counts, write: Callable[..., None], console: Console
    ) -> None:
        self._case = case
        self._counts = counts
        self._write = write
        self._console = console
        self._ways: list[Way] = []
        self._steps: dict[str, list[Step]] = {}

    def run(self, names: Sequence[str]) -> Table:
        """Measure these ways, and write rows.

        Raises:
            WayFailed: See there. Its row is written.
        """
        initialize(self._case.model)
        if use_gpu():
            from megatron.slipstream.integration import numa

            # As installing the engine does; before the first step, so that all have it alike.
            numa.bind_to_gpu(0)
        base = BaseModel(self._case)
        with Progress(console=self._console, transient=True) as progress:
            for name in progress.track(names, description=f"{self._case.name}: building"):
                self._prepare(name, base)
            with without_garbage_collection():
                rounds = range(self._counts.steps)
                for number in progress.track(rounds, description=f"{self._case.name}: measuring"):
                    self._round(number)
        table = self._table()
        self.close()
        return table

    def close(self) -> None:
        """Give everything back."""
        for way in self._ways:
            way.close()
        self._ways.clear()
        release_host_memory()

    def _prepare(self, name: str, base: BaseModel) -> None:
        if GRAPH in name and not can_capture():
            self._refuse(name, "CUDA graphs need a GPU, and torch sees none")
            return
        counts = self._counts
        try:
            way = Way(name, base, counts.eager_steps)
        except Exception as error:  # nothing has been launched yet
            self._refuse(name, describe(error))
            return
        self._ways.append(way)
        for number in range(counts.eager_steps + counts.warmups):
            if number == counts.eager_steps:
                self._attempt(way, way.capture)
            self._attempt(way, way.step, number)
        way.peaks.clear()

    def _round(self, number: int) -> None:
        for way in in_turn(self._ways, number):
            gc.collect()
            step = self._attempt(way, way.step, number)
            self._steps.setdefault(way.name, []).append(step)
            self._write("step", way=way.name, number=number, ms=step.ms)

    def _attempt(self, way: Way, action: Callable[..., Any], *arguments: Any) -> Any:
        try:
            # megatron-core's engine prints a table after its first iteration.
            with contextlib.redirect_stdout(io.StringIO()):
                return action(*arguments)
        except Exception as error:
            self._refuse(way.name, describe(error))
            raise WayFailed(way.name) from error

    def _refuse(self, name: str, why: str) -> None:
        self._write("summary", way=name, error=why)
        self._console.print(f"{self._case.name}, {name}: {why}", markup=False)

    def _table(self) -> Table:
        table = Table(
            *("way", "ms", "slower", "held", "graphs", "step", "moved", "planned"),
            title=f"{self._case.name}: {self._case.about}; {' '.join(self._case.modules)} moves",
        )
        times = {name: [step.ms for step in steps] for name, steps in self._steps.items()}
        for way in self._ways:
            pace = Pace.of(times[way.name], times.get(GRAPH) or next(iter(times.values())))
            fields = self._summary(way, pace)
            self._write("summary", way=way.name, **fields)
            table.add_row(way.name, *pace.cells(), *_cells(fields))
        return table

    def _summary(self, way: Way, pace: Pace) -> dict[str, Any]:
        losses = {
            name: [loss for step in steps for loss in step.losses]
            for name, steps in self._steps.items()
        }
        first = next(iter(losses))
        difference = loss_difference(losses[way.name], losses[first])
        differs = difference is not None and not difference <= LOSS_TOLERANCE
        return {
            "error": f"losses differ from those of {first} by {difference:.2g}"
            if differs
            else None,
            "captured": self._case.captured if GRAPH in way.name else None,
            "modules": self._case.modules if OFFLOAD in way.name else (),
            "num_steps": len(self._steps[way.name]),
            "step_ms": pace.ms.median,
            "step_ms_interquartile": pace.ms.interquartile,
            "slower_percent": pace.slower_percent.median,
            "slower_percent_standard_error": pace.slower_percent.standard_error,
            "held_bytes": way.held_bytes,
            "graph_pool_bytes": way.pool_bytes,
            "step_peak_bytes": max(way.peaks, default=0),
            "copied_bytes": self._attempt(way, way.copied_bytes),
            "claimed_bytes": self._attempt(way, way.claimed_bytes),
            "planned_saved_bytes": way.planned_saved_bytes,
            "loss_difference": difference,
        }


def _cells(fields: Mapping[str, Any]) -> list[str]:
    moved = fields["copied_bytes"] or fields["claimed_bytes"]
    sizes = [fields[f"{name}_bytes"] for name in ("held", "graph_pool", "step_peak")]
    return [
        *(format_bytes(nbytes) if nbytes else "" for nbytes in sizes),
        format_bytes(moved) if moved else "",
        format_bytes(fields["planned_saved_bytes"]) if fields["planned_saved_bytes"] else "",
    ]


# The command


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns 0, or 2 for an error of the user's."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    # Read by Transformer Engine when it is imported; without it, it keeps its saved tensors.
    os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")
    names = options.case or [name for name, case in CASES.items() if case.needs_gpu]
    needy = [name for name in names if CASES[name].needs_gpu]
    if needy and not use_gpu():
        sys.stderr.write(f"error: --case {needy[0]}: torch sees no GPU; smoke runs without one\n")
        return 2
    if min(options.eager_steps, options.warmups, options.steps) < 1:
        sys.stderr.write("error: --eager-steps, --warmups and --steps are at least 1\n")
        return 2
    # megatron-core warns of each optional package that is not there, and of each GPTModel.
    warnings.simplefilter("ignore")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    writer = RowWriter(options.output, options.run)
    command = f"python -m benchmarks.layer_graphs {' '.join(arguments)}"
    writer.write("machine", **machine_facts(), command=command)
    for position, name in enumerate(names):
        failed = _measure(CASES[name], options, writer)
        if failed is not None:
            _go_on_elsewhere(options, failed, names[position:])
    return 0


def _measure(case: Case, options: argparse.Namespace, writer: RowWriter) -> Optional[str]:
    """Measure a case. Returns the way that failed; None if all is well."""
    write = functools.partial(writer.write, case=case.name)
    counts = Counts(options.eager_steps, options.warmups, options.steps)
    ways = [way for way in WAYS if way in (options.ways or case.ways)]
    measurement = Measurement(case, counts, write, Console(stderr=True))
    try:
        # Into a file as wide as it is: cut off, figures are of no use.
        Console(width=None if sys.stdout.isatty() else 160).print(measurement.run(ways))
    except WayFailed as failed:
        return str(failed)
    return None


def _go_on_elsewhere(options: argparse.Namespace, failed: str, names: Sequence[str]) -> NoReturn:
    """End this process; another one measures the first of these cases without the way that failed,
    and then the others."""
    sys.stdout.flush()
    with contextlib.suppress(Exception):
        release_host_memory()
    first, *others = names
    ways = [way for way in options.ways or CASES[first].ways if way != failed]
    commands = [["--case", first, "--ways", *ways]] if ways else []
    if others:
        commands.append(["--case", *others, *(["--ways", *options.ways] if options.ways else [])])
    same = [f"--{name}={getattr(options, name)}" for name in ("steps", "warmups", "run")]
    same += [f"--eager-steps={options.eager_steps}"]
    same += [] if options.output is None else [f"--output={options.output}"]
    codes = [
        subprocess.run(
            [sys.executable, "-m", "benchmarks.layer_graphs", *command, *same]
        ).returncode
        for command in commands
    ]
    # Without the interpreter's shutdown: what a failed capture has left may not be freed.
    os._exit(max(codes, default=0))


def _parser() -> argparse.ArgumentParser:
    cases = {name: case.about for name, case in CASES.items()}
    parser = parser_of("layer_graphs", cases, DESCRIPTION, EPILOG)
    add = parser.add_argument
    add("--case", nargs="+", choices=CASES, metavar="NAME", help="all that need a GPU")
    add(
        "--ways", nargs="+", choices=WAYS, metavar="WAY", help="those of the list above that differ"
    )
    add("--steps", type=int, default=8, metavar="N", help="measured, of each way: %(default)s")
    add("--eager-steps", type=int, default=3, metavar="N", help="before a capture: %(default)s")
    add("--warmups", type=int, default=3, metavar="N", help="steps after it: %(default)s")
    add("--output", type=Path, metavar="FILE", help="append rows to this file")
    add("--run", default=time.strftime("%Y-%m-%dT%H:%M:%S"), help=argparse.SUPPRESS)
    return parser


if __name__ == "__main__":
    sys.exit(main())
