# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What moves less than it could says the real reason: in the warning, the handle and the report."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attached_models import WIDTH, Chain, Layer, equal, gradients, make, numbers
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.utils.checkpoint import checkpoint

from megatron.slipstream.attached.handle import attach
from megatron.slipstream.options.fields import OffloadConfig

SMALL = "min_offloaded_tensor_size"
Block = Callable[[torch.Tensor], torch.Tensor]


class Blocks(torch.nn.Module):
    """Layers of which each call is wrapped."""

    def __init__(
        self, wrap: Callable[[Block, torch.Tensor], torch.Tensor], is_inside: bool
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Wrapped(wrap) if is_inside else Layer() for _ in range(4))
        self.wrap = wrap
        self.is_inside = is_inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.is_inside else self.wrap(layer, x)
        return x


class Wrapped(Layer):
    def __init__(self, wrap: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrap(super().forward, x)


class Half(Wrapped):
    """Only a part of what it saves is taken."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.wrap(self.mlp, x)


class Jagged(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)
        return self.linear(rows).sin().to_padded_tensor(0.0)


def on_cpu(block: Block, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        return block(x)


def by_hand(block: Block, x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(lambda tensor: (tensor,), lambda saved: saved[0]):
        return block(x)


def checkpointed(block: Block, x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    with save_on_cpu():
        return checkpoint(block, x, use_reentrant=use_reentrant)


TAKEN = "it saves only tensors that other saved-tensor hooks take"
AROUND = "modules of '{}' run under other saved-tensor hooks ({}), which take what they save"
INSIDE = "modules of '{}' set other saved-tensor hooks ({}), which take what they save"

CASES: dict[str, tuple[Callable[[], torch.nn.Module], str, list[str]]] = {
    "around": (
        partial(Blocks, on_cpu, False), "layers.*", [AROUND.format("layers.*", "save_on_cpu")]
    ),
    "around checkpoints": (
        partial(Blocks, partial(checkpointed, use_reentrant=False), False),
        "layers.*",
        [AROUND.format("layers.*", "save_on_cpu")],
    ),
    "around reentrant checkpoints": (
        partial(Blocks, partial(checkpointed, use_reentrant=True), False),
        "layers.*",
        [AROUND.format("layers.*", "save_on_cpu")],
    ),
    "inside": (
        partial(Blocks, on_cpu, True),
        "layers.*",
        [INSIDE.format("layers.*", "save_on_cpu"), f"Of 4 groups 4 stay: {TAKEN}"],
    ),
    "inside by other functions": (
        partial(Blocks, by_hand, True),
        "layers.*",
        [INSIDE.format("layers.*", "by_hand"), f"Of 4 groups 4 stay: {TAKEN}"],
    ),
    "jagged": (
        partial(Chain, Jagged),
        "parts.*",
        ["Of 3 groups 3 stay: it saves only parameters and buffers, nested tensors"],
    ),
}  # fmt: skip


def train(build: Callable[[], torch.nn.Module], patterns: str | None, path: str) -> Any:
    model, attached = make(build), None
    if patterns is not None:
        config = OffloadConfig(offload_backend="cpu", offload_native=path)
        attached = attach(model, patterns, config, min_offloaded_tensor_size=1)
    for index in range(3):
        torch.manual_seed(index)
        x = numbers(index, 2, 8, WIDTH).requires_grad_()
        model(x).square().sum().backward()
    return [x.grad, *gradients(model)], attached


def warnings_of(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]


@pytest.mark.parametrize("path", ["auto", "off"])
@pytest.mark.parametrize("name", CASES)
def test_where_nothing_moves_the_real_reason_is_told(
    name: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, patterns, words = CASES[name]
    expected, _ = train(build, None, path)
    results, attached = train(build, patterns, path)
    assert equal(results, expected)
    assert attached.report().ranks[0].d2h_bytes == 0
    told = warnings_of(caplog)
    assert len(told) == len(words), told
    places = {"handle": repr(attached), "report": attached.report().render()}
    for word, text in zip(words, told, strict=True):
        assert word in text
        reason = word.removeprefix("Of 4 groups 4 stay: ").removeprefix("Of 3 groups 3 stay: ")
        for place, content in places.items():
            assert reason in content, place
    for text in (*told, *places.values()):
        assert SMALL not in text
        assert "the modules that are checkpointed" not in text
        assert "set the option" not in text


@pytest.mark.parametrize("path", ["auto", "off"])
def test_a_group_of_which_a_part_is_taken_says_so(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    build = partial(Chain, partial(Half, on_cpu), 4)
    expected, _ = train(build, None, path)
    results, attached = train(build, "parts.*", path)
    assert equal(results, expected)
    assert attached.report().ranks[0].modules["parts.*"].num_groups_moved == 3
    (told,) = warnings_of(caplog)
    assert INSIDE.format("parts.*", "save_on_cpu") in told
    for content in (repr(attached), attached.report().render()):
        assert told.removeprefix("attach(): ") in content
        assert "3 groups that move also save tensors that other saved-tensor hooks take" in content


class Keeps(torch.nn.Module):
    """Its result is saved by an operation outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sin()


@pytest.mark.parametrize("path", ["auto", "off"])
def test_memory_that_something_else_holds_is_said_with_its_bytes(path: str) -> None:
    _, attached = train(partial(Chain, Keeps, 4), "parts.*.inner", path)
    # In two layers the sigmoid's result, which the sine saves; of the first, its input is held too.
    nbytes = 2 * 2 * 8 * WIDTH * 4
    text = f"of groups that move, {nbytes / 1024:.1f} KiB stay: an operation outside the chosen"
    for content in (repr(attached), attached.report().render()):
        assert text in content
