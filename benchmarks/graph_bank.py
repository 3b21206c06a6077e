# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares context-parallel sizes with and without graphs: ``python -m benchmarks.graph_bank -h``.

Every rank is a process; the first one measures for all and writes.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import gc
import logging
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import numpy as np
import torch
from megatron_models import initialize, make_config, shared_inputs, use_gpu, wrap
from model_case import ModelCase
from rich.console import Console
from rich.table import Table

from benchmarks.figures import Pace
from benchmarks.measure import Step, reserved_bytes, timed_step
from benchmarks.rows import RowWriter
from benchmarks.ways import parser_of, take_turns
from benchmarks.worker import machine_facts
from megatron.slipstream.context_parallel.limits import CostModel, RankLimits
from megatron.slipstream.context_parallel.scheduler import (
    MicroBatch,
    batches,
    schedule,
    share_of,
)
from megatron.slipstream.integration.free_port import free_port
from megatron.slipstream.packed_sequences.packing import Piece
from megatron.slipstream.plan.render import format_bytes

DESCRIPTION = """\
Measure training steps on documents whose lengths vary a thousandfold

  eager        each micro-batch with the context-parallel size that its documents need, kernels
               launched one by one
  bank         the same micro-batches, by CUDA graphs of each size (Slipstream's graph bank)
  fixed        all micro-batches with one size, that of the longest document
  fixed+graph  the same by CUDA graphs

on the same documents and weights. A step is the forward and backward of the documents of one global
batch without an optimizer. Ways take turns, step by step, so drift of clocks cancels. Needs two
GPUs or more; '--case smoke' shows on any machine that it runs.
"""

EPILOG = """\
examples:
  python -m benchmarks.graph_bank --case smoke                        try it
  python -m benchmarks.graph_bank --ranks 4 --output rows.jsonl

what is written, to --output FILE: a row about the machine, a row per step and way ('ms' of the
slowest rank), a summary row per way, and a row per size of each bank; a way that cannot run leaves
a row with its error. What the table says:

  ms          median of a step, with its interquartile range
  slower      by how much than 'eager': median of neighbouring steps, with its standard error
  reserved    device memory that the allocator cannot give back after the warm-up, with the graphs
  outside     what the device lost on top: graphs themselves, connections of NCCL
  loss        how far from that of 'eager'; equal, bit by bit, where sizes are the same
  each size   what the graphs of a micro-batch in flight hold, beyond those of larger sizes
"""

NUM_EAGER_STEPS = 2
NUM_WARMUPS = 4
MEAN_LOG_LENGTH, SIGMA_LOG_LENGTH = 6.0, 1.5
"""Of documents: log-normal, half of them shorter than 404 tokens, one in a hundred than 13,000."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model, and what is in a micro-batch."""

    model: ModelCase
    """Its sequence length is the buffer of a rank."""
    what: str
    max_sequences: int = 64
    num_micro_batches: int = 4
    length_scale: float = 1.0
    """Of documents."""


def _model(**sizes: Any) -> ModelCase:
    given: dict[str, Any] = {"micro_batch_size": 1, "vocab_size": 8192, "bf16": True, **sizes}
    overrides = {"apply_rope_fusion": True, "calculate_per_token_loss": True}
    return ModelCase(te_rng_tracker=True, overrides=overrides, **given)


CASES: Mapping[str, Case] = {
    "launch_bound": Case(
        _model(num_layers=16, hidden_size=1024, num_attention_heads=16, seq_length=4096),
        "16 layers of hidden 1024, 4096 tokens a rank: the GPU waits for launches",
    ),
    "larger": Case(
        _model(num_layers=8, hidden_size=2048, num_attention_heads=16, seq_length=16384),
        "8 layers of hidden 2048, 16384 tokens a rank",
        length_scale=4.0,
    ),
    "smoke": Case(
        ModelCase(seq_length=64, overrides={"calculate_per_token_loss": True}),
        "tiny, for machines without a GPU",
        max_sequences=8,
        num_micro_batches=2,
        length_scale=1 / 16,
    ),
}
WAYS = ("eager", "bank", "fixed", "fixed+graph")


class Documents:
    """The documents of every step, and the micro-batches that they make with given sizes.

    Args:
        case: The case.
        num_ranks: That share them.
    """

    def __init__(self, case: Case, num_ranks: int) -> None:
        self._case = case
        model = case.model
        sizes = (num_ranks, model.seq_length, case.max_sequences)
        self.limits = {False: RankLimits(*sizes), True: RankLimits(*sizes, min_size=num_ranks)}
        """By whether there is one size only."""
        width = model.hidden_size
        self._cost = CostModel.of_layer(3 * width**2 + 9 * width**2, width)

    def micro_batches(self, step: int, is_fixed: bool) -> list[MicroBatch]:
        """All with the same documents."""
        limits = self.limits[False]
        draw = np.random.default_rng(step)
        longest = limits.largest * limits.tokens_per_rank

        def stream() -> Iterator[Piece]:
            number = 0
            while True:
                length = draw.lognormal(MEAN_LOG_LENGTH, SIGMA_LOG_LENGTH) * self._case.length_scale
                yield Piece(number, 0, min(longest, int(length) + 1))
                number += 1

        count = self._case.num_micro_batches
        dynamic = next(batches(stream(), limits, self._cost, count, look_ahead=64))
        if not is_fixed:
            return dynamic
        pieces = [piece for groups in dynamic for group in groups for piece in group.pack]
        return schedule(pieces, self.limits[True], self._cost)

    def text(self, piece: Piece, step: int) -> Any:
        """Tokens of a document, and one more."""
        draw = np.random.default_rng((step, piece.document))
        return draw.integers(self._case.model.vocab_size, size=piece.length + 1)


