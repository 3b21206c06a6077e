# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The engine's settings as fields of Megatron's ``TransformerConfig``."""

from __future__ import annotations

import ast
import itertools
import re
import textwrap
from collections.abc import Sequence
from pathlib import Path

from tools.upstream.anchors import (
    Change,
    Edit,
    Source,
    at_end,
    decorate,
    decorated,
    instead_of_call,
)
from tools.upstream.modules import ENGINE, EXPERTS, GRAPH_TRAINING, source_of

CONFIG = "megatron/core/transformer/transformer_config.py"
_CLASS = "TransformerConfig"
_POST_INIT = f"{_CLASS}.__post_init__"
_SWITCH = "fine_grained_activation_offloading"
FIELDS = (
    *("offload_backend", "offload_release_lag", "offload_prefetch_depth"),
    *("offload_target_memory_gib", "offload_max_overhead_percent"),
    *("offload_host_memory_limit_bytes", "offload_native", "offload_verify"),
    "offload_nvtx_ranges",
)
"""Settings that the engine alone supports, beside ``offload_engine``."""
EXPERT_FIELDS = ("moe_sync_free_experts", "moe_sync_free_capacity_factor")
BUDGET_FIELDS = ("activation_memory_budget", "offload_checkpoint_inputs")
_NUMBER_OR_AUTO = """\
float | Literal["auto"] | None = field(
    default=None,
    metadata={"argparse_meta": {"type": lambda text: text if text == "auto" else float(text)}},
)
"""
"""A field of which Megatron's factory makes a flag only with a function that reads it."""
_LEFT_OUT = {
    "cuda_graph_granularity": (", replayed by Slipstream",),
    "activation_memory_budget": (
        "Switches offloading on, including the inputs of checkpoints; the default of "
        "`--offload-modules` is then all modules of the model that can move. ",
    ),
    "offload_checkpoint_inputs": (
        ", and of MLPs in tiles (`--mlp-sequence-tiles`)",
        " The default of `--offload-modules` is then core_attn.",
    ),
}
"""Parts of descriptions that do not hold there."""

_ENGINE_FIELD = '''\
offload_engine: Literal["megatron", "slipstream"] = "megatron"
"""Engine behind fine_grained_activation_offloading: 'megatron', or 'slipstream', which plans what
moves and when from measured iterations."""
'''
_CHECK = f"""\
if self.fine_grained_activation_offloading and self.offload_engine == "slipstream":
    # Imported here: the module imports models, which import this one.
    from {ENGINE}.select import select_at_first_call

    select_at_first_call(self)
"""
_MOE_LAYER = "megatron/core/transformer/moe/moe_layer.py"
_EXPERT_CHECK = f"""\
if self.moe_sync_free_experts or self.moe_sync_free_capacity_factor is not None:
    # Imported here: the modules import the schedules, which import this one.
    from {ENGINE}.rules import check_rules, require
    from {EXPERTS}.option_rules import EXPERT_RULES

    require(check_rules(EXPERT_RULES, self))
"""
_BUILD_EXPERTS = f"""\
build_experts = self.submodules.experts
if config.moe_sync_free_experts:
    # Imported here: the module imports the schedules, which import this one.
    from {EXPERTS} import layers

    layers.check_experts(config, config.moe_sync_free_capacity_factor)
    layers.use_sync_free_dispatch(self, pg_collection, config.moe_sync_free_capacity_factor)
    build_experts = layers.SyncFreeGroupedMLP
"""
_EXPERT_LAYOUT = """\
is_resharded = getattr(checkpoint_args, 'dist_ckpt_optim_fully_reshardable', False)
if args.use_distributed_optimizer and not args.no_load_optim and not is_resharded:
    # Its buckets have the weights of all experts as one parameter, or each.
    _compare('moe_sync_free_experts', default=False)
"""
_BUDGET_CHECK = """\
if self.activation_memory_budget is not None or self.offload_checkpoint_inputs:
    if not self.fine_grained_activation_offloading or self.offload_engine != "slipstream":
        raise ValueError(
            "activation_memory_budget and offload_checkpoint_inputs are not supported "
            "without the engine that follows them because no other does; set "
            "fine_grained_activation_offloading=True and offload_engine='slipstream'"
        )
"""


