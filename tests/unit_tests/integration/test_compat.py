# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Replacements for functions that some releases of megatron-core lack behave like them."""

from __future__ import annotations

import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks
from tiny_gpt import ModelCase, build_chunks, initialize, make_config, run_step

from megatron.slipstream.integration.seam import compat
from megatron.slipstream.options.rules import require
from megatron.slipstream.patches import releases

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.releases

GPT = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 200 --num-layers 2 --hidden-size 32
    --num-attention-heads 2 --seq-length 16 --max-position-embeddings 24 --micro-batch-size 1
    --global-batch-size 1 --lr 1e-3 --train-iters 1 --eval-iters 0 --eval-interval 1
    --normalization RMSNorm --position-embedding-type rope --rotary-percent 0.5 --rotary-base 77
    --untie-embeddings-and-output-weights --rotary-seq-len-interpolation-factor 2
    --use-rope-scaling --make-vocab-size-divisible-by 16
""".split()


def test_each_older_release_is_tested_by_ci() -> None:
    tested_by_ci = re.findall(r"test-release (\S+)", (ROOT / ".ci" / "run").read_text())
    assert tested_by_ci == [*releases.TESTED_RELEASES[:-1]]


LAYERS_IN_GRAPHS = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn"],
    "offload_engine": "slipstream",
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_granularity": "layer",
    "hybrid_layer_pattern": None,
    "tokenizer_json": None,
    "moe_sync_free_experts": False,
    "sequence_packing": None,
}


def test_offloading_in_graphs_of_layers_is_refused_on_no_release() -> None:
    require(compat.check_release(SimpleNamespace(**LAYERS_IN_GRAPHS)))


def test_packed_sequences_in_graphs_of_layers_need_a_place_for_finished_models() -> None:
    args = SimpleNamespace(**{**LAYERS_IN_GRAPHS, "sequence_packing": "greedy"})
    found = [finding.rule for finding in compat.check_release(args)]
    assert found == ([] if releases.is_since("0.19") else ["cuda_graph_impl"])


def _build_twice(rank: int, world_size: int, port: int) -> list[dict[str, Any]]:
    """The arguments that megatron's builder of GPT models and ours pass to the model."""
    from megatron.core import parallel_state
    from megatron.core.models import gpt as core_gpt
    from megatron.training.argument_utils import gpt_config_from_args
    from megatron.training.models import gpt as training_gpt

    from megatron.slipstream.integration.entry.checks import parse_and_validate

    args = parse_and_validate(GPT)
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel()
    passed: list[dict[str, Any]] = []
    core_gpt.GPTModel = training_gpt.GPTModel = lambda **options: passed.append(options)
    config = gpt_config_from_args(args)
    config.get_builder_cls()(config).build_model(None, True, True, None)
    compat._GPT(args).build_model(None, True, True, None)
    for options in passed:
        del options["transformer_layer_spec"]  # one is of a block, the other of a layer
        options["config"] = repr(options["config"])
    return passed


def test_our_builder_passes_to_a_gpt_model_what_megatrons_does() -> None:
    if not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has no builder to compare with")
    ((expected, actual),) = run_ranks(1, _build_twice)
    defaults: dict[str, Any] = {"mtp_block_spec": None, "parallel_output": True}
    if releases.is_since("0.20"):
        defaults["logit_dtype"] = None
    assert defaults | {"scatter_embedding_sequence_parallel": True} | actual == expected


def _layer_names(rank: int, world_size: int, port: int) -> set[str]:
    from megatron.core import parallel_state

    from megatron.slipstream.integration.entry.checks import parse_and_validate
    from megatron.slipstream.integration.graphs.layers import with_graph_offloading
    from megatron.slipstream.integration.seam.specs import change_model_spec

    config = compat._GPT(parse_and_validate(GPT))
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=world_size)
    parallel_state.initialize_model_parallel()
    change_model_spec(config, with_graph_offloading)
    spec = config.transformer_layer_spec(config, vp_stage=None)
    return {layer.module.__name__ for layer in spec.layer_specs}


def test_our_builder_makes_models_of_layers_that_offload_in_graphs() -> None:
    assert run_ranks(1, _layer_names) == [{"GraphOffloadTransformerLayer"}]


def _slice(rank: int, world_size: int, port: int) -> dict[str, Any]:
    address = f"tcp://127.0.0.1:{port}"
    torch.distributed.init_process_group(
        "gloo", init_method=address, rank=rank, world_size=world_size
    )
    batch = {"tokens": torch.arange(8)[None], "attention_mask": None}
    result = compat.slice_for_context_parallel(batch, torch.distributed.group.WORLD)
    return {"tokens": result["tokens"].tolist(), "attention_mask": result["attention_mask"]}


def test_each_context_parallel_rank_gets_an_early_and_a_late_part() -> None:
    assert run_ranks(2, _slice) == [
        {"tokens": [[0, 1, 6, 7]], "attention_mask": None},
        {"tokens": [[2, 3, 4, 5]], "attention_mask": None},
    ]


def _train_shallow_then_deep(rank: int, world_size: int, port: int) -> list[int]:
    """The number of losses of a step of each of two models with experts."""
    counts = []
    for num_layers in (2, 4):
        case = ModelCase("moe", num_layers=num_layers)
        initialize(case, rank, world_size, port)
        config = make_config(case)
        counts.append(len(run_step(case, config, build_chunks(case, config), 0, 1)))
    return counts


def test_a_process_may_have_a_deeper_model_with_experts_after_another() -> None:
    assert run_ranks(1, _train_shallow_then_deep) == [[1, 1]]
