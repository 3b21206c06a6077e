# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Which settings each layer takes, what is refused, and that nothing stays behind."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from model_case import DENSE_MODULES, ModelCase
from ranks import run_ranks
from tiny_gpt import build_chunks, initialize, make_config, run_step

from megatron.slipstream.integration import install
from megatron.slipstream.integration.graphs import chunks as chunk_graphs
from megatron.slipstream.integration.layers.layer_parts import decisions_of
from megatron.slipstream.integration.layers.layer_settings import (
    LayerOptions,
    apply,
    assignment_of,
    layers_of,
    restore,
)
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.settings import (
    NOTHING,
    WHOLE,
    LayerSetting,
    describe_setting,
)

pytestmark = pytest.mark.releases

NORM: dict[str, Any] = {"normalization": "LayerNorm"}
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 32}


def build(
    kind: str = "dense", num_layers: int = 2, modules: tuple[str, ...] = (), **options: Any
) -> list[torch.nn.Module]:
    case = ModelCase(kind, num_layers=num_layers, overrides=NORM | options)
    initialize(case)
    return build_chunks(case, make_config(case, modules))


def recompute(*modules: str, **others: Any) -> dict[str, Any]:
    return {"recompute_granularity": "selective", "recompute_modules": list(modules), **others}


def full(method: str, num_layers: int) -> dict[str, Any]:
    return {
        "recompute_granularity": "full",
        "recompute_method": method,
        "recompute_num_layers": num_layers,
    }


def texts(one: LayerOptions) -> list[str]:
    return [describe_setting(setting) for setting in one.settings]


def refusal(change: Callable[[], Any], error: type[Exception] = ValueError) -> str:
    with pytest.raises(error) as raised:
        change()
    return str(raised.value)


def built_with(chunks: list[torch.nn.Module]) -> list[Any]:
    return [
        (type(one.layer), [getattr(owner, d.attribute) for d, owner in decisions_of(one.layer)])
        for one in layers_of(chunks)
    ]


# Each runs in a process of its own, since megatron-core's groups cannot be undone.


def settings_are_listed() -> None:
    (dense, _) = layers_of(build())
    assert texts(dense) == [
        *("layer", "core_attn+layernorm+mlp", "core_attn+mlp", "layernorm+mlp", "mlp"),
        *("core_attn+layernorm", "core_attn", "layernorm", "keep"),
    ]
    assert dense.minimum == NOTHING
    assert not dense.refused
    (moe, _) = layers_of(build("moe", **SHARED))
    assert len(moe.settings) == 21  # the whole experts, or two parts of them
    assert LayerSetting(["moe", "moe_act"]) not in moe.settings
    for kind in ("dense", "moe", "mla"):
        for one in layers_of(build(kind)):
            assert (one.settings[0], one.settings[-1]) == (WHOLE, NOTHING)
            assert len(set(one.settings)) == len(one.settings)


def flags_are_the_minimum() -> None:
    (one, _) = layers_of(build(**recompute("layernorm")))
    assert one.minimum == {"layernorm"}
    assert one.settings[0] == WHOLE
    assert all(one.minimum <= setting for setting in one.settings[1:])
    assert one.settings[-1] == one.minimum
    # A flag for parts that the layer lacks says nothing about it.
    assert layers_of(build(**recompute("mlp")))[0].minimum == {"mlp"}
    assert layers_of(build("moe", **recompute("mlp")))[0].minimum == NOTHING
    (one, _) = layers_of(build("moe", **recompute("moe", "moe_act")))
    assert one.minimum == {"moe", "moe_act"}
    assert LayerSetting(["moe", "moe_act", "layernorm"]) in one.settings


def full_recomputation_stays() -> None:
    chunks = build(**full("uniform", 1))
    assert [one.settings for one in layers_of(chunks)] == [(WHOLE,)] * 2
    apply((WHOLE, WHOLE), chunks)
    assert {type(one.layer).__name__ for one in layers_of(chunks)} == {"TransformerLayer"}
    chunks = build(num_layers=3, **full("block", 1))
    first, *others = layers_of(chunks)
    assert first.settings == (WHOLE,)
    assert all(NOTHING in one.settings for one in others)
    apply((WHOLE, WHOLE, NOTHING), chunks)
    names = [type(one.layer).__name__ for one in layers_of(chunks)]
    assert names == ["TransformerLayer", "RecomputedTransformerLayer", "TransformerLayer"]


