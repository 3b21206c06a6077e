# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Edits for packed sequences, and for their context-parallel groups."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tools.upstream.anchors import Edit, at_end, at_start, decorated
from tools.upstream.fields import CONFIG, behind, fields_of
from tools.upstream.modules import DYNAMIC_TRAINING, ENGINE, PACKED_TRAINING, place_of

FIELDS = ("sequence_packing", "thd_max_packed_sequences")
DYNAMIC_FIELDS = (
    *("dynamic_context_parallel", "min_dynamic_context_parallel_size"),
    *("max_dynamic_context_parallel_size", "dynamic_context_parallel_verify"),
)
SCRIPTS = ("pretrain_gpt.py", "pretrain_hybrid.py")

_CHECK = f"""\
if {{condition}}:
    # Imported here: the modules import the schedules, which import this one.
    from {ENGINE}.rules import require
    from {{module}} import {{check}}

    require({{check}}(args))
"""
_PACKS = "args.sequence_packing is not None or args.thd_max_packed_sequences is not None"
_DYNAMIC = "args.dynamic_context_parallel or args.max_dynamic_context_parallel_size is not None"
_DATASETS = """\
if {condition}:
    config = core_gpt_dataset_config_from_args(get_args())
    return {prefix}_datasets(train_val_test_num_samples, config)

"""
_FORWARD = """\
if {condition}:
    output, loss_mask = {prefix}_forward(data_iterator, model)
    return output, partial(loss_func, loss_mask, model=model)

"""
_GROUPS = str(place_of("integration.packed.batch_group"))


def packed_edits(root: Path) -> list[Edit]:
    """Return the edits of packed sequences."""
    del root
    return [
        Edit(
            *(CONFIG, "TransformerConfig", behind("cp_comm_type", fields_of(FIELDS))),
            "fields of packed sequences",
        ),
        _checks(_PACKS, "options.packing", "check_packing"),
        *_of_scripts(
            *("get_args().sequence_packing is not None", "packed", PACKED_TRAINING),
            "samples would be rows that are cut out of the concatenation of documents",
            "the model would get no offsets of documents",
        ),
    ]


def dynamic_edits(root: Path) -> list[Edit]:
    """Return the edits of dynamic context parallelism."""
    del root
    positions = "a micro-batch would have the positions of the static group"
    return [
        Edit(
            *(CONFIG, "TransformerConfig", behind(FIELDS[-1], fields_of(DYNAMIC_FIELDS))),
            "fields of dynamic context parallelism",
        ),
        _checks(_DYNAMIC, "options.context_parallel", "check_dynamic_context_parallel"),
        *_of_scripts(
            *("get_args().dynamic_context_parallel", "dynamic", DYNAMIC_TRAINING),
            "documents would be divided among the ranks of the static group",
            "the model would get no group",
        ),
        *(
            decorated(f"megatron/core/{path}.py", f"{name}.forward", decorator, _GROUPS, why)
            for path, name, decorator, why in (
                ("transformer/attention", "Attention", "uses_batch_group", positions),
                (
                    *("transformer/multi_latent_attention", "MultiLatentAttention"),
                    *("uses_batch_group", positions),
                ),
                (
                    *("extensions/transformer_engine", "TEDotProductAttention", "restores_group"),
                    "attention would keep the group of another micro-batch",
                ),
            )
        ),
    ]


def _checks(condition: str, module: str, check: str) -> Edit:
    code = _CHECK.format(condition=condition, module=place_of(module), check=check)
    place = ("megatron/training/arguments.py", "validate_args")
    return Edit(*place, at_end(code, "args"), "their checks")


def _of_scripts(
    condition: str, prefix: str, module: str, why_datasets: str, why_forward: str
) -> Iterator[Edit]:
    names = {"condition": condition, "prefix": prefix}
    datasets, forward = _DATASETS.format(**names), _FORWARD.format(**names)
    for path in SCRIPTS:
        yield Edit(
            *(path, "train_valid_test_datasets_provider"),
            at_start(datasets, "train_val_test_num_samples", "core_gpt_dataset_config_from_args"),
            why_datasets,
            ((module, f"datasets as {prefix}_datasets"),),
        )
        yield Edit(
            *(path, "forward_step", at_start(forward, "data_iterator", "model", "loss_func")),
            why_forward,
            ((module, f"forward as {prefix}_forward"),),
        )
