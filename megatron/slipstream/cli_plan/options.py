# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The options of the ``plan`` sub-command."""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional

from megatron.slipstream.estimate.gpus import ACHIEVED_SHARE, GPUS
from megatron.slipstream.options.fields import AUTO_OVERHEAD_PERCENT, parse_percent

_EPILOG = """\
Examples with a recorded trace (training writes one with --offload-trace-path trace.json):

  Show which groups move, when, and the cost:
    slipstream plan trace.json

  Find the fastest plan under 60 GiB, save it, and show where it stalls:
    slipstream plan trace.json --target-memory 60 --output plan.json --timeline plan.html

  Free the most memory for 1 percent of the step time:
    slipstream plan trace.json --max-overhead 1

  Plan the same iteration with sequences of 16,384 tokens:
    slipstream plan trace.json --seq-length 16k

  Draw memory against time for all targets:
    slipstream plan trace.json --frontier frontier.png

Examples of what fits (nothing is run; 8k is 8192 tokens):

  The longest sequence of Llama-3-8B on one H100, with gradients in bfloat16 and no optimizer:
    slipstream plan --hf-config config.json --longest-sequence --gpu h100 --state-gib 30 \\
        --cross-entropy-fusion-impl te

  The same for 64 GPUs, with 100 GiB of host memory for each, compared at 32k tokens:
    slipstream plan --hf-config config.json --longest-sequence --gpu h200 --pp 4 --dp 16 \\
        --host-memory 100 --seq-length 32k

  The largest micro-batch of a training command:
    slipstream plan --largest-micro-batch --gpu h100 -- torchrun --nproc-per-node 8 ...

Examples before the first run, without a GPU (sizes follow from shapes, times are estimated):

  Plan megatron's flags, or a whole command (not a shell script); needs megatron-core:
    slipstream plan --gpu h200 -- --num-layers 32 --hidden-size 4096 ...
    slipstream plan --gpu h200 -- torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 32 ...
    slipstream plan --gpu h200 --args-file model.yaml

  Plan the config.json of a model, with training options:
    slipstream plan --hf-config config.json --seq-length 8192 --pp 4 --gpu h200

  Plan some modules only, on a GPU that is not in the table:
    slipstream plan --hf-config config.json --seq-length 8192 \\
        --offload-modules core_attn attn_proj --gpu h100 --tflops 400 --gb-per-s 25

A timeline as .json opens in https://ui.perfetto.dev. A frontier as .json holds every plan of the
sweep. Times are simulated from those in the trace: a real step stalls at least as long.

Exit status: 0; 2 for invalid options; 3 if no plan keeps to --target-memory (the shown plan has the
lowest peak) or no size fits; 4 if the trace lacks the times or memory readings that a goal needs.
"""

_UNITS = {"": 1, "k": 1 << 10, "m": 1 << 20}


def parse_tokens(text: str) -> int:
    """Return a number of tokens; ``8k`` is 8192, ``1m`` is 1048576.

    Raises:
        argparse.ArgumentTypeError: The text is not such a number.
    """
    found = re.fullmatch(r"(-?\d+)([km]?)", text.strip().lower())
    if found is None:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not a number of tokens, such as 8192, 8k or 1m"
        )
    return int(found[1]) * _UNITS[found[2]]


