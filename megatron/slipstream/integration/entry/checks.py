# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""All checks of the training arguments, run before megatron's own bare assertions.

Training stops at the first error, ``slipstream doctor`` shows all of them, and ``slipstream plan``
uses those of :func:`check_options`, which do not depend on the machine.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.slipstream import preflight
from megatron.slipstream.chunk_graphs.options import check_chunk_graphs
from megatron.slipstream.config import RULES, OffloadConfig
from megatron.slipstream.context_parallel.options import check_dynamic_context_parallel
from megatron.slipstream.estimate.file_errors import require_distinct, require_writable
from megatron.slipstream.experts.options import check_experts
from megatron.slipstream.integration.budget.memory_budget_rules import BUDGET_RULES
from megatron.slipstream.integration.entry.flag_names import given_flags
from megatron.slipstream.integration.entry.schedule_checks import check_schedule
from megatron.slipstream.integration.frameworks.options import (
    OffloadOptions,
    defaults_of_later_options,
)
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.model_rules import (
    CHECKPOINT_RULES,
    NO_EFFECT,
    NO_EFFECT_ON_MEGATRON,
    NO_FILES,
    NOTHING_TO_MOVE,
    STAYS,
    check_model_options,
    check_options_in_graphs,
    modules_at_the_edge_of_graphs,
    moves_in_layer_graphs,
)
from megatron.slipstream.packed_sequences.options import check_corpora, check_packing
from megatron.slipstream.rules import (
    Finding,
    Rule,
    always,
    check_by,
    check_rules,
    finding_of,
    option_rule,
    unsupported,
)
from megatron.slipstream.tiles.options import check_tiles

OptionCheck = Callable[[Any], list[Finding]]
"""A check of parsed arguments."""


def check_options(args: Any, argv: Sequence[str] = ()) -> list[Finding]:
    """Return findings about parsed options, on any machine; ``argv`` are their flags."""
    findings = _of_all(OPTION_CHECKS, args)
    return findings + unused_flags(args, argv) + _unused_interval(args, argv)


def check_run(args: Any) -> list[Finding]:
    """Return findings that prevent training on this machine: devices, data, files."""
    return _of_all(RUN_CHECKS, args)


def check_process(args: Any, facts: preflight.Facts) -> list[Finding]:
    """Return findings about this process that conflict with the options."""
    findings = preflight.check_process(facts, args.fine_grained_activation_offloading)
    return findings + (preflight.check_graphs(facts) if moves_in_layer_graphs(args) else [])


def _of_all(checks: Sequence[OptionCheck], args: Any) -> list[Finding]:
    return [finding for check in checks for finding in check(args)]


# Options


def _check_model_options(args: Any) -> list[Finding]:
    """Check megatron's offloading options, under their names in ``TransformerConfig``."""
    facts = SimpleNamespace(**{**defaults_of_later_options(), **vars(args)})
    facts.num_moe_experts = args.num_experts
    facts.cpu_offloading = args.cpu_offloading_num_layers > 0
    return check_model_options(facts) + check_rules((*CHECKPOINT_RULES, *BUDGET_RULES), facts)


def _check_experts(args: Any) -> list[Finding]:
    has_gpu = torch.cuda.is_available()
    return check_experts(args, torch.cuda.get_device_capability() if has_gpu else None)


def _check_what_moves(args: Any) -> list[Finding]:
    if not args.fine_grained_activation_offloading:
        return []
    names = modules_at_the_edge_of_graphs(args)
    findings = [STAYS.found(names=", ".join(names))] if names else []
    is_own = args.offload_engine == "slipstream"
    if args.recompute_granularity == "full" and not (is_own and args.offload_checkpoint_inputs):
        needed = "offload_checkpoint_inputs=True"
        needed = needed if is_own else f"offload_engine=slipstream and {needed}"
        findings.append(NOTHING_TO_MOVE.found(needed=needed))
    return findings


OPTION_CHECKS: tuple[OptionCheck, ...] = (
    compat.check_release,
    _check_model_options,
    partial(check_rules, RULES),
    check_packing,
    check_dynamic_context_parallel,
    _check_experts,
    check_tiles,
    lambda args: check_chunk_graphs(args, torch.cuda.is_available()),
    _check_what_moves,
    lambda args: check_options_in_graphs(args, torch.cuda.is_available()),
)
"""All checks of options, in the order in which training runs them."""


