# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Random training programs on a random model, with and without ``attach()``, compared bit by bit.

A program is a list of steps, each drawn from its own seed, so that both runs do the same. With
``attach()`` everything that the model computes must be equal: results, gradients, and errors.
"""

from __future__ import annotations

import contextlib
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Optional

import torch
from random_models import BATCH, LENGTH, WIDTH, Fault, RandomModel, draw_patterns, loss_of

from megatron.slipstream.attached.handle import Attached, attach
from megatron.slipstream.options.fields import OffloadConfig


@dataclass
class Run:
    """One model while a program runs on it."""

    model: RandomModel
    attached: Optional[Attached]
    optimizer: torch.optim.Optimizer = field(init=False)
    results: list[torch.Tensor] = field(default_factory=list)
    """All computed tensors; equal in both runs."""
    alive: list[torch.Tensor] = field(default_factory=list)
    """Results whose graphs are kept while later steps run."""

    def __post_init__(self) -> None:
        self.optimizer = torch.optim.SGD(self.model.parameters(), 0.05)

    def loss(self, draw: random.Random) -> torch.Tensor:
        """Forward on a new micro-batch."""
        seed = draw.randrange(2**31)
        data = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
        loss = loss_of(self.model(data), seed)
        self.results.append(loss.detach().clone())
        return loss

    def note_gradients(self) -> None:
        """Note every gradient, and the parameters without one."""
        for parameter in self.model.parameters():
            grad = parameter.grad
            self.results.append(torch.zeros(0) if grad is None else grad.clone())

    def suspended(self) -> contextlib.AbstractContextManager[Any]:
        return contextlib.nullcontext() if self.attached is None else self.attached.suspended()


Step = Callable[[Run, random.Random], None]


def accumulate(run: Run, draw: random.Random) -> None:
    for _ in range(draw.randint(1, 3)):
        run.loss(draw).backward()


def several_forwards_first(run: Run, draw: random.Random) -> None:
    losses = [run.loss(draw) for _ in range(draw.randint(2, 3))]
    draw.shuffle(losses)
    for loss in losses:
        loss.backward()


def sum_of_losses(run: Run, draw: random.Random) -> None:
    torch.stack([run.loss(draw) for _ in range(2)]).sum().backward()


def interleave(run: Run, draw: random.Random) -> None:
    waiting: list[torch.Tensor] = []
    for _ in range(4):
        waiting.append(run.loss(draw))
        if draw.random() < 0.5:
            waiting.pop(draw.randrange(len(waiting))).backward()
    for loss in waiting:
        loss.backward()


def backward_twice(run: Run, draw: random.Random) -> None:
    loss = run.loss(draw)
    loss.backward(retain_graph=True)
    if draw.random() < 0.5:
        run.loss(draw).backward()
    loss.backward()


def two_losses(run: Run, draw: random.Random) -> None:
    seed = draw.randrange(2**31)
    data = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    output = run.model(data)
    loss_of(output[:1], seed).backward(retain_graph=True)
    loss_of(output[1:], seed + 1).backward()


def some_gradients(run: Run, draw: random.Random) -> None:
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    chosen = draw.sample(parameters, draw.randint(1, len(parameters)))
    grads = torch.autograd.grad(run.loss(draw), chosen, allow_unused=True)
    run.results += [grad.clone() for grad in grads if grad is not None]


def gradient_penalty(run: Run, draw: random.Random) -> None:
    parameters = [p for p in run.model.parameters() if p.requires_grad]
    loss = run.loss(draw)
    grads = torch.autograd.grad(loss, parameters, create_graph=True, allow_unused=True)
    penalty = sum(grad.abs().square().sum() for grad in grads if grad is not None)
    (loss + 0.1 * penalty).backward()


def keep_a_graph(run: Run, draw: random.Random) -> None:
    """Keep the graph of a forward or backward, with an optimizer step, while other steps run."""
    loss = run.loss(draw)
    if draw.random() < 0.5:
        loss.backward(retain_graph=True)
    run.alive.append(loss)
    del run.alive[:-2]


def backward_through_a_kept_graph(run: Run, draw: random.Random) -> None:
    """Backward through a kept graph; autograd refuses it if an optimizer has changed weights."""
    if run.alive:
        run.alive.pop(draw.randrange(len(run.alive))).backward()


def forward_only(run: Run, draw: random.Random) -> None:
    mode = draw.choice([torch.no_grad, torch.enable_grad])
    waiting = run.loss(draw) if draw.random() < 0.5 else None
    with mode():
        run.loss(draw)
    if waiting is not None:
        waiting.backward()


def fail_in_forward(run: Run, draw: random.Random) -> None:
    waiting = run.loss(draw) if draw.random() < 0.5 else None
    run.model.fault_before = draw.randrange(len(run.model.order))
    with contextlib.suppress(Fault):
        run.loss(draw)
    run.model.fault_before = None
    if waiting is not None:
        waiting.backward()


def fail_in_backward(run: Run, draw: random.Random) -> None:
    run.model.backward_fault_before = draw.randrange(len(run.model.order))
    loss = run.loss(draw)
    run.model.backward_fault_before = None
    with contextlib.suppress(Fault):
        loss.backward()


def suspend(run: Run, draw: random.Random) -> None:
    before = run.loss(draw) if draw.random() < 0.5 else None
    with run.suspended():
        loss = run.loss(draw)
        if draw.random() < 0.5 and before is not None:
            before, loss = loss, before
        loss.backward()
    if before is not None:
        before.backward()


def call_a_part(run: Run, draw: random.Random) -> None:
    seed = draw.randrange(2**31)
    data = torch.randn(BATCH, LENGTH, WIDTH, generator=torch.Generator().manual_seed(seed))
    loss_of(draw.choice(list(run.model.parts))(data.requires_grad_()), seed).backward()
    if draw.random() < 0.5:
        run.loss(draw).backward()


STEPS: tuple[Step, ...] = (
    *(accumulate, several_forwards_first, sum_of_losses, interleave, backward_twice, two_losses),
    *(some_gradients, gradient_penalty, keep_a_graph, backward_through_a_kept_graph),
    *(forward_only, fail_in_forward, fail_in_backward, suspend, call_a_part),
)


class Trial(NamedTuple):
    """Everything that a seed determines."""

    seed: int
    steps: list[tuple[Step, int]]
    optimizes: list[bool]
    """For each step, whether the optimizer runs after it."""
    options: dict[str, Any]
    """Options of ``attach()``."""
    settings: dict[str, Any]
    """Options of ``OffloadConfig``."""


class Outcome(NamedTuple):
    """Result of a trial."""

    num_values: int
    """Number of compared values."""
    num_errors: int
    """Number of steps that raised, with and without ``attach()``."""
    moved_bytes: int


def draw_trial(seed: int) -> Trial:
    draw = random.Random(seed)
    steps = [(draw.choice(STEPS), draw.randrange(2**31)) for _ in range(draw.randint(3, 7))]
    repeated = draw.choice(steps)
    steps += [repeated] * draw.randint(0, 3)  # so that a plan is followed
    options = {
        "min_offloaded_tensor_size": draw.choice([1, 1, 1, BATCH * LENGTH * WIDTH]),
        "activation_offload_fraction": draw.choice([1.0, 1.0, 0.5]),
    }
    settings = {
        "offload_backend": draw.choice(["cpu", "cpu-lazy", "cpu-lazy"]),
        "offload_release_lag": draw.choice([0, 1, 1, 3]),
        "offload_prefetch_depth": draw.choice([1, 1, 2]),
        "offload_verify": draw.choice([0, 0, 2]),
        "offload_max_overhead_percent": draw.choice([None, None, 1]),
        # Alternate between both kinds of hooks, so that a seed's other choices do not change.
        "offload_native": "auto" if seed % 2 else "off",
    }
    return Trial(seed, steps, [draw.random() < 0.5 for _ in steps], options, settings)


def compare(seed: int) -> Outcome:
    """Run the trial of ``seed`` with and without ``attach()``.

    Raises:
        AssertionError: They differ; the message names the difference and the trial.
    """
    trial = draw_trial(seed)
    plain, attached = (_start(trial, is_attached) for is_attached in (False, True))
    num_errors, moved_bytes = 0, 0
    for index, (step, _) in enumerate(trial.steps):
        raised = [_run_step(run, trial, index) for run in (plain, attached)]
        where = f"step {index} ({step.__name__}) of {_describe(trial, plain.model)}"
        kinds = [type(error) for error in raised]
        if kinds[0] is not kinds[1]:
            message = f"without {raised[0]!r}, with {raised[1]!r}, {where}"
            raise AssertionError(message) from raised[1]
        num_errors += raised[0] is not None
        _assert_equal(plain.results, attached.results, where)
        ranks = attached.attached.report().ranks
        moved_bytes += sum(rank.total.d2h_bytes for rank in ranks)
    return Outcome(sum(result.numel() for result in plain.results), num_errors, moved_bytes)


def _start(trial: Trial, is_attached: bool) -> Run:
    draw = random.Random(trial.seed + 1)
    torch.manual_seed(trial.seed)
    model = RandomModel(draw)
    patterns = draw_patterns(draw, model)
    if not is_attached:
        return Run(model, None)
    config = OffloadConfig(**trial.settings)
    return Run(model, attach(model, patterns, config, **trial.options))


def _run_step(run: Run, trial: Trial, index: int) -> Optional[Exception]:
    step, seed = trial.steps[index]
    torch.manual_seed(seed)  # of the dropout
    run.optimizer.zero_grad()
    error = None
    try:
        step(run, random.Random(seed))
        run.note_gradients()
    except Exception as raised:
        error = raised.with_traceback(None)
        run.model.fault_before = run.model.backward_fault_before = None
        run.optimizer.zero_grad()
    if trial.optimizes[index]:
        run.optimizer.step()
    return error


def _assert_equal(left: list[torch.Tensor], right: list[torch.Tensor], where: str) -> None:
    assert len(left) == len(right), f"{len(left)} results without, {len(right)} with, {where}"
    for place, (a, b) in enumerate(zip(left, right, strict=True)):
        assert a.shape == b.shape, f"result {place} exists in one of the two runs only, {where}"
        if a.contiguous().numpy().tobytes() != b.contiguous().numpy().tobytes():
            raise AssertionError(f"result {place} of shape {list(a.shape)} differs, {where}")


def _describe(trial: Trial, model: RandomModel) -> str:
    steps = [step.__name__ for step, _ in trial.steps]
    return f"seed {trial.seed}: {model.describe()}; steps {steps}; {trial.options} {trial.settings}"