TRAINING: dict[str, tuple[tuple[str, ...], dict[str, Any]]] = {
    "seq_length": (
        ("--seq-length",),
        {"type": parse_tokens, "metavar": "N", "help": "tokens per sequence; 8k is 8192"},
    ),
    "micro_batch_size": (("--micro-batch-size",), {"type": int, "help": "sequences (default: 1)"}),
    "precision": (
        ("--precision",),
        {"choices": ("bf16", "fp16", "fp32"), "help": "precision of activations (default: bf16)"},
    ),
    "attention_backend": (
        ("--attention-backend",),
        {
            "choices": ("fused", "flash", "unfused", "local"),
            "help": "core attention of Transformer Engine, or 'local': megatron-core's plain "
            "modules without it (default: fused)",
        },
    ),
    "cross_entropy": (
        ("--cross-entropy-fusion-impl",),
        {"choices": ("native", "te"), "help": "fused cross entropy (default: not fused)"},
    ),
    "tp": (
        ("--tensor-model-parallel-size", "--tp"),
        {"type": int, "help": "tensor parallelism"},
    ),
    "sequence_parallel": (
        ("--sequence-parallel",),
        {"action": "store_true", "default": None, "help": "divide norms and residuals"},
    ),
    "cp": (
        ("--context-parallel-size", "--cp"),
        {"type": int, "help": "context parallelism"},
    ),
    "pp": (
        ("--pipeline-model-parallel-size", "--pp"),
        {"type": int, "help": "pipeline ranks"},
    ),
    "vpp": (
        ("--virtual-pipeline-model-parallel-size", "--vpp"),
        {"type": int, "help": "model chunks per rank, interleaved"},
    ),
    "first": (
        ("--decoder-first-pipeline-num-layers",),
        {"type": int, "help": "layers of the first pipeline rank"},
    ),
    "last": (
        ("--decoder-last-pipeline-num-layers",),
        {"type": int, "help": "layers of the last pipeline rank"},
    ),
    "ep": (
        ("--expert-model-parallel-size", "--ep"),
        {"type": int, "help": "expert parallelism"},
    ),
    "etp": (
        ("--expert-tensor-parallel-size", "--etp"),
        {"type": int, "help": "tensor parallelism of experts (default: 1)"},
    ),
    "dp": (
        ("--data-parallel-size", "--dp"),
        {
            "type": int,
            "help": "replicas of the model, which share the optimizer's state with the "
            "context-parallel ranks (default: the fewest)",
        },
    ),
    "recompute_granularity": (
        ("--recompute-granularity",),
        {"choices": ("selective", "full"), "help": "modules, or whole layers, are recomputed"},
    ),
    "recompute_method": (
        ("--recompute-method",),
        {"choices": ("uniform", "block"), "help": "which layers are, of 'full' (default: uniform)"},
    ),
    "recompute_num_layers": (
        ("--recompute-num-layers",),
        {"type": int, "help": "layers of a checkpoint, or of 'block' (default: 1)"},
    ),
    "recompute_modules": (
        ("--recompute-modules",),
        {"nargs": "+", "metavar": "MODULE", "help": "modules that are recomputed"},
    ),
    "offload_modules": (
        ("--offload-modules",),
        {"nargs": "+", "metavar": "MODULE", "help": "modules that may move (default: all)"},
    ),
    "min_offloaded_tensor_size": (
        ("--min-offloaded-tensor-size",),
        {"type": int, "metavar": "N", "help": "smaller tensors stay (default: 1048576 elements)"},
    ),
}
"""Options for a model from --hf-config, by name in the namespace."""


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


def _config_file(text: str) -> Path:
    path = Path(text)
    return path / "config.json" if path.is_dir() else path


def flag_of(name: str, options: argparse.Namespace) -> str:
    """Return the option as the user typed it, or its first spelling; ``name`` is its ``dest``."""
    first = TRAINING[name][0][0] if name in TRAINING else "--" + name.replace("_", "-")
    return str(options.typed.get(name, first))


def as_typed(message: str, options: argparse.Namespace) -> str:
    """Replace megatron's names in a message about a model by the user's options."""
    for name in TRAINING:
        megatrons = TRAINING[name][0][0].removeprefix("--").replace("-", "_")
        # Short names can be ordinary words, unless a value follows.
        found = rf"(?<![\w-])(?:{megatrons}{'' if '_' in megatrons else '(?==)'}|{name}(?==))\b"
        message = re.sub(found, flag_of(name, options), message)
    return message.replace("num_microbatches=", "--num-micro-batches=")


SEARCH = ("longest_sequence", "largest_micro_batch", "memory", "margin", "host_memory", "json")
"""Options of the search for the largest size that fits."""

AIMS = (*("target_memory", "max_overhead", "fraction", "output", "timeline", "frontier", "rank"),)
"""Options of one plan."""

UNTIMED = (
    *("gpu", "achieved_share", "tflops", "gb_per_s", "num_micro_batches", "rank", "state_gib"),
    *SEARCH,
)
"""Options that apply only without recorded times."""