def unused_flags(args: Any, argv: Sequence[str]) -> list[Finding]:
    """Return a finding about flags without effect: offloading is off, or another engine's.

    Not an error: users leave flags in place to compare training with and without offloading, or
    the two engines. A settings file applies to all runs, so its options do not count.
    """
    own = tuple(field.name for field in dataclasses.fields(OffloadConfig))
    if not args.fine_grained_activation_offloading:
        rule, options = NO_EFFECT, (*OffloadOptions.__annotations__, *own)
    elif args.offload_engine == "megatron":
        rule, options = NO_EFFECT_ON_MEGATRON, own
    else:
        return []
    given = given_flags(argv)
    unused = [name for name in options if "--" + name.replace("_", "-") in given]
    unused = [name for name in unused if rule is NO_EFFECT or name != "offload_engine"]
    return [rule.found(names=", ".join(unused))] if unused else []


def _unused_interval(args: Any, argv: Sequence[str]) -> list[Finding]:
    is_own = args.fine_grained_activation_offloading and args.offload_engine == "slipstream"
    of_engine = args.offload_report_path, args.offload_trace_path
    if args.run_record_path or (is_own and any(of_engine)):
        return []
    is_given = "--output-interval" in given_flags(argv)
    return [NO_FILES.found(interval=args.output_interval)] if is_given else []


# Machine, data and files


def _offloads_without_gpu(facts: Any) -> bool:
    return bool(facts.fine_grained_activation_offloading) and not facts.has_gpu


def _graphs_layers_without_gpu(facts: Any) -> bool:
    # With packed sequences, the packing rules check layer graphs, with or without a GPU.
    return not facts.has_gpu and facts.sequence_packing is None


def _graphs_are_off(option: str, off: Any) -> Rule:
    """Return a rule against layer graphs without a GPU, where only chunk graphs are emulated."""
    return unsupported(
        "without a GPU",
        _graphs_layers_without_gpu,
        option,
        "CUDA graphs are captured from a GPU's streams",
        f"set {option}={off}, or leave it out",
        lambda facts: getattr(facts, option, None) in (None, False, off),
    )


