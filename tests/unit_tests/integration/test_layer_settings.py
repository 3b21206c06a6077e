# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Settings of layers take effect, change between iterations, and change no bit of the results."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

import pytest
import torch
from gpu_models import MLA_SIZES, on_gpu
from megatron.core.transformer.identity_op import IdentityOp
from megatron.core.transformer.mlp import MLP
from model_case import DENSE_MODULES, ModelCase
from ranks import run_ranks
from tiny_gpt import (
    build_chunks,
    first_difference,
    initialize,
    make_config,
    skip_without_model,
    train_steps,
    use_gpu,
)

from megatron.slipstream.fine_grained_activation_offload.markers import CHECKPOINT_INPUTS
from megatron.slipstream.integration import install
from megatron.slipstream.integration.layers.layer_settings import LayerOptions, apply, layers_of
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.settings import WHOLE, Assignment, LayerSetting

NORM = {"normalization": "LayerNorm"}
"""One operation, as Transformer Engine's norms are."""
SHARED: dict[str, Any] = {"moe_shared_expert_intermediate_size": 32}
EXPERTS: dict[str, Any] = {
    "num_moe_experts": 8,
    "moe_router_topk": 4,  # A sum of so many scores rounds by their order.
    "moe_ffn_hidden_size": 64,
    "moe_grouped_gemm": True,
    "moe_token_dispatcher_type": "alltoall",
}
DROPOUT: dict[str, Any] = {"hidden_dropout": 0.1, "attention_dropout": 0.1}
CASES = {
    "dense and experts": ModelCase("mixed", num_layers=4),
    "latent attention and experts": ModelCase("mla", num_layers=2, overrides=EXPERTS | SHARED),
    "MLPs in tiles": ModelCase(
        "mixed", num_layers=2, mlp_sequence_tiles=3, loss_sequence_tiles=2, overrides=SHARED
    ),
    "dropout": ModelCase("dense", num_layers=2, overrides=DROPOUT),
    "packed experts": ModelCase("moe", num_layers=2, is_packed=True, micro_batch_size=1),
}
KINDS = {
    "dense and experts": ["dense", "moe"] * 2,
    "latent attention and experts": ["mla moe"] * 2,
    "MLPs in tiles": ["dense", "moe"],
    "dropout": ["dense"] * 2,
    "packed experts": ["moe"] * 2,
}
MODULE_OF = {
    "layernorm": "input_layernorm",  # or the other one
    "mlp": "mlp",
    "moe": "mlp.router",
    "moe_act": "mlp.experts.activation_func",
    "shared_experts": "mlp.shared_experts",
    "core_attn": "self_attention.core_attention",
    "mla_up_proj": "self_attention.linear_kv_up_proj",
}
"""A module, or a function, that a recomputation of the part calls a second time."""
INSIDE = {"moe": ("moe_act", "shared_experts")}


def moving_in(case: ModelCase) -> list[str]:
    """All modules of a case that can move, also those that a setting recomputes."""
    has_experts = bool(case.overrides.get("num_moe_experts")) or case.kind in ("moe", "mixed")
    names = [*DENSE_MODULES]
    if case.kind == "mla":
        names += ["mla_down_proj", "mla_up_proj"]
    if not has_experts or case.kind == "mixed":
        names += ["mlp_fc1", "mlp_act", "mlp_fc2"]
    if has_experts:
        names += ["expert_fc1", "moe_act", "expert_fc2"]
    if "moe_shared_expert_intermediate_size" in case.overrides:
        names.append("shared_experts")
    if case.mlp_sequence_tiles != 1:
        names = [
            name
            for name in names
            if not name.startswith(("mlp_fc", "mlp_act", "expert", "moe_act"))
        ]
    return names


def assignments(options: Sequence[LayerOptions]) -> list[Assignment]:
    """Whole layers, then every setting of each layer, beside others on the other layers."""
    longest = max(len(one.settings) for one in options)
    mixed = [
        tuple(
            one.settings[(number + 2 * place) % len(one.settings)]
            for place, one in enumerate(options)
        )
        for number in range(longest)
    ]
    return [tuple(one.settings[0] for one in options), *mixed]


