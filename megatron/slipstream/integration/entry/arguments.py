# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The command line of the training script: one parser of megatron's flags and ours.

:mod:`checks` does the steps after parsing.
"""

from __future__ import annotations

import argparse
import dataclasses
import logging
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn, get_type_hints
from unittest import mock

import torch

from megatron.slipstream.integration.cpu import cpu_only
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.launcher import rank
from megatron.slipstream.options import preflight
from megatron.slipstream.options.budget import complete_arguments
from megatron.slipstream.options.config_file import config_from_environment
from megatron.slipstream.options.datasets import read_tokenizer
from megatron.slipstream.options.fields import GROUPS, OffloadConfig
from megatron.slipstream.options.model import (
    MODULE_NAMES,
    graphed_modules,
    offloads_with_our_engine,
)
from megatron.slipstream.options.modules import has_layers, own_modules
from megatron.slipstream.options.rules import given_flags, nearest_flags
from megatron.slipstream.patches import table
from megatron.slipstream.patches.table import Feature

logger = logging.getLogger(__name__)

# Megatron's defaults assume a GPU. These come before the user's flags, so the user's win.
_CPU_DEFAULTS = """
    --distributed-backend gloo --transformer-impl local --num-workers 0 --use-cpu-initialization
    --no-gradient-accumulation-fusion --no-persist-layer-norm --no-rope-fusion
    --no-masked-softmax-fusion --no-bias-gelu-fusion --no-bias-swiglu-fusion
    --no-bias-dropout-fusion
"""

# Megatron assumes Apex's fused weight gradient and raises without it in the first forward of the
# output layer, on that pipeline stage only; the others then hang.
_GPU_DEFAULTS = "--no-gradient-accumulation-fusion"
_APEX_FUSED_WEIGHT_GRADIENT = "fused_weight_gradient_mlp_cuda"
"""The extension module of Apex that megatron's gradient_accumulation_fusion calls."""

_SEVERAL_QUEUES = frozenset(
    "--use-megatron-fsdp --use-torch-fsdp2 --overlap-moe-expert-parallel-comm "
    "--pipeline-model-parallel-comm-backend".split()
)
"""Flags whose communication (of the last, 'ucc') must not wait for kernels of the same queue."""

_EXAMPLES = """\
examples:
  Tokenise the text that comes with the repository, then train on it with offloading:

    python tools/preprocess_text.py examples/data/first_folio/*.txt --output-prefix .cache/text
    python pretrain_gpt.py --data-path .cache/text --tokenizer-json .cache/text-tokenizer.json \\
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \\
        --max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 \\
        --train-iters 20 --eval-interval 20 --eval-iters 2 --log-interval 1 --split 95,5,0 \\
        --fine-grained-activation-offloading --offload-modules core_attn attn_proj mlp_norm

  Whole documents side by side, none of which sees another, on two processes as a pipeline:

    python -m torch.distributed.run --nproc-per-node 2 pretrain_gpt.py ... --micro-batch-size 1 \\
        --pipeline-model-parallel-size 2 --sequence-packing balanced
"""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our argument groups; the flags are the field names of their dataclasses."""
    for options, title in GROUPS:
        _add_group(parser, options, title)

    # argparse would print megatron's thousand-line usage before the one line that matters.
    def error(message: str) -> NoReturn:
        compat.refuse_later_flags(message)
        known = parser._option_string_actions
        words = (word.rstrip(":,").split("=")[0] for word in message.split() if word[:2] == "--")
        unknown = [word for word in words if word not in known]
        raise ValueError(message + nearest_flags(unknown, known))

    parser.error = error  # type: ignore[method-assign]
    return parser


def add_offload_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add only the engine's flags: an ``extra_args_provider`` for other scripts.

    Raises ``ValueError`` if the settings file, which sets their defaults, cannot be used.
    """
    _add_group(parser, *GROUPS[0])
    return parser


def _add_group(parser: argparse.ArgumentParser, options: type, title: str) -> None:
    from megatron.training.argument_utils import ArgumentGroupFactory

    # Megatron's factory needs types, but postponed annotations are strings.
    types = get_type_hints(options)
    for field in dataclasses.fields(options):
        # It warns about types it cannot infer, even if the field specifies how it is parsed.
        is_told = "type" in field.metadata.get("argparse_meta", {})
        field.type = str if is_told else types[field.name]
    ArgumentGroupFactory(options).build_group(parser, title)
    if options is OffloadConfig:
        # The values of the settings file are the flags' defaults.
        parser.set_defaults(**dataclasses.asdict(config_from_environment()))


