# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Patches of ``megatron.training`` where it has no callback, for the training entry."""

from __future__ import annotations

import contextlib
import functools
import io
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from typing import Any, Optional, TextIO

from megatron.slipstream.patches.patching import Patch, replacing


class CheckpointRefusedError(ValueError):
    """The options cannot load the checkpoint.

    Raised before training starts: on every rank, or on the one whose part does not fit.
    """


def bound(patch: Patch, *values: Any) -> Patch:
    """Return a patch of this module, bound to values known only at run time."""
    return replace(patch, replace=functools.partial(patch.replace, *values))


@replacing
def evaluate_first(args: Any, train: Callable[..., Any], *given: Any, **groups: Any) -> Any:
    """Replace ``train``: evaluate once more, between building the model and the first iteration."""
    from megatron.training import training

    forward_step, model, *_, valid_iterator, process_non_loss_data, config = given[:8]
    iteration = args.iteration  # above 0 if training resumes
    training.evaluate_and_print_results(
        f"iteration {iteration}", forward_step, valid_iterator, model, iteration,
        process_non_loss_data, config, **groups,
    )  # fmt: skip
    return train(*given, **groups)


def finalize_through(
    finalizing: Callable[[Any], Callable[..., Any]], finalize: Callable[..., Any]
) -> Callable[..., Any]:
    """Replace ``finalize_model_grads``."""
    return finalizing(finalize)


@replacing
def check_expert_layout(
    args: Any, check: Callable[..., Any], saved: Any, *arguments: Any, **options: Any
) -> Any:
    """Replace ``check_checkpoint_args``: refuse the optimizer state of other experts.

    The distributed optimizer saves flat buckets by default. Their sizes do not depend on the order
    of the parameters in them, so state of parameters in another order loads without an error.
    """
    # Other launchers do not save this option.
    was_on = vars(saved).get("moe_sync_free_experts")
    if (
        bool(was_on) != args.moe_sync_free_experts
        and args.use_distributed_optimizer
        and not args.no_load_optim
        and not getattr(saved, "dist_ckpt_optim_fully_reshardable", False)
    ):
        was_saved = f"was saved with moe_sync_free_experts={was_on}"
        if was_on is None:
            was_saved = "does not record moe_sync_free_experts, which counts as off"
        raise CheckpointRefusedError(
            f"load={args.load} {was_saved}, and parameters are in another order in the "
            "distributed optimizer's buckets with moe_sync_free_experts="
            f"{args.moe_sync_free_experts}; set no_load_optim=True to load the weights, or "
            "dist_ckpt_optim_fully_reshardable=True where the checkpoint is saved"
        )
    return check(saved, *arguments, **options)