def add_options(
    commands: argparse._SubParsersAction[argparse.ArgumentParser],
    run: Callable[[argparse.Namespace], int],
) -> None:
    """Add the sub-command; it calls ``run`` with the options."""
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
    plan.add_argument(
        "--recorded-seq-length",
        type=parse_tokens,
        metavar="N",
        help="the length of a trace's sequences, for --seq-length, if the trace does not say it",
    )
    other = plan.add_argument_group("a model instead of a trace")
    other.add_argument(
        "--hf-config",
        type=_config_file,
        metavar="FILE",
        help="config.json of a Hugging Face model, or the folder that holds it",
    )
    other.add_argument(
        "--args-file",
        type=Path,
        metavar="FILE",
        help="megatron's flags as text, or as YAML ('--num-layers: 32'; MODEL_ARGS at the top)",
    )
    training = plan.add_argument_group(
        "training options (with --hf-config)",
        "The names are megatron's. With a trace, --seq-length plans it as if its sequences had "
        "this length.",
    )
    for destination, (names, options) in TRAINING.items():
        if options.get("type") is int:
            options = {"metavar": "N", **options}
        if "action" not in options:
            options = {"action": _AsTyped, **options}
        training.add_argument(*names, dest=destination, **options)
    _add_search(plan.add_argument_group("the largest size that fits (without a trace)"))
    _add_gpu(plan.add_argument_group("hardware and schedule (without a trace)"))
    _add_aim(plan.add_argument_group("goals"))
    _add_files(plan.add_argument_group("output"))
    hint = "; put megatron's flags after '--'"
    plan.set_defaults(run=run, typed={}, hint_for_unknown=hint)


def _add_search(group: argparse._ArgumentGroup) -> None:
    searched = group.add_mutually_exclusive_group()
    searched.add_argument(
        "--longest-sequence",
        action="store_true",
        default=None,
        help="find the longest sequence that fits without offloading, with recomputation, with "
        "the built-in engine and with a memory budget; --seq-length N also compares them at N",
    )
    searched.add_argument(
        "--largest-micro-batch",
        action="store_true",
        default=None,
        help="find the largest micro-batch of sequences of --seq-length tokens",
    )
    group.add_argument(
        "--memory", type=float, metavar="GIB", help="device memory (default: the GPU's)"
    )
    group.add_argument(
        "--margin",
        type=float,
        metavar="GIB",
        help="device memory left for the CUDA context, communication and fragmentation (default: "
        "2%% of it)",
    )
    group.add_argument(
        "--host-memory", type=float, metavar="GIB", help="host memory of a rank (default: no limit)"
    )
    group.add_argument("--json", type=Path, metavar="FILE", help="write the answer for tools")


def _add_gpu(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--gpu", metavar="NAME", help="a100, b200, gb200, h100, h20, h200 or l40s (default: h200)"
    )
    group.add_argument(
        "--achieved-share",
        type=float,
        metavar="SHARE",
        help="fraction of its peak rate that matrix products reach (default: "
        f"{ACHIEVED_SHARE:g}, on an h100 {GPUS['h100'].achieved_share:g})",
    )
    group.add_argument("--tflops", type=float, metavar="T", help="their rate in TFLOP/s, instead")
    group.add_argument(
        "--gb-per-s",
        type=float,
        metavar="GB",
        help="bandwidth of copies each way (slipstream doctor measures it)",
    )
    group.add_argument(
        "--num-micro-batches",
        type=int,
        metavar="N",
        help="micro-batches of an iteration (default: two rounds of the pipeline)",
    )
    group.add_argument(
        "--rank", type=int, metavar="N", help="plan this pipeline rank only (default: all)"
    )
    group.add_argument(
        "--state-gib",
        type=float,
        metavar="GIB",
        help="weights, gradients and optimizer of a rank (default: from the parameters)",
    )


def _add_aim(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--target-memory",
        type=float,
        metavar="GIB",
        help="lower the device peak to this many GiB in the least time",
    )
    group.add_argument(
        "--max-overhead",
        type=parse_percent,
        metavar="PERCENT",
        help="limit the time added to the step, in percent of its compute time ('auto' is "
        f"{AUTO_OVERHEAD_PERCENT:g})",
    )
    group.add_argument(
        "--fraction",
        type=float,
        metavar="F",
        help="move this fraction of each pass's groups, 0 to 1; the latest ones stay",
    )


def _add_files(files: argparse._ArgumentGroup) -> None:
    files.add_argument(
        "--details",
        action="store_true",
        help="show every group of a plan, the bytes of a model's layers, and what fills the "
        "device at the largest size",
    )
    files.add_argument("--output", type=Path, metavar="PLAN.json", help="the plan, with its trace")
    files.add_argument(
        "--timeline",
        type=Path,
        metavar="FILE.{html,json}",
        help="compute, copies, stalls and memory over time: a page for a browser, or a trace for "
        "Perfetto",
    )
    files.add_argument(
        "--frontier",
        type=Path,
        metavar="FILE.{png,json}",
        help="plan for many targets, and draw or write device peak against overhead",
    )
