# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares ways to launch a model's kernels: ``python -m benchmarks.chunk_graphs --help``."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import gc
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from captured_layers import capture_layers, with_graphs
from megatron_models import (
    build_chunks,
    initialize,
    make_config,
    micro_batches,
    run_schedule,
    use_gpu,
    wrap,
)
from model_case import ModelCase
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Pace
from benchmarks.measure import reserved_bytes
from benchmarks.rows import RowWriter
from benchmarks.ways import parser_of, take_turns

DESCRIPTION = """\
Measure training steps whose kernels are launched

  eager   one by one
  layer   by a CUDA graph for each layer (megatron-core with Transformer Engine's graphs), where
          those can run: not with packed sequences, and of expert layers only the attention
  chunk   by one CUDA graph for all layers (Slipstream's chunk graphs)

on the same weights and data. A step is the forward and backward of some micro-batches without an
optimizer. Ways take turns, step by step, so drift of clocks cancels. Needs a GPU; '--case smoke'
shows on any machine that it runs.
"""

EPILOG = """\
what is written, to --output FILE: a row about the machine, a row per step and way ('ms' on the GPU,
'host_ms' until the last launch), and a summary row per way; a way that cannot run leaves a row with
its error. What the table says:

  ms          median of a step, with its interquartile range
  slower      by how much than 'eager': median of neighbouring steps, with its standard error
  host        median time until the host had launched everything
  a replay    median host time of one forward pass through all layers, in microseconds
  memory      the most that the allocator held, with the graphs
  a slot      what the graphs of one micro-batch in flight hold, and what was predicted before
"""

NUM_EAGER_STEPS = 3
NUM_WARMUPS = 6
EXPERTS = {
    "moe_expert_capacity_factor": 1.25,
    "moe_pad_expert_input_to_capacity": True,
    "moe_permute_fusion": True,
}


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and what is in a micro-batch."""

    model: ModelCase
    what: str
    num_micro_batches: int = 4
    layer_modules: Optional[tuple[str, ...]] = ()
    """What the way 'layer' captures of each layer: everything if empty; None where it can't."""


def _model(kind: str = "dense", **sizes: Any) -> ModelCase:
    given: dict[str, Any] = {"micro_batch_size": 1, "vocab_size": 8192, "bf16": True, **sizes}
    return ModelCase(kind, te_rng_tracker=True, **given)


_SMALL = {"num_layers": 16, "hidden_size": 1024, "num_attention_heads": 16, "seq_length": 4096}
CASES: Mapping[str, Case] = {
    "launch_bound_thd": Case(
        _model(**_SMALL, is_packed=True, overrides={"apply_rope_fusion": True}),
        "16 layers of hidden 1024, 4096 packed tokens: the GPU waits for launches",
        layer_modules=None,
    ),
    "launch_bound": Case(_model(**_SMALL), "the same, one sequence of 4096 tokens"),
    "compute_bound": Case(
        _model(num_layers=8, hidden_size=4096, num_attention_heads=32, seq_length=8192),
        "8 layers of hidden 4096, 8192 tokens: the GPU never waits",
        num_micro_batches=2,
    ),
    "experts": Case(
        _model("moe", **{**_SMALL, "num_layers": 8}, overrides=EXPERTS),
        "8 layers with 4 experts, dropped and padded to capacity",
        layer_modules=("attn",),
    ),
    "smoke": Case(ModelCase(bf16=True), "tiny, for machines without a GPU", layer_modules=None),
}


class Timing(NamedTuple):
    """One step."""

    ms: float
    host_ms: float


class Way:
    """A model that is trained in one of the ways. Each has weights and gradients of its own.

    Args:
        name: 'eager', 'layer' or 'chunk'.
        case: The model and its data.
    """

    def __init__(self, name: str, case: Case) -> None:
        self.name = name
        self.case = case
        model = case.model
        if name == "layer":
            assert case.layer_modules is not None
            model = with_graphs(model, case.layer_modules, NUM_EAGER_STEPS)
        self._model = model
        self.config = make_config(model)
        self.chunks: list[Any] = wrap(self.config, build_chunks(model, self.config))
        self.graphs: Any = None
        self._layer_graphs: Any = None
        if name == "chunk":
            from megatron.slipstream.integration.chunk_graphs import replay_chunks

            (self.graphs,) = replay_chunks(self.chunks, NUM_EAGER_STEPS)
        self.replay_us: list[float] = []
        """Host time of each forward pass through the layers."""
        self._time_forward()

    def _time_forward(self) -> None:
        from megatron.core.utils import get_attr_wrapped_model

        block: Any = get_attr_wrapped_model(self.chunks[0], "decoder")
        forward = block.forward

        @functools.wraps(forward)
        def timed(*arguments: Any, **options: Any) -> Any:
            begin = time.perf_counter()
            output = forward(*arguments, **options)
            self.replay_us.append(1e6 * (time.perf_counter() - begin))
            return output

        block.forward = timed

    def step(self, number: int) -> Timing:
        """Run one step and wait for it."""
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        batches = list(micro_batches(self._model, number, self.case.num_micro_batches))
        _synchronize()
        begin_s = time.perf_counter()
        with _gpu_time() as gpu_ms:
            run_schedule(self._model, self.chunks, batches)
            host_ms = 1e3 * (time.perf_counter() - begin_s)
        return Timing(gpu_ms() or 1e3 * (time.perf_counter() - begin_s), host_ms)

    def capture_layers(self) -> None:
        """What ``megatron.training`` does for 'layer' after the eager steps."""
        if self.name != "layer":
            return
        self._layer_graphs = capture_layers(
            self._model, self.config, self.chunks, self.case.num_micro_batches
        )

    def close(self) -> None:
        """Delete the graphs."""
        if self._layer_graphs is not None:
            self._layer_graphs.delete_cuda_graphs()
        if self.graphs is not None:
            self.graphs.delete()
        self.chunks.clear()
        gc.collect()


