# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What megatron's scheduler asserts without a word is refused first, and the cures are accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import training

from megatron.slipstream.options.training import SCHEDULE_RULES, check_schedule

pytestmark = pytest.mark.releases

BY_ITERATIONS: dict[str, Any] = {
    "train_iters": 10, "train_samples": None, "global_batch_size": 4, "skip_train": False,
    "lr": 1e-3, "min_lr": 0.0, "lr_warmup_init": 0.0, "lr_warmup_fraction": None,
    "lr_warmup_iters": 0, "lr_decay_iters": None, "lr_wsd_decay_iters": None,
    "lr_warmup_samples": 0, "lr_decay_samples": None, "lr_wsd_decay_samples": None,
    "lr_decay_style": "linear", "lr_wsd_decay_style": "linear", "weight_decay": 0.01,
    "start_weight_decay": None, "end_weight_decay": None, "weight_decay_incr_style": "constant",
    "use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": False,
}  # fmt: skip
BY_SAMPLES = BY_ITERATIONS | {"train_iters": None, "train_samples": 40}
RISING = {"weight_decay_incr_style": "linear", "start_weight_decay": 0.1, "end_weight_decay": 0.2}

CASES: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("lr", {"lr": None}, [{"lr": 1e-3}]),
    ("min_lr", {"min_lr": -1.0}, [{"min_lr": 0.0}]),
    ("min_lr", {"min_lr": 1.0}, [{"min_lr": 1e-3}]),
    ("lr_warmup_init", {"lr_warmup_init": 1.0}, [{"lr_warmup_init": 1e-3}]),
    ("lr_decay_iters", {"lr_decay_iters": -1}, [{"lr_decay_iters": 1}]),
    ("lr_warmup_fraction", {"lr_warmup_fraction": 1.0}, [{"lr_warmup_fraction": 0.5}]),
    ("lr_warmup_iters", {"lr_warmup_iters": 10}, [{"lr_warmup_iters": 9}, {"lr_decay_iters": 11}]),
    ("lr_warmup_iters", {"lr_warmup_iters": 5, "lr_decay_iters": 5}, [{"lr_decay_iters": 6}]),
    (
        "lr_wsd_decay_iters",
        {"lr_decay_style": "WSD"},
        [{"lr_wsd_decay_iters": 2}, {"lr_decay_style": "cosine"}],
    ),
    ("weight_decay", {"weight_decay": -0.1}, [{"weight_decay": 0.0}]),
    ("end_weight_decay", RISING | {"end_weight_decay": 0.05}, [{"end_weight_decay": 0.1}]),
    ("end_weight_decay", RISING | {"start_weight_decay": -1.0}, [{"start_weight_decay": 0.0}]),
    (
        "override_opt_param_scheduler",
        {"use_checkpoint_opt_param_scheduler": True, "override_opt_param_scheduler": True},
        [
            {"use_checkpoint_opt_param_scheduler": False},
            {"override_opt_param_scheduler": False},
        ],
    ),
]
OF_SAMPLES: list[tuple[str, dict[str, Any], list[dict[str, Any]]]] = [
    ("lr_decay_samples", {"lr_decay_samples": -1}, [{"lr_decay_samples": 1}]),
    (
        "lr_warmup_samples",
        {"lr_warmup_samples": 40},
        [{"lr_warmup_samples": 39}, {"lr_decay_samples": 41}],
    ),
    ("lr_wsd_decay_samples", {"lr_decay_style": "WSD"}, [{"lr_wsd_decay_samples": 8}]),
]


def megatron_accepts(options: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> bool:
    args = SimpleNamespace(**options)
    if args.start_weight_decay is None:  # as megatron's validation does
        args.start_weight_decay = args.end_weight_decay = args.weight_decay
    monkeypatch.setattr(training, "get_args", lambda: args)
    monkeypatch.setattr(training, "update_train_iters", lambda _: None)
    try:
        training.get_optimizer_param_scheduler(SimpleNamespace(param_groups=[]))
    except (AssertionError, TypeError):
        return False
    return True


@pytest.mark.parametrize(
    "base, name, broken, cures",
    [(BY_ITERATIONS, *case) for case in CASES] + [(BY_SAMPLES, *case) for case in OF_SAMPLES],
)
def test_what_megatron_asserts_is_refused_and_the_cures_are_accepted(
    base: dict[str, Any],
    name: str,
    broken: dict[str, Any],
    cures: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert check_schedule(SimpleNamespace(**base)) == []
    assert not megatron_accepts(base | broken, monkeypatch)
    (finding,) = check_schedule(SimpleNamespace(**(base | broken)))
    assert finding.rule == name
    assert finding.cure.startswith(("set --", "leave one"))
    for cure in cures:
        assert check_schedule(SimpleNamespace(**(base | broken | cure))) == []
        assert megatron_accepts(base | broken | cure, monkeypatch)
    assert check_schedule(SimpleNamespace(**(base | broken | {"skip_train": True}))) == []


def test_every_rule_has_a_case() -> None:
    assert {name for name, *_ in CASES + OF_SAMPLES} == {rule.name for rule in SCHEDULE_RULES}
