# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Offloading with ``overlap_moe_expert_parallel_comm``: layers of two micro-batches alternate."""

from __future__ import annotations

import functools

import pytest
import torch
from hand_driven import LAZY_NATIVE
from nodes_gpt import InNodes, compare_in_nodes
from ranks import run_ranks
from tiny_gpt import MOE_MODULES
from toy_model import make_manager

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import LazyCpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.integration.seam.manager import (
    PipelineOffloadManager,
)

NUM_RANKS = 2


MODULES = (*MOE_MODULES, "expert_fc2", "output_layer")
ENGINES = {"all": (MODULES, "cpu-lazy")}
ENGINES |= {module: ((module,), "cpu") for module in ("attn_norm", "mlp_norm")}


@functools.cache
def _train_all(recomputes: bool) -> list[list[InNodes]]:
    """Each of :data:`ENGINES` on each rank; the training without an engine is the same."""
    engines = list(ENGINES.values())
    return run_ranks(NUM_RANKS, compare_in_nodes, engines, recomputes, 2)


def _compare(name: str, recomputes: bool) -> list[InNodes]:
    results = [of_rank[list(ENGINES).index(name)] for of_rank in _train_all(recomputes)]
    for result in results:
        assert result.difference == 0 < result.num_tensors
        assert result.num_late == 0
        assert result.num_plans == 1
    return results


@pytest.mark.parametrize("recomputes", [False, True])
def test_loss_and_gradients_are_those_without_the_engine(recomputes: bool) -> None:
    for result in _compare("all", recomputes):
        # A recomputed output is not an input of the linear layer after it that could move.
        assert set(result.moved_modules) >= set(MODULES) - {"qkv_linear", "expert_fc2"}
        assert recomputes or set(result.moved_modules) == set(MODULES)


@pytest.mark.parametrize("recomputes", [False, True])
@pytest.mark.parametrize("module", ["attn_norm", "mlp_norm"])
def test_memory_that_nodes_keep_is_taken(module: str, recomputes: bool) -> None:
    """Nodes keep their inputs and outputs: unless these are released, nothing is freed."""
    for result in _compare(module, recomputes):
        assert result.moved_modules == (module,)
        print(result)
        assert result.claimed_drop_bytes > 0
        if module == "attn_norm" and recomputes:
            # Layers keep these inputs of their last micro-batch until the next iteration, in which
            # they are missing as well.
            assert result.peak_drop_bytes > result.claimed_drop_bytes
        else:
            assert result.peak_drop_bytes == result.claimed_drop_bytes


@pytest.mark.gpus2
@pytest.mark.parametrize("recomputes", [False, True])
def test_loss_and_gradients_are_those_without_the_engine_on_two_gpus(recomputes: bool) -> None:
    """Where the nodes run on two streams, and memory of one is read on the other."""
    engines = [(MODULES, "cuda")]
    for (result,) in run_ranks(NUM_RANKS, compare_in_nodes, engines, recomputes, 6):
        assert result.difference == 0 < result.num_tensors
        assert {"core_attn", "expert_fc1"} <= set(result.moved_modules)


@pytest.mark.parametrize("is_given_up", [False, True])
def test_memory_is_taken_only_where_it_was_given_up(is_given_up: bool) -> None:
    manager = PipelineOffloadManager(OffloadEngine(LazyCpuBackend()))
    manager.init_model_chunk_offload_handler(0, 1, 0, 1)
    manager.engine.run_in_nodes()
    weight = torch.randn(64, requires_grad=True)
    kept = torch.randn(64)
    expected = kept.clone()
    for name in ("mlp_norm", "core_attn", "core_attn"):
        manager.pop_forward_chunk(name)
        with manager:
            output = weight * kept if name == "mlp_norm" else weight * 2
        mark = manager.cur_forward_chunk()
        mark.on_group_commit_forward(name, [kept] if is_given_up else [])
        if name == "mlp_norm":
            first, first_mark = output, mark
    assert (kept.untyped_storage().nbytes() == 0) is is_given_up
    first_mark.on_group_commit_backward("mlp_norm")
    first.sum().backward()
    assert torch.equal(weight.grad, expected)


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
def test_memory_is_taken_where_a_plan_is_followed_too(backend: str) -> None:
    manager = make_manager(backend)
    weight = torch.randn(64, requires_grad=True)
    for _ in range(5):
        manager.init_model_chunk_offload_handler(0, 1, 0, 1)
        manager.engine.run_in_nodes()
        kept, value = [torch.randn(64) for _ in range(3)], weight * 1
        expected = kept[2] * kept[1] * kept[0]
        for factor in kept:
            for name in ("mlp_norm", "core_attn"):
                manager.start_on(value, name)
                with manager:
                    value = value * factor if name == "mlp_norm" else value * 1
                value = manager.end_on(value, name, [factor])
        assert kept[0].untyped_storage().nbytes() == 0, "released after later groups"
        (gradient,) = torch.autograd.grad(value.sum(), weight)
        assert torch.equal(gradient, expected)
        manager.reset()
    assert manager.report.num_plans == 1
    assert manager.report.total.num_groups_moved > 0


@pytest.mark.parametrize("runs_in_nodes", [False, True])
def test_the_allocator_knows_that_d2h_reads_what_is_of_another_stream(runs_in_nodes: bool) -> None:
    backend = LazyCpuBackend()
    told: list[tuple[int, object]] = []
    backend.hold = lambda tensor, stream: told.append((tensor.data_ptr(), stream))
    manager = PipelineOffloadManager(OffloadEngine(backend))
    manager.init_model_chunk_offload_handler(0, 1, 0, 1)
    if runs_in_nodes:
        manager.engine.run_in_nodes()
    weight, saved = torch.randn(64, requires_grad=True), torch.randn(64)
    manager.pop_forward_chunk("expert_fc1")
    with manager:
        output = weight * saved
    mark = manager.cur_forward_chunk()
    mark.on_group_commit_forward("expert_fc1")
    assert told == ([(saved.data_ptr(), manager.d2h_stream)] if runs_in_nodes else [])
    del output
