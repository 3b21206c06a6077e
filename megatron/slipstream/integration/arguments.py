# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The command line of the training script: megatron's flags and ours, and every check of them.

What can be known to be wrong is a ``ValueError`` here, before megatron's own bare assertions and
long before training.
"""

from __future__ import annotations

import argparse
import dataclasses
import difflib
import itertools
import json
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any, Literal, NoReturn, Optional, get_type_hints

import torch

from megatron.slipstream import preflight
from megatron.slipstream.chunk_graphs.options import ChunkGraphOptions
from megatron.slipstream.config import (
    MODULE_NAMES,
    OffloadConfig,
    check_model_options,
    modules_at_the_edge_of_graphs,
)
from megatron.slipstream.context_parallel.options import (
    DynamicContextParallelOptions,
    check_dynamic_context_parallel,
)
from megatron.slipstream.estimate.file_errors import require_distinct, require_writable
from megatron.slipstream.integration import compat, cpu_only
from megatron.slipstream.integration.config_file import config_from_environment
from megatron.slipstream.integration.frameworks.options import OffloadOptions
from megatron.slipstream.packed_sequences.options import (
    PackingOptions,
    check_corpora,
    check_packing,
)

logger = logging.getLogger(__name__)

END_OF_DOCUMENT = "<|endoftext|>"
"""The special token that ``tools/preprocess_text.py`` puts between documents."""

# What megatron's defaults assume of a GPU. Given before the user's own flags, so the user's win.
_CPU_DEFAULTS: tuple[tuple[str, ...], ...] = (
    ("--distributed-backend", "gloo"),
    ("--transformer-impl", "local"),
    ("--num-workers", "0"),
    ("--use-cpu-initialization",),
    ("--no-gradient-accumulation-fusion",),
    ("--no-persist-layer-norm",),
    ("--no-rope-fusion",),
    ("--no-masked-softmax-fusion",),
    ("--no-bias-gelu-fusion",),
    ("--no-bias-swiglu-fusion",),
    ("--no-bias-dropout-fusion",),
)

_APEX_FUSED_WEIGHT_GRADIENT = "fused_weight_gradient_mlp_cuda"
"""The extension module of Apex that megatron's gradient_accumulation_fusion calls."""

_EXAMPLES = """\
examples:
  Tokenise the text that comes with the repository, then train on it with offloading:

    python tools/preprocess_text.py examples/data/first_folio/*.txt --output-prefix .cache/text
    python pretrain_gpt.py --data-path .cache/text --tokenizer-json .cache/text-tokenizer.json \\
        --num-layers 4 --hidden-size 128 --num-attention-heads 4 --seq-length 128 \\
        --max-position-embeddings 128 --micro-batch-size 4 --global-batch-size 8 --lr 1e-3 \\
        --train-iters 20 --eval-interval 20 --eval-iters 2 --log-interval 1 --split 95,5,0 \\
        --fine-grained-activation-offloading --offload-modules core_attn attn_proj mlp_norm

  The same model on two processes, as a pipeline:

    python -m torch.distributed.run --nproc-per-node 2 pretrain_gpt.py ... \\
        --pipeline-model-parallel-size 2

  Whole documents side by side, none of which sees another, instead of cuts of the text:

    python pretrain_gpt.py ... --micro-batch-size 1 --sequence-packing balanced
"""


@dataclass(frozen=True)
class EntryOptions:
    """Settings of the training script, beside those of the engine."""

    tokenizer_json: Optional[str] = None
    """Tokenizer file written by tools/preprocess_text.py. Sets the vocabulary size and the
    end-of-document token; replaces --tokenizer-type and --vocab-size."""

    progress: Literal["auto", "on", "off"] = "auto"
    """Loss and offloaded bytes on stderr: 'on' draws a progress bar; 'auto' does so on a terminal
    and otherwise logs a line every --log-interval iterations; 'off' shows neither."""

    eval_before_training: bool = False
    """Evaluate on the validation set before the first iteration, too."""

    run_record_path: Optional[str] = None
    """Write this run's figures as JSON to this file: loss and peak activation bytes per iteration,
    evaluation losses, digests of the last gradients and the final weights. Ranks are named as in
    '--offload-report-path'."""

    output_interval: int = 100
    """Iterations between two writings of report, trace and run record, which are also written when
    training ends; 0: only then. An .html report is written at the end."""


