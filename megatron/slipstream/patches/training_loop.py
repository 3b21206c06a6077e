# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Patches of ``megatron.training`` where it has no callback, for the training entry."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from megatron.slipstream.patches.patching import Patch


class CheckpointRefusedError(ValueError):
    """The options cannot load the checkpoint. Every rank raises it, before training starts."""


def bound(patch: Patch, *values: Any) -> Patch:
    """Return a patch of this module, bound to values known only at run time."""
    return replace(patch, replace=functools.partial(patch.replace, *values))


def evaluate_first(args: Any, train: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``train``: evaluate once more, between building the model and the first iteration."""

    def evaluate_then_train(
        forward_step: Any,
        model: Any,
        optimizer: Any,
        scheduler: Any,
        train_iterator: Any,
        valid_iterator: Any,
        process_non_loss_data: Any,
        config: Any,
        *rest: Any,
        **groups: Any,
    ) -> Any:
        from megatron.training import training

        iteration = args.iteration  # above 0 if training resumes
        training.evaluate_and_print_results(
            f"iteration {iteration}", forward_step, valid_iterator, model, iteration,
            process_non_loss_data, config, **groups,
        )  # fmt: skip
        return train(
            forward_step, model, optimizer, scheduler, train_iterator, valid_iterator,
            process_non_loss_data, config, *rest, **groups,
        )  # fmt: skip

    return evaluate_then_train


def finalize_through(
    finalizing: Callable[[Any], Callable[..., Any]], finalize: Callable[..., Any]
) -> Callable[..., Any]:
    """Replace ``finalize_model_grads``."""
    return finalizing(finalize)


def check_expert_layout(args: Any, check: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``check_checkpoint_args``: refuse the optimizer state of other experts.

    The distributed optimizer saves flat buckets by default. Their sizes do not depend on the order
    of the parameters in them, so state of parameters in another order loads without an error.

    Raises:
        CheckpointRefusedError: The replacement is called for such a checkpoint.
    """

    def check_all(saved: Any, *arguments: Any, **options: Any) -> Any:
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

    return check_all


def take_arguments(args: Any, initialize: Callable[..., Any]) -> Callable[..., Any]:
    """Replace ``initialize_megatron``: use arguments that are already parsed and validated."""
    return functools.partial(initialize, parsed_args=args)


def do_nothing(_: Callable[..., Any]) -> Callable[..., Any]:
    """Replace a function whose work is already done."""
    return lambda *_, **__: None
