# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Groups of modules that megatron-core does not mark: ``options.modules.OWN_MODULES``.

Forward hooks start a group before a module and end it after, as megatron-core's layers do around
their own. The hooks find the engine when they run, so they keep no reference to it.

The activation function of an MLP is no module: its group starts after ``linear_fc1`` and ends
before ``linear_fc2``. So do those of state-space layers, between two projections. If the code
between them raises, the engine leaves the open region when the call of the model ends
(``Router.calling``).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Optional

import torch
from megatron.core.ssm.mamba_layer import MambaLayer
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.transformer_layer import TransformerLayer

from megatron.slipstream.options.modules import own_modules
from megatron.slipstream.patches.marks import marking_engine
from megatron.slipstream.patches.model_calls import tensors_in

_Groups = tuple[tuple[str, ...], ...]
"""A name of ``OWN_MODULES``, and the module that is the group, or two that surround it."""

_IN_MODEL: _Groups = (
    ("embedding", "embedding"),
    ("output_layer", "decoder.final_layernorm"),
    ("output_layer", "decoder.final_norm"),  # of a hybrid model
    ("output_layer", "output_layer"),
)
"""Groups of a model chunk."""

_IN_LAYER: _Groups = (
    ("mla_down_proj", "self_attention.linear_q_proj"),  # without a latent query
    ("mla_down_proj", "self_attention.linear_q_down_proj"),
    ("mla_down_proj", "self_attention.linear_kv_down_proj"),
    ("mla_down_proj", "self_attention.linear_qkv_down_proj"),
    ("mla_up_proj", "self_attention.q_layernorm"),
    ("mla_up_proj", "self_attention.kv_layernorm"),
    ("mla_up_proj", "self_attention.linear_q_up_proj"),
    ("mla_up_proj", "self_attention.linear_kv_up_proj"),
    ("gdn_in_proj", "self_attention.in_proj"),
    ("gdn_rule", "self_attention.in_proj", "self_attention.out_proj"),
    ("gdn_out_proj", "self_attention.out_proj"),
    ("mamba_in_proj", "norm"),  # unless the projection contains it
    ("mamba_in_proj", "mixer.in_proj"),
    ("mamba_scan", "mixer.in_proj", "mixer.out_proj"),
    ("mamba_out_proj", "mixer.out_proj"),
    ("mlp_fc1", "mlp.linear_fc1"),
    ("mlp_act", "mlp.linear_fc1", "mlp.linear_fc2"),
    ("mlp_fc2", "mlp.linear_fc2"),
    ("expert_fc2", "mlp.experts.linear_fc2"),
    ("shared_experts", "mlp.shared_experts"),
)
"""Groups of a layer; those whose modules it lacks are skipped."""


@dataclass(frozen=True)
class _Mark:
    name: str

    def start_before(self, _: torch.nn.Module, inputs: Any, options: Any) -> None:
        self._start((*inputs, *options.values()))

    def start_after(self, _: torch.nn.Module, __: Any, output: Any) -> None:
        self._start((output,) if isinstance(output, torch.Tensor) else output)

    def end_after(self, _: torch.nn.Module, __: Any, output: Any) -> Any:
        return self._end(output)

    def end_before(self, _: torch.nn.Module, inputs: Any) -> Any:
        return self._end(inputs)

    def _start(self, given: Iterable[Any]) -> None:
        engine = marking_engine()
        if engine is not None:
            engine.start(next(filter(torch.is_tensor, given)), self.name)
            engine.enter()

    def _end(self, given: Any) -> Any:
        engine = marking_engine()
        if engine is None:
            return None
        engine.leave()
        if self.name == "output_layer":
            # The loss changes logits in place; tiles give losses instead.
            engine.end_without_node(tensors_in(given)[0], self.name)
            return None
        first, *others = (given,) if isinstance(given, torch.Tensor) else given
        marked = engine.end(first, self.name)
        return marked if first is given else (marked, *others)

    def put_around(
        self, before: torch.nn.Module, after: torch.nn.Module
    ) -> list[Callable[[], None]]:
        """Mark what runs between two modules, or one module, given twice; return how to undo it.

        Of the hooks of one module, those that end a group run first, and those that start one last.
        """
        hooks = after._forward_pre_hooks.values()
        if any(getattr(hook, "__self__", None) == self for hook in hooks):
            return []  # Engines that alternate on one model share its marks.
        if before is after:
            handles = (
                before.register_forward_pre_hook(self.start_before, with_kwargs=True),
                before.register_forward_hook(self.end_after, prepend=True),
            )
        else:
            handles = (
                before.register_forward_hook(self.start_after),
                after.register_forward_pre_hook(self.end_before, prepend=True),
            )
        return [handle.remove for handle in handles]


def mark_modules(chunk: torch.nn.Module) -> list[Callable[[], None]]:
    """Mark what ``offload_modules`` name and megatron-core does not mark; return how to undo it."""
    names = own_modules(chunk.config)
    undo: list[Callable[[], None]] = []
    for name, before, after in _places(chunk) if names else ():
        if name in names:
            undo += _Mark(name).put_around(before, after)
    return undo


def _places(chunk: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Module, torch.nn.Module]]:
    kinds = TransformerLayer, MambaLayer
    layers = [module for module in chunk.modules() if isinstance(module, kinds)]
    for owner, groups in ((chunk, _IN_MODEL), *((layer, _IN_LAYER) for layer in layers)):
        for name, first, *others in groups:
            before = _module(owner, first)
            after = _module(owner, others[0]) if others else before
            if before is not None and after is not None:
                yield name, before, after


def _module(owner: torch.nn.Module, path: str) -> Optional[torch.nn.Module]:
    found: Any = owner
    for name in path.split("."):
        found = getattr(found, name, None)
    return None if isinstance(found, IdentityOp) else found
