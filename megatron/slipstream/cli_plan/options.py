# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The options of the ``plan`` sub-command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any, NamedTuple, Optional

from megatron.slipstream.estimate.gpus import ACHIEVED_SHARE, H100_SHARE
from megatron.slipstream.estimate.model_shapes import ATTENTION_BACKENDS
from megatron.slipstream.options.fields import AUTO_OVERHEAD_PERCENT, parse_percent
from megatron.slipstream.options.rules import as_flag

_EPILOG = """\
Examples (nothing is run; 8k is 8192 tokens):

  The longest sequence of Llama-3-8B on one H100, with gradients in bfloat16 and no optimizer:
    slipstream plan --hf-config config.json --longest-sequence --gpu h100 --state-gib 30 \\
        --cross-entropy-fusion-impl te

  The fastest plan under 60 GiB of a recorded iteration (--offload-trace-path trace.json):
    slipstream plan trace.json --target-memory 60 --timeline plan.html

With megatron-core, the flags of a training are planned, too: slipstream plan -- torchrun ...
Times are simulated from those of the trace, or estimated: a real step stalls at least as long.

Exit status: 0; 2 for invalid options; 3 if no plan keeps to --target-memory (the shown plan has the
lowest peak) or no size fits; 4 if the trace lacks the times or memory readings that a goal needs.
"""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_tokens(text: str) -> int:
    """Return a number of tokens, or ``ArgumentTypeError``; ``8k`` is 8192, ``1m`` is 1048576."""
    found = re.fullmatch(r"(-?\d+)([km]?)", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens, such as 8192, 8k or 1m"
        )
    return int(found[1]) * _UNITS[found[2]]


class Given(NamedTuple):
    """An option of the sub-command."""

    flags: str
    """Its spellings, the first of which messages use."""
    kind: Any
    """The type of its value; or the values to choose from; or 'flag', or 'names' for several."""
    help: str
    metavar: str = "N"

    @property
    def name(self) -> str:
        """Name in the namespace, which is megatron's."""
        return self.flags.split()[0].removeprefix("--").replace("-", "_")

    def add_to(self, group: argparse._ActionsContainer) -> None:
        options: dict[str, Any] = {"action": _AsTyped, "type": self.kind, "metavar": self.metavar}
        if self.kind == "flag":
            options = {"action": "store_true", "default": None}
        elif self.kind == "names":
            options = {"action": _AsTyped, "nargs": "+", "metavar": "MODULE"}
        elif isinstance(self.kind, tuple):
            options = {"action": _AsTyped, "choices": self.kind}
        group.add_argument(*self.flags.split(), help=self.help, **options)


def _config_file(text: str) -> Path:
    path = Path(text)
    return path / "config.json" if path.is_dir() else path


_RECORDED = Given("--recorded-seq-length", parse_tokens, "the length of a trace's sequences, for "
                  "--seq-length, if the trace does not say it")  # fmt: skip

_MODEL = (
    Given("--hf-config", _config_file, "config.json of a Hugging Face model, or the folder that "
          "holds it", "FILE"),
    Given("--args-file", Path, "a file of megatron's flags", "FILE"),
)  # fmt: skip

TRAINING = {
    given.name: given
    for given in (
        Given("--seq-length", parse_tokens, "tokens per sequence; 8k is 8192"),
        Given("--micro-batch-size", int, "sequences (default: 1)"),
        Given("--precision", ("bf16", "fp16", "fp32"), "precision of activations (default: bf16)"),
        Given("--attention-backend", ATTENTION_BACKENDS, "core attention of Transformer Engine, or "
              "'local': megatron-core's plain modules without it (default: fused)"),
        Given("--cross-entropy-fusion-impl", ("native", "te"),
              "fused cross entropy (default: not fused)"),
        Given("--tensor-model-parallel-size --tp", int, "tensor parallelism"),
        Given("--sequence-parallel", "flag", "divide norms and residuals"),
        Given("--context-parallel-size --cp", int, "context parallelism"),
        Given("--pipeline-model-parallel-size --pp", int, "pipeline ranks"),
        Given("--virtual-pipeline-model-parallel-size --vpp", int,
              "model chunks per rank, interleaved"),
        Given("--decoder-first-pipeline-num-layers", int, "layers of the first pipeline rank"),
        Given("--decoder-last-pipeline-num-layers", int, "layers of the last pipeline rank"),
        Given("--expert-model-parallel-size --ep", int, "expert parallelism"),
        Given("--expert-tensor-parallel-size --etp", int,
              "tensor parallelism of experts (default: 1)"),
        Given("--data-parallel-size --dp", int, "replicas of the model, which share the "
              "optimizer's state with the context-parallel ranks (default: the fewest)"),
        Given("--recompute-granularity", ("selective", "full"),
              "modules, or whole layers, are recomputed"),
        Given("--recompute-modules", "names", "modules that are recomputed"),
        Given("--offload-modules", "names", "modules that may move (default: all)"),
    )
}  # fmt: skip
"""Options for a model from --hf-config, by name in the namespace."""

_SEARCHED = (
    Given("--longest-sequence", "flag", "find the longest sequence that fits without offloading, "
          "with recomputation, with the built-in engine and with a memory budget; --seq-length N "
          "also compares them at N"),
    Given("--largest-micro-batch", "flag",
          "find the largest micro-batch of sequences of --seq-length tokens"),
)  # fmt: skip