class Calls:
    """Counts the calls of the modules in :data:`MODULE_OF`, by layer and part."""

    def __init__(self, options: Sequence[LayerOptions]) -> None:
        self.counts: Counter[tuple[int, str]] = Counter()
        for number, one in enumerate(options):
            for part, path in MODULE_OF.items():
                if isinstance(getattr(one.layer, path, None), IdentityOp):
                    path = "pre_mlp_layernorm"
                if isinstance(getattr(one.layer, path, None), IdentityOp):
                    continue  # Both norms are part of a linear layer.
                self._watch(one.layer, path, (number, part))

    def _watch(self, layer: Any, path: str, key: tuple[int, str]) -> None:
        *owners, name = path.split(".")
        for owner in owners:
            layer = getattr(layer, owner, None)
        found = getattr(layer, name, None)
        if isinstance(found, torch.nn.Module):
            found.register_forward_pre_hook(lambda *_: self.counts.update([key]))
        elif found is not None:

            def counted(*arguments: Any) -> Any:
                self.counts.update([key])
                return found(*arguments)

            setattr(layer, name, counted)

    def recomputed(self, num_passes: int, num_layers: int) -> list[set[str]]:
        """The parts of each layer that ran twice in each pass, as far as they exist."""
        found: list[set[str]] = [set() for _ in range(num_layers)]
        for (number, part), count in self.counts.items():
            assert count in (num_passes, 2 * num_passes), (number, part, count)
            if count == 2 * num_passes:
                found[number].add(part)
        self.counts.clear()
        return found


def expected_calls(one: LayerOptions, setting: LayerSetting, has: set[str]) -> set[str]:
    if setting == WHOLE:
        return has
    inside = {part for name in setting for part in INSIDE.get(name, ())}
    return (setting | inside) & has


def try_all(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    modules: Sequence[str],
    backend: str,
    chosen: Sequence[int] = (),
) -> tuple[Optional[str], list[str]]:
    """Train with a new assignment in every step, and without any.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: The model.
        modules: What moves; empty: without an engine.
        backend: The engine's backend.
        chosen: Indices of assignments; empty: all.

    Returns:
        The first difference of the results, and the kinds of the layers.
    """
    if not use_gpu():
        case = replace(case, overrides=NORM | case.overrides)
    initialize(case, rank, world_size, port)
    if case.ep > 1:  # Compiled sums round by the kernel chosen for the first number of tokens.
        torch.compiler.set_stance("force_eager")
    counts = (case.pp,)
    chunks = build_chunks(case, make_config(case))
    plain = [[t.clone() for t in step] for step in train_steps(case, None, chunks, counts)]
    if modules:
        install.install(OffloadConfig(offload_backend=backend, offload_checkpoint_inputs=True))
    chunks = build_chunks(case, make_config(case, modules))
    options = layers_of(chunks)
    calls = Calls(options)
    difference = first_difference(plain, train_steps(case, None, chunks, counts))
    has = [{part for number, part in calls.counts if number == n} for n in range(len(options))]
    assert calls.recomputed(counts[0], len(options)) == [set() for _ in options]
    for one, parts in zip(options, has, strict=True):
        no_parts = set() if isinstance(one.layer.mlp, MLP) else {"mlp"}
        assert parts - no_parts <= set().union(one.refused, *one.settings)
    tried = assignments(options)
    for step, assignment in enumerate([tried[number] for number in chosen] or tried):
        apply(assignment, chunks)
        found = first_difference(plain, train_steps(case, None, chunks, counts))
        difference = difference or (found and f"{assignment}: {found}")
        seen = calls.recomputed(counts[0], len(options))
        pairs = zip(options, assignment, has, strict=True)
        assert seen == [expected_calls(*pair) for pair in pairs], assignment
        manager = install.installed()
        if manager is not None:
            assert manager.plan.trace.assignment == assignment
            if step == 0:  # Whole layers. Only a schedule also holds what it has received.
                inputs = manager.report.modules[CHECKPOINT_INPUTS]
                assert inputs.freed_bytes > 0
                assert inputs.freed_bytes == inputs.d2h_bytes or case.pp > 1
    return difference, [one.kind for one in options]


PLAIN = "dense and experts", "dropout"
"""Models that also recompute without an engine."""
OF_A_RELEASE = "dense and experts", "latent attention and experts", "packed experts"
"""They have each kind of layer, and each part of one that can be recomputed."""


