# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A whole model with sync-free experts, forward and backward, never makes the host wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any
from unittest.mock import patch

import pytest
import torch
from gpu_models import SMALL_SIZES, on_gpu
from host_reads import HostReads
from megatron_models import micro_batches, run_schedule, wrap
from ranks import run_ranks
from tiny_gpt import ModelCase, build_chunks, initialize, make_config

from megatron.slipstream.experts import capacity
from megatron.slipstream.experts.capacity import step_check
from megatron.slipstream.graphs.capture import EagerGraphs, Recorded, Work
from megatron.slipstream.integration.graphs.chunks import replay_chunks

EVERYTHING = {
    "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss", "global_aux_loss"],
    "moe_aux_loss_coeff": [0.01, 0.02, 0.03],
    "moe_z_loss_coeff": 0.001,
    "moe_shared_expert_intermediate_size": 64,
}
BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_dtype": "fp32",
}
NO_WAITS = (
    "/tensor_parallel/random.py",  # the state of the CPU's random numbers
    "/tensor_parallel/cross_entropy.py",  # torch fills by a mask without knowing how many
)
"""Files of megatron-core whose reads are no waits for a GPU."""
ROUTERS: dict[str, dict[str, Any]] = {"auxiliary losses": EVERYTHING, "expert bias": BIAS}


@contextlib.contextmanager
def synchronizations(found: list[str]) -> Iterator[None]:
    """Inside, collect what makes the host wait: on a GPU the first such call only."""
    if not torch.cuda.is_available():
        with HostReads() as reads:
            yield
        found += [read for read in reads.found if not any(name in read for name in NO_WAITS)]
        return
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    except RuntimeError as error:
        found.append(str(error))
    finally:
        torch.cuda.set_sync_debug_mode("default")


def waits_of_a_step(rank: int, num_ranks: int, port: int, case: ModelCase) -> list[str]:
    initialize(case, rank, num_ranks, port)
    chunks = build_chunks(case, make_config(case))
    batches = list(micro_batches(case, 0, 2))
    run_schedule(case, chunks, batches)  # what is made once may wait
    found: list[str] = []
    with synchronizations(found):
        run_schedule(case, chunks, batches)
    return found


@pytest.mark.parametrize("tiles", [1, 3], ids=["", "in tiles"])
@pytest.mark.parametrize("overrides", ROUTERS.values(), ids=ROUTERS)
def test_a_step_of_micro_batches(overrides: dict[str, Any], tiles: int) -> None:
    case = ModelCase("moe", sync_free_experts=True, mlp_sequence_tiles=tiles, overrides=overrides)
    assert run_ranks(1, waits_of_a_step, case) == [[]]


def test_megatrons_experts_are_found() -> None:
    (found,) = run_ranks(1, waits_of_a_step, ModelCase("moe"))
    assert found


@pytest.mark.gpu
@pytest.mark.parametrize("is_packed", [False, True], ids=["", "packed"])
@pytest.mark.parametrize("overrides", ROUTERS.values(), ids=ROUTERS)
def test_a_step_on_a_gpu(overrides: dict[str, Any], is_packed: bool) -> None:
    fused = {"moe_permute_fusion": True, "apply_rope_fusion": True}
    case = ModelCase(
        "moe",
        sync_free_experts=True,
        is_packed=is_packed,
        overrides={**overrides, **fused},
        **SMALL_SIZES,
    )
    assert run_ranks(1, waits_of_a_step, case) == [[]]


# --- chunk graphs on several ranks ----------------------------------------------------------------


class _WithoutPython(EagerGraphs):
    """A replay has the layers' operations, and nothing that they do beside them.

    As in a capture, reading the numbers of rows is an error while one is recorded.
    """

    def record(self, work: Work, pool: Any) -> Recorded:
        with patch.object(capacity, "check_capacity", side_effect=AssertionError):
            graph, results = super().record(work, pool)
        replay = graph.replay

        def without_checks() -> None:
            with step_check.off():
                replay()

        graph.replay = without_checks  # type: ignore[method-assign]
        return Recorded(graph, results)


def errors_of_replays(
    rank: int, num_ranks: int, port: int, case: ModelCase, has_finalize: bool
) -> tuple[list[str], list[bool], list[int], int]:
    """Of steps with even rows, all rows for one rank, and even ones again.

    Returns:
        Each step's error, whether it ran in graphs, the rows that are noted when its micro-batches
        begin, and the number of replays.
    """
    initialize(case, rank, num_ranks, port)
    config = make_config(case)
    (model,) = build_chunks(case, config)
    chunks: list[Any] = wrap(config, [model])
    backend = None if torch.cuda.is_available() else _WithoutPython()
    (graphs,) = replay_chunks(chunks, 1, backend)
    layers = [layer.mlp for layer in model.decoder.layers]
    errors, were_captured, noted = [], [], []
    for step, experts in enumerate([(0, 2), (0, 2), (0, 1), (1, 3)]):
        # A training loop of its own may set the function for each step.
        config.finalize_model_grads_func = (lambda *_, **__: None) if has_finalize else None
        for layer in layers:
            layer.router.expert_bias.zero_()
            layer.router.expert_bias[list(experts)] = 9.0
        chunks[0].zero_grad_buffer()
        were_captured.append(graphs.is_captured)
        noted.append(sum(int(layer.token_dispatcher.capacity_use.largest) for layer in layers))
        try:
            run_schedule(case, chunks, list(micro_batches(case, step, 1)))
            errors.append("")
        except RuntimeError as error:
            errors.append(str(error))
    return errors, were_captured, noted, graphs.num_replays


UNEVEN = ModelCase(
    "moe",
    ep=2,
    te_rng_tracker=True,
    sync_free_experts=True,
    sync_free_capacity_factor=1.5,
    overrides=BIAS,
)


@pytest.mark.parametrize("has_finalize", [True, False], ids=["finalized", "own loop"])
def test_a_replay_with_too_many_rows_ends_in_an_error(has_finalize: bool) -> None:
    check_errors_of_replays(UNEVEN, has_finalize)


@pytest.mark.gpus2
@pytest.mark.parametrize("has_finalize", [True, False], ids=["finalized", "own loop"])
def test_a_replay_with_too_many_rows_ends_in_an_error_on_gpus(has_finalize: bool) -> None:
    check_errors_of_replays(on_gpu(UNEVEN, moe_permute_fusion=True), has_finalize)


def check_errors_of_replays(case: ModelCase, has_finalize: bool) -> None:
    num_rows = case.seq_length * case.micro_batch_size * 2
    for rank, found in enumerate(run_ranks(2, errors_of_replays, case, has_finalize)):
        errors, were_captured, noted, num_replays = found
        assert errors[2].startswith(
            f"rank {rank}, layer 1: {num_rows} of {num_rows} rows are for the experts of one rank"
        )
        assert errors[:2] + errors[3:] == [""] * 3
        assert were_captured == [False, True, True, True]
        assert noted == [0] * 4, "the pass before the capture is not a step"
        assert num_replays == 3