def everything_is_restored() -> None:
    chunks = build("moe", **SHARED, **recompute("layernorm", "shared_experts"))
    before = built_with(chunks)
    minimum = assignment_of(chunks)
    for setting in layers_of(chunks)[0].settings:
        apply((setting, minimum[1]), chunks)
        assert assignment_of(chunks) == (setting, minimum[1])
        assert (built_with(chunks) == before) == (setting == minimum[0])
    apply((WHOLE, WHOLE), chunks)
    restore(chunks)
    assert built_with(chunks) == before
    assert assignment_of(chunks) == minimum
    restore(chunks)


def wrong_assignments_are_refused() -> None:
    chunks = build("mixed", num_layers=2)
    before = built_with(chunks)
    text = refusal(lambda: apply((WHOLE,), chunks))
    assert "an assignment of 1 settings is not supported because this rank has 2 layers" in text
    text = refusal(lambda: apply((WHOLE, LayerSetting(("mlp",))), chunks))
    assert "setting=mlp is not supported with layer 1 of kind 'moe'" in text
    named = text.split("set one of: ")[1].split(", ")[3]
    apply((WHOLE, LayerSetting(named.split("+"))), chunks)
    restore(chunks)
    assert built_with(chunks) == before
    chunks = build(**recompute("mlp"))
    text = refusal(lambda: apply((NOTHING, NOTHING), chunks))
    assert "its flags recompute others" in text
    model = SimpleNamespace(modules=lambda: [], config=None)
    assert "no language model" in refusal(lambda: layers_of([model]))  # type: ignore[list-item]


REFUSED: dict[str, tuple[dict[str, Any], set[str], str]] = {
    "fp8": ({"fp8": "e4m3"}, {"layer", "mlp", "layernorm", "core_attn"}, "one choice"),
    "cpu offloading": (
        {"cpu_offloading": True},
        {"layer", "mlp", "layernorm", "core_attn"},
        "moves the same tensors",
    ),
    "full iteration": (
        {"cuda_graph_impl": "full_iteration"},
        {"layer", "mlp", "layernorm", "core_attn"},
        "the whole iteration",
    ),
    "local graphs": (
        {"cuda_graph_impl": "local"},
        {"layer", "mlp", "layernorm", "core_attn"},
        "",
    ),
    "graphs of layers": (
        {"cuda_graph_impl": "transformer_engine"},
        {"layer", "mlp", "core_attn"},
        "graph",
    ),
    "graphs of attention": (
        {"cuda_graph_impl": "transformer_engine", "cuda_graph_modules": ["attn"]},
        {"layer", "core_attn"},
        "graph",
    ),
    "layers in nodes": ({"overlap_moe_expert_parallel_comm": True}, {"layer"}, "nodes"),
    "chunks of the mlp": ({"mlp_chunks_for_training": 2}, {"mlp"}, "rounds differently"),
}


def parts_are_refused_with_a_reason() -> None:
    """The options are set on a built model: some cannot be built without a GPU."""
    for name, (changed, refused, reason) in REFUSED.items():
        chunks: list[Any] = build()
        for option, value in changed.items():
            setattr(chunks[0].config, option, value)
        one = layers_of(chunks)[0]
        assert set(one.refused) == refused, name
        assert all(reason in text for text in one.refused.values()), name
        assert one.settings[-1] == NOTHING
        for setting in one.settings:
            assert not setting & refused, name
        part = min(refused)
        text = refusal(partial(apply, (LayerSetting([part]), NOTHING), chunks))
        assert one.refused[part] in text
    chunks = build("moe")
    chunks[0].config.cuda_graph_impl = "transformer_engine"  # type: ignore[union-attr]
    chunks[0].config.cuda_graph_modules = ["moe_router"]  # type: ignore[union-attr]
    assert set(layers_of(chunks)[0].refused) == {"layer", "moe", "layernorm"}
    torchs_norm = build(normalization="RMSNorm")
    assert set(layers_of(torchs_norm)[0].refused) == {"layernorm"}


def captured_layers_do_not_change() -> None:
    chunks = build()
    (first, second) = layers_of(chunks)
    first.layer.cuda_graphs = [object()]  # type: ignore[assignment]
    text = refusal(lambda: apply((WHOLE, NOTHING), chunks), RuntimeError)
    assert "delete the graphs first" in text
    assert assignment_of(chunks) == (NOTHING, NOTHING)
    apply((NOTHING, WHOLE), chunks)  # The other layer is not captured.
    restore(chunks)
    assert assignment_of(chunks) == (NOTHING, NOTHING)
    first.layer.cuda_graphs = []  # type: ignore[assignment]
    apply((WHOLE, NOTHING), chunks)