@pytest.mark.parametrize(
    "name, offloads",
    [
        *(
            pytest.param(name, True, marks=[pytest.mark.releases] * (name in OF_A_RELEASE))
            for name in CASES
        ),
        *((name, False) for name in PLAIN),
    ],
    ids=lambda value: {True: "offloaded", False: "plain"}.get(value, value),
)
def test_every_setting_computes_the_same(name: str, offloads: bool) -> None:
    case = CASES[name]
    modules = moving_in(case) if offloads else ()
    ((difference, kinds),) = run_ranks(1, try_all, case, modules, "cpu-lazy")
    assert difference is None
    assert kinds == KINDS[name]


OTHERS = {
    "pipeline": ModelCase("dense", num_layers=4, pp=2),
    "interleaved pipeline": ModelCase("mixed", num_layers=8, pp=2, vpp=2),
    "divided inputs": ModelCase(
        "dense", num_layers=2, tp=2, overrides={"distribute_saved_activations": True}
    ),
    "expert parallel": ModelCase("moe", num_layers=2, dp=2, ep=2),
    "hybrid": ModelCase("hybrid", num_layers=4),
    "several predicted tokens": ModelCase("dense", num_layers=2, overrides={"mtp_num_layers": 1}),
}
OTHER_KINDS = {
    "interleaved pipeline": ["dense", "moe"] * 2,
    "hybrid": ["attention", "dense mlp", "attention", "moe mlp"],
    "several predicted tokens": ["dense", "dense", "dense mtp"],
}
OTHERS_OF_A_RELEASE = "interleaved pipeline", "hybrid", "several predicted tokens"
FEW = (0, 1, -3, 0)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=[pytest.mark.releases] * (name in OTHERS_OF_A_RELEASE))
        for name in OTHERS
    ],
)
def test_other_schedules_and_models(name: str) -> None:
    case = OTHERS[name]
    skip_without_model(case)
    num_ranks = case.pp * case.tp * case.dp
    results = run_ranks(num_ranks, try_all, case, DENSE_MODULES, "cpu-lazy", FEW)
    for difference, kinds in results:
        assert difference is None
        assert kinds == OTHER_KINDS.get(name, kinds)


UNFUSED: dict[str, Any] = {"bias_activation_fusion": False}
"""Fused experts compare their activation with known functions, so its calls cannot be counted."""
GPU_CASES = {
    "dense": on_gpu(ModelCase("dense", num_layers=3)),
    "separate norms": on_gpu(ModelCase("dense", num_layers=3, has_own_norms=True)),
    "experts": on_gpu(ModelCase("moe", num_layers=2), **SHARED, **UNFUSED, moe_permute_fusion=True),
    "latent attention and experts": on_gpu(
        ModelCase("mla", num_layers=2), **MLA_SIZES, **EXPERTS, **SHARED, **UNFUSED
    ),
    "dropout": on_gpu(ModelCase("dense", num_layers=2), hidden_dropout=0.1),
}


@pytest.mark.gpu
@pytest.mark.releases
@pytest.mark.parametrize("offloads", [False, True], ids=["plain", "offloaded"])
@pytest.mark.parametrize("name", GPU_CASES)
def test_every_setting_on_a_gpu(name: str, offloads: bool) -> None:
    modules = moving_in(GPU_CASES[name]) if offloads else ()
    ((difference, _),) = run_ranks(1, try_all, GPU_CASES[name], modules, "cuda")
    assert difference is None


@pytest.mark.gpus2
@pytest.mark.releases
@pytest.mark.parametrize("case", [
    on_gpu(ModelCase("dense", num_layers=2, tp=2), sequence_parallel=True, hidden_dropout=0.1),
    on_gpu(ModelCase("moe", num_layers=2, dp=2, ep=2), **UNFUSED),
    # The schedule also holds the input of the first layer of a chunk.
    on_gpu(ModelCase("dense", num_layers=8, pp=2, vpp=2)),
], ids=["sequence parallel", "expert parallel", "interleaved pipeline"])  # fmt: skip
def test_few_settings_on_two_gpus(case: ModelCase) -> None:
    for difference, _ in run_ranks(2, try_all, case, DENSE_MODULES, "cuda", FEW):
        assert difference is None
