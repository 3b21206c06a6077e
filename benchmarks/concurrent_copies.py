# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What pinned copies of each GPU reach while 1, 2, 4 and 8 GPUs of a host copy at once.

``python -m benchmarks.concurrent_copies --output FILE.jsonl`` on a machine with GPUs, in some
seconds; FILE.md is the table. All GPUs have the same host memory, which may be slower than their
links together: what a link reaches alone is then not what it reaches in training. Host memory lies
where training has it, on the NUMA node of its GPU. One process drives all GPUs, which makes no
difference to copies: they need no CPU.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import statistics
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch

from benchmarks.rows import Row, read_rows
from benchmarks.worker import machine_facts
from megatron.slipstream.fine_grained_activation_offload.backend import Backend, Bytes
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.integration import numa

MIB = 1 << 20
NUMBERS = "1,2,4,8"
WAYS = {"out": ("d2h",), "back": ("h2d",), "both ways": ("d2h", "h2d")}
"""What is copied at once: to the host, to the device, or both."""

LEGEND = """\
1e9 bytes per second of each GPU, by CUDA events around its own copies: the slowest GPU's, the
median, and the sum of all. `both ways`: copies to the host and to the device at the same time."""


class Link:
    """A GPU with pinned memory of its own, and a stream for each direction.

    Args:
        backend: The device.
        nbytes: Of one copy.
        gpu: Its number; None where the CPU stands for the device.
        node: The NUMA node of its host memory; None for wherever it lies.
    """

    def __init__(
        self, backend: Backend, nbytes: int, gpu: Optional[int] = None, node: Optional[int] = None
    ) -> None:
        self.gpu, self.node = gpu, node
        self._backend = backend
        with self._current():
            device = backend.allocate_scratch(2 * nbytes)
            if device is None:
                raise ValueError(f"GPU {gpu} has no {2 * nbytes / MIB:.0f} MiB to spare; set --mib")
            self._host = backend.allocate_host(2 * nbytes)
            host = Bytes.of(self._host)
            rest = Bytes(host.storage, host.start + nbytes, nbytes)
            self._copies = {
                "d2h": (host.first(nbytes), Bytes(device, 0, nbytes)),
                "h2d": (Bytes(device, nbytes, nbytes), rest),
            }
            self._streams = {way: backend.new_stream() for way in self._copies}

    def time(self, directions: Sequence[str]) -> list[Any]:
        """An event in the stream of each direction."""
        with self._current():
            return [self._backend.timed_event(self._streams[way]) for way in directions]

    def copy(self, directions: Sequence[str]) -> None:
        """One copy each way, as soon as those before are done. The host does not block."""
        with self._current():
            for way in directions:
                self._backend.run_copies([self._copies[way]], self._streams[way])

    def elapsed_ms(self, starts: Sequence[Any], stops: Sequence[Any]) -> list[float]:
        """Between the events of each direction. Blocks the host until the last has happened."""
        with self._current():
            for stream in self._streams.values():
                self._backend.wait_on_host(stream)
            times = map(self._backend.elapsed_ms, starts, stops)
            return [ms for ms in times if ms is not None]

    def close(self) -> None:
        """Give the host memory back."""
        with self._current():
            self._backend.free_host(self._host)

    def _current(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.gpu is None else torch.cuda.device(self.gpu)


class Amount(NamedTuple):
    """How much is copied for one rate."""

    nbytes: int
    num_copies: int
    num_rounds: int
    """Rates of which the median counts."""


def measure(links: Sequence[Link], directions: Sequence[str], amount: Amount) -> list[list[float]]:
    """For each direction the rate of each link, in 1e9 bytes per second, all copying at once."""
    _round(links, directions, amount.num_copies)  # the first copies touch the memory
    rounds = []
    for _ in range(amount.num_rounds):
        times_ms = _round(links, directions, amount.num_copies)
        nbytes = amount.num_copies * amount.nbytes
        rounds.append([[nbytes / ms / 1e6 for ms in of_link] for of_link in times_ms])
    medians = [
        [statistics.median(rates) for rates in zip(*of_link, strict=True)]
        for of_link in zip(*rounds, strict=True)
    ]
    return [list(of_way) for of_way in zip(*medians, strict=True)]


def _round(links: Sequence[Link], directions: Sequence[str], num_copies: int) -> list[list[float]]:
    """Milliseconds of ``num_copies`` copies, for each link and direction."""
    starts = [link.time(directions) for link in links]
    for _ in range(num_copies):
        for link in links:
            link.copy(directions)
    stops = [link.time(directions) for link in links]
    return [link.elapsed_ms(*events) for link, *events in zip(links, starts, stops, strict=True)]


def rate_rows(
    links: Sequence[Link], numbers: Sequence[int], amount: Amount
) -> Iterator[dict[str, Any]]:
    """A row for each number of GPUs at once, the first ones each time, and each way."""
    for number in numbers:
        for way, directions in WAYS.items():
            rates = measure(links[:number], directions, amount)
            yield {
                "kind": "rates",
                "num_gpus": number,
                "way": way,
                "gpus": [link.gpu for link in links[:number]],
                "nodes": [link.node for link in links[:number]],
                **{
                    f"{name}_gb_per_s": found for name, found in zip(directions, rates, strict=True)
                },
            }


def render(rows: Sequence[Row]) -> str:
    """The table as Markdown.

    Raises:
        ValueError: There are no rates.
    """
    rates = [row for row in rows if row["kind"] == "rates"]
    if not rates:
        raise ValueError("no rows of rates; they are written by benchmarks.concurrent_copies")
    parts = ["# Pinned copies of several GPUs at once"]
    for row in rows:
        if row["kind"] == "machine":
            versions = ", ".join(f"{name} {value}" for name, value in row["versions"].items())
            driver = f", driver {row['driver']}" if row.get("driver") else ""
            parts += [f"{row['device']} ({row['num_devices']} seen){driver}; {versions}."]
            parts += [f"`{row['command']}`"]
    lines = [
        "| GPUs at once | NUMA nodes | way | direction | slowest | median | all together |",
        "|---|---|---|---|---|---|---|",
    ]
    for row in rates:
        nodes = " ".join("?" if node is None else str(node) for node in row["nodes"])
        for direction in WAYS[row["way"]]:
            found = row[f"{direction}_gb_per_s"]
            figures = (min(found), statistics.median(found), sum(found))
            cells = [row["num_gpus"], nodes, row["way"], direction.upper()]
            cells += [f"{figure:.1f}" for figure in figures]
            lines.append("| " + " | ".join(map(str, cells)) + " |")
    return "\n\n".join([*parts, LEGEND, "\n".join(lines)]) + "\n"


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns 0, or 2 for an error of the user's."""
    arguments = list(sys.argv[1:] if arguments is None else arguments)
    options = _parser().parse_args(arguments)
    try:
        numbers = _numbers(options.gpus)
        amount = Amount(int(options.mib * MIB), options.copies, options.rounds)
        if min(amount) < 1:
            raise ValueError("--mib, --copies and --rounds must be above 0; set larger ones")
        command = " ".join(["python -m benchmarks.concurrent_copies", *arguments])
        machine = {"kind": "machine", **machine_facts(), "command": command}
        links = make_links(max(numbers), amount.nbytes)
        _write(options.output, [machine], rate_rows(links, numbers, amount))
        for link in links:
            link.close()
    except (OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.concurrent_copies", description=__doc__
    )
    add = parser.add_argument
    add(
        "--gpus",
        default=NUMBERS,
        metavar="N,M",
        help="numbers of GPUs to copy at once; what the machine does not have is left out "
        "(default: %(default)s)",
    )
    add("--mib", type=float, default=256, metavar="M", help="of one copy (default: %(default)s)")
    add("--copies", type=int, default=20, metavar="N", help="for a rate (default: %(default)s)")
    add("--rounds", type=int, default=3, metavar="N", help="median of (default: %(default)s)")
    add("--output", type=Path, metavar="FILE.jsonl", help="rows; the table goes to FILE.md")
    return parser


def _numbers(text: str) -> list[int]:
    """The numbers of GPUs that there are."""
    try:
        numbers = sorted({int(number) for number in text.split(",")})
    except ValueError:
        raise ValueError(f"--gpus {text} is no list of numbers such as {NUMBERS}") from None
    num_gpus = torch.cuda.device_count()
    found = [number for number in numbers if 1 <= number <= num_gpus]
    if not found:
        raise ValueError(
            f"--gpus {text} cannot be measured because torch sees {num_gpus} GPUs; name numbers "
            "that there are, on a machine with GPUs"
        )
    for number in sorted(set(numbers) - set(found)):
        sys.stderr.write(f"{number} GPUs at once are left out: torch sees {num_gpus}\n")
    return found


def make_links(number: int, nbytes: int) -> list[Link]:
    """The links of the first ``number`` GPUs, with host memory where training would have it."""
    cpus, policy = frozenset(os.sched_getaffinity(0)), numa.get_memory_policy()
    links = []
    for gpu in range(number):
        backend = CudaBackend()
        decision = numa.decide(numa.SYSFS, numa.gpu_pci_address(gpu), cpus, policy)
        node = None if isinstance(decision, str) else decision.node
        if node is not None:
            backend.place_host_memory = numa.NodeMemory(node)
        links.append(Link(backend, nbytes, gpu, node))
    return links


def _write(
    output: Optional[Path], rows: list[dict[str, Any]], more: Iterator[dict[str, Any]]
) -> None:
    """Write rows as they come, and the table."""
    for row in more:
        sys.stdout.write(json.dumps(row) + "\n")
        sys.stdout.flush()
        rows.append(row)
    if output is not None:
        output.parent.mkdir(parents=True, exist_ok=True)
        output.write_text("".join(json.dumps(row) + "\n" for row in rows))
        rows = [dict(row) for row in read_rows(output)]
        output.with_suffix(".md").write_text(render(rows))
    else:
        sys.stdout.write("\n" + render(rows))


if __name__ == "__main__":
    sys.exit(main())
