# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What megatron's scheduler asserts without a word is refused first, and the cures are accepted."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from megatron.training import training
from rule_cases import TABLES, TRAINING, Case

pytestmark = pytest.mark.releases


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


@pytest.mark.parametrize("case", TABLES["schedule"].cases, ids=lambda case: str(case.broken))
def test_megatron_asserts_what_a_rule_refuses_and_accepts_the_cures(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert megatron_accepts(TRAINING, monkeypatch)
    assert not megatron_accepts({**TRAINING, **case.broken}, monkeypatch)
    for cure in case.cures:
        assert megatron_accepts({**TRAINING, **case.broken, **cure}, monkeypatch)
