# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares attach() with other ways to offload: ``python -m benchmarks.attached --help``."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import gc
import importlib
import os
import platform
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Optional

import torch
from torch.utils.checkpoint import checkpoint

from benchmarks.measure import measure_memory
from benchmarks.rows import RowWriter
from benchmarks.ways import in_turn
from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.integration.attach.handle import Attached, attach

DESCRIPTION = """\
Compare ways to move what a model saves for backward to host memory, on the same weights and data:

  plain         nothing moves
  attach        Slipstream's attach(): the chosen sub-modules, by a plan, on streams of their own
  torchtune     OffloadActivations of torchtune, if it is installed: every saved tensor
  trl           the class of the same name of TRL, if it is installed
  save_on_cpu   torch.autograd.graph.save_on_cpu(pin_memory=True): every saved tensor, in order

An iteration is one forward and backward without an optimizer. Ways take turns, iteration by
iteration, so drift of clocks cancels; memory is measured for each alone. Each way's loss and
gradients are compared to those of 'plain', bit by bit.
"""

EPILOG = """\
examples:
  python -m benchmarks.attached --size tiny                      try it, without a GPU, in seconds
  python -m benchmarks.attached --size 1b                        a GPU with 40 GiB
  python -m benchmarks.attached --size 8b --checkpointing non-reentrant
  python -m benchmarks.attached --model llama --size 1b          Hugging Face's Llama instead
  python -m benchmarks.attached --size 1b --patterns 'layers.*.attn' --patterns 'layers.*.mlp'
  python -m benchmarks.attached --size 1b --config offload_max_overhead_percent=1

what is written, to --output FILE: a row about the machine, a row per iteration and way ('ms'), and
a summary row per way; a way that cannot run leaves a row with its error. What the table says:

  ms            median of an iteration, with the 20th and 80th percentile
  slower        by how much, against 'plain', median of neighbouring iterations
  act. peak     device memory at the peak, less weights and gradients
  saved         of that, against 'plain'
  same          whether every loss and gradient was that of 'plain', bit by bit, with kernels that
                add in the same order every time ('plain' itself: a second time)

reading it: 'attach' plans anew from times until about its fifteenth iteration, so keep --warmup at
20 or more on a GPU. Without a GPU, 'attach' imitates a device in host memory: its bytes are right,
its times mean nothing, and memory is not measured for the others.
"""

SIZES = {
    # hidden, layers, heads, vocabulary, sequence, batch
    "tiny": (64, 4, 4, 256, 64, 2),
    "1b": (2048, 16, 16, 32768, 4096, 2),
    "8b": (4096, 32, 32, 32768, 4096, 1),
}
"""Sizes of the models; with 8b, weights and gradients in bfloat16 take 26 GiB."""

WAYS = ("plain", "attach", "torchtune", "trl", "save_on_cpu")


