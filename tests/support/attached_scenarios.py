# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models and training loops for ``attach()``, and what the report says after them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from attached_models import (
    BACKENDS,
    LAZY,
    VOCABULARY,
    WIDTH,
    Decoder,
    Layer,
    loss_of,
    micro_batch,
    one_backward_each,
)
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

INPUT_BYTES = 2 * 8 * WIDTH * 4
INPUTS = "inputs of layers.*"


# --- models ---------------------------------------------------------------------------------------


class Encoder(torch.nn.Module):
    """``torch.nn.TransformerEncoder`` between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        layer = torch.nn.TransformerEncoderLayer(WIDTH, 4, 4 * WIDTH, batch_first=True)
        self.encoder = torch.nn.TransformerEncoder(layer, 3)
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.head(self.encoder(self.embedding(ids)))


@dataclass
class Result:
    hidden: torch.Tensor
    aside: Any = None


class Opaque:
    __slots__ = ("hidden",)

    def __init__(self, hidden: torch.Tensor) -> None:
        self.hidden = hidden


FORMS: dict[str, tuple[Callable[[torch.Tensor, torch.Tensor], Any], Callable[[Any], Any]]] = {
    "tuple": (lambda hidden, x: (hidden, x, None), lambda output: output[0] + output[1]),
    "nested": (lambda hidden, _: [{"a": (hidden,)}, 0.5], lambda output: output[0]["a"][0]),
    "dictionary": (
        lambda hidden, x: {"hidden": hidden, "inputs": x},
        lambda output: output["hidden"] + output["inputs"],
    ),
    "data class": (lambda hidden, x: Result(hidden, aside=(x,)), lambda output: output.hidden),
    "object": (lambda hidden, _: SimpleNamespace(hidden=hidden), lambda output: output.hidden),
    "opaque": (lambda hidden, _: Opaque(hidden), lambda output: output.hidden),
}
"""What a layer returns for its result and its input, and what is computed from it."""


class Returns(torch.nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.layer = Layer()
        self.form = form

    def forward(self, *, hidden: torch.Tensor, scale: float) -> Any:
        return FORMS[self.form][0](self.layer(hidden) * scale, hidden)


class Forms(torch.nn.Module):
    def __init__(self, form: str) -> None:
        super().__init__()
        self.embedding = torch.nn.Embedding(VOCABULARY, WIDTH)
        self.parts = torch.nn.ModuleList(Returns(form) for _ in range(3))
        self.head = torch.nn.Linear(WIDTH, VOCABULARY)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for part in self.parts:
            x = FORMS[part.form][1](part(hidden=x, scale=0.5))
        return self.head(x)


class Monitors(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = Layer()

    def forward(self, x: torch.Tensor) -> Any:
        return x, self.layer(x)


class Monitored(Decoder):
    """Backward does not reach its monitors, which return an input that backward does reach."""

    def __init__(self) -> None:
        super().__init__()
        self.monitors = torch.nn.ModuleList(Monitors() for _ in self.layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        self.seen = []
        for layer, monitor in zip(self.layers, self.monitors, strict=True):
            x, seen = monitor(layer(x))
            self.seen.append(seen)
        return self.head(x)


class InPlace(Decoder):
    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return layer(x).mul_(0.5).add_(1.0)


class Retries(Decoder):
    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        try:
            return layer(x, None)
        except TypeError:
            return layer(x)


class Shared(Decoder):
    def __init__(self) -> None:
        super().__init__(2)
        self.layers.append(self.layers[0])


class Calls(torch.nn.Module):
    """Calls a module that is not registered in it."""

    def __init__(self, other: torch.nn.Module) -> None:
        super().__init__()
        self.hidden = [other]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.hidden[0](x) * 2


class Nests(Decoder):
    def __init__(self) -> None:
        super().__init__(3)
        self.outer = torch.nn.ModuleList(Calls(layer) for layer in self.layers)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for outer in self.outer:
            x = outer(x)
        return self.head(x)


class UnusedHead(Decoder):
    """The loss does not use one of its outputs."""

    def __init__(self) -> None:
        super().__init__()
        self.heads = torch.nn.ModuleList(torch.nn.Linear(WIDTH, VOCABULARY) for _ in range(2))

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = layer(x)
        self.unused = self.heads[1](x * 2)  # alive until the next pass
        return self.heads[0](x)


class TwoHeads(Encoder):
    def __init__(self) -> None:
        super().__init__()
        self.tower = torch.nn.Sequential(*(Layer() for _ in range(3)))

    def forward(self, ids: torch.Tensor) -> Any:
        x = self.encoder(self.embedding(ids))
        return self.head(x), self.tower(x)


class Force(Decoder):
    """Runs backward in its forward, as models of forces do: gradients of energies."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        position = x
        for layer in self.layers[:2]:
            x = layer.mlp(x)
        (force,) = torch.autograd.grad(x.sum(), position, create_graph=True)
        x = force + x
        for layer in self.layers[2:]:
            x = layer.mlp(x)
        return self.head(x)