_GROUPS: tuple[tuple[type, str], ...] = (
    (OffloadConfig, "slipstream"),
    (PackingOptions, "slipstream packed sequences"),
    (DynamicContextParallelOptions, "slipstream dynamic context parallelism"),
    (ChunkGraphOptions, "slipstream CUDA graphs"),
    (EntryOptions, "slipstream script"),
)
"""Dataclasses whose fields are flags, and the titles of their groups."""


def add_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add our argument groups; the flags are the field names of their dataclasses."""
    for options, title in _GROUPS:
        _add_group(parser, options, title)
    _default_to_file(parser)

    # argparse would print megatron's thousand-line usage before the one line that matters.
    def error(message: str) -> NoReturn:
        compat.refuse_later_flags(message)
        raise ValueError(message + _nearest_flags(parser, message))

    parser.error = error  # type: ignore[method-assign]
    return parser


def add_offload_arguments(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """Add the engine's flags only: an ``extra_args_provider`` for scripts of others.

    Raises:
        ValueError: The file of settings, whose values are the flags' defaults, cannot be used.
    """
    _add_group(parser, *_GROUPS[0])
    _default_to_file(parser)
    return parser


def _add_group(parser: argparse.ArgumentParser, options: type, title: str) -> None:
    from megatron.training.argument_utils import ArgumentGroupFactory

    # Megatron's factory wants types where postponed annotations leave their text.
    types = get_type_hints(options)
    for field in dataclasses.fields(options):
        # Of a type that it cannot infer it prints a warning, though the field says how it is read.
        is_told = "type" in field.metadata.get("argparse_meta", {})
        field.type = str if is_told else types[field.name]
    ArgumentGroupFactory(options).build_group(parser, title)


def _default_to_file(parser: argparse.ArgumentParser) -> None:
    """Where a flag is not given, the file of settings holds."""
    parser.set_defaults(**dataclasses.asdict(config_from_environment()))


def parse_and_validate(argv: Sequence[str]) -> Any:
    """Megatron's arguments, parsed, checked by us, then by megatron, and made global.

    Args:
        argv: Flags without the program's name.

    Returns:
        Megatron's namespace with our fields added.

    Raises:
        ValueError: The first thing that is wrong, naming option, value and cure.
    """
    if any(argument.split("=")[0] == "--yaml-cfg" for argument in argv):
        raise ValueError(
            "yaml_cfg is not supported with this script because megatron's YAML path drops the "
            "flags of others; give the settings as flags"
        )
    # A broken Transformer Engine breaks the import of megatron-core; say so before.
    facts = preflight.collect()
    preflight.require(preflight.check_process(facts, offloading=False))
    if not torch.cuda.is_available():
        # Megatron warns at import about every GPU package that is absent, and torch's data loader
        # about memory it cannot pin; without a GPU that is as it should be.
        warnings.filterwarnings("ignore", message=".*(not installed|transformer-engine|pin_memory)")
    on_cpu = cpu_only.install_training_shims()
    cpu_only.skip_helper_compilation()
    from megatron.training import arguments as megatron_arguments

    defaults = _cpu_defaults(argv) if on_cpu else _gpu_defaults(argv)
    with _process_arguments([*defaults, *argv]):
        args = megatron_arguments.parse_args(add_arguments)
    if not on_cpu and args.fine_grained_activation_offloading:
        cpu_only.tolerate_missing_affinity_tools()
    _apply_tokenizer(args)
    _apply_checkpoint_inputs(args)
    check(args, facts)
    _tell_what_has_no_effect(args, argv)
    _prepare_chunk_graphs(args)
    _validate_with_megatron(args, hide_offloading=on_cpu)
    # Again: options may have come from a checkpoint, or been given by the names they once had.
    check_packing(args)
    check_dynamic_context_parallel(args)
    return args


def check(args: Any, facts: preflight.Facts) -> None:
    """Everything we can know to be wrong before megatron's own checks and before training.

    Raises:
        ValueError: The first thing that is wrong.
    """
    compat.check_options(args)
    check_model_options(_model_facts(args))
    check_packing(args)
    check_dynamic_context_parallel(args)
    config = offload_config(args)
    if args.fine_grained_activation_offloading:
        _check_engine(args, config)
        if getattr(args, "cuda_graph_impl", "none") == "transformer_engine":
            preflight.require(preflight.check_graphs(facts))
        _tell_what_stays(args)
        _tell_what_is_recomputed(args)
    preflight.require(preflight.check_process(facts, args.fine_grained_activation_offloading))
    _check_device(args)
    check_evaluation(args)
    _check_packed_attention(args)
    _check_outputs(args)
    # Only for the tokenizer that stands for tokens made elsewhere is their range known here.
    vocab_size = args.vocab_size if args.tokenizer_type == "NullTokenizer" else None
    blends = _dataset_prefixes(args)
    check_corpora(args, blends)
    for prefix in itertools.chain.from_iterable(blends):
        preflight.require(preflight.check_dataset(prefix, vocab_size))


def _apply_checkpoint_inputs(args: Any) -> None:
    """Megatron asks for a module to move, also where only the inputs of checkpoints are to."""
    if args.fine_grained_activation_offloading and args.offload_checkpoint_inputs:
        args.offload_modules = args.offload_modules or ["core_attn"]


def _prepare_chunk_graphs(args: Any) -> None:
    from megatron.slipstream.integration.chunk_graphs import prepare_arguments

    prepare_arguments(args)


def _tell_what_stays(args: Any) -> None:
    names = modules_at_the_edge_of_graphs(args)
    if names and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "offload_modules: %s of the layers that CUDA graphs capture (cuda_graph_impl, "
            "cuda_graph_modules) stay on the device, since graphs keep what they take in and give "
            "out; leave %s out, or capture other parts",
            ", ".join(names),
            "them" if len(names) > 1 else "it",
        )


def _tell_what_is_recomputed(args: Any) -> None:
    if args.recompute_granularity != "full" or args.offload_checkpoint_inputs:
        return
    if os.environ.get("RANK", "0") == "0":
        logger.warning(
            "recompute_granularity=full: a layer that is recomputed as a whole saves its input "
            "only, which stays; set offload_checkpoint_inputs=True to move it"
        )


def _tell_what_has_no_effect(args: Any, argv: Sequence[str]) -> None:
    names = unused_flags(args, argv)
    if names and os.environ.get("RANK", "0") == "0":
        logger.warning(
            "%s %s no effect without fine_grained_activation_offloading; add "
            "--fine-grained-activation-offloading, or leave %s out",
            ", ".join(names),
            "have" if len(names) > 1 else "has",
            "them" if len(names) > 1 else "it",
        )


def unused_flags(args: Any, argv: Sequence[str]) -> list[str]:
    """Options of an engine that is not switched on, of those that were given as flags.

    Not an error, since it is how a training with and one without offloading are compared; and what
    a file of settings says is meant for all trainings.
    """
    if args.fine_grained_activation_offloading:
        return []
    given = {word.split("=")[0] for word in argv}
    own = (field.name for field in dataclasses.fields(OffloadConfig))
    options = (*OffloadOptions.__annotations__, *own)
    return [name for name in options if "--" + name.replace("_", "-") in given]


def offload_config(args: Any) -> OffloadConfig:
    """The engine's settings from parsed arguments."""
    fields = dataclasses.fields(OffloadConfig)
    return OffloadConfig(**{field.name: getattr(args, field.name) for field in fields})