def _of_torchtune(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    return importlib.import_module("torchtune.training").OffloadActivations()


def _of_trl(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    # It has to be told which tensors are parameters.
    package = importlib.import_module("trl.models.activation_offloading")
    return package.get_act_offloading_ctx_manager(model, warn_if_no_head=False)


OTHERS = {"torchtune": _of_torchtune, "trl": _of_trl}
"""What makes the context of a package, which is entered in every iteration."""


class Layer(torch.nn.Module):
    """A decoder layer: causal attention and a gated MLP, each behind a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attn_norm = torch.nn.RMSNorm(hidden)
        self.attn = Attention(hidden, heads)
        self.mlp_norm = torch.nn.RMSNorm(hidden)
        self.mlp = GatedMLP(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(torch.nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in split)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class GatedMLP(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = 256 * -(-8 * hidden // 768)
        self.up = torch.nn.Linear(hidden, 2 * inner, bias=False)
        self.down = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * value)


class Decoder(torch.nn.Module):
    """Takes token ids ``[b, s]``, returns the loss of predicting each next one."""

    patterns = ("layers.*",)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        hidden, num_layers, heads, vocabulary, *_ = SIZES[options.size]
        self.embedding = torch.nn.Embedding(vocabulary, hidden)
        self.layers = torch.nn.ModuleList(Layer(hidden, heads) for _ in range(num_layers))
        self.norm = torch.nn.RMSNorm(hidden)
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)
        self.checkpointing = options.checkpointing

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            if self.checkpointing == "none":
                x = layer(x)
            else:
                x = checkpoint(layer, x, use_reentrant=self.checkpointing == "reentrant")
        logits = self.head(self.norm(x))[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class Llama(torch.nn.Module):
    """The same of Hugging Face's classes."""

    patterns = ("model.model.layers.*",)

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        import transformers

        hidden, num_layers, heads, vocabulary, *_ = SIZES[options.size]
        config = transformers.LlamaConfig(
            vocab_size=vocabulary,
            hidden_size=hidden,
            intermediate_size=256 * -(-8 * hidden // 768),
            num_hidden_layers=num_layers,
            num_attention_heads=heads,
            use_cache=False,
        )
        self.model = transformers.LlamaForCausalLM(config)
        if options.checkpointing != "none":
            self.model.gradient_checkpointing_enable(
                {"use_reentrant": options.checkpointing == "reentrant"}
            )

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.model(input_ids=ids, labels=ids).loss


MODELS = {"decoder": Decoder, "llama": Llama}


class Unavailable(Exception):
    """A way cannot run here; the text says why."""


class Way(NamedTuple):
    """One way to keep what forward saves."""

    name: str
    model: torch.nn.Module
    context: Callable[[], contextlib.AbstractContextManager[Any]]
    """Entered around forward."""
    attached: Optional[Attached] = None

    def run(self, ids: torch.Tensor, accumulates: bool = False) -> torch.Tensor:
        """One iteration. Returns the loss; gradients are in the parameters."""
        if not accumulates:
            self.model.zero_grad(set_to_none=True)
        with self.context():
            loss = self.model(ids)
        loss.backward()
        return loss.detach()


def main(arguments: Optional[Sequence[str]] = None) -> int:
    """Run the command. Returns 0, or 2 for an error of the user's."""
    options = _parser().parse_args(arguments)
    # Read when cuBLAS is first used; without it deterministic algorithms are refused.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    try:
        _compare(options)
    except (ImportError, OSError, ValueError) as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.attached",
        description=DESCRIPTION,
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--model", choices=MODELS, default="decoder", help="whose classes (default: %(default)s)")
    add("--size", choices=SIZES, default="tiny", help="of the model (default: %(default)s)")
    add("--sequence", type=_positive, help="tokens of a sequence (default: that of the size)")
    add("--batch", type=_positive, help="sequences (default: that of the size)")
    add(
        "--checkpointing",
        choices=("none", "non-reentrant", "reentrant"),
        default="none",
        help="recompute every layer (default: %(default)s)",
    )
    add(
        "--way",
        action="append",
        choices=WAYS,
        help="measure this one beside 'plain'; may be given several times (default: all)",
    )
    add(
        "--patterns",
        action="append",
        metavar="P",
        help="sub-modules for attach(); may be given several times (default: every layer)",
    )
    add("--min-numel", type=int, help="elements of the least tensor that attach() moves")
    add(
        "--config",
        action="append",
        default=[],
        metavar="NAME=VALUE",
        help="a setting of OffloadConfig for attach(); may be given several times",
    )
    add("--warmup", type=_positive, default=20, help="iterations before (default: %(default)s)")
    add("--iterations", type=_positive, default=20, help="measured (default: %(default)s)")
    add("--output", type=Path, metavar="FILE", help="append rows to this file of JSON lines")
    return parser


def _positive(text: str) -> int:
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text} is not 1 or more")
    return value


def _compare(options: argparse.Namespace) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    if device.type == "cpu" and options.size != "tiny":
        raise ValueError(f"--size {options.size} needs a GPU, torch sees none; give --size tiny")
    now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
    writer = RowWriter(options.output, now)
    writer.write("machine", **_machine(options, device))
    plain = _build(options, device)
    ways = [Way("plain", plain, contextlib.nullcontext)]
    errors: dict[str, str] = {}
    wanted = options.way or WAYS
    for name in [name for name in WAYS[1:] if name in wanted]:
        try:
            ways.append(_way(name, options, plain, device))
        except Unavailable as error:
            errors[name] = str(error)
            writer.write("summary", way=name, error=str(error))
    *_, vocabulary, sequence, batch = SIZES[options.size]
    shape = (options.batch or batch, options.sequence or sequence)
    data = torch.Generator().manual_seed(1)
    ids = [torch.randint(0, vocabulary, shape, generator=data).to(device) for _ in range(4)]
    num_rounds = len(ways) * (options.warmup + options.iterations)
    with _progress(num_rounds + len(ways)) as advance:
        summaries = _measure(ways, ids, options, writer, advance)
    for summary in summaries:
        writer.write("summary", **summary)
    _print_table(summaries, errors)


def _machine(options: argparse.Namespace, device: torch.device) -> dict[str, Any]:
    name = torch.cuda.get_device_name() if device.type == "cuda" else platform.processor() or "CPU"
    settings = {key: value for key, value in vars(options).items() if key != "output"}
    return {"device": name, "torch": torch.__version__, "options": settings}


def _build(options: argparse.Namespace, device: torch.device) -> torch.nn.Module:
    torch.manual_seed(0)
    with device:
        model = MODELS[options.model](options)
    return model.to(torch.bfloat16 if device.type == "cuda" else torch.float32).train()


def _way(
    name: str, options: argparse.Namespace, plain: torch.nn.Module, device: torch.device
) -> Way:
    if name == "attach":
        return _attached_way(options, plain, device)
    if name == "save_on_cpu":
        pin = device.type == "cuda"
        return Way(name, plain, lambda: torch.autograd.graph.save_on_cpu(pin_memory=pin))
    if device.type != "cuda":
        raise Unavailable("needs a GPU")
    try:
        context = OTHERS[name](plain)
    except Exception as error:  # Whatever the package's own imports raise.
        raise Unavailable(f"{name} does not import: {error}") from error
    return Way(name, plain, lambda: context)


def _attached_way(options: argparse.Namespace, plain: torch.nn.Module, device: torch.device) -> Way:
    """A model of its own, so that nothing is hooked in the others', with the same weights."""
    model = _build(options, device)
    for module, other in zip(model.modules(), plain.modules(), strict=True):
        module._parameters.update(other._parameters)
    config = OffloadConfig(**dict(_setting(text) for text in options.config))
    sizes = {} if options.min_numel is None else {"min_offloaded_tensor_size": options.min_numel}
    if options.min_numel is None and options.size == "tiny":
        sizes = {"min_offloaded_tensor_size": 1}
    attached = attach(model, options.patterns or MODELS[options.model].patterns, config, **sizes)
    return Way("attach", model, contextlib.nullcontext, attached)


def _setting(text: str) -> tuple[str, Any]:
    name, separator, value = text.partition("=")
    if not separator or name not in OffloadConfig.__dataclass_fields__:
        raise ValueError(f"--config {text} is not NAME=VALUE with a name of OffloadConfig")
    for convert in (int, float):
        with contextlib.suppress(ValueError):
            return name, convert(value)
    return name, value


def _measure(
    ways: Sequence[Way],
    ids: Sequence[torch.Tensor],
    options: argparse.Namespace,
    writer: RowWriter,
    advance: Callable[[str], None],
) -> list[dict[str, Any]]:
    ms: dict[str, list[float]] = {way.name: [] for way in ways}
    for way in ways:
        for index in range(options.warmup):
            way.run(ids[index % len(ids)])
            advance(f"{way.name}: warming up")
    peaks = {}
    for way in ways:
        peaks[way.name] = _activation_peak_bytes(way, ids[0])
        advance(f"{way.name}: memory")
    is_same = _compare_results(ways, ids)
    gc.collect()
    for iteration in range(options.iterations):
        batch = ids[iteration % len(ids)]
        for way in in_turn(ways, iteration):
            took_ms = _timed(way, batch)
            ms[way.name].append(took_ms)
            writer.write("iteration", way=way.name, iteration=iteration, ms=took_ms)
            advance(f"{way.name}: {took_ms:.1f} ms")
    return [_summary(way, ms, peaks, is_same[way.name]) for way in ways]


def _compare_results(ways: Sequence[Way], ids: Sequence[torch.Tensor]) -> dict[str, Optional[bool]]:
    """Whether each way gives the loss and the gradients of 'plain', bit by bit.

    'plain' is compared with itself: where that differs, the others could not be told from it. On a
    GPU kernels add in any order unless they are asked not to; attention goes on doing so if it is
    only to warn. None where 'plain' has no such kernels.
    """
    is_same: dict[str, Optional[bool]] = dict.fromkeys((way.name for way in ways), True)
    torch.use_deterministic_algorithms(True)
    try:
        for batch in ids:
            try:
                expected = [result.clone() for result in _results(ways[0], batch)]
            except RuntimeError as error:
                sys.stderr.write(f"results are not compared: {error}\n")
                return dict.fromkeys(is_same)
            for way in ways:
                if not all(map(torch.equal, _results(way, batch), expected)):
                    is_same[way.name] = False
    finally:
        torch.use_deterministic_algorithms(False)
    return is_same


def _results(way: Way, batch: torch.Tensor) -> list[torch.Tensor]:
    loss = way.run(batch)
    return [loss, *(p.grad for p in way.model.parameters() if p.grad is not None)]


def _timed(way: Way, batch: torch.Tensor) -> float:
    """Milliseconds from an empty device to an empty device."""
    _synchronize(batch.device)
    start_s = time.perf_counter()
    way.run(batch)
    _synchronize(batch.device)
    return 1e3 * (time.perf_counter() - start_s)


def _synchronize(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def _activation_peak_bytes(way: Way, batch: torch.Tensor) -> Optional[int]:
    """Device memory at the peak of an iteration, less what is allocated before it.

    Gradients are there before, and are added to, so that they do not count.
    """
    way.run(batch)
    if batch.device.type == "cpu" and way.name not in ("plain", "attach"):
        return None  # Their host memory cannot be told from the device's.
    engine = None if way.attached is None else way.attached.engine
    figures = measure_memory(lambda _: [way.run(batch, accumulates=True)], engine, 1)
    return figures.act_bytes


def _summary(
    way: Way, ms: dict[str, list[float]], peaks: dict[str, Optional[int]], is_same: Optional[bool]
) -> dict[str, Any]:
    own = ms[way.name]
    ratios = [100 * (a / b - 1) for a, b in zip(own, ms["plain"], strict=True)]
    low, high = own[0], own[0]
    if len(own) > 1:
        fifths = statistics.quantiles(own, n=5, method="inclusive")
        low, high = fifths[0], fifths[-1]
    summary: dict[str, Any] = {
        "way": way.name,
        "num_iterations": len(own),
        "ms": statistics.median(own),
        "p20_ms": low,
        "p80_ms": high,
        "slower_percent": statistics.median(ratios),
        "activation_peak_bytes": peaks[way.name],
        "plain_activation_peak_bytes": peaks["plain"],
        "is_same": is_same,
    }
    if way.attached is not None:
        report = way.attached.report().ranks[0]
        summary |= {
            "d2h_bytes": report.d2h_bytes,
            "num_late": report.total.num_late,
            "host_allocated_bytes": report.host_allocated_bytes,
        }
    return summary


@contextlib.contextmanager
def _progress(total: int) -> Iterator[Callable[[str], None]]:
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    columns = (
        BarColumn(bar_width=30),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[text]}", style="dim"),
    )
    with Progress(*columns, console=Console(stderr=True)) as progress:
        task = progress.add_task("", total=total, text="")
        yield lambda text: progress.update(task, advance=1, text=text)


def _print_table(summaries: Sequence[dict[str, Any]], errors: dict[str, str]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("way", "ms", "p20-p80", "slower", "act. peak", "saved", "same")
    for column in table.columns[1:-1]:
        column.justify = "right"
    for row in summaries:
        peak, plain = row["activation_peak_bytes"], row["plain_activation_peak_bytes"]
        table.add_row(
            row["way"],
            f"{row['ms']:.1f}",
            f"{row['p20_ms']:.1f}-{row['p80_ms']:.1f}",
            f"{row['slower_percent']:+.1f}%",
            "-" if peak is None else f"{peak / 2**20:.1f} MiB",
            "-" if peak is None else f"{1 - peak / plain:.0%}",
            {True: "yes", False: "NO", None: "-"}[row["is_same"]],
        )
    for name, error in errors.items():
        table.add_row(name, "-", "-", "-", "-", "-", error)
    Console().print(table)


if __name__ == "__main__":
    sys.exit(main())
