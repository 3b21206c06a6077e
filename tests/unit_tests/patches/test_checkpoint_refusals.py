# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A checkpoint that megatron refuses is one line with flags that cure it."""

from __future__ import annotations

import sys
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
import torch
from megatron.core.dist_checkpointing.core import CheckpointingException
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.training import checkpointing

from megatron.slipstream.patches.training_loop import CheckpointRefusedError, name_refusals

pytestmark = pytest.mark.releases

SCHEDULE: dict[str, Any] = {
    "init_lr": 0.0, "max_lr": 1e-3, "min_lr": 1e-5, "lr_warmup_steps": 2, "lr_decay_steps": 500,
    "lr_decay_style": "linear", "start_wd": 0.1, "end_wd": 0.1, "wd_incr_steps": 500,
    "wd_incr_style": "constant",
}  # fmt: skip
OTHER = {
    "max_lr": (2e-3, "lr differs (learning rate: 0.001 saved, 0.002 here)"),
    "min_lr": (0.0, "min_lr differs (minimum learning rate: 1e-05 saved, 0.0 here)"),
    "lr_warmup_steps": (3, "lr_warmup_iters, lr_warmup_fraction or global_batch_size differ"),
    "lr_decay_steps": (9, "train_iters, lr_decay_iters or global_batch_size differ (total number "
                          "of iterations: 500 saved, 9 here)"),
    "lr_decay_style": ("cosine", "lr_decay_style differs"),
    "start_wd": (0.05, "weight_decay or start_weight_decay differs"),
    "end_wd": (0.2, "weight_decay or end_weight_decay differs"),
    "wd_incr_steps": (9, "train_iters or global_batch_size differ"),
    "wd_incr_style": ("linear", "weight_decay_incr_style differs"),
}  # fmt: skip


def scheduler(**options: Any) -> OptimizerParamScheduler:
    optimizer = SimpleNamespace(param_groups=[])
    unset = {"use_checkpoint_opt_param_scheduler": False}  # megatron's default on the command line
    return OptimizerParamScheduler(optimizer, **{**SCHEDULE, **unset, **options})


def refusal(load: Any) -> str:
    with pytest.raises(CheckpointRefusedError) as refused:
        name_refusals(SimpleNamespace(load="folder"), load)()
    message = str(refused.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("name", OTHER)
def test_another_schedule_names_its_options_and_the_flags_that_cure_it(name: str) -> None:
    saved = scheduler().state_dict()
    value, words = OTHER[name]
    message = refusal(lambda: scheduler(**{name: value}).load_state_dict(saved))
    assert message.startswith(f"load=folder has another schedule: {words}")
    assert "; set --override-opt_param-scheduler to train by the flags given here, or " in message
    # Both cures are accepted.
    here = scheduler(**{name: value}, override_opt_param_scheduler=True)
    here.load_state_dict(saved)
    assert getattr(here, name) == value
    there = scheduler(**{name: value}, use_checkpoint_opt_param_scheduler=True)
    there.load_state_dict(saved)
    assert getattr(there, name) == SCHEDULE[name]


def test_another_model_names_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    saved = SimpleNamespace(num_layers=4, hidden_size=8)
    monkeypatch.setattr(checkpointing, "get_args", lambda: SimpleNamespace(num_layers=6))
    assert refusal(lambda: checkpointing.check_checkpoint_args(saved)) == (
        "num_layers=6 is not supported with load=folder because that was saved with num_layers=4; "
        "set num_layers=4, or load another checkpoint"
    )


def _fail() -> NoReturn:
    raise AssertionError("checkpoint versions do not match")


def _exit() -> NoReturn:
    print("Unable to load rng state from iter_3. Specify --no-load-rng or --finetune, exiting ...")
    print()
    sys.exit()


def _tear() -> NoReturn:
    print("could not load the checkpoint")
    print("PytorchStreamReader failed reading zip archive")
    sys.exit()


def _miss() -> NoReturn:
    print("Unable to load optimizer from iter_3. Specify --no-load-optim, exiting ...")
    raise KeyError("optimizer")


@pytest.mark.parametrize(
    "load, words",
    [
        (_fail, "checkpoint versions do not match; load another checkpoint, or set the flags that"),
        (_exit, "Unable to load rng state from iter_3. Specify --no-load-rng or --finetune"),
        (_tear, "PytorchStreamReader failed reading zip archive; load another checkpoint, or"),
        (_miss, "Unable to load optimizer from iter_3. Specify --no-load-optim"),
    ],
)
def test_what_megatron_prints_before_it_exits_is_the_error(
    load: Any, words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert refusal(load).startswith(f"load=folder is refused by megatron: {words}")
    assert ("exiting" in capsys.readouterr().out) == (load in (_exit, _miss))


@pytest.mark.parametrize(
    "saved, words",
    [
        (torch.nn.Linear(8, 4), "0.weight is [4, 8] there and [2, 8] here (and 1 more)"),
        (torch.nn.Linear(8, 2, bias=False), "0.bias is not saved"),
        (torch.nn.Bilinear(1, 8, 2), "0.weight is [2, 1, 8] there and [2, 8] here"),
    ],
)
def test_weights_that_do_not_fit_are_named(saved: torch.nn.Module, words: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 2))
    state = torch.nn.Sequential(saved).state_dict()
    assert refusal(lambda: model.load_state_dict(state)) == (
        f"load=folder does not fit the model: {words}; set the flags of the model that was saved, "
        "or load another checkpoint"
    )
    model = torch.nn.Sequential(torch.nn.Linear(8, 2, bias=False))
    state = torch.nn.Sequential(torch.nn.Linear(8, 2)).state_dict()
    assert "0.bias is not in the model; set" in refusal(lambda: model.load_state_dict(state))


def test_global_shapes_that_do_not_fit_are_named() -> None:
    def load() -> NoReturn:
        sizes = f"loaded ({torch.Size([4, 8])}) and expected ({(2, 8)}) tensor for key a.weight"
        raise CheckpointingException(f"Global shape mismatch for {sizes}")

    def miss() -> NoReturn:
        raise KeyError("a.bias from model not in state dict: ['a.weight']")

    assert "the model: a.bias is not saved; set" in refusal(miss)
    assert "the model: a.weight is [4, 8] there and [2, 8] here; set" in refusal(load)


def test_other_ends_of_loading_are_left_alone() -> None:
    def leave() -> NoReturn:
        print("the launcher ends this rank")
        sys.exit(7)

    def err() -> NoReturn:
        raise RuntimeError("no space")

    args = SimpleNamespace(load="folder")
    with pytest.raises(SystemExit):
        name_refusals(args, leave)()
    with pytest.raises(RuntimeError, match="no space"):
        name_refusals(args, err)()
    assert name_refusals(args, lambda *values, **named: (values, named))(1, a=2) == ((1,), {"a": 2})
