# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Train two small models with and without offloading, and compare: loss, gradients, memory.

Two transformers (HybridModel), a dense one and a mixture of experts, are trained by pretrain_gpt.py
on ten plays by Shakespeare, each once with activations offloaded by Slipstream and once without.
Everything that training computes must be the same to the last bit; the activations' peak in device
memory must not. Needs no GPU and no network.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import MofNCompleteColumn, Progress, TimeElapsedColumn
from rich.table import Table

from megatron.slipstream.launcher import INTERRUPTED
from megatron.slipstream.plan.progress_bar import columns

ROOT = Path(__file__).resolve().parent.parent
CORPUS = ROOT / "examples" / "data" / "first_folio"
VOCAB_SIZE = 2048

_SHARED_FLAGS = """
    --hidden-size 128 --num-attention-heads 4 --swiglu --disable-bias-linear
    --seq-length 128 --max-position-embeddings 128 --position-embedding-type rope
    --untie-embeddings-and-output-weights --attention-dropout 0 --hidden-dropout 0
    --micro-batch-size 4 --global-batch-size 8
    --lr 2e-3 --min-lr 2e-4 --lr-decay-style cosine --lr-warmup-fraction 0.125 --weight-decay 0.1
    --adam-beta2 0.95
    --split 95,5,0 --eval-iters 8 --eval-before-training --log-interval 1 --seed 1234
""".split()
# LayerNorm (the default), not RMSNorm: without a GPU, torch makes RMSNorm of several operations,
# and megatron's marks change the order in which their gradients are added, moved or not.

_MODEL_FLAGS: Mapping[str, list[str]] = {
    "dense": f"--hybrid-layer-pattern {6 * '*-'} --ffn-hidden-size 256".split(),
    "moe": (
        f"--hybrid-layer-pattern {6 * '*E'} --ffn-hidden-size 128 --num-experts 4 "
        "--moe-router-topk 2 --moe-aux-loss-coeff 0.01 --moe-grouped-gemm"
    ).split(),
}
_OFFLOAD_FLAGS = """
    --fine-grained-activation-offloading --min-offloaded-tensor-size 1024 --offload-modules
""".split()
_OFFLOAD_MODULES: Mapping[str, list[str]] = {
    "dense": "attn_norm qkv_linear core_attn attn_proj mlp_norm".split(),
    "moe": "attn_norm qkv_linear core_attn attn_proj mlp_norm expert_fc1 moe_act".split(),
}
# Transformer Engine's kernels, told to be reproducible, or off and on could not be compared.
_GPU_FLAGS = """
    --bf16 --transformer-impl transformer_engine --attention-backend fused
    --no-gradient-accumulation-fusion --deterministic-mode
""".split()
_PROGRESS_LINE = re.compile(r"slipstream: iteration (\d+)/\d+: (.*)")


_NEXT = (
    "Now your model: add --fine-grained-activation-offloading --offload-modules core_attn "
    "attn_proj to its flags; ./run train --help lists the modules"
)


@dataclass
class Run:
    """One training process: which model, with or without offloading, and its files."""

    model: str
    offload: bool
    folder: Path
    seconds: float = 0.0
    process: subprocess.Popen[str] | None = None

    @property
    def name(self) -> str:
        return f"{self.model}, offloading {'on' if self.offload else 'off'}"

    def file(self, kind: str) -> Path:
        return self.folder / f"{self.model}-{'on' if self.offload else 'off'}{kind}"

    def record(self) -> dict[str, Any]:
        return json.loads(self.file(".json").read_text(encoding="utf-8"))


