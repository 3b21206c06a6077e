# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Expert layers of megatron-core, run by themselves."""

from __future__ import annotations

import functools
import re
from collections.abc import Callable
from typing import Any

import torch
from forked import run_function
from megatron.core.dist_checkpointing.dict_utils import dict_list_map_outplace, nested_values
from megatron.core.dist_checkpointing.mapping import apply_factories, apply_factory_merges
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.transformer.moe.experts import TEGroupedMLP
from tiny_gpt import ModelCase, initialize, make_config

TOKENS, BATCH = 24, 2


def in_a_process(test: Callable[..., None]) -> Callable[..., None]:
    """Run a test in a child that has set megatron-core up for one rank.

    What has run the layers cannot be forked afterwards, as other tests do.
    """

    @functools.wraps(test)
    def run(**arguments: Any) -> None:
        def child() -> int:
            initialize(ModelCase("moe"))
            test(**arguments)
            return 0

        done = run_function(child)
        assert done.returncode == 0, done.stderr

    return run


def expert_config(bf16: bool = False, **overrides: Any) -> Any:
    return make_config(ModelCase("moe", bf16=bf16, overrides=overrides))


def expert_spec(config: Any, experts: type) -> Any:
    """The layer's ``mlp``: with grouped experts as Transformer Engine has them, or one by one."""
    spec = get_gpt_layer_local_spec(
        num_experts=config.num_moe_experts, moe_grouped_gemm=experts is TEGroupedMLP
    )
    return spec.submodules.mlp


def expert_layer(
    config: Any, experts: type, change: Callable[[Any], Any] = lambda spec: spec
) -> Any:
    torch.manual_seed(3)
    layer = change(expert_spec(config, experts))(config=config)
    layer.set_layer_number(1)
    return layer.to(config.params_dtype)


def load_from(layer: Any, other: Any) -> None:
    """Give ``layer`` the weights of ``other``, by name and place of their shards."""
    saved, wanted = other.sharded_state_dict(), layer.sharded_state_dict()
    factories = {name: item for name, item in wanted.items() if hasattr(item, "build_fn")}
    for state in (saved, wanted):
        apply_factories(state)
    shards = {
        (item.key, item.global_offset, item.global_shape): item.data
        for item in nested_values(saved)
        if item.data is not None
    }

    def found(item: Any) -> Any:
        return shards.pop((item.key, item.global_offset, item.global_shape), None)

    loaded = dict_list_map_outplace(found, wanted)
    assert not shards, "a shard is not asked for"
    layer.load_state_dict(apply_factory_merges(loaded, factories))


def run_layer(layer: Any, config: Any, seed: int = 5) -> dict[str, torch.Tensor]:
    """Output of one pass, and every gradient; those of weights by expert."""
    generator = torch.Generator().manual_seed(seed)
    shape = (TOKENS, BATCH, config.hidden_size)
    values, upstream = (
        torch.randn(shape, generator=generator).to(config.params_dtype) for _ in range(2)
    )
    values.requires_grad_()
    layer.zero_grad(set_to_none=True)
    output, _ = layer(values)
    output.backward(upstream)
    results = {"output": output.detach(), "input": values.grad}
    for name, parameter in layer.named_parameters():
        kind, _, of_experts = name.partition("experts.linear_")
        if kind == "" and parameter.dim() == 3:
            linear = of_experts.removesuffix(".weight")
            for index, gradient in enumerate(parameter.grad):
                results[f"experts.{index}.linear_{linear}.weight"] = gradient
        else:
            name = re.sub(r"^experts\.(linear_fc.)\.weight(\d+)$", r"experts.\2.\1.weight", name)
            results[name.replace("local_experts.", "")] = parameter.grad
    return results


def differences(left: dict[str, torch.Tensor], right: dict[str, torch.Tensor]) -> list[str]:
    assert left.keys() == right.keys()
    return [name for name in left if not torch.equal(left[name], right[name])]


def held(layer: Any) -> list[str]:
    """What a layer's dispatcher holds between passes of what depends on the tokens of one."""
    dispatcher = layer.token_dispatcher
    names = "tokens_per_expert", "_exchange"
    return [name for name in names if getattr(dispatcher, name) is not None]


def reduced_over_all_ranks(layer: Any) -> set[bool]:
    """Whether DDP averages the experts' gradients over all data-parallel ranks, not only over
    those that have the same experts."""
    return {weight.allreduce for weight in layer.experts.parameters()}