class Backbone(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.decoder = Decoder()

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return self.decoder(ids)


class Recursive(Decoder):
    def forward(self, ids: torch.Tensor, depth: int = 2) -> torch.Tensor:
        own = super().forward(ids)
        return own + self(ids, depth - 1) if depth else own


class Tower(Decoder):
    """Has a frozen part without gradients."""

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


class Wrapped(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(checkpoint_wrapper(layer) for layer in self.layers)


class Pairs(Decoder):
    """One checkpoint around several chosen modules."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for first in range(0, len(self.layers), 2):
            pair = torch.nn.Sequential(*self.layers[first : first + 2])
            x = checkpoint(pair, x, use_reentrant=self.checkpointing)
        return self.head(x)


class Between(Decoder):
    """Inputs of its checkpoints are saved before them, too: every holder must release them."""

    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        return super().run(layer, torch.tanh(x))


class Skips(Decoder):
    """tanh saves its result, so the last checkpoint has saved everything that tanh does."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = first = self.embedding(ids)
        for layer in self.layers:
            x = self.run(layer, x)
        return self.head(torch.tanh(x) * first)


class Selective(Decoder):
    def run(self, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
        contexts = partial(create_selective_checkpoint_contexts, _keep_products)
        return checkpoint(layer, x, use_reentrant=False, context_fn=contexts)


def _keep_products(_: Any, op: Any, *args: Any, **kwargs: Any) -> CheckpointPolicy:
    is_product = op in (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
    return CheckpointPolicy.MUST_SAVE if is_product else CheckpointPolicy.PREFER_RECOMPUTE


# --- training loops -------------------------------------------------------------------------------


def in_autocast(dtype: torch.dtype, model: Any, iteration: int) -> list[torch.Tensor]:
    with torch.autocast("cpu", dtype):
        loss = loss_of(model, iteration)
    loss.backward()
    return [loss]


def both_at_once(model: Any, iteration: int) -> list[torch.Tensor]:
    losses = [loss_of(model, 10 * iteration + index) for index in range(2)]
    torch.stack(losses).sum().backward()
    return losses


def first_in_first_out(model: Any, iteration: int) -> list[torch.Tensor]:
    losses = [loss_of(model, 10 * iteration), loss_of(model, 10 * iteration + 1)]
    losses[0].backward()
    losses.append(loss_of(model, 10 * iteration + 2))
    losses[1].backward()
    losses[2].backward()
    return losses


def forwards_first(model: Any, iteration: int, is_reversed: bool = False) -> list[torch.Tensor]:
    losses = [loss_of(model, 10 * iteration + index) for index in range(3)]
    for loss in reversed(losses) if is_reversed else losses:
        loss.backward()
    return losses


def kept_graph(model: Any, iteration: int) -> list[torch.Tensor]:
    loss = loss_of(model, iteration)
    loss.backward(retain_graph=True)
    loss.backward()
    # Something refers to the graph while the next iteration runs.
    model.graph = loss
    return [loss]


def all_graphs_kept(model: Any, iteration: int) -> list[torch.Tensor]:
    loss = loss_of(model, iteration)
    loss.backward(retain_graph=True)
    model.graphs = [*getattr(model, "graphs", []), loss]
    return [loss]


def second_order(model: Any, iteration: int) -> list[torch.Tensor]:
    with sdpa_kernel(SDPBackend.MATH):  # The other ones have no second derivative.
        loss = loss_of(model, iteration)
    weights = list(model.parameters())
    first = torch.autograd.grad(loss, weights, create_graph=True)
    penalty = torch.stack([grad.square().sum() for grad in first]).sum()
    (loss + penalty).backward()
    return [loss, penalty]


def with_metric(keeps: bool, model: Any, iteration: int) -> list[torch.Tensor]:
    """A forward with gradients enabled, although it should run under ``no_grad``."""
    losses = one_backward_each(model, iteration)
    model.kept = loss_of(model, 99) if keeps else None
    return [*losses, loss_of(model, 98).detach()]


def without_gradients(mode: Any, model: Any, iteration: int) -> list[torch.Tensor]:
    with mode():
        loss_of(model, 97)
    loss = loss_of(model, iteration)
    model.eval()
    with mode():
        aside = loss_of(model, 98)
    model.train()
    loss.backward()
    return [loss, aside]


def a_backward_for_each_output(model: Any, iteration: int) -> list[torch.Tensor]:
    losses = [output.square().mean() for output in model(micro_batch(iteration))]
    losses[0].backward(retain_graph=True)
    losses[1].backward()
    return losses


def a_part_alone(model: Any, iteration: int) -> list[torch.Tensor]:
    """As in trainers that compute the loss from hidden states."""
    return one_backward_each(model.decoder, iteration)


def a_part_after_the_model(model: Any, iteration: int) -> list[torch.Tensor]:
    x = model.embedding(micro_batch(iteration))
    loss = loss_of(model, iteration) + model.layers[0](x).square().mean()
    loss.backward()
    return [loss]


def a_part_without_backward(model: Any, iteration: int) -> list[torch.Tensor]:
    loss = loss_of(model.decoder, iteration)
    model.unused = model.decoder.layers[0](model.decoder.embedding(micro_batch(iteration)))
    loss.backward()
    return [loss]


def under_other_hooks(model: Any, iteration: int) -> list[torch.Tensor]:
    with torch.autograd.graph.save_on_cpu():
        loss = loss_of(model, iteration)
    loss.backward()
    return [loss]


def all_in_a_checkpoint(model: Any, iteration: int) -> list[torch.Tensor]:
    ids = micro_batch(iteration)
    logits = checkpoint(model, ids, use_reentrant=False)
    loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids.flatten())
    loss.backward()
    return [loss]


# --- scenarios ------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Scenario:
    """A model and a training loop, and what an attached model's report says after them."""

    build: Callable[[], torch.nn.Module] = Decoder
    patterns: Any = "layers.*"
    step: Any = one_backward_each
    plain: Callable[[], torch.nn.Module] | None = None
    """The model without the engine, if another one."""
    backend: str = LAZY
    num_iterations: int = 3
    num_modules: int | None = None
    late: int | None = 0
    plans: int | None = 1
    iterations: int | None = None
    groups: dict[str, int] | None = None
    """The number of groups by name, of those that exist."""
    moved: dict[str, int] | None = None
    """Of groups that move; a negative number: more than that."""
    freed: dict[str, int] | None = None
    """Bytes that are freed, which is all that moves."""
    passes: list[int] | None = None
    """The number of groups of each pass of the last iteration."""
    told: str = ""
    """What one warning says."""


def _equality() -> dict[str, Scenario]:
    rows: dict[str, tuple[Callable[[], torch.nn.Module], Any, int]] = {
        "layers": (Decoder, "layers.*", 4),
        "two patterns": (Decoder, ["layers.*.attn", "layers.*.mlp"], 8),
        "types": (Decoder, [torch.nn.Linear, torch.nn.LayerNorm], 25),
        "tiny modules": (Decoder, ["**.mlp.*", "embedding"], 17),
        "encoder layers": (Encoder, "encoder.layers.*", 3),
        "encoder parts": (Encoder, [torch.nn.MultiheadAttention, "encoder.layers.*.linear?"], 9),
    }
    return {
        f"{name}, {backend}": Scenario(build, patterns, backend=backend, num_modules=number)
        for name, (build, patterns, number) in rows.items()
        for backend in BACKENDS
    }


def _of_checkpoints(reentrant: bool) -> dict[str, Scenario]:
    of = partial(partial, checkpointing=reentrant)
    inputs: dict[str, Any] = {"groups": {INPUTS: 4}, "freed": {INPUTS: 3 * INPUT_BYTES}}
    rows = {
        **{
            f"checkpointed, {backend}": Scenario(
                of(Decoder), plain=Decoder, backend=backend, moved={INPUTS: 3}, **inputs
            )
            for backend in BACKENDS
        },
        "one checkpoint around several": Scenario(
            of(Pairs, 6),
            plain=partial(Decoder, 6),
            groups={INPUTS: 3},
            moved={INPUTS: 2},
            freed={INPUTS: 2 * INPUT_BYTES},
        ),
        "inputs saved before, too": Scenario(of(Between), **inputs),
        "saved after the checkpoint": Scenario(of(Skips), groups={INPUTS: 4}),
    }
    return {f"{name}, {reentrant=}": row for name, row in rows.items()}


SCENARIOS = {
    **_equality(),
    **{
        str(dtype): Scenario(step=partial(in_autocast, dtype), moved={"layers.*": 3})
        for dtype in (torch.bfloat16, torch.float16)
    },
    **{
        f"returns a {form}": Scenario(partial(Forms, form), "parts.*", moved={"parts.*": 2})
        for form in FORMS
        if form != "opaque"
    },
    "returns no visible tensor": Scenario(
        partial(Forms, "opaque"),
        "parts.*",
        late=None,
        plans=None,
        told="returns, a Opaque, so its saved tensors are reloaded late",
    ),
    "backward does not reach some": Scenario(
        Monitored, ["layers.*", "monitors.*"], moved={"layers.*": 3, "monitors.*": 0}
    ),
    "outputs change in place": Scenario(InPlace),
    "the model catches an exception": Scenario(Retries),
    "a shared module": Scenario(
        Shared, num_modules=2, groups={"layers.*": 3}, moved={"layers.*": 2}
    ),
    "calls inside each other": Scenario(Nests, ["outer.*", "layers.*"], groups={"outer.*": 3}),
    **{
        name: Scenario(step=step, groups={"layers.*": 4 * number}, moved={"layers.*": -2 * number})
        for name, step, number in (
            ("one backward each", one_backward_each, 1),
            ("both at once", both_at_once, 2),
            ("first in, first out", first_in_first_out, 3),
            ("last in, first out", partial(forwards_first, is_reversed=True), 3),
            ("a kept graph", kept_graph, 1),
            ("all graphs kept", all_graphs_kept, 1),
        )
    },
    "gradients of gradients": Scenario(step=second_order, iterations=3, moved={"layers.*": 3}),
    **{
        f"a metric, {keeps=}": Scenario(
            step=partial(with_metric, keeps), num_iterations=5, moved={"layers.*": -1}
        )
        for keeps in (False, True)
    },
    **{
        mode.__name__: Scenario(step=partial(without_gradients, mode), iterations=3)
        for mode in (torch.no_grad, torch.inference_mode)
    },
    "an unused output": Scenario(
        # The last iteration ends with the next forward.
        UnusedHead, ["layers.*", "heads.*"], iterations=5, moved={"layers.*": 3}
    ),
    "a backward for each output": Scenario(
        TwoHeads, ["encoder.layers.*", "tower.*"], a_backward_for_each_output, moved={"tower.*": 2}
    ),
    "backward inside of forward": Scenario(
        Force, "layers.*.mlp", late=None, groups={"layers.*.mlp": 4}
    ),
    "a part alone": Scenario(
        Backbone, "decoder.layers.*", a_part_alone, iterations=6, moved={"decoder.layers.*": 3}
    ),
    "a part after the model": Scenario(step=a_part_after_the_model, late=None, passes=[4, 1]),
    "a model that calls itself": Scenario(Recursive, late=None, passes=[12]),
    "a part that backward never reaches": Scenario(
        Backbone,
        "decoder.layers.*",
        a_part_without_backward,
        num_iterations=6,
        late=None,
        iterations=5,
        groups={"decoder.layers.*": 5},
    ),
    "a frozen part": Scenario(Tower, ["layers.*", "tower.*"], moved={"layers.*": 3}),
    **_of_checkpoints(False),
    **_of_checkpoints(True),
    "a wrapper's checkpoint": Scenario(
        Wrapped, [Layer], plain=Decoder, freed={"Layer": 3 * INPUT_BYTES}
    ),
    "selective checkpoints": Scenario(Selective, plain=Decoder, freed={INPUTS: 3 * INPUT_BYTES}),
    "checkpoints, forwards first": Scenario(
        partial(Decoder, checkpointing=False),
        step=forwards_first,
        groups={INPUTS: 12},
        moved={INPUTS: -6},
    ),
    "other hooks": Scenario(
        step=under_other_hooks,
        plans=0,
        iterations=0,
        told="the model runs under other saved-tensor hooks",
    ),
    "the model in a checkpoint": Scenario(step=all_in_a_checkpoint, plans=0, iterations=0),
}  # fmt: skip
