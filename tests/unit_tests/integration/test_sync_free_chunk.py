# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A whole model with sync-free experts, forward and backward, never makes the host wait."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from gpu_models import SMALL_SIZES
from host_reads import HostReads
from megatron_models import micro_batches, run_schedule
from ranks import run_ranks
from tiny_gpt import ModelCase, build_chunks, initialize, make_config

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


@pytest.mark.parametrize("overrides", ROUTERS.values(), ids=ROUTERS)
def test_a_step_of_micro_batches(overrides: dict[str, Any]) -> None:
    case = ModelCase("moe", sync_free_experts=True, overrides=overrides)
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
