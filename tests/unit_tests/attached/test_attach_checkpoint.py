# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Modules that run in ``torch.utils.checkpoint`` or ``torch.compile``, attached."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from attached_models import (
    BACKENDS,
    LAZY,
    WIDTH,
    Decoder,
    Layer,
    attach_to,
    counters,
    equal,
    has_own_hooks,
    loss_of,
    make,
    make_attached,
    micro_batch,
    one_backward_each,
    train,
    train_as_plain,
)
from torch._dynamo.convert_frame import input_codes
from torch._dynamo.testing import CompileCounterWithBackend
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from megatron import slipstream

ENGINE = str(Path(slipstream.__file__).parent)

INPUT_BYTES = 2 * 8 * WIDTH * 4

REENTRANT = pytest.mark.parametrize("reentrant", [False, True], ids=["", "reentrant"])


@pytest.fixture(params=BACKENDS)
def backend(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@REENTRANT
def test_of_checkpointed_modules_the_inputs_move(backend: str, reentrant: bool) -> None:
    build = partial(Decoder, checkpointing=reentrant)
    attached = train_as_plain(build, "layers.*", backend=backend, plain=Decoder)
    moved = counters(attached)["inputs of layers.*"]
    assert (moved.num_groups, moved.num_groups_moved, moved.num_late) == (4, 3, 0)
    assert moved.freed_bytes == moved.d2h_bytes == 3 * INPUT_BYTES
    assert attached.report().ranks[0].num_plans == 1
    assert not has_own_hooks()


def test_of_a_checkpoint_wrapper_the_inputs_move() -> None:
    class Wrapped(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in self.layers)

    attached = train_as_plain(Wrapped, [Layer], plain=Decoder)
    assert counters(attached)["Layer"].freed_bytes == 3 * INPUT_BYTES


@REENTRANT
def test_a_checkpoint_inside_of_a_chosen_module(reentrant: bool) -> None:
    class Partly(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = checkpoint(lambda y: y + self.attn(self.attn_norm(y)), x, use_reentrant=reentrant)
            return x + self.mlp(self.mlp_norm(x))

    class Partial(Decoder):
        def __init__(self) -> None:
            super().__init__()
            for index, layer in enumerate(list(self.layers)):
                layer.__class__ = Partly
                self.layers[index] = layer

    whole_bytes = counters(train_as_plain(Decoder, "layers.*"))["layers.*"].d2h_bytes
    attached = train_as_plain(Partial, "layers.*", plain=Decoder)
    assert 3 * INPUT_BYTES < counters(attached)["layers.*"].d2h_bytes < whole_bytes
    assert counters(attached)["layers.*"].num_late == 0


@REENTRANT
def test_one_checkpoint_around_several_chosen_modules(reentrant: bool) -> None:
    class Pairs(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            for first in range(0, len(self.layers), 2):
                pair = torch.nn.Sequential(*self.layers[first : first + 2])
                x = checkpoint(pair, x, use_reentrant=reentrant)
            return self.head(x)

    attached = train_as_plain(partial(Pairs, 6), "layers.*", plain=partial(Decoder, 6))
    moved = counters(attached)["inputs of layers.*"]
    assert (moved.num_groups, moved.num_groups_moved, moved.num_late) == (3, 2, 0)
    assert moved.freed_bytes == 2 * INPUT_BYTES


@REENTRANT
def test_inputs_that_are_also_saved_before_the_checkpoint_leave_the_device(reentrant: bool) -> None:
    """Every holder must release them."""

    class Between(Decoder):
        def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            return checkpoint(layer, torch.tanh(x), use_reentrant=reentrant)

    attached = train_as_plain(Between, "layers.*")
    assert counters(attached)["inputs of layers.*"].freed_bytes == 3 * INPUT_BYTES


@REENTRANT
def test_an_input_that_was_changed_in_place_since_it_was_saved_is_an_error(reentrant: bool) -> None:
    class Changes(Decoder):
        def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            x = torch.tanh(x)
            x.detach().mul_(0.5)
            return checkpoint(layer, x, use_reentrant=reentrant)

    for patterns in (None, "layers.*"):
        model = make(Changes, patterns, LAZY)
        with pytest.raises(RuntimeError, match="in-?place operation"):
            loss_of(model, 0).backward()


@REENTRANT
def test_only_what_a_checkpoint_saves_is_taken_for_its_input(reentrant: bool) -> None:
    class Skips(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = first = self.embedding(ids)
            for layer in self.layers:
                x = self.run(layer, x)
            # tanh saves its result, so the checkpoint has saved everything that tanh does.
            return self.head(torch.tanh(x) * first)

    attached = train_as_plain(partial(Skips, checkpointing=reentrant), "layers.*")
    assert counters(attached)["inputs of layers.*"].num_groups == 4


def test_hooks_lie_around_the_model_only_where_checkpoints_are_seen() -> None:
    class Looks(Decoder):
        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            seen.append(has_own_hooks())
            return super().forward(ids)

    seen: list[bool] = []
    model = make(Looks, "layers.*", LAZY)
    for model.checkpointing in (None, None, False, False, None, None):
        one_backward_each(model, 0)
    # The first pass knows nothing; later passes know the previous one.
    assert seen == [True, *[False] * 4, *[True] * 4, *[False] * 3]


def test_selective_checkpointing() -> None:
    def keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
        is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
        return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE

    class Selective(Decoder):
        def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
            contexts = partial(create_selective_checkpoint_contexts, keep_products)
            return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)

    attached = train_as_plain(Selective, "layers.*", plain=Decoder)
    assert counters(attached)["inputs of layers.*"].freed_bytes == 3 * INPUT_BYTES


@REENTRANT
def test_checkpointing_switched_on_and_off_while_training(reentrant: bool) -> None:
    def step(model: Any, iteration: int) -> list[torch.Tensor]:
        model.checkpointing = reentrant if iteration // 3 % 2 else None
        return one_backward_each(model, iteration)

    expected = train(make(Decoder), one_backward_each, 12)
    model, attached = make_attached(Decoder, "layers.*", LAZY)
    assert equal(train(model, step, 12), expected)
    assert list(counters(attached)) == ["inputs of layers.*"]
    assert counters(attached)["inputs of layers.*"].num_late == 0


def test_modules_of_which_recomputation_keeps_nothing_are_named(
    caplog: pytest.LogCaptureFixture,
) -> None:
    model = make(partial(Decoder, checkpointing=False), ["layers.*.mlp", "head"])
    train(model, one_backward_each)
    assert caplog.text.count("'layers.*.mlp' ran only where nothing is kept of them") == 1
    assert "'head'" not in caplog.text


def test_modules_that_never_run_are_named(caplog: pytest.LogCaptureFixture) -> None:
    class Unused(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.spare = Layer()

    model = make(Unused, ["layers.*", "spare"])
    train(model, one_backward_each)
    assert caplog.text.count("no module of 'spare' ran in the model's forward") == 1


def test_a_frozen_part_without_gradients() -> None:
    class Tower(Decoder):
        def __init__(self) -> None:
            super().__init__()
            self.tower = torch.nn.Sequential(Layer(), Layer())

        def forward(self, ids: torch.Tensor) -> torch.Tensor:
            x = self.embedding(ids)
            with torch.no_grad():
                frozen = self.tower(x)
            for layer in self.layers:
                x = layer(x + frozen)
            return self.head(x)

    attached = train_as_plain(Tower, ["layers.*", "tower.*"])
    assert counters(attached)["layers.*"].num_groups_moved == 3


def test_checkpoints_of_passes_whose_forwards_come_first() -> None:
    def step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        losses = [loss_of(model, 10 * iteration + index) for index in range(3)]
        for loss in losses:
            loss.backward()
        return losses

    build = partial(Decoder, checkpointing=False)
    attached = train_as_plain(build, "layers.*", step)
    moved = counters(attached)["inputs of layers.*"]
    assert (moved.num_groups, moved.num_late) == (12, 0)
    assert moved.num_groups_moved > 6


@pytest.mark.parametrize(
    "what, first",
    [
        ("layers", "attached"),
        ("layers in place", "compiled"),
        ("model", "compiled"),
        ("model in place", "attached"),
    ],
)
def test_compiled_modules(what: str, first: str) -> None:
    """With a compiler that does not fuse: fusion would change the results of a split model."""

    def run(patterns: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        compiler = CompileCounterWithBackend("aot_eager")
        model, attached = make(partial(Decoder, 3)), None
        model.eval()  # Dropout of compiled graphs draws other numbers.
        if patterns and first == "attached":
            attached = attach_to(model, patterns, "cpu-lazy")
        call = _compile(model, what, compiler)
        if patterns and first == "compiled":
            attached = attach_to(call, patterns, "cpu-lazy")
        results = train(call, one_backward_each, 2)
        # One graph for all layers, or for the whole model.
        assert compiler.frame_count == 1
        if attached is not None:
            assert counters(attached)["layers.*"].num_groups_moved == 2
        return results

    assert equal(run("layers.*"), run(None))


@pytest.mark.parametrize("first", ["attached", "compiled"])
@torch._dynamo.config.patch(skip_nnmodule_hook_guards=True)
def test_code_that_was_compiled_for_a_model_without_hooks_is_not_used(first: str) -> None:
    torch._dynamo.reset()
    plain = torch.compile(make(partial(Decoder, 3)).eval(), backend="aot_eager")
    expected = train(plain, one_backward_each, 2)
    model = make(partial(Decoder, 3))
    model.eval()
    if first == "attached":
        attached = attach_to(model, "layers.*", LAZY)
    call: Any = torch.compile(model, backend="aot_eager")
    if first == "compiled":
        attached = attach_to(call, "layers.*", LAZY)
    one_backward_each(plain, 0)
    assert equal(train(call, one_backward_each, 2), expected)
    assert counters(attached)["layers.*"].num_groups_moved == 2


@pytest.mark.parametrize("checkpointing", [None, False], ids=["", "checkpoint"])
def test_the_engine_is_not_compiled_with_a_training_step(checkpointing: Optional[bool]) -> None:
    class Breaks(Layer):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            for _ in range(1):
                torch._dynamo.graph_break()  # in a loop: the rest is not compiled
            return super().forward(x)

    def run(patterns: Any) -> list[torch.Tensor]:
        torch._dynamo.reset()
        model = make(partial(Decoder, 2, checkpointing), patterns, LAZY)
        model.layers[1].__class__ = Breaks
        model.eval()
        return train(model, torch.compile(one_backward_each, backend="aot_eager"), 2)

    expected = run(None)
    assert equal(run("layers.*"), expected)
    codes = [code for reference in input_codes.seen if (code := reference()) is not None]
    own = [code.co_name for code in codes if code.co_filename.startswith(ENGINE)]
    # A finaliser has no effect that a compiler could change, and runs at any time. A hook only asks
    # whether it may break the graph, and breaks it there.
    assert {name for name in own if not name.endswith("__call__") and "___call___" not in name} <= {
        "__del__"
    }
    assert codes


def _compile(model: Any, what: str, compiler: Any) -> Any:
    if what == "model":
        return torch.compile(model, backend=compiler)
    if what == "model in place":
        model.compile(backend=compiler)
    for index, layer in enumerate(model.layers):
        if what == "layers in place":
            layer.compile(backend=compiler)
        elif what == "layers":
            model.layers[index] = torch.compile(layer, backend=compiler)
    return model


def test_a_whole_model_in_a_checkpoint_is_left_alone() -> None:
    def step(model: torch.nn.Module, iteration: int) -> list[torch.Tensor]:
        ids = micro_batch(iteration)
        logits = checkpoint(model, ids, use_reentrant=False)
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
        loss.backward()
        return [loss]

    attached = train_as_plain(Decoder, "layers.*", step)
    assert attached.report().ranks[0].num_iterations == 0