def captured_chunks_do_not_change() -> None:
    chunks: list[Any] = build(hidden_dropout=0.1)
    graphs: Any = SimpleNamespace(is_captured=False)
    replayed = chunk_graphs._ReplayedChunk(graphs, chunks[0].decoder)
    chunk_graphs._replayed.add(replayed)
    (one, _) = layers_of(chunks)
    assert set(one.refused) == {"layer"}
    mlp = (LayerSetting(("mlp",)), NOTHING)
    apply(mlp, chunks)
    graphs.is_captured = True
    assert "before the capture" in refusal(lambda: apply((NOTHING, NOTHING), chunks), RuntimeError)
    apply(mlp, chunks)


def iterations_are_not_interrupted() -> None:
    case = ModelCase("dense", num_layers=2, overrides=NORM)
    initialize(case)
    install.install(OffloadConfig(offload_backend="cpu"))
    config = make_config(case, DENSE_MODULES)
    chunks = build_chunks(case, config)
    run_step(case, config, chunks, 0, 2)
    said = []

    def change(*_: Any) -> None:
        with pytest.raises(RuntimeError, match="after the schedule has returned") as raised:
            apply((WHOLE, WHOLE), chunks)
        said.append(raised)

    hook = chunks[0].output_layer.register_forward_pre_hook(change)  # type: ignore[union-attr]
    run_step(case, config, chunks, 0, 2)
    hook.remove()
    assert len(said) == 2
    assert assignment_of(chunks) == (NOTHING, NOTHING)
    apply((WHOLE, WHOLE), chunks)
    run_step(case, config, chunks, 0, 2)


def models_are_freed() -> None:
    chunks = build()
    apply((WHOLE, LayerSetting(("mlp",))), chunks)
    layers = [weakref.ref(one.layer) for one in layers_of(chunks)]
    del chunks
    gc.collect()
    assert [reference() for reference in layers] == [None, None]


def memory_falls() -> None:
    """What a pass keeps for backward, by setting of all layers."""
    case = ModelCase("moe", num_layers=2, overrides=NORM | SHARED)
    initialize(case)
    config = make_config(case)
    chunks = build_chunks(case, config)
    kept = {}
    for setting in layers_of(chunks)[0].settings:
        apply((setting, setting), chunks)
        kept[describe_setting(setting)] = _kept_bytes(case, config, chunks)
    assert min(kept, key=kept.__getitem__) == "layer"
    assert max(kept, key=kept.__getitem__) == "keep"
    for part in ("layernorm", "moe", "moe_act", "shared_experts", "core_attn"):
        assert kept[part] < kept["keep"], part
    assert kept["core_attn+layernorm+moe_act+shared_experts"] < kept["core_attn+moe_act"]


def _kept_bytes(case: ModelCase, config: Any, chunks: Any) -> int:
    saved: dict[int, torch.UntypedStorage] = {}

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        saved[storage._cdata] = storage
        return tensor

    sizes: list[int] = []

    def measure(*_: Any) -> None:
        sizes.append(sum(storage.nbytes() for storage in saved.values()))

    hook = chunks[0].output_layer.register_forward_pre_hook(measure)
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        run_step(case, config, chunks, 0, 1)
    hook.remove()
    return sizes[0]


def a_frozen_embedding_leaves_gradients() -> None:
    """The first layer's input then has none, and a checkpoint would give its parameters none."""
    case = ModelCase("dense", num_layers=2, overrides=NORM)
    initialize(case)
    config = make_config(case)
    results = []
    for assignment in ((NOTHING, NOTHING), (WHOLE, WHOLE)):
        chunks: Any = build_chunks(case, config)
        chunks[0].embedding.requires_grad_(False)
        apply(assignment, chunks)
        run_step(case, config, chunks, 0, 1)
        trained = [p for p in chunks[0].parameters() if p.requires_grad]
        assert all(p.grad is not None for p in trained)
        results.append([p.grad for p in trained])
    assert all(map(torch.equal, *results))


CHECKS = [
    *(settings_are_listed, flags_are_the_minimum, full_recomputation_stays, everything_is_restored),
    *(
        wrong_assignments_are_refused,
        parts_are_refused_with_a_reason,
        captured_layers_do_not_change,
    ),
    *(
        captured_chunks_do_not_change,
        iterations_are_not_interrupted,
        models_are_freed,
        memory_falls,
    ),
    a_frozen_embedding_leaves_gradients,
]


def check_on_rank(rank: int, num_ranks: int, port: int, number: int) -> None:
    CHECKS[number]()


@pytest.mark.parametrize("number", range(len(CHECKS)), ids=[check.__name__ for check in CHECKS])
def test_on_a_rank(number: int) -> None:
    run_ranks(1, check_on_rank, number)