MACHINE_RULES: tuple[Rule, ...] = (
    unsupported(
        "without a GPU",
        _offloads_without_gpu,
        "offload_engine",
        "megatron-core's engine is written for CUDA streams",
        "set offload_engine=slipstream",
        lambda f: f.offload_engine == "slipstream",
    ),
    unsupported(
        "without a GPU",
        _offloads_without_gpu,
        "offload_backend",
        "there is no device memory to leave",
        "set offload_backend=auto or cpu",
        lambda f: f.offload_backend != "cuda",
    ),
    unsupported(
        "without a GPU",
        lambda f: not f.has_gpu,
        "activation_memory_budget",
        "host memory stands in for the device's, and has no end of its own",
        "set the GiB that activations may use",
        lambda f: f.activation_memory_budget != "auto",
    ),
    _graphs_are_off("cuda_graph_impl", "none"),
    _graphs_are_off("enable_cuda_graph", False),
    _graphs_are_off("external_cuda_graph", False),
    _graphs_are_off("optimizer_cuda_graph", False),
    unsupported(
        "without a GPU",
        lambda f: not f.has_gpu,
        "transformer_impl",
        "its kernels run on CUDA only",
        "set --transformer-impl local",
        lambda f: f.transformer_impl != "transformer_engine",
    ),
    option_rule(
        "eval_interval",
        lambda f: not (f.full_validation or f.skip_train),
        lambda f: f.eval_interval is not None,
        "eval_interval is not set, and megatron-core divides by it even if nothing is evaluated",
        "set --eval-interval to the iterations between evaluations (with --eval-iters 0 there is "
        "none)",
    ),
    option_rule(
        "train_iters",
        lambda f: not (f.skip_train or f.train_samples),
        lambda f: f.train_iters is not None and f.train_iters > 0,
        "train_iters={train_iters} is no number of iterations to train",
        "set --train-iters to 1 or more, or --train-samples",
    ),
    option_rule(
        "num_layers",
        always,
        lambda f: f.num_layers is None or f.num_layers > 0,
        "num_layers={num_layers} is no number of layers",
        "set --num-layers to 1 or more",
    ),
    option_rule(
        "vocab_size",
        always,
        lambda f: f.vocab_size is None or f.vocab_size > 0,
        "vocab_size={vocab_size} is no number of tokens",
        "set --vocab-size to 1 or more, or --tokenizer-json",
    ),
    option_rule(
        "log_interval",
        always,
        lambda f: f.log_interval > 0,
        "log_interval={log_interval} is not positive, and megatron-core divides by it",
        "set --log-interval to 1 or more iterations",
    ),
    option_rule(
        "data_path",
        lambda f: f.mock_data,
        lambda f: f.data_path is None,
        "data_path={data_path} is not supported with mock_data=True because one source of data is "
        "read",
        "leave --mock-data out, or --data-path",
    ),
    # Without a GPU, our own core attention supports packed sequences; see cpu_modules.py.
    unsupported(
        "with sequence_packing={sequence_packing} on a GPU",
        lambda f: f.has_gpu and f.sequence_packing is not None,
        "transformer_impl",
        "megatron-core's own attention takes no packed sequences",
        "set --transformer-impl transformer_engine",
        lambda f: f.transformer_impl == "transformer_engine",
    ),
    unsupported(
        "without a GPU",
        lambda f: not f.has_gpu and f.tensor_model_parallel_size > 1,
        "sequence_parallel",
        "megatron-core's layers for tensor parallelism then ask for a CUDA device",
        "leave --sequence-parallel out",
    ),
    unsupported(
        "without a GPU",
        lambda f: (
            not f.has_gpu
            and f.num_experts is not None
            and f.ckpt_format == "torch_dist"
            and (f.save is not None or f.load is not None)
            and not f.moe_sync_free_experts
        ),
        "moe_grouped_gemm",
        "the grouped GEMM for the CPU has no sharded state for ckpt_format=torch_dist",
        "set --ckpt-format torch, or leave --moe-grouped-gemm out",
    ),
    option_rule(
        "eval_before_training",
        lambda f: f.eval_before_training,
        lambda f: f.full_validation or f.eval_iters != 0,
        "eval_before_training=True is not supported with eval_iters=0 because nothing is evaluated",
        "set --eval-iters to 1 or more, or leave --eval-before-training out",
    ),
    option_rule(
        "eval_before_training",
        lambda f: f.eval_before_training,
        lambda f: not f.skip_train,
        "eval_before_training=True is not supported with skip_train=True because there is no "
        "training to evaluate before",
        "leave --eval-before-training out: --skip-train evaluates",
    ),
    option_rule(
        "output_interval",
        always,
        lambda f: f.output_interval >= 0,
        "output_interval={output_interval} is negative",
        "set 1 or more iterations, or 0 to write at the end only",
    ),
)
"""Requirements on the arguments for training on this machine; they also read ``has_gpu``."""


def _check_machine(args: Any) -> list[Finding]:
    facts = SimpleNamespace(**vars(args), has_gpu=torch.cuda.is_available())
    return check_rules(MACHINE_RULES, facts)


def _check_data(args: Any) -> list[Finding]:
    try:
        blends = dataset_prefixes(args)
    except ValueError as error:
        return [finding_of(error, "data_path")]
    # The range of token IDs is known here only for the tokenizer of preprocessed text.
    vocab_size = args.vocab_size if args.tokenizer_type == "NullTokenizer" else None
    findings = check_corpora(args, blends)
    for prefix in dict.fromkeys(itertools.chain.from_iterable(blends)):
        findings += preflight.check_dataset(prefix, vocab_size)
    return findings


def dataset_prefixes(args: Any) -> list[list[str]]:
    """Return the path prefixes of the datasets that each split blends, without their weights.

    Raises:
        ValueError: Neither data nor mock data was requested, or the list of paths is unreadable.
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


def _check_outputs(args: Any) -> list[Finding]:
    options = ("offload_report_path", "offload_trace_path", "run_record_path")
    paths = {name: Path(getattr(args, name)) for name in options if getattr(args, name) is not None}
    findings = check_by(partial(require_distinct, paths))
    for option, path in paths.items():
        findings += check_by(partial(require_writable, option, path), option)
    return findings


RUN_CHECKS: tuple[OptionCheck, ...] = (_check_machine, check_schedule, _check_data, _check_outputs)
