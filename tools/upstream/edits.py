# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The edit in place that each row of the table of patches becomes.

A row is found by the function that makes its replacement. Most rows become a decorator, which is
that function; a fault of Megatron becomes a repair of its lines.
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Union

from megatron.slipstream.patches import releases
from megatron.slipstream.patches.patching import Patch
from tools.upstream.anchors import (
    Change,
    Edit,
    MovedError,
    Source,
    at_end,
    at_start,
    before_call,
    decorate,
    instead_of_call,
    new_body,
    override,
)
from tools.upstream.modules import ENGINE, place_of

_CHECKPOINT = "CheckpointWithoutOutput"
_ROUTER = "megatron/core/transformer/moe/router.py"
_UTILS = "megatron/core/transformer/moe/moe_utils.py"
_DISPATCHER = "megatron/core/transformer/moe/token_dispatcher.py"


def version_of(root: Path) -> str:
    """Return the first two numbers of a checkout's version, such as '0.19'."""
    path = root / "megatron/core/package_info.py"
    if not path.is_file():
        raise MovedError(f"{root} holds no megatron/core; name a checkout of Megatron-LM")
    numbers = {
        target.id: node.value.value
        for node in ast.parse(path.read_text()).body
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.Constant)
        for target in node.targets
        if isinstance(target, ast.Name)
    }
    return f"{numbers['MAJOR']}.{numbers['MINOR']}"


def rows_for(root: Path, patches: tuple[Patch, ...]) -> Iterator[Patch]:
    """Yield the rows that a checkout needs."""
    version = version_of(root)
    for patch in patches:
        is_within = releases.is_within(version, patch.since, patch.until)
        if is_within and not (patch.unless and _exists(root, patch.unless)):
            yield patch


def _exists(root: Path, target: str) -> bool:
    path, name = _split(root, target)
    return Source(root, path).has(name)


def _split(root: Path, target: str) -> tuple[str, str]:
    """Return the file and the name in it of a dotted path."""
    parts = target.split(".")
    for length in range(len(parts) - 1, 0, -1):
        path = "/".join(parts[:length]) + ".py"
        if (root / path).is_file():
            return path, ".".join(parts[length:])
    raise MovedError(f"{target} is in no file of this checkout; adapt tools/upstream")


Maker = Callable[[Path, Patch], Edit]


def key_of(patch: Patch) -> str:
    """Return the name of the function that makes a row's replacement."""
    made: Any = patch.replace
    return str(made.args[1])


def _import_of(patch: Patch) -> tuple[str, str]:
    made: Any = patch.replace
    module = place_of(f"patches.{made.args[0]}")
    assert module is not None, patch.target
    return module, key_of(patch)


def _calling(change: Callable[[str], Change]) -> Maker:
    """Return the maker of edits that call the function which makes a row's replacement."""

    def make(root: Path, patch: Patch) -> Edit:
        path, name = _split(root, patch.target)
        return Edit(path, name, change(key_of(patch)), patch.reason, (_import_of(patch),))

    return make


_decorated, _overridden = _calling(decorate), _calling(override)


def _in_file(path: str, name: str, change: Change, *imports: tuple[str, str]) -> Maker:
    return lambda root, patch: Edit(path, name, change, patch.reason, imports)


def _mask_of_two_dimensions(source: Source, name: str) -> None:
    """Give the padding mask of the expert bias the second dimension of the routing map."""
    function = source.function(name, "padding_mask", "routing_map")
    masks = [
        node
        for node in ast.walk(function)
        if isinstance(node, ast.Assign) and isinstance(node.value, ast.BinOp)
    ]
    values = [ast.unparse(mask.value) for mask in masks]
    if values == ["routing_map & (~padding_mask).unsqueeze(-1)"]:
        return  # 0.20 has it.
    if values != ["routing_map & ~padding_mask"]:
        raise source.moved(name, "does not mask the routing map as before")
    source.replace(
        masks[0], masks[0], f"routing_map = {values[0].replace('~', '(~')}).unsqueeze(-1)\n"
    )


_DROP_PADDING = """\
if padding_mask is not None:
    # Padding does not compete for the capacity of experts.
    probs = probs.masked_fill(padding_mask.unsqueeze(-1), 0.0)
    routing_map = routing_map & ~padding_mask.unsqueeze(-1)
"""
_COUNT_ONE = """\
if with_padding_mask:
    # If all tokens are padding, the counts that it divides are 0 as well.
    total_num_tokens = total_num_tokens.clamp(min=1)
"""
_TELL = f"""\
# Imported here: the module imports the schedules, which import this one.
from {ENGINE}.marks import tell_discard

tell_discard(self)
"""
_FORGET = f"""\
elif getattr(self, "ckpt_manager", None) is None and not any(
    output.requires_grad for output in self.outputs
):
    # Without gradients nothing is recomputed.
    from {ENGINE}.marks import forget_recomputation

    forget_recomputation(self)
"""