_LIMITS = (
    Given("--memory", float, "device memory (default: the GPU's)", "GIB"),
    Given("--margin", float, "device memory left for the CUDA context, communication and "
          "fragmentation (default: 2%% of it)", "GIB"),
    Given("--host-memory", float, "host memory of a rank (default: no limit)", "GIB"),
)  # fmt: skip

_GPU = (
    Given("--gpu", str, "a100, b200, gb200, h100, h20, h200 or l40s (default: h200)", "NAME"),
    Given("--tflops", float, "rate that matrix products in 16 bits reach, in TFLOP/s (default: "
          f"{ACHIEVED_SHARE:g} of the peak, on an h100 {H100_SHARE:g})", "T"),
    Given("--gb-per-s", float, "bandwidth of copies each way (slipstream doctor measures it)",
          "GB"),
    Given("--num-micro-batches", int,
          "micro-batches of an iteration (default: two rounds of the pipeline)"),
    Given("--rank", int, "plan this pipeline rank only (default: all)"),
    Given("--state-gib", float,
          "weights, gradients and optimizer of a rank (default: from the parameters)", "GIB"),
)  # fmt: skip

_GOALS = (
    Given("--target-memory", float, "lower the device peak to this many GiB in the least time",
          "GIB"),
    Given("--max-overhead", parse_percent, "limit the time added to the step, in percent of its "
          f"compute time ('auto' is {AUTO_OVERHEAD_PERCENT:g})", "PERCENT"),
    Given("--fraction", float,
          "move this fraction of each pass's groups, 0 to 1; the latest ones stay", "F"),
)  # fmt: skip

_FILES = (
    Given("--details", "flag", "show every group of a plan, the bytes of a model's layers, and "
          "what fills the device at the largest size"),
    Given("--output", Path, "the plan, with its trace", "PLAN.json"),
    Given("--timeline", Path, "compute, copies, stalls and memory over time: a page for a browser, "
          "or a trace for Perfetto", "FILE.{html,json}"),
    Given("--frontier", Path,
          "plan for many targets, and draw or write device peak against overhead",
          "FILE.{png,json}"),
)  # fmt: skip


class _AsTyped(argparse.Action):
    """Stores a value, and records its option as spelled by the user in ``typed``."""

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: Any,
        option_string: Optional[str] = None,
    ) -> None:
        setattr(namespace, self.dest, values)
        namespace.typed = {**namespace.typed, self.dest: option_string}


def flag_of(name: str, options: argparse.Namespace) -> str:
    """Return the option as the user typed it, or its first spelling; ``name`` is its ``dest``."""
    return str(options.typed.get(name, as_flag(name)))


def refuse(
    options: argparse.Namespace, names: Iterable[str], where: str, why: str, cure: str = ""
) -> None:
    """Raise ``ValueError`` if one of the options is given where it is not supported."""
    for name in names:
        if getattr(options, name) is not None:
            flag = flag_of(name, options)
            raise ValueError(
                f"{flag} is not supported {where} because {why}; {cure}leave {flag} out"
            )


def as_typed(message: str, options: argparse.Namespace) -> str:
    """Replace megatron's names in a message about a model by the user's options."""
    for name in TRAINING:
        # A name without '_' can be an ordinary word, unless a value follows.
        found = rf"(?<![\w-]){name}{'' if '_' in name else '(?==)'}\b"
        message = re.sub(found, flag_of(name, options), message)
    return message.replace("num_microbatches=", "--num-micro-batches=")


SEARCH = tuple(given.name for given in (*_SEARCHED, *_LIMITS))
"""Options of the search for the largest size that fits."""

AIMS = ("target_memory", "max_overhead", "fraction", "output", "timeline", "frontier", "rank")

UNTIMED = (*(given.name for given in _GPU), *SEARCH)
"""Options that apply only without recorded times."""


def add_plan(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
) -> None:
    """Add the sub-command, which ``run`` carries out."""
    plan = commands.add_parser(
        "plan",
        help="plan a recorded iteration, or an estimated one; predict its time and memory",
        description="Plan the iteration of a trace file, or one estimated from a model's "
        "configuration: what moves when, step time, stalls and memory peaks. Or find the longest "
        "sequence or the largest micro-batch that fits. Needs no GPU.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    plan.add_argument(
        "words",
        nargs="*",
        metavar="TRACE.json | -- FLAGS",
        help="trace of one rank; or, after --, megatron's flags of a training",
    )
    _RECORDED.add_to(plan)
    training = (
        "The names are megatron's. With a trace, --seq-length plans it as if its sequences had "
        "this length."
    )
    for title, description, options in (
        ("a model instead of a trace", None, _MODEL),
        ("training options (with --hf-config)", training, TRAINING.values()),
        ("the largest size that fits (without a trace)", None, _LIMITS),
        ("hardware and schedule (without a trace)", None, _GPU),
        ("goals", None, _GOALS),
        ("output", None, _FILES),
    ):
        group = plan.add_argument_group(title, description)
        if options is _LIMITS:
            searched = group.add_mutually_exclusive_group()
            for given in _SEARCHED:
                given.add_to(searched)
        for given in options:
            given.add_to(group)
    hint = "; put megatron's flags after '--'"
    plan.set_defaults(run=run, typed={}, hint_for_unknown=hint)
