# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Gradients that parameters hold, and new ones."""

from __future__ import annotations

import torch

from megatron.slipstream.integration.seam.gradients import Gradients


def test_each_gradient_that_appears_is_told_once() -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.Linear(5, 2))
    gradients = Gradients(lambda: [model])
    told: list[int] = []
    gradients.begin(told.append)
    assert gradients.count() == 0
    for _ in range(2):
        model(torch.ones(1, 3)).sum().backward()
    assert sorted(told) == [8, 20, 40, 60]
    assert gradients.count() == sum(told)


def test_gradients_that_are_there_are_not_told() -> None:
    model = torch.nn.Linear(3, 5)
    model(torch.ones(1, 3)).sum().backward()
    gradients = Gradients(lambda: [model])
    told: list[int] = []
    gradients.begin(told.append)
    model.bias.grad = None
    model(torch.ones(1, 3)).sum().backward()
    assert told == []
    assert gradients.count() == 80


def test_no_hook_is_left() -> None:
    model = torch.nn.Linear(3, 5)
    gradients = Gradients(lambda: [model])
    told: list[int] = []
    gradients.begin(told.append)
    gradients.end()
    model(torch.ones(1, 3)).sum().backward()
    assert told == []