def _model_facts(args: Any) -> SimpleNamespace:
    """Megatron's offloading options under the names that ``TransformerConfig`` gives them."""
    facts = SimpleNamespace(**{**compat.defaults_of_later_options(), **vars(args)})
    facts.num_moe_experts = args.num_experts
    facts.cpu_offloading = args.cpu_offloading_num_layers > 0
    if getattr(args, "cuda_graph_granularity", None) == "chunk":
        # Graphs of megatron-core, which these options are about, are off then.
        facts.cuda_graph_impl = "none"
    return facts


def _check_engine(args: Any, config: OffloadConfig) -> None:
    if torch.cuda.is_available():
        return
    if config.offload_engine == "megatron":
        raise ValueError(
            "offload_engine='megatron' is not supported without a GPU because megatron-core's "
            "engine is written for CUDA streams; set offload_engine='slipstream'"
        )
    if config.offload_backend == "cuda":
        raise ValueError(
            "offload_backend='cuda' is not supported without a GPU because there is no device "
            "memory to leave; set offload_backend='auto' or 'cpu'"
        )


def check_evaluation(args: Any) -> None:
    """Megatron 0.19 divides by ``eval_interval``, which has no default there.

    Raises:
        ValueError: It is not set.
    """
    if args.eval_interval is None and not (args.full_validation or args.skip_train):
        raise ValueError(
            "eval_interval is not set, and megatron-core divides by it even if nothing is "
            "evaluated; set --eval-interval to the iterations between evaluations (with "
            "--eval-iters 0 there is none)"
        )


