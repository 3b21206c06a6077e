# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Where nothing moves a warning says why, once; a handle prints what it does."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from attached_models import (
    Chain,
    Decoder,
    Layer,
    attach_to,
    loss_of,
    make,
    make_attached,
    micro_batch,
    numbers,
)
from torch.utils.checkpoint import checkpoint

from megatron.slipstream.attached.engine import MAX_LOST_PASSES
from megatron.slipstream.attached.handle import attach
from megatron.slipstream.options.fields import OffloadConfig


def train(model: torch.nn.Module) -> None:
    for index in range(3):
        loss_of(model, index).backward()


def without_gradients() -> Decoder:
    model = Decoder()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def with_identities() -> Decoder:
    model = Decoder()
    for layer in model.layers:
        layer.mlp_norm = torch.nn.Identity()
    return model


def never_backward(model: torch.nn.Module) -> None:
    for index in range(2 * MAX_LOST_PASSES):
        loss_of(model, index)


def train_in_a_checkpoint(model: torch.nn.Module) -> None:
    for index in range(3):
        checkpoint(model, micro_batch(index), use_reentrant=False).sum().backward()


def train_a_part_in_a_checkpoint(model: torch.nn.Module) -> None:
    x = numbers(0, 2, 8, 32).requires_grad_()
    for _ in range(3):
        checkpoint(model.layers[0], x, use_reentrant=False).sum().backward()


def train_compiled(model: torch.nn.Module) -> None:
    train(torch.compile(model, fullgraph=True, backend="eager"))


class Case:
    def __init__(
        self,
        words: list[str],
        build: Callable[[], torch.nn.Module] = Decoder,
        patterns: Any = "layers.*",
        run: Callable[[torch.nn.Module], None] = train,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.words, self.build, self.patterns, self.run = words, build, patterns, run
        self.config = OffloadConfig(offload_backend="cpu", **(config or {}))
        self.options = {"min_offloaded_tensor_size": 1, **options}


CASES = {
    "too small": Case(
        [
            "nothing moves. Of 4 groups 4 stay: it saves only tensors smaller than "
            "min_offloaded_tensor_size, parameters and buffers",
            "or set the option named",
        ],
        min_offloaded_tensor_size=1 << 20,
    ),
    "a fraction of none": Case(
        ["nothing moves. Of 4 groups 3 stay: activation_offload_fraction keeps it; 1 stays"],
        activation_offload_fraction=0.0,
    ),
    "host memory for none": Case(
        ["nothing moves. Of 4 groups 3 stay: offload_host_memory_limit_bytes keeps it; 1 stays"],
        config={"offload_host_memory_limit_bytes": 100},
    ),
    "before backward only": Case(
        ["nothing moves. Of 1 groups 1 stays: its backward follows before another layer"],
        patterns="layers.3",
    ),
    "no gradients": Case(
        ["backward does not reach modules of 'layers.*.mlp'", "name modules that are trained"],
        without_gradients, "layers.*.mlp",
    ),
    "nothing computed": Case(
        ["backward does not reach modules of 'layers.*.mlp_norm'"],
        with_identities, "layers.*.mlp_norm",
    ),
    "never a backward": Case(
        [f"{MAX_LOST_PASSES + 1} times in a row with gradients and no backward", "torch.no_grad()"],
        run=never_backward,
    ),
    "a model in a checkpoint": Case(["under other saved-tensor hooks"], run=train_in_a_checkpoint),
    "a part in a checkpoint": Case(
        ["a module of 'layers.*' runs outside of the model's forward and under other saved-tensor"],
        run=train_a_part_in_a_checkpoint,
    ),
    "one graph": Case(["compiled with fullgraph=True", "leave fullgraph out"], run=train_compiled),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_where_nothing_moves_one_warning_says_why(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    model = make(case.build)
    attached = attach(model, case.patterns, case.config, **case.options)
    case.run(model)
    assert attached.report().ranks[0].d2h_bytes == 0 or name in ("a fraction of none",)
    warnings = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    told = [text for text in warnings if case.words[0] in text]
    assert len(told) == 1, warnings
    for word in case.words[1:]:
        assert word in told[0]
    assert attached.report().ranks[0].warnings


def test_where_something_moves_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, attached = make_attached(Decoder, "layers.*")
    train(model)
    for index in range(MAX_LOST_PASSES):  # forwards for a metric
        loss_of(model, index)
    train(model)
    assert attached.report().ranks[0].d2h_bytes > 0
    assert [r.getMessage() for r in caplog.records if r.levelname == "WARNING"] == []


# --- print(attached) ------------------------------------------------------------------------------


def test_a_handle_prints_modules_bytes_and_plan() -> None:
    model = make(Decoder)
    attached = attach_to(model, ["layers.*.mlp", "head"])
    assert str(attached).splitlines() == [
        "Attached to Decoder, backend cpu",
        "  layers.*.mlp: 4 modules",
        "  head: 1 module",
        "  no plan yet: it is made after the first forward and backward",
    ]
    train(model)
    lines = str(attached).splitlines()
    moved = attached.report().ranks[0].modules["layers.*.mlp"]
    assert lines[1].startswith("  layers.*.mlp: 4 modules, 3 of 4 groups and ")
    assert f"{moved.d2h_bytes / 1024:.1f} KiB moved in the last iteration" in lines[1]
    assert lines[2].startswith("  head: 1 module, 0 of 1 groups and 0 B moved")
    assert lines[3].startswith("  3 iterations, plan: 3 of 5 groups move, ")
    attached.detach()
    assert str(attached).startswith("Attached to Decoder, backend cpu, detached\n")


def test_printing_a_handle_changes_no_figure() -> None:
    results = []
    for prints in (False, True):
        model, attached = make_attached(partial(Chain, Layer), "parts.*")
        for _ in range(3):
            loss = model(numbers(1, 2, 8, 32)).sum()
            if prints:
                str(attached)
            loss.backward()
            if prints:
                repr(attached)
        rank = attached.report().ranks[0]
        results.append((rank.modules, rank.num_plans, rank.num_iterations))
    assert results[0] == results[1]


# --- ranks ---------------------------------------------------------------------------------------


def test_a_process_group_made_after_attach_gives_the_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(Decoder)
    attached = attach_to(model, "layers.3")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    loss_of(model, 0).backward()
    (told,) = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert told.startswith("rank 1: nothing moves. Of 1 groups 1 stays")
    assert attached.report().ranks[0].rank == 1