def field_edits(root: Path) -> list[Edit]:
    """Return the edits that add the fields and their checks."""
    fields = _ENGINE_FIELD + "\n" + fields_of(FIELDS)
    return [
        Edit(CONFIG, _CLASS, behind(_SWITCH, fields), "fields of the engine"),
        Edit(CONFIG, _POST_INIT, at_end(_CHECK), "their checks, and the choice"),
    ]


def budget_edits(root: Path) -> list[Edit]:
    """Return the edits that add the fields of recomputation and budget, and their checks."""
    fields = behind(FIELDS[-1], fields_of(BUDGET_FIELDS))
    return [
        Edit(CONFIG, _CLASS, fields, "fields of recomputation and the memory budget"),
        Edit(CONFIG, _POST_INIT, at_end(_BUDGET_CHECK), "the same without the engine is refused"),
    ]


def chunk_edits(root: Path) -> list[Edit]:
    """Return the edits of chunk graphs."""
    return [
        Edit(
            *(CONFIG, _CLASS, behind("cuda_graph_impl", fields_of(("cuda_graph_granularity",)))),
            "field of chunk graphs",
        ),
        decorated(
            *("megatron/training/training.py", "train", "captures_model", GRAPH_TRAINING),
            "the training loop would run all passes eagerly",
        ),
    ]


def expert_edits(root: Path) -> list[Edit]:
    """Return the edits of sync-free experts."""
    fields = behind("moe_permute_fusion", fields_of(EXPERT_FIELDS))
    build = "self.submodules.experts"
    return [
        Edit(CONFIG, _CLASS, fields, "fields of sync-free experts"),
        Edit(CONFIG, _POST_INIT, at_end(_EXPERT_CHECK), "their checks"),
        Edit(
            *(_MOE_LAYER, "MoELayer.__init__"),
            instead_of_call(build, "build_experts", _BUILD_EXPERTS),
            "experts and dispatcher would read the numbers of tokens",
        ),
        Edit(
            *(_MOE_LAYER, "MoELayer.forward", decorate("checks_capacity")),
            "rows that find no room would be lost",
            ((f"{EXPERTS}.capacity", "checks_capacity"),),
        ),
        Edit(
            *("megatron/training/checkpointing.py", "check_checkpoint_args"),
            at_end(_EXPERT_LAYOUT, "args", "checkpoint_args", "_compare"),
            "the distributed optimizer's state of other experts would load in another order",
        ),
    ]


def behind(field: str, code: str) -> Change:
    """Add fields behind another one, which the class must have."""

    def change(source: Source, name: str) -> None:
        config = source.find(name)
        places = [
            place
            for place, node in enumerate(config.body)
            if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == field
        ]
        if len(places) != 1:
            raise source.moved(f"{name}.{field}", "is not a field")
        last = config.body[places[0] + 1]  # its description
        if not isinstance(last, ast.Expr):
            raise source.moved(f"{name}.{field}", "has no description")
        source.insert((last.end_lineno or 0) + 1, f"\n{code}", last.col_offset)

    return change


def fields_of(names: Sequence[str]) -> str:
    """Return settings' fields and descriptions, from the classes that have them here."""
    text = source_of("options.fields").read_text()
    classes = (node for node in ast.parse(text).body if isinstance(node, ast.ClassDef))
    pairs = (pair for one in classes for pair in itertools.pairwise(one.body))
    found = {}
    for node, description in pairs:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            name = ast.unparse(node.target)
            words = ast.get_source_segment(text, description) or ""
            found[name] = f"{_typed(node)}\n{_said(name, words)}\n"
    return "\n".join(f"{name}: {found[name]}" for name in names)


def _typed(node: ast.AnnAssign) -> str:
    """Return the type of a field and its default."""
    hint = ast.unparse(node.annotation)
    shown = _NUMBER_OR_AUTO if hint.startswith("Union") else f"{hint} = {ast.unparse(node.value)}"
    return shown.replace("'", '"').rstrip("\n")


def _said(name: str, words: str) -> str:
    """Return a field's description with names of fields in place of flags."""
    words = " ".join(words.split())
    for left_out in _LEFT_OUT.get(name, ()):
        if left_out not in words:
            raise ValueError(f"{name} is no longer described by {left_out!r}; adapt _LEFT_OUT")
        words = words.replace(left_out, "")
    words = re.sub(r"--([a-z-]+)", lambda flag: flag[1].replace("-", "_"), words)
    return textwrap.fill(words, 96, break_long_words=False, break_on_hyphens=False)
