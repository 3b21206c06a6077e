# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Parse flags into validated arguments.

All errors are ``ValueError``, raised before megatron's own bare assertions.
"""

from __future__ import annotations

import json
import re
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from megatron.slipstream.integration.cpu import cpu_only
from megatron.slipstream.integration.entry import checks
from megatron.slipstream.integration.entry.arguments import defaults_of_machine, parse
from megatron.slipstream.integration.graphs import goals
from megatron.slipstream.options import preflight
from megatron.slipstream.options.rules import require

END_OF_DOCUMENT = "<|endoftext|>"
"""Special token that ``tools/preprocess_text.py`` inserts between documents."""


def parse_and_validate(argv: Sequence[str]) -> Any:
    """Parse arguments, check them, validate them with megatron, and set them as global.

    Args:
        argv: Flags without the program's name.

    Raises:
        ValueError: The first error, naming option, value and remedy.
    """
    # A broken Transformer Engine breaks the import of megatron-core; report it first.
    facts = preflight.collect()
    require(preflight.check_process(facts, offloading=False))
    if not torch.cuda.is_available():
        # Megatron warns at import about every GPU package that is absent, and torch's data loader
        # about memory it cannot pin; without a GPU both are expected.
        warnings.filterwarnings("ignore", message=".*(not installed|transformer-engine|pin_memory)")
    on_cpu = cpu_only.install_training_shims()
    cpu_only.skip_helper_compilation()
    args = parse(argv, defaults_of_machine(argv))
    if not on_cpu and args.fine_grained_activation_offloading:
        cpu_only.tolerate_missing_affinity_tools()
    apply_tokenizer(args)
    before = checks.check_options(args, argv)
    for findings in (
        before,
        checks.check_run(args),
        checks.check_process(args, facts),
    ):
        require(findings)
    if args.cuda_graph_granularity == "chunk":
        from megatron.slipstream.integration.graphs.chunks import prepare_arguments

        prepare_arguments(args)
    goals.prepare_arguments(args)
    if args.use_checkpoint_args:
        _load_from_checkpoint(args)
    validate(args)
    # Check again: options may come from a checkpoint, or have been given by former names.
    require(f for f in checks.check_options(args) if f not in before)
    from megatron.training.global_vars import set_global_variables

    set_global_variables(args)
    return args


def _load_from_checkpoint(args: Any) -> None:
    from megatron.training.checkpointing import load_args_from_checkpoint

    try:
        load_args_from_checkpoint(args, load_arg="pretrained_checkpoint")
        load_args_from_checkpoint(args)
    except AssertionError as error:
        raise refused_by_megatron(error) from error


def validate(args: Any) -> None:
    """Run megatron's own validation, which completes the arguments, in every release.

    With offloading, megatron requires Transformer Engine. Nothing needs it without a GPU, so the
    flag is then off during the check.

    Raises:
        ValueError: Megatron refuses the arguments.
    """
    from megatron.training.arguments import validate_args

    offloading = args.fine_grained_activation_offloading
    try:
        args.fine_grained_activation_offloading = offloading and torch.cuda.is_available()
        validate_args(args, {})
    except AssertionError as error:
        raise refused_by_megatron(error) from error
    finally:
        args.fine_grained_activation_offloading = offloading


def refused_by_megatron(error: AssertionError) -> ValueError:
    """Return the assertion as a ``ValueError``; without a message, it quotes the check."""
    test = traceback.extract_tb(error.__traceback__)[-1].line or "an unnamed check"
    missing = re.fullmatch(r"assert args\.(\w+) is not None", test)
    cure = f"; set --{missing[1].replace('_', '-')}" if missing else ""
    return ValueError(
        str(error) or f"megatron refuses the arguments because of its check: {test}{cure}"
    )


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


def read_tokenizer(path: Path) -> tuple[int, int]:
    """Return the number of tokens and the end-of-document token's id from a tokenizer file.

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