@replacing
def name_refusals(args: Any, load: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Replace ``load_checkpoint``: a checkpoint that megatron refuses is an error with a cure.

    megatron asserts what differs, or prints and exits with 0, as if the training had ended.
    """
    with contextlib.redirect_stdout(_Heard(sys.stdout)) as heard:
        try:
            return load(*arguments, **options)
        except AssertionError as error:
            raise CheckpointRefusedError(_refusal(args.load, str(error))) from error
        except (SystemExit, Exception) as error:
            reason = _printed_reason(error, heard.last_line)
            misfit = _misfit(str(error))
            if reason is not None:
                raise CheckpointRefusedError(_refusal(args.load, reason)) from error
            if misfit is not None:
                raise CheckpointRefusedError(
                    f"load={args.load} does not fit the model: {misfit}; set the flags of the "
                    "model that was saved, or load another checkpoint"
                ) from error
            raise


def report_all_layers(args: Any, report: Callable[..., str]) -> Callable[..., str]:
    """Replace ``MoEMetricsTracker.report``: ranks without experts have an entry for each layer.

    megatron passes the number of a hybrid model's expert layers as the number of layers, but ranks
    with experts have recorded an entry for each layer of the model.
    """
    if not args.hybrid_layer_pattern:
        return report

    def report_all(*arguments: Any, num_layers: int, **options: Any) -> str:
        # A list of layers with experts keeps the mean over those.
        options["moe_layer_freq"] = [1] * num_layers
        return report(*arguments, num_layers=args.num_layers, **options)

    return report_all


@replacing
def record_in_range(
    record: Callable[..., None], self: Any, name: str, value: Any, layer_number: Any,
    num_layers: int, *arguments: Any, **options: Any,
) -> None:  # fmt: skip
    """Replace ``MoEMetricsTracker.record``: experts of further tokens count in the last entry.

    A tracker has one entry for each further token, but routers of a hybrid model count the letters
    of all of them. The entries' sum, which is reported, is the same wherever they are added.
    """
    if layer_number is not None:
        layer_number = min(layer_number, num_layers)
    record(self, name, value, layer_number, num_layers, *arguments, **options)


class _Heard(io.TextIOBase):
    def __init__(self, target: TextIO) -> None:
        self._target = target
        self.last_line = ""

    def write(self, text: str) -> int:
        self.last_line = next((line for line in reversed(text.splitlines()) if line.strip()),
                              self.last_line)  # fmt: skip
        return self._target.write(text)

    def flush(self) -> None:
        self._target.flush()


def _printed_reason(error: BaseException, last_line: str) -> Optional[str]:
    """Return what megatron printed before it gave up; None if it did not."""
    gives_up = isinstance(error, SystemExit) and not error.code
    says_so = isinstance(error, KeyError) and "exiting" in last_line.lower()
    if not gives_up and not says_so:
        return None
    return re.sub(r"[,. ]*exiting *\.* *<*$", "", last_line, flags=re.IGNORECASE)


_OTHER_SCHEDULE = re.compile(
    r"OptimizerParamScheduler: class input value (?P<given>.*) and checkpoint ?value (?P<saved>.*) "
    r"for (?P<name>.*) do not match"
)
_OTHER_ARGUMENT = re.compile(
    r"(?P<name>\w+) value from checkpoint \((?P<saved>.*)\) is not equal to the input argument "
    r"value \((?P<given>.*)\)\."
)
_SCHEDULED = {
    "total number of iterations": "train_iters, lr_decay_iters or global_batch_size differ",
    "warmup iterations": "lr_warmup_iters, lr_warmup_fraction or global_batch_size differ",
    "learning rate": "lr differs",
    "minimum learning rate": "min_lr differs",
    "learning rate decay style": "lr_decay_style differs",
    "start weight decay": "weight_decay or start_weight_decay differs",
    "end weight decay": "weight_decay or end_weight_decay differs",
    "total number of weight decay iterations": "train_iters or global_batch_size differ",
    "weight decay incr style": "weight_decay_incr_style differs",
}
"""The options behind what megatron's scheduler compares."""


_OTHER_SHAPE = re.compile(
    r"size mismatch for (?P<name>\S+): copying a param with shape torch\.Size\(\[(?P<saved>.*)\]\) "
    r"from checkpoint, the shape in current model is torch\.Size\(\[(?P<here>.*)\]\)\."
)
_OTHER_GLOBAL_SHAPE = re.compile(
    r"Global shape mismatch for loaded \(torch\.Size\(\[(?P<saved>.*)\]\)\) and expected "
    r"\(\((?P<here>.*?)\)\) tensor for key (?P<name>\S+)"
)
_ABSENT = (
    (re.compile(r'Missing key\(s\) in state_dict: "(?P<name>[^"]+)"'), "is not saved"),
    (re.compile(r"(?P<name>[\w.]+) from model not in state dict"), "is not saved"),
    (re.compile(r'Unexpected key\(s\) in state_dict: "(?P<name>[^"]+)"'), "is not in the model"),
)


def _misfit(said: str) -> Optional[str]:
    """Return which weight does not fit; None if the error is another one."""
    for pattern in (_OTHER_SHAPE, _OTHER_GLOBAL_SHAPE):
        if found := list(pattern.finditer(said)):
            first = found[0]
            others = f" (and {len(found) - 1} more)" if len(found) > 1 else ""
            return f"{first['name']} is [{first['saved']}] there and [{first['here']}] here{others}"
    for pattern, what in _ABSENT:
        if name := pattern.search(said):
            return f"{name['name']} {what}"
    return None


def _refusal(load: Any, said: str) -> str:
    """Return why a checkpoint is not loaded, and what to set."""
    if found := _OTHER_SCHEDULE.fullmatch(said):
        name = found["name"]
        return (
            f"load={load} has another schedule: {_SCHEDULED.get(name, name)} ({name}: "
            f"{found['saved']} saved, {found['given']} here); set --override-opt_param-scheduler "
            "to train by the flags given here, or --use-checkpoint-opt_param-scheduler by those "
            "that were saved"
        )
    if found := _OTHER_ARGUMENT.fullmatch(said):
        name, saved = found["name"], found["saved"]
        return (
            f"{name}={found['given']} is not supported with load={load} because that was saved "
            f"with {name}={saved}; set {name}={saved}, or load another checkpoint"
        )
    cure = (
        "" if "--" in said else "; load another checkpoint, or set the flags that it was saved with"
    )
    return f"load={load} is refused by megatron: {said or 'a check without a message'}{cure}"
