# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Edits of Megatron's configuration and training script for packed sequences."""

from __future__ import annotations

from pathlib import Path

from tools.upstream.anchors import Edit, at_end, at_start
from tools.upstream.fields import CONFIG, behind, fields_of
from tools.upstream.modules import ENGINE, PACKED_TRAINING, place_of

FIELDS = ("sequence_packing", "thd_max_packed_sequences")
SCRIPTS = ("pretrain_gpt.py", "pretrain_hybrid.py")

_CHECK = f"""\
if args.sequence_packing is not None or args.thd_max_packed_sequences is not None:
    # Imported here: the modules import the schedules, which import this one.
    from {ENGINE}.rules import require
    from {place_of("options.packing")} import check_packing

    require(check_packing(args))
"""
_DATASETS = """\
if get_args().sequence_packing is not None:
    config = core_gpt_dataset_config_from_args(get_args())
    return packed_datasets(train_val_test_num_samples, config)

"""
_FORWARD = """\
if get_args().sequence_packing is not None:
    output, loss_mask = packed_forward(data_iterator, model)
    return output, partial(loss_func, loss_mask, model=model)

"""


def packed_edits(root: Path) -> list[Edit]:
    """Return the edits of packed sequences."""
    del root
    return [
        Edit(
            CONFIG,
            "TransformerConfig",
            behind("cp_comm_type", fields_of(FIELDS)),
            "fields of packed sequences",
        ),
        Edit(
            *("megatron/training/arguments.py", "validate_args", at_end(_CHECK, "args")),
            "their checks",
        ),
        *(edit for script in SCRIPTS for edit in _of_script(script)),
    ]


def _of_script(path: str) -> list[Edit]:
    return [
        Edit(
            *(path, "train_valid_test_datasets_provider"),
            at_start(_DATASETS, "train_val_test_num_samples", "core_gpt_dataset_config_from_args"),
            "samples would be rows that are cut out of the concatenation of documents",
            ((PACKED_TRAINING, "datasets as packed_datasets"),),
        ),
        Edit(
            *(path, "forward_step", at_start(_FORWARD, "data_iterator", "model", "loss_func")),
            "the model would get no offsets of documents",
            ((PACKED_TRAINING, "forward as packed_forward"),),
        ),
    ]