_GRAPHS = {
    "cuda_graph_impl": "none",
    "enable_cuda_graph": False,
    "external_cuda_graph": False,
    "optimizer_cuda_graph": False,
}
"""Megatron's options that ask for CUDA graphs, with the values that do not. (Graphs of whole chunks
are imitated without a GPU.)"""


def _check_device(args: Any) -> None:
    if torch.cuda.is_available():
        return
    # Packed sequences go with no graphs of layers, with a GPU either: their rules say so.
    has_other_rules = args.cuda_graph_granularity == "chunk" or args.sequence_packing is not None
    for option, off in _GRAPHS.items() if not has_other_rules else ():
        value = getattr(args, option, None)
        if value and value != off:
            raise ValueError(
                f"{option}={value!r} is not supported without a GPU because CUDA graphs are "
                f"captured from a GPU's streams; set {option}={off!r}, or leave it out"
            )
    if args.transformer_impl == "transformer_engine":
        raise ValueError(
            "transformer_impl='transformer_engine' is not supported without a GPU because its "
            "kernels run on CUDA only; set --transformer-impl local"
        )


def _check_packed_attention(args: Any) -> None:
    """Without a GPU our own core attention takes packed sequences; see ``cpu_modules.py``."""
    if args.sequence_packing is None or args.transformer_impl == "transformer_engine":
        return
    if torch.cuda.is_available():
        raise ValueError(
            f"transformer_impl={args.transformer_impl!r} is not supported with sequence_packing="
            f"{args.sequence_packing} on a GPU because megatron-core's own attention takes no "
            "packed sequences; set --transformer-impl transformer_engine"
        )


def _check_outputs(args: Any) -> None:
    """The files that a training writes."""
    if args.output_interval < 0:
        raise ValueError(
            f"output_interval={args.output_interval} is no number of iterations; set 1 or more, or "
            "0 to write at the end only"
        )
    options = ("offload_report_path", "offload_trace_path", "run_record_path")
    paths = {name: Path(getattr(args, name)) for name in options if getattr(args, name) is not None}
    for option, path in paths.items():
        require_writable(option, path)
    require_distinct(paths)


def _dataset_prefixes(args: Any) -> list[list[str]]:
    """Path prefixes of the datasets that each set is mixed from, without the weights between them.

    Raises:
        ValueError: Neither data nor mock data was asked for, or the list of paths is unreadable.
    """
    from megatron.training.utils import get_blend_and_blend_per_split

    if args.mock_data:
        return []
    try:
        blend, per_split = get_blend_and_blend_per_split(args)
    except OSError as error:
        raise ValueError(
            f"the list of data paths {error.filename} cannot be read ({error.strerror}); set "
            "data_args_path or per_split_data_args_path to a file that exists"
        ) from error
    blends = [blend] if blend is not None else [b for b in per_split or () if b is not None]
    if not blends:
        raise ValueError(
            "data_path is not set, so there is nothing to train on; set --data-path to the prefix "
            "of a dataset made by tools/preprocess_text.py, or --mock-data"
        )
    return [prefixes for prefixes, _ in blends]


def _apply_tokenizer(args: Any) -> None:
    """Take vocabulary size and end-of-document token from ``tokenizer_json``."""
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