def parse(argv: Sequence[str], defaults: Sequence[str] = ()) -> Any:
    """Return megatron's arguments with our fields, unchecked, from flags and their defaults.

    The CPU shims must be in place (:func:`cpu_only.install_training_shims`). Raises ``ValueError``
    for a flag that is unknown, has an invalid value, or cannot be used with this parser.
    """
    if {"-h", "--help", "--help-all"} & set(argv):
        raise ValueError("the flags ask for help, so there is nothing to check; leave --help out")
    if "--yaml-cfg" in given_flags(argv):
        raise ValueError(
            "yaml_cfg is not supported with this script because megatron's YAML path drops the "
            "flags of others; give the settings as flags"
        )
    from megatron.training import arguments as megatron_arguments

    # Megatron's parser always reads the arguments of the process.
    program = sys.argv[0] if sys.argv else "pretrain_gpt.py"
    with mock.patch.object(sys, "argv", [program, *defaults, *argv]):
        args = megatron_arguments.parse_args(add_arguments)
    complete_arguments(args)
    if args.moe_layer_freq == 1 and "mlp" in graphed_modules(args) and has_layers(args, "-"):
        # megatron-core asks this option whether there are dense layers, of hybrid models, too.
        args.moe_layer_freq = 2
    # Megatron requires a module, even to offload only the inputs of checkpoints.
    is_own = offloads_with_our_engine(args)
    if is_own and args.offload_checkpoint_inputs:
        args.offload_modules = args.offload_modules or ["core_attn"]
    if is_own and own_modules(args):
        table.apply(Feature.MODULE_NAMES)
    return args


def apply_tokenizer(args: Any) -> None:
    """Take vocabulary size and end-of-document token from ``tokenizer_json``, if it is set."""
    if args.tokenizer_json is None:
        return
    vocab_size, end_of_document = read_tokenizer(Path(args.tokenizer_json))
    if args.tokenizer_type not in (None, "NullTokenizer"):
        raise ValueError(
            f"tokenizer_type={args.tokenizer_type} is not supported with tokenizer_json because "
            "the file stands for the tokenizer; remove one of the two"
        )
    args.tokenizer_type = "NullTokenizer"  # the text is tokenised already; only sizes are needed
    args.vocab_size = vocab_size
    args.null_tokenizer_eod_id = end_of_document


def use_one_device_queue(argv: Sequence[str]) -> None:
    """Set ``CUDA_DEVICE_MAX_CONNECTIONS`` to 1 if it is not set. Call before CUDA starts.

    Streams that wait then slow no copies down (docs/design/overhead.md, "One queue"), and megatron
    requires it for tensor and context parallelism up to Hopper. On later GPUs megatron accepts it;
    which GPU it is cannot be asked before CUDA starts.
    """
    if not _SEVERAL_QUEUES & given_flags(argv):
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")


def defaults_of_machine(argv: Sequence[str]) -> list[str]:
    """Return and log flags that training on this machine needs and the user did not give."""
    given = given_flags(argv)
    if torch.cuda.is_available():
        needed, reason = _GPU_DEFAULTS, "Apex is not installed; running"
        if preflight.is_installed(_APEX_FUSED_WEIGHT_GRADIENT):
            return []
    else:
        needed, reason = _CPU_DEFAULTS, "no GPU found; running on the CPU"
    flags = (flag.split() for flag in re.findall(r"--\S+(?: [^-\s]\S*)?", needed))
    added = [word for words in flags if words[0] not in given for word in words]
    if added and rank() == 0:
        logger.info("%s with %s", reason, " ".join(added))
    return added


def print_help(everything: bool) -> None:
    """Print our flags with examples; with ``everything`` also megatron's flags."""
    cpu_only.install_training_shims()
    modules = (
        "\nwhat to move (megatron's --fine-grained-activation-offloading --offload-modules ...):\n"
    )
    width = max(map(len, MODULE_NAMES))
    modules += "".join(f"    {name:<{width}}  {what}\n" for name, what in MODULE_NAMES.items())
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py",
        description=(
            "Train a GPT model with megatron-core, with activations moved to the host during the "
            "forward pass and back before the backward pass needs them. Takes all of megatron's "
            "flags and those below."
        ),
        epilog=f"{_EXAMPLES}{modules}\nMegatron's own flags: --help-all",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="pretrain_gpt.py [megatron's flags] [slipstream's flags]",
        allow_abbrev=False,
    )
    if everything:
        from megatron.training.arguments import add_megatron_arguments

        add_megatron_arguments(parser)
    add_arguments(parser)
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (KeyError, TypeError, ValueError):
            # A bare '%' in megatron's help texts, which argparse cannot format.
            action.help = (action.help or "").replace("%", "%%")
    parser.print_help()
