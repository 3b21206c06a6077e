# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares ways to offload what a PyTorch model saves for backward, on the same weights.

- ``plain``: nothing is offloaded.
- ``attach``: Slipstream's ``attach()``: the sub-modules that match the patterns, by a plan, on
  side streams. It replans from measured times until about its fifteenth iteration.
- ``torchtune``: torchtune's OffloadActivations, if installed: every saved tensor; ``trl``: TRL's
  class of the same name.
- ``save_on_cpu``: ``torch.autograd.graph.save_on_cpu(pin_memory=True)``: every saved tensor.

Without a GPU ``attach`` imitates a device in host memory: its byte counts are right, its times are
meaningless, and the memory of ``save_on_cpu`` is not measured.
"""

from __future__ import annotations

import contextlib
import importlib
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from model_case import ModelCase
from torch.utils.checkpoint import checkpoint

from benchmarks.case import Case, Variant
from benchmarks.engines import NUM_DATA, offload_config
from benchmarks.ways import Way
from megatron.slipstream.integration.attach.handle import Attached, attach


def _of_torchtune(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    return importlib.import_module("torchtune.training").OffloadActivations()


def _of_trl(model: torch.nn.Module) -> contextlib.AbstractContextManager[Any]:
    # It needs the model to recognise parameters.
    package = importlib.import_module("trl.models.activation_offloading")
    return package.get_act_offloading_ctx_manager(model, warn_if_no_head=False)


OTHERS = {"torchtune": _of_torchtune, "trl": _of_trl}
"""Functions that create a package's context, which is entered in every iteration."""


class Layer(torch.nn.Module):
    """A decoder layer: causal attention and a gated MLP, each preceded by a norm."""

    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.attn_norm = torch.nn.RMSNorm(hidden)
        self.attn = Attention(hidden, heads)
        self.mlp_norm = torch.nn.RMSNorm(hidden)
        self.mlp = GatedMLP(hidden)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.mlp(self.mlp_norm(x))


class Attention(torch.nn.Module):
    def __init__(self, hidden: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.qkv = torch.nn.Linear(hidden, 3 * hidden, bias=False)
        self.out = torch.nn.Linear(hidden, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        split = (part.unflatten(-1, (self.heads, -1)) for part in self.qkv(x).chunk(3, -1))
        q, k, v = (part.transpose(1, 2) for part in split)
        mixed = torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(mixed.transpose(1, 2).flatten(-2))


class GatedMLP(torch.nn.Module):
    def __init__(self, hidden: int) -> None:
        super().__init__()
        inner = 256 * -(-8 * hidden // 768)
        self.up = torch.nn.Linear(hidden, 2 * inner, bias=False)
        self.down = torch.nn.Linear(inner, hidden, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        gate, value = self.up(x).chunk(2, -1)
        return self.down(torch.nn.functional.silu(gate) * value)


class Decoder(torch.nn.Module):
    """Takes token ids ``[b, s]`` and returns the next-token prediction loss."""

    def __init__(self, case: ModelCase) -> None:
        super().__init__()
        hidden, heads, vocabulary = case.hidden_size, case.num_attention_heads, case.vocab_size
        self.embedding = torch.nn.Embedding(vocabulary, hidden)
        self.layers = torch.nn.ModuleList(Layer(hidden, heads) for _ in range(case.num_layers))
        self.norm = torch.nn.RMSNorm(hidden)
        self.head = torch.nn.Linear(hidden, vocabulary, bias=False)
        self._recompute: dict[str, Any] = case.overrides

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = checkpoint(layer, x, **self._recompute) if self._recompute else layer(x)
        logits = self.head(self.norm(x))[:, :-1]
        return torch.nn.functional.cross_entropy(logits.flatten(0, 1), ids[:, 1:].flatten())


class AttachWay(Way):
    """A way to store what forward saves.

    Args:
        label: See above.
        model: The model; gradients accumulate.
        data: Token ids ``[b, s]`` of each iteration.
        context: Returns the context to enter around forward.
        attached: The return value of ``attach()``.
    """

    def __init__(
        self,
        label: str,
        model: torch.nn.Module,
        data: list[torch.Tensor],
        context: Callable[[], contextlib.AbstractContextManager[Any]] = contextlib.nullcontext,
        attached: Optional[Attached] = None,
    ) -> None:
        self.label = label
        self._model, self._data, self._context = model, data, context
        self._attached = attached
        self.is_ours = attached is not None
        self.manager = attached.engine if attached is not None else None
        # Host memory cannot be distinguished from an imitated device's.
        self.has_memory = data[0].is_cuda or context is contextlib.nullcontext

    def run(self, iteration: int) -> list[torch.Tensor]:
        """See :meth:`Way.run`."""
        with self._context():
            loss = self._model(self._data[iteration % NUM_DATA])
        loss.backward()
        return [loss.detach()]

    def close(self) -> None:
        """Detach from the model."""
        if self._attached is not None:
            self._attached.detach()
        self.manager = None


class Comparison:
    """The ways above, on the weights of one model.

    Args:
        case: The case; with ``use_reentrant`` in its model's overrides, all layers are recomputed.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        self._device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
        self._plain = self._build_model()
        model, generator = case.model, torch.Generator().manual_seed(1)
        shape = (model.micro_batch_size, model.seq_length)
        self._data = [
            torch.randint(0, model.vocab_size, shape, generator=generator).to(self._device)
            for _ in range(NUM_DATA)
        ]

    def build(self, variant: Variant, label: str, options: Mapping[str, Any]) -> AttachWay:
        """See :class:`benchmarks.ways.Comparison`."""
        if label == "attach":
            return self._attach(variant.modules, options)
        if label == "plain":
            return AttachWay(label, self._plain, self._data)
        is_cuda = self._device.type == "cuda"
        if label == "save_on_cpu":
            hooks = torch.autograd.graph.save_on_cpu
            return AttachWay(label, self._plain, self._data, lambda: hooks(pin_memory=is_cuda))
        if not is_cuda:
            raise ValueError(f"{label} needs a GPU")
        try:
            context = OTHERS[label](self._plain)
        except Exception as error:  # the package's own imports may raise anything
            raise ValueError(f"{label} does not import: {error}") from error
        return AttachWay(label, self._plain, self._data, lambda: context)

    def _build_model(self) -> torch.nn.Module:
        torch.manual_seed(0)
        with self._device:
            model = Decoder(self._case.model)
        return model.to(torch.bfloat16 if self._device.type == "cuda" else torch.float32).train()

    def _attach(self, patterns: tuple[str, ...], options: Mapping[str, Any]) -> AttachWay:
        """Attach to a separate model with the same weights, so that the others get no hooks."""
        model = self._build_model()
        for module, other in zip(model.modules(), self._plain.modules(), strict=True):
            module._parameters.update(other._parameters)
        attached = attach(model, patterns, offload_config(options), **self._case.offload)
        return AttachWay("attach", model, self._data, attached=attached)