class DemoError(Exception):
    """Something that ends the demonstration; its text is for the user."""


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    console = Console()
    folder = Path(args.output_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        on_gpu = _use_gpu(args.device, console)
        started = time.monotonic()
        data = _tokenise(folder, console)
        runs = [Run(m, offload, folder) for m in args.models for offload in (False, True)]
        _train_all(runs, data, args, on_gpu, console)
        results = {model: _compare(model, runs) for model in args.models}
        seconds = time.monotonic() - started
    except KeyboardInterrupt:
        Console(stderr=True).print("interrupted")
        return INTERRUPTED
    except (DemoError, OSError) as error:
        Console(stderr=True).print(f"error: {error}", style="bold red", highlight=False)
        return 1
    content = {"device": "cuda" if on_gpu else "cpu", "seconds": seconds, "models": results}
    figures = Path(args.json) if args.json else folder / "demo.json"
    figures.write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    _show_reports(runs, console)
    _show_summary(results, on_gpu, console)
    picture = _draw(runs, results, folder)
    console.print(f"{seconds:.0f} s; figures in {figures}" + picture, highlight=False)
    console.print(_NEXT, highlight=False, markup=False, soft_wrap=True)
    return 0 if all(_succeeded(result) for result in results.values()) else 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__,
        epilog="Exit code 0 means: bit-equal, less memory, and a held-out loss that fell.",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--output-dir",
        default=str(ROOT / ".cache" / "demo"),
        help="where the tokenised text, logs, reports and the picture go (.cache/demo)",
    )
    parser.add_argument("--json", metavar="FILE", help="figures (demo.json in the output folder)")
    parser.add_argument("--iterations", type=int, default=80, help="per run (%(default)s)")
    parser.add_argument(
        "--models", nargs="+", choices=list(_MODEL_FLAGS), default=list(_MODEL_FLAGS)
    )
    parser.add_argument(
        "--device", choices=["auto", "cpu", "cuda"], default="auto", help="(%(default)s)"
    )
    parser.add_argument(
        "--jobs",
        type=int,
        default=min(2, os.cpu_count() or 1),
        help="runs at once without a GPU, one core each (%(default)s)",
    )
    return parser


def _use_gpu(choice: str, console: Console) -> bool:
    """Whether to train on a GPU, which megatron supports only with Transformer Engine."""
    if choice == "cpu":
        return False
    import torch

    available = torch.cuda.is_available()
    has_kernels = importlib.util.find_spec("transformer_engine") is not None
    if choice == "cuda" and not (available and has_kernels):
        lacking = "transformer_engine is not installed" if available else "torch sees no GPU"
        raise DemoError(f"--device cuda is not possible because {lacking}; leave it out")
    if available and not has_kernels:
        console.print("transformer_engine is not installed: training on the CPU instead of the GPU")
    return available and has_kernels


def _tokenise(folder: Path, console: Console) -> Path:
    """The dataset's prefix; made once and found again by what it was made from."""
    sys.path.insert(0, str(ROOT / "tools"))
    import preprocess_text

    files = sorted(CORPUS.glob("*.txt"))
    if not files:
        raise DemoError(f"there is no text in {CORPUS}; restore it from the repository")
    digest = hashlib.sha256(Path(preprocess_text.__file__).read_bytes())
    for file in files:
        digest.update(file.read_bytes())
    prefix = folder / f"first_folio-{VOCAB_SIZE}-{digest.hexdigest()[:12]}"
    if not Path(f"{prefix}.idx").exists():
        try:
            summary = preprocess_text.preprocess(files, prefix, VOCAB_SIZE, overwrite=True)
        except ValueError as error:
            raise DemoError(str(error)) from error
        console.print(
            f"tokenised {len(files)} plays: {summary.num_tokens} tokens of a vocabulary of "
            f"{summary.vocab_size}",
            highlight=False,
        )
    return prefix


# Training


class _Bars(contextlib.AbstractContextManager["_Bars"]):
    """Shows the runs on a terminal, a bar each."""

    def __init__(self, runs: Sequence[Run], total: int, console: Console) -> None:
        shown = columns(MofNCompleteColumn, TimeElapsedColumn, has_figures=True)
        self._progress = Progress(*shown, console=console)
        self._tasks = {
            run.name: self._progress.add_task(run.name, total=total, start=False, figures="waiting")
            for run in runs
        }

    def __enter__(self) -> _Bars:
        self._progress.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._progress.stop()

    def start(self, run: Run) -> None:
        self._progress.start_task(self._tasks[run.name])
        self._progress.update(self._tasks[run.name], figures="starting")

    def step(self, run: Run, done: int, figures: str) -> None:
        self._progress.update(self._tasks[run.name], completed=done, figures=figures)

    def stop(self, run: Run) -> None:
        self._progress.stop_task(self._tasks[run.name])