def _discarding(root: Path, patch: Patch) -> Edit:
    """The engine is told where outputs are discarded, which 0.20 does in a method of its own."""
    path, name = _split(root, patch.target)
    tell = at_start(_TELL)
    if key_of(patch) == "tell_discarded_outputs":
        return Edit(path, name, tell, patch.reason)
    is_apart = Source(root, path).has(f"{_CHECKPOINT}._discard_outputs")

    def change(source: Source, place: str) -> None:
        last = source.function(place, "hook_tensor").body[-1]
        if not isinstance(last, ast.If) or ast.unparse(last.test) != "hook_tensor.requires_grad":
            raise source.moved(place, "does not end with the hook of hook_tensor")
        at_end(_FORGET)(source, place)
        if not is_apart:
            tell(source, place)

    return Edit(path, name, change, patch.reason)


_GROUP = f"""\
# Imported here: the module imports the schedules, which import this one.
from {ENGINE}.marks import run_in_a_group

"""


def _group_of_te(source: Source, name: str) -> None:
    """Call the imported ``checkpoint`` in a group."""
    imports = [s for s in source.function(name, "checkpoint").body if isinstance(s, ast.ImportFrom)]
    if len(imports) != 1:
        raise source.moved(name, "does not import checkpoint in one place")
    line = (imports[0].end_lineno or 0) + 1
    source.insert(line, f"{_GROUP}checkpoint = run_in_a_group(checkpoint)\n", 4)


def _grouping(_: Path, patch: Patch) -> Edit:
    """Checkpoints run in a group, those of Transformer Engine where Megatron calls them."""
    if not patch.target.startswith("megatron."):
        path = "megatron/core/extensions/transformer_engine.py"
        return Edit(path, "te_checkpoint", _group_of_te, patch.reason)
    apply = "CheckpointFunction.apply"
    change = instead_of_call(apply, f"run_in_a_group({apply})", _GROUP)
    return Edit("megatron/core/tensor_parallel/random.py", "checkpoint", change, patch.reason)


IN_PLACE: Mapping[str, Union[Maker, str]] = {
    "call_through_router": _overridden,
    "build_through_router": _decorated,
    "name_what_fits": _decorated,
    "restrict_autotune_configs": _decorated,
    "tell_group_input": _decorated,
    "end_by_engine": _decorated,
    "end_checkpoint": _discarding,
    "tell_discarded_outputs": _discarding,
    "D2HByKernel": lambda root, patch: replace(
        _decorated(root, patch), path=_UTILS, name="maybe_move_tensor_to_cpu"
    ),
    "exchange_by_kernels": _decorated,
    "convert_by_scatter": _in_file(
        *(_DISPATCHER, "_DeepepManager._indices_to_multihot"),
        new_body(
            "return indices_to_multihot(indices, probs, self.num_local_experts)\n",
            *("indices", "probs"),
        ),
        (str(place_of("patches.multihot_map")), "indices_to_multihot"),
    ),
    "drop_padding_first": _in_file(
        *(_ROUTER, "TopKRouter.routing"),
        before_call(
            "apply_router_token_dropping", _DROP_PADDING, "padding_mask", "probs", "routing_map"
        ),
    ),
    "count_without_padding": _in_file(
        _ROUTER, "TopKRouter._apply_expert_bias", _mask_of_two_dimensions
    ),
    "count_at_least_one": _in_file(
        *(_UTILS, "get_tokens_per_expert_and_token_count"),
        at_end(_COUNT_ONE, "with_padding_mask", "total_num_tokens"),
    ),
    "pass_mask_on": "the edit of routing() has the mask",
    "accept_own_modules": "modules of our own are not part of the series yet",
    "run_in_a_group": _grouping,
    "capture_packed": _decorated,
    "delete_packed": _decorated,
    "keep_tensors": "torch is changed, while a pass is measured",
    "add_discarded_peaks": "torch is changed, not Megatron",
    "forget_discarded_peaks": "torch is changed, not Megatron",
    "evaluate_first": "our training script only",
    "check_expert_layout": "the edit of check_checkpoint_args() has the field",
    "name_refusals": "our training script only",
    "report_all_layers": "main has the repair",
    "record_in_range": "logging of experts is not part of the series",
    "finalize_through": "our training script only",
}
"""For each row of the table the edit that it becomes, or why it becomes none."""


def edits_for(root: Path, patches: tuple[Patch, ...]) -> list[Edit]:
    """Return the edits of a checkout that these rows become."""
    found = []
    for patch in rows_for(root, patches):
        make = IN_PLACE[key_of(patch)]
        if not isinstance(make, str):
            found.append(make(root, patch))
    return found