def _synchronize() -> None:
    if use_gpu():
        torch.cuda.synchronize()


@contextlib.contextmanager
def _gpu_time() -> Iterator[Callable[[], float]]:
    """Yields what tells, afterwards, the milliseconds on the GPU; 0 without one."""
    if not use_gpu():
        yield lambda: 0.0
        return
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    yield lambda: start.elapsed_time(stop)
    stop.record()
    stop.synchronize()


# Measuring


def measure(case: Case, num_steps: int, write: Callable[..., None], console: Console) -> Table:
    """Measure every way of a case, and write rows.

    Args:
        case: The case.
        num_steps: Of each way, after the warm-up.
        write: Takes a row's kind and its fields.
        console: Where progress is shown.
    """
    initialize(case.model)
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    ways: list[Way] = []
    memory: dict[str, int] = {}
    names = ["eager", "chunk"] if case.layer_modules is None else ["eager", "layer", "chunk"]
    for name in names:
        model_parallel_cuda_manual_seed(1, te_rng_tracker=use_gpu(), force_reset_rng=True)
        held = reserved_bytes()
        try:
            way = Way(name, case)
            for number in range(NUM_WARMUPS):
                if number == NUM_EAGER_STEPS:
                    way.capture_layers()
                way.step(number)
        except (RuntimeError, ValueError, AssertionError) as error:
            write("summary", way=name, error=f"{type(error).__name__}: {error}")
            console.print(f"{name}: {type(error).__name__}: {error}")
            continue
        memory[name] = reserved_bytes() - held
        way.replay_us.clear()
        ways.append(way)
    times: dict[str, list[Timing]] = {way.name: [] for way in ways}

    def step(way: Way, number: int) -> None:
        timing = way.step(number)
        times[way.name].append(timing)
        write("step", way=way.name, number=number, **timing._asdict())

    take_turns(ways, num_steps, step, console)
    table = _table(ways, times, memory, write)
    for way in ways:
        way.close()
    return table


def _table(
    ways: Sequence[Way],
    times: Mapping[str, Sequence[Timing]],
    memory: Mapping[str, int],
    write: Callable[..., None],
) -> Table:
    table = Table("way", "ms", "slower", "host", "a replay", "memory", "a slot")
    base = [timing.ms for timing in times["eager"]]
    for way in ways:
        pace = Pace.of([timing.ms for timing in times[way.name]], base)
        host_ms = statistics.median(timing.host_ms for timing in times[way.name])
        replay_us = statistics.median(way.replay_us)
        figures = way.graphs.figures if way.graphs is not None else None
        fields = {
            **pace.fields(),
            "host_ms": host_ms,
            "replay_us": replay_us,
            "reserved_bytes": memory[way.name],
            "slot": None if figures is None else dataclasses.asdict(figures),
        }
        write("summary", way=way.name, **fields)
        table.add_row(
            way.name,
            *pace.cells(),
            f"{host_ms:.2f} ms",
            f"{replay_us:.0f} µs",
            f"{memory[way.name] / 2**20:.0f} MiB",
            "" if figures is None else figures.render(),
        )
    return table


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns 0, or 2 for an error of the user's."""
    cases = {name: case.what for name, case in CASES.items()}
    parser = parser_of("chunk_graphs", cases, DESCRIPTION, EPILOG)
    parser.add_argument("--case", choices=CASES, default="launch_bound_thd", help="%(default)s")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="of each way: 20")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append rows to this file")
    options = parser.parse_args(arguments)
    if not use_gpu() and options.case != "smoke":
        sys.stderr.write("error: torch sees no GPU; --case smoke runs without one\n")
        return 2
    command = f"python -m benchmarks.chunk_graphs --case {options.case} --steps {options.steps}"
    rows = RowWriter(options.output, time.strftime("%Y-%m-%dT%H:%M:%S"))
    write = functools.partial(rows.write, case=options.case)
    gpu = torch.cuda.get_device_name() if use_gpu() else None
    write("machine", gpu=gpu, torch=torch.__version__, command=command)
    console = Console(stderr=True)
    Console().print(measure(CASES[options.case], options.steps, write, console))
    return 0


if __name__ == "__main__":
    sys.exit(main())