class _Lines(contextlib.AbstractContextManager["_Lines"]):
    """Shows the runs in a file or pipe, a line now and then."""

    NUM_LINES = 8
    """Lines of each run between its first and its last."""

    def __init__(self, runs: Sequence[Run], total: int, console: Console) -> None:
        self._width = max(len(run.name) for run in runs)
        self._total, self._console = total, console
        self._interval = max(1, total // self.NUM_LINES)

    def __exit__(self, *_: object) -> None:
        pass

    def start(self, run: Run) -> None:
        self._say(run, "starting")

    def step(self, run: Run, done: int, figures: str) -> None:
        if done % self._interval == 0 or done == self._total:
            self._say(run, f"iteration {done}/{self._total}: {figures}")

    def stop(self, run: Run) -> None:
        self._say(run, f"ended after {run.seconds:.0f} s")

    def _say(self, run: Run, what: str) -> None:
        line = f"{run.name:<{self._width}}  {what}"
        self._console.print(line, highlight=False, markup=False, soft_wrap=True)


def _train_all(
    runs: Sequence[Run], data: Path, args: argparse.Namespace, on_gpu: bool, console: Console
) -> None:
    """Run every process, a few at a time on the CPU, and show how they come along."""
    jobs = 1 if on_gpu else max(1, args.jobs)
    display = (_Bars if console.is_terminal else _Lines)(runs, args.iterations, console)
    with display, ThreadPoolExecutor(jobs) as pool:
        futures = []
        for run in runs:
            flags = _flags(run, data, args.iterations, on_gpu)
            futures.append(pool.submit(_train, run, flags, on_gpu, display))
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for run in runs:
                if run.process is not None:
                    run.process.terminate()
            raise


def _flags(run: Run, data: Path, iterations: int, on_gpu: bool) -> list[str]:
    flags = [*_SHARED_FLAGS, *_MODEL_FLAGS[run.model]]
    flags += ["--data-path", str(data), "--tokenizer-json", f"{data}-tokenizer.json"]
    flags += ["--data-cache-path", str(run.folder / "indices")]
    flags += ["--megatron-output-path", "-"]
    flags += ["--train-iters", str(iterations), "--eval-interval", str(iterations)]
    flags += ["--run-record-path", str(run.file(".json"))]
    if on_gpu:
        flags += _GPU_FLAGS
    if run.offload:
        flags += [*_OFFLOAD_FLAGS, *_OFFLOAD_MODULES[run.model]]
        flags += ["--offload-report-path", str(run.file("-report.json"))]
    return flags


def _train(run: Run, flags: Sequence[str], on_gpu: bool, display: _Bars | _Lines) -> None:
    """One training process; its output goes to a log file, its progress to the display."""
    for kind in (".json", "-report.json"):
        run.file(kind).unlink(missing_ok=True)
    display.start(run)
    started = time.monotonic()
    with run.file(".log").open("w", encoding="utf-8") as log:
        command = [sys.executable, str(ROOT / "pretrain_gpt.py"), *flags]
        process = subprocess.Popen(
            command,
            env=_environment(on_gpu),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
        )
        run.process = process
        assert process.stdout is not None
        with process:
            for line in process.stdout:
                log.write(line)
                match = _PROGRESS_LINE.search(line)
                if match:
                    display.step(run, int(match[1]), match[2])
    run.seconds = time.monotonic() - started
    display.stop(run)
    if process.returncode != 0 or not run.file(".json").exists():
        raise DemoError(f"the run '{run.name}' failed; the end of {run.file('.log')} says why")


def _environment(on_gpu: bool) -> dict[str, str]:
    """The training processes' environment: one thread each, the same for all of them."""
    distributed = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
    environment = {name: value for name, value in os.environ.items() if name not in distributed}
    path = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    environment["PYTHONPATH"] = os.pathsep.join(path)
    if on_gpu:
        return environment
    # Sums over another number of threads round differently.
    return {**environment, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


# Results


def _compare(model: str, runs: Iterable[Run]) -> dict[str, Any]:
    """Both runs of a model side by side."""
    pair = {run.offload: run for run in runs if run.model == model}
    off, on = pair[False].record(), pair[True].record()
    losses = [[step["loss"] for step in record["iterations"]] for record in (off, on)]
    evaluations = [record["evaluations"] for record in (off, on)]
    return {
        "iterations": len(losses[0]),
        "losses_equal": losses[0] == losses[1] and evaluations[0] == evaluations[1],
        "gradients_equal": off["gradients_sha256"] == on["gradients_sha256"],
        "weights_equal": off["weights_sha256"] == on["weights_sha256"],
        "first_loss": losses[0][0],
        "last_loss": losses[0][-1],
        "held_out_loss_before": evaluations[0][0]["loss"],
        "held_out_loss_after": evaluations[0][-1]["loss"],
        "activation_peak_bytes_off": _peak_bytes(off),
        "activation_peak_bytes_on": _peak_bytes(on),
        "bytes_offloaded_per_iteration": on["iterations"][-1]["bytes_offloaded"],
        "seconds_off": pair[False].seconds,
        "seconds_on": pair[True].seconds,
    }


def _peak_bytes(record: Mapping[str, Any]) -> int:
    """The highest activation peak once a plan is in force: the first iteration only records."""
    steps = record["iterations"]
    return max(step["activation_peak_bytes"] for step in steps[2:] or steps)


def _succeeded(result: Mapping[str, Any]) -> bool:
    return (
        all(result[f"{what}_equal"] for what in ("losses", "gradients", "weights"))
        and result["activation_peak_bytes_on"] < result["activation_peak_bytes_off"]
        and result["held_out_loss_after"] < result["held_out_loss_before"]
    )


def _show_reports(runs: Iterable[Run], console: Console) -> None:
    """The engine's report; the plan stays in the file."""
    from megatron.slipstream.fine_grained_activation_offload.report import Report

    for run in runs:
        path = run.file("-report.json")
        if not run.offload or not path.exists():
            continue
        text = Report.from_json(path.read_text(encoding="utf-8")).render()
        console.print(f"\n[bold]{run.name}[/bold]")
        console.print(text.split("\n\n")[0], highlight=False, markup=False, soft_wrap=True)
        console.print(f"with the plan: ./run report {path}", highlight=False)


def _show_summary(results: Mapping[str, Any], on_gpu: bool, console: Console) -> None:
    where = "GPU memory" if on_gpu else "memory that stands for the GPU's"
    table = Table(title=f"\nOffloading off and on ({where})")
    table.add_column("")
    for model in results:
        table.add_column(model, justify="right")

    def row(title: str, figure: Any) -> None:
        table.add_row(title, *(figure(result) for result in results.values()))

    def mib(result: Mapping[str, Any], key: str) -> str:
        return f"{result[key] / 2**20:.1f} MiB"

    row("training loss", lambda r: f"{r['first_loss']:.3f} -> {r['last_loss']:.3f}")
    row(
        "held-out loss",
        lambda r: f"{r['held_out_loss_before']:.3f} -> {r['held_out_loss_after']:.3f}",
    )
    for what in ("losses", "gradients", "weights"):
        row(f"{what}, off and on", lambda r, w=what: _verdict(r[f"{w}_equal"]))
    row("activation peak, off", lambda r: mib(r, "activation_peak_bytes_off"))
    row("activation peak, on", lambda r: mib(r, "activation_peak_bytes_on"))
    row("saved", lambda r: f"{100 * _saving(r):.0f} %")
    row("offloaded per iteration", lambda r: mib(r, "bytes_offloaded_per_iteration"))
    console.print(table)
    if not on_gpu:
        console.print(
            "Without a GPU, copies and computation share the processor: times mean nothing here.",
            soft_wrap=True,
        )


def _verdict(equal: bool) -> str:
    return "[green]bit-equal[/green]" if equal else "[bold red]DIFFERENT[/bold red]"


def _saving(result: Mapping[str, Any]) -> float:
    return 1 - result["activation_peak_bytes_on"] / result["activation_peak_bytes_off"]


def _draw(runs: Sequence[Run], results: Mapping[str, Any], folder: Path) -> str:
    """Draw loss and peak; returns what to say about it."""
    try:
        import matplotlib
    except ImportError:
        return "; no picture, because matplotlib is not installed"
    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, (losses, peaks) = pyplot.subplots(1, 2, figsize=(10, 4), layout="constrained")
    for run in runs:
        values = [step["loss"] for step in run.record()["iterations"]]
        style = {"linestyle": ":", "linewidth": 3} if run.offload else {"alpha": 0.6}
        losses.plot(range(1, len(values) + 1), values, label=run.name, **style)
    same = all(result["losses_equal"] for result in results.values())
    title = "Same loss, bit by bit" if same else "Different loss"
    losses.set(xlabel="iteration", ylabel="training loss", title=title)
    losses.legend()
    for position, result in enumerate(results.values()):
        for shift, key, color in ((-0.2, "off", "tab:gray"), (0.2, "on", "tab:blue")):
            mib = result[f"activation_peak_bytes_{key}"] / 2**20
            label = f"offloading {key}" if position == 0 else None
            bar = peaks.bar(position + shift, mib, 0.4, color=color, label=label)
            peaks.bar_label(bar, fmt="%.1f")
    peaks.set_xticks(range(len(results)), list(results))
    peaks.set(ylabel="peak of the activations (MiB)", title="Device memory")
    peaks.margins(y=0.25)
    peaks.legend(loc="upper center", ncols=2)
    path = folder / "demo.png"
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
    return f", picture in {path}"


if __name__ == "__main__":
    sys.exit(main())