def read_tokenizer(path: Path) -> tuple[int, int]:
    """Number of tokens and the id of the end-of-document token in a tokenizer file.

    Raises:
        ValueError: The file does not exist or is not one of ours.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary: dict[str, int] = dict(content["model"]["vocab"])
        vocabulary.update({token["content"]: token["id"] for token in content["added_tokens"]})
        return max(vocabulary.values()) + 1, vocabulary[END_OF_DOCUMENT]
    except OSError as error:
        raise ValueError(
            f"tokenizer_json={path} cannot be read ({error.strerror}); set it to the "
            "<prefix>-tokenizer.json that tools/preprocess_text.py wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"tokenizer_json={path} is not a tokenizer with a {END_OF_DOCUMENT} token; make it "
            "again with tools/preprocess_text.py"
        ) from error


def _validate_with_megatron(args: Any, hide_offloading: bool) -> None:
    """Run megatron's own validation and publish the arguments, tokenizer and timers.

    Without a GPU, megatron's demand for Transformer Engine whenever activations are offloaded
    cannot be met and need not be: with ``hide_offloading`` the flag is off while megatron looks.
    """
    from megatron.training.arguments import validate_args
    from megatron.training.global_vars import set_global_variables

    offloading = args.fine_grained_activation_offloading
    try:
        if args.use_checkpoint_args:
            from megatron.training.checkpointing import load_args_from_checkpoint

            load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
            load_args_from_checkpoint(args)
        if hide_offloading:
            args.fine_grained_activation_offloading = False
        validate_args(args, {})
    except AssertionError as error:
        raise refused_by_megatron(error) from error
    finally:
        args.fine_grained_activation_offloading = offloading
    set_global_variables(args)
    compat.complete_arguments(args)


def refused_by_megatron(error: AssertionError) -> ValueError:
    """Megatron asserts what users must keep, often without a message: then the test is one."""
    test = traceback.extract_tb(error.__traceback__)[-1].line or "an unnamed check"
    missing = re.fullmatch(r"assert args\.(\w+) is not None", test)
    cure = f"; set --{missing[1].replace('_', '-')}" if missing else ""
    return ValueError(
        str(error) or f"megatron refuses the arguments because of its check: {test}{cure}"
    )


@contextmanager
def _process_arguments(argv: Sequence[str]) -> Iterator[None]:
    """Megatron's parser reads ``sys.argv``, whoever calls it."""
    before = sys.argv
    sys.argv = [before[0] if before else "pretrain_gpt.py", *argv]
    try:
        yield
    finally:
        sys.argv = before


def _cpu_defaults(argv: Sequence[str]) -> list[str]:
    """Flags that a run without a GPU needs and the user did not give; logs them."""
    given = {argument.split("=")[0] for argument in argv}
    added = [flag for flags in _CPU_DEFAULTS if flags[0] not in given for flag in flags]
    # Megatron wants it with tensor parallelism, for the order of launches on a GPU.
    os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    if os.environ.get("RANK", "0") == "0":
        logger.info("no GPU found; running on the CPU with %s", " ".join(added))
    return added


def _gpu_defaults(argv: Sequence[str]) -> list[str]:
    """Flags that a GPU run needs for want of Apex and the user did not give; logs them.

    Megatron takes Apex's fused weight gradient for granted and raises in the first forward of the
    output layer without it, on that pipeline stage alone; the others then hang.
    """
    flag = "--no-gradient-accumulation-fusion"
    if flag in argv or preflight.is_installed(_APEX_FUSED_WEIGHT_GRADIENT):
        return []
    if os.environ.get("RANK", "0") == "0":
        logger.info("Apex is not installed; running with %s", flag)
    return [flag]


def _nearest_flags(parser: argparse.ArgumentParser, message: str) -> str:
    known = [flag for action in parser._actions for flag in action.option_strings]
    words = [word.rstrip(":,").split("=")[0] for word in message.split() if word[:2] == "--"]
    unknown = [word for word in words if word not in known]
    near = [match for word in unknown for match in difflib.get_close_matches(word, known, n=1)]
    return f"; did you mean {' or '.join(near)}?" if near else ""


def print_help(everything: bool) -> None:
    """Print our flags with examples, and with ``everything`` megatron's flags as well."""
    cpu_only.install_training_shims()
    parser = argparse.ArgumentParser(
        prog="pretrain_gpt.py",
        description=(
            "Train a GPT model with megatron-core, with activations moved to the host during the "
            "forward pass and back before the backward pass needs them. Takes all of megatron's "
            "flags and those below."
        ),
        epilog=_EXAMPLES + _modules_help() + "\nMegatron's own flags: --help-all",
        formatter_class=argparse.RawDescriptionHelpFormatter,
        usage="pretrain_gpt.py [megatron's flags] [slipstream's flags]",
        allow_abbrev=False,
    )
    if everything:
        from megatron.training.arguments import add_megatron_arguments

        add_megatron_arguments(parser)
    add_arguments(parser)
    _repair_help(parser)
    parser.print_help()


def _repair_help(parser: argparse.ArgumentParser) -> None:
    """Some of megatron's help texts hold a bare '%', at which argparse stumbles."""
    formatter = parser._get_formatter()
    for action in parser._actions:
        try:
            formatter._expand_help(action)
        except (KeyError, TypeError, ValueError):
            action.help = (action.help or "").replace("%", "%%")


def _modules_help() -> str:
    width = max(map(len, MODULE_NAMES))
    rows = [f"    {name:<{width}}  {what}" for name, what in MODULE_NAMES.items()]
    return (
        "\nwhat to move (megatron's --fine-grained-activation-offloading --offload-modules ...):\n"
        + "\n".join(rows)
        + "\n"
    )