class Way:
    """A model that is trained in one of the ways. Each has weights and gradients of its own.

    Args:
        name: One of :data:`WAYS`.
        case: The model.
        documents: What it is trained on.
    """

    def __init__(self, name: str, case: Case, documents: Documents) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

        from megatron.slipstream.integration.context_parallel_groups import context_parallel_groups
        from megatron.slipstream.integration.dynamic_context_parallel import (
            with_dynamic_context_parallelism,
        )

        self.name = name
        self._case, self._documents = case, documents
        self._is_fixed = name.startswith("fixed")
        limits = documents.limits[self._is_fixed]
        self._groups = context_parallel_groups(documents.limits[False])
        config = make_config(case.model)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=use_gpu())
        model = GPTModel(
            config=config,
            transformer_layer_spec=with_dynamic_context_parallelism(spec),
            vocab_size=case.model.vocab_size,
            max_sequence_length=limits.largest * limits.tokens_per_rank,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        self.chunks: list[Any] = wrap(config, [model if not use_gpu() else model.cuda()])
        self.bank: Any = None
        self.losses: list[float] = []
        if name in ("bank", "fixed+graph"):
            from megatron.slipstream.integration.chunk_graphs import replay_chunks

            (self.bank,) = replay_chunks(self.chunks, NUM_EAGER_STEPS, limits=limits)

    def step(self, number: int) -> Step:
        """Run one step and wait for it; a collective."""
        inputs = [self._inputs(batch, number) for batch in self._batches(number)]
        step = timed_step(lambda _: self._run(inputs), number)
        device = "cuda" if use_gpu() else "cpu"
        total = torch.tensor(step.losses, dtype=torch.float64, device=device).sum()
        torch.distributed.all_reduce(total)
        self.losses.append(float(total))
        return step

    def close(self) -> None:
        """Delete the graphs."""
        if self.bank is not None:
            self.bank.delete()
        self.chunks.clear()
        gc.collect()

    def _batches(self, number: int) -> list[MicroBatch]:
        return self._documents.micro_batches(number, self._is_fixed)

    def _inputs(self, micro_batch: MicroBatch, step: int) -> tuple[dict[str, Any], torch.Tensor]:
        """What the model is called with, and which labels count."""
        share = share_of(micro_batch, self._groups.rank)
        texts = [self._documents.text(piece, step) for piece in share.pack]
        limits = self._documents.limits[self._is_fixed]
        return shared_inputs(texts, share, limits, self._groups.of_size[share.size])

    def _run(self, batches: Sequence[tuple[dict[str, Any], torch.Tensor]]) -> list[torch.Tensor]:
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self.chunks:
            chunk.zero_grad_buffer()

        def forward_step(data: Iterator[Any], model: Any) -> Any:
            inputs, counts = next(data)
            output = model(**inputs)

            def loss(per_token: torch.Tensor) -> Any:
                total = (per_token.float() * counts).sum()
                return total, counts.sum().int(), {"loss": total.detach()}

            return output, loss

        results = get_forward_backward_func()(
            forward_step_func=forward_step, data_iterator=iter(batches), model=self.chunks[0],
            num_microbatches=len(batches), seq_length=self._case.model.seq_length,
            micro_batch_size=1, forward_only=False,
        )  # fmt: skip
        return [result["loss"] for result in results]


# Measuring


class Memory(NamedTuple):
    """What a way takes on this rank's device."""

    reserved_bytes: int
    outside_bytes: int
    """Not from torch's allocator."""

    @classmethod
    def now(cls) -> Memory:
        """All that is held."""
        reserved = reserved_bytes()
        if not use_gpu():
            return cls(0, 0)
        free, total = torch.cuda.mem_get_info()
        return cls(reserved, total - free - reserved)


Write = Callable[..., None]
"""Takes a row's kind and its fields."""


def measure(case: Case, num_ranks: int, num_steps: int, write: Write, console: Console) -> None:
    """Measure every way of a case, write rows, and print what they say. A collective.

    Args:
        case: The case.
        num_ranks: How many there are.
        num_steps: Of each way, after the warm-up.
        write: Takes a row's kind and its fields.
        console: Where progress and tables are shown.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    documents = Documents(case, num_ranks)
    ways: list[Way] = []
    memory: dict[str, Memory] = {}
    for name in WAYS:
        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, te_rng_tracker=use_gpu(), force_reset_rng=True)
        before = Memory.now()
        try:
            way = Way(name, case, documents)
            for number in range(NUM_EAGER_STEPS + NUM_WARMUPS):
                way.step(number)
        except (RuntimeError, ValueError, AssertionError) as error:
            write("summary", way=name, error=f"{type(error).__name__}: {error}")
            raise
        after = Memory.now()
        memory[name] = Memory(*(b - a for a, b in zip(before, after, strict=True)))
        way.losses.clear()
        ways.append(way)
    times: dict[str, list[float]] = {way.name: [] for way in ways}

    def step(way: Way, number: int) -> None:
        ms = way.step(number).ms
        times[way.name].append(ms)
        write("step", way=way.name, number=number, ms=ms)

    take_turns(ways, num_steps, step, console)
    console.print(_table(ways, times, memory, write))
    console.print(_sizes_table(ways, write))
    for way in ways:
        way.close()


def _table(
    ways: Sequence[Way],
    times: Mapping[str, Sequence[float]],
    memory: Mapping[str, Memory],
    write: Write,
) -> Table:
    table = Table("way", "ms", "slower", "reserved", "outside", "loss")
    base, *_ = ways
    for way in ways:
        pace = Pace.of(times[way.name], times[base.name])
        pairs = list(zip(way.losses, base.losses, strict=True))
        difference = max((abs(a - b) / max(abs(b), 1) for a, b in pairs), default=0.0)
        write(
            "summary",
            way=way.name,
            **pace.fields(),
            loss_difference=difference,
            **memory[way.name]._asdict(),
        )
        table.add_row(
            way.name,
            *pace.cells(),
            format_bytes(memory[way.name].reserved_bytes),
            format_bytes(memory[way.name].outside_bytes),
            "equal" if difference == 0 else f"{difference:.1e}",
        )
    return table


def _sizes_table(ways: Sequence[Way], write: Write) -> Table:
    table = Table("way", "size", "each size", "micro-batches")
    for way in ways:
        for size, graphs in way.bank.of_size.items() if way.bank is not None else ():
            figures = graphs.figures
            write(
                "size",
                way=way.name,
                size=size,
                num_replays=graphs.num_replays,
                **dataclasses.asdict(figures),
            )
            table.add_row(way.name, str(size), figures.render(), str(graphs.num_replays))
    return table


def _work(rank: int, options: argparse.Namespace, port: int, run: str) -> None:
    """One rank."""
    warnings.simplefilter("ignore")
    logging.getLogger("megatron").setLevel(logging.ERROR)
    case = CASES[options.case]
    initialize(case.model, rank, options.ranks, port)
    if use_gpu():
        from megatron.slipstream.integration import numa

        numa.bind_to_gpu(rank)
    else:
        torch.compiler.set_stance("force_eager")  # megatron-core's fused functions take long
    rows = RowWriter(options.output if rank == 0 else None, run)
    write = functools.partial(rows.write, case=options.case)
    command = f"--case {options.case} --ranks {options.ranks} --steps {options.steps}"
    write(
        "machine",
        command=f"python -m benchmarks.graph_bank {command}",
        num_ranks=options.ranks,
        **machine_facts(),
    )
    with contextlib.ExitStack() as stack:
        quiet = stack.enter_context(Path("/dev/null").open("w"))
        console = Console() if rank == 0 else Console(file=quiet)
        measure(case, options.ranks, options.steps, write, console)
    torch.distributed.barrier()


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns 0, or 2 for an error of the user's."""
    cases = {name: case.what for name, case in CASES.items()}
    parser = parser_of("graph_bank", cases, DESCRIPTION, EPILOG)
    parser.add_argument("--case", choices=CASES, default="launch_bound", help="%(default)s")
    parser.add_argument("--ranks", type=int, default=2, metavar="N", help="processes: %(default)s")
    parser.add_argument("--steps", type=int, default=20, metavar="N", help="of each way: 20")
    parser.add_argument("--output", type=Path, metavar="FILE", help="append rows to this file")
    options = parser.parse_args(arguments)
    if options.ranks < 2 or options.ranks & (options.ranks - 1):
        sys.stderr.write(f"error: --ranks {options.ranks} is no power of two above 1; set 2 or 4\n")
        return 2
    num_gpus = torch.cuda.device_count()
    if options.case != "smoke" and num_gpus < options.ranks:
        sys.stderr.write(
            f"error: --ranks {options.ranks} needs as many GPUs, and torch sees {num_gpus}; set "
            "fewer, or --case smoke, which runs without one\n"
        )
        return 2
    port = free_port()
    run = time.strftime("%Y-%m-%dT%H:%M:%S")
    start: Any = torch.multiprocessing.start_processes  # type: ignore[attr-defined]
    method = "spawn" if use_gpu() else "fork"  # CUDA does not survive a fork, imports do
    start(_work, (options, port, run), nprocs=options.ranks, start_method=method)
    return 0


if __name__ == "__main__":
    sys.exit(main())
