# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Checks of learning rate and weight decay, which megatron asserts after it has built the model."""

from __future__ import annotations

from typing import Any, Optional

from megatron.slipstream.rules import Finding, Rule, always, check_rules, option_rule


def check_schedule(args: Any) -> list[Finding]:
    """Return findings about the schedule of the optimizer's parameters."""
    return [] if args.skip_train else check_rules(SCHEDULE_RULES, args)


def _is_by_samples(args: Any) -> bool:
    return not args.train_iters and bool(args.train_samples)


def _is_by_iterations(args: Any) -> bool:
    return bool(args.train_iters)


def _decay_iters(args: Any) -> int:
    return int(args.train_iters if args.lr_decay_iters is None else args.lr_decay_iters)


def _decay_samples(args: Any) -> int:
    return int(args.train_samples if args.lr_decay_samples is None else args.lr_decay_samples)


def _is_wsd(args: Any) -> bool:
    return bool(args.lr_decay_style == "WSD")


def _positive(value: Optional[float]) -> bool:
    return value is None or value > 0


SCHEDULE_RULES: tuple[Rule, ...] = (
    option_rule("lr", always, lambda f: f.lr is not None, "lr is not set", "set --lr"),
    option_rule(
        "min_lr",
        always,
        lambda f: f.min_lr >= 0 and (f.lr is None or f.min_lr <= f.lr),
        "min_lr={min_lr} is not from 0 to lr={lr}",
        "set --min-lr to 0 or more, and at most --lr",
    ),
    option_rule(
        "lr_warmup_init",
        lambda f: f.lr is not None,
        lambda f: f.lr_warmup_init <= f.lr,
        "lr_warmup_init={lr_warmup_init} is above lr={lr}",
        "set --lr-warmup-init to at most --lr",
    ),
    option_rule(
        "lr_decay_iters",
        _is_by_iterations,
        lambda f: _positive(f.lr_decay_iters),
        "lr_decay_iters={lr_decay_iters} is no number of iterations",
        "set --lr-decay-iters to 1 or more",
    ),
    option_rule(
        "lr_decay_samples",
        _is_by_samples,
        lambda f: _positive(f.lr_decay_samples),
        "lr_decay_samples={lr_decay_samples} is no number of samples",
        "set --lr-decay-samples to 1 or more",
    ),
    option_rule(
        "lr_warmup_fraction",
        always,
        lambda f: f.lr_warmup_fraction is None or f.lr_warmup_fraction < 1,
        "lr_warmup_fraction={lr_warmup_fraction} leaves nothing after the warm-up",
        "set --lr-warmup-fraction to less than 1",
    ),
    option_rule(
        "lr_warmup_iters",
        lambda f: _is_by_iterations(f) and f.lr_warmup_fraction is None,
        lambda f: f.lr_warmup_iters < _decay_iters(f) or not _positive(f.lr_decay_iters),
        "lr_warmup_iters={lr_warmup_iters} leaves nothing after the warm-up of a learning rate "
        "that decays in train_iters={train_iters} or lr_decay_iters={lr_decay_iters} iterations",
        "set --lr-warmup-iters to fewer, or --lr-decay-iters to more",
    ),
    option_rule(
        "lr_warmup_samples",
        lambda f: _is_by_samples(f) and f.lr_warmup_fraction is None,
        lambda f: f.lr_warmup_samples < _decay_samples(f) or not _positive(f.lr_decay_samples),
        "lr_warmup_samples={lr_warmup_samples} leaves nothing after the warm-up of a learning rate "
        "that decays in train_samples={train_samples} or lr_decay_samples={lr_decay_samples}",
        "set --lr-warmup-samples to fewer, or --lr-decay-samples to more",
    ),
    option_rule(
        "lr_wsd_decay_iters",
        lambda f: _is_wsd(f) and _is_by_iterations(f),
        lambda f: f.lr_wsd_decay_iters is not None,
        "lr_wsd_decay_iters is not set, which lr_decay_style=WSD needs",
        "set --lr-wsd-decay-iters, or another --lr-decay-style",
    ),
    option_rule(
        "lr_wsd_decay_samples",
        lambda f: _is_wsd(f) and _is_by_samples(f),
        lambda f: f.lr_wsd_decay_samples is not None,
        "lr_wsd_decay_samples is not set, which lr_decay_style=WSD needs",
        "set --lr-wsd-decay-samples, or another --lr-decay-style",
    ),
    option_rule(
        "weight_decay",
        always,
        lambda f: f.weight_decay >= 0,
        "weight_decay={weight_decay} is negative",
        "set --weight-decay to 0 or more",
    ),
    option_rule(
        "end_weight_decay",
        lambda f: None not in (f.start_weight_decay, f.end_weight_decay),
        lambda f: 0 <= f.start_weight_decay <= f.end_weight_decay,
        "start_weight_decay={start_weight_decay} is not from 0 to "
        "end_weight_decay={end_weight_decay}",
        "set --end-weight-decay to at least --start-weight-decay, and that to 0 or more",
    ),
    option_rule(
        "override_opt_param_scheduler",
        lambda f: f.use_checkpoint_opt_param_scheduler,
        lambda f: not f.override_opt_param_scheduler,
        "override_opt_param_scheduler=True is not supported with "
        "use_checkpoint_opt_param_scheduler=True because one schedule is followed",
        "leave one of them out",
    ),
)
"""Requirements of megatron's ``OptimizerParamScheduler``."""
