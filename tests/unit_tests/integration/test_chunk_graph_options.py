# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Engines in graphs of chunks have the options of the installed one, and replays move as reported.

Without a GPU a replay runs the pass again, with the copies that a CUDA graph contains.
"""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any, Optional

import pytest
from gpu_models import SMALL_SIZES
from megatron_models import wrap
from ranks import run_ranks
from replayed_gpt import start
from tiny_gpt import ModelCase, build_chunks, make_config, run_step

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import (
    CpuBackend,
    LazyCpuBackend,
)
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.fine_grained_activation_offload.pass_policy import PassPolicy
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.candidates import PolicyOptions

DENSE = ModelCase("dense", num_layers=4)
COUNTS = (2, 2, 3)
"""Micro-batches of each iteration; the first runs without graphs."""
CPU = OffloadConfig(offload_backend="cpu")
POLICY = {
    "min_offloaded_tensor_size": 8,
    "activation_offload_fraction": 0.75,
    "delta_offload_bytes_across_pp_ranks": 64,
    "fine_grained_offloading_max_inflight_offloads": 0,
}


@dataclasses.dataclass
class Found:
    """What a rank found."""

    options: list[PolicyOptions] = dataclasses.field(default_factory=list)
    """Options of each engine in graphs."""
    ranks: list[int] = dataclasses.field(default_factory=list)
    """The rank of each."""
    copied_bytes: list[int] = dataclasses.field(default_factory=list)
    """Bytes copied out and back in each iteration with graphs, counted at the backend."""
    reported_bytes: list[int] = dataclasses.field(default_factory=list)
    """The same in the reports."""
    num_verified: int = 0
    """Storages that came back unchanged in graphs."""
    host_bytes: tuple[int, int] = (0, 0)
    """Host memory of all slots, and what is left to another engine of the process."""
    poisons: bool = False
    """Whether released memory is still filled in the end."""
    messages: list[str] = dataclasses.field(default_factory=list)
    error: Optional[str] = None


class _Log(logging.Handler):
    def __init__(self, messages: list[str]) -> None:
        super().__init__(logging.INFO)
        self._messages = messages

    def emit(self, record: logging.LogRecord) -> None:
        self._messages.append(record.getMessage())


class _Copies:
    """Counts copied bytes, and damages them from :attr:`damages` on."""

    def __init__(self) -> None:
        self.nbytes = 0
        self.damages = False

    def install(self) -> None:
        """Count from now on."""
        for kind in (CpuBackend, LazyCpuBackend):
            kind.run_copies = self._replacement_of(kind.run_copies)  # type: ignore[method-assign]

    def _replacement_of(self, original: Any) -> Any:
        def run_copies(backend: Any, copies: Any, stream: Any) -> None:
            original(backend, copies, stream)
            for target, source in copies:
                self.nbytes += min(target.nbytes, source.nbytes)
                if self.damages:
                    target.first(9).view()[3] += 1  # Out and back do not cancel out.

        return run_copies


def _train(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    config: OffloadConfig,
    policy: dict[str, Any],
    damaged_from: Optional[int] = None,
) -> Found:
    from megatron.slipstream.fine_grained_activation_offload.engine_setup import host_limit
    from megatron.slipstream.integration import install
    from megatron.slipstream.integration.graphs.chunks import close_graphs, replay_chunks

    found, copies, engines = Found(), _Copies(), []
    copies.install()
    logger = logging.getLogger("megatron.slipstream")
    logger.addHandler(_Log(found.messages))
    logger.setLevel(logging.INFO)
    case = start(case, rank, world_size, port)
    manager = install.install(config)
    make = manager.make_graph_engine

    def noting(*arguments: Any) -> Any:
        engines.append(make(*arguments))
        verifier = engines[-1].store.verifier
        if verifier is not None:
            verifiers.append(verifier)
        return engines[-1]

    verifiers: list[Any] = []
    manager.make_graph_engine = noting  # type: ignore[method-assign]
    model_config = make_config(case, ("qkv_linear", "core_attn", "attn_proj"), **policy)
    chunks = wrap(model_config, build_chunks(case, model_config))
    replay_chunks(chunks, 1)
    try:
        for step, count in enumerate(COUNTS):
            copies.damages = damaged_from is not None and step >= damaged_from
            for chunk in chunks:
                chunk.zero_grad_buffer()  # Captures before the second iteration.
            copies.nbytes = 0
            run_step(case, model_config, chunks, step, count)
            for chunk in chunks:
                chunk.finish_grad_sync()
            graphs = manager.report.graphs.values()
            found.copied_bytes.append(copies.nbytes)
            found.reported_bytes.append(sum(item.d2h_bytes + item.h2d_bytes for item in graphs))
    except RuntimeError as error:
        found.error = str(error)
    found.poisons = manager.store.backend.poisons_dropped
    slots = {id(engine.store.host_pool): engine.store.host_pool for engine in engines}
    other = HostPool(CpuBackend())
    host_limit.join(other, config.offload_host_memory_limit_bytes)
    held = sum(pool.allocated_bytes for pool in slots.values())
    found.host_bytes = (held, other.limit_bytes or 0)
    host_limit.leave(other)
    close_graphs()
    install.uninstall()
    found.options = [engine.options for engine in engines]
    found.ranks = [engine.report.rank for engine in engines]
    found.num_verified = sum(verifier.num_verified for verifier in verifiers)
    return found


def _of_one_rank(config: OffloadConfig, damaged_from: Optional[int] = None, **policy: Any) -> Found:
    (found,) = run_ranks(1, _train, DENSE, config, policy, damaged_from)
    return found


@pytest.mark.parametrize("backend", ["cpu", "cpu-lazy"])
def test_figures_of_replays_are_those_of_the_iteration(backend: str) -> None:
    found = _of_one_rank(OffloadConfig(offload_backend=backend))
    assert found.reported_bytes[0] == 0
    assert found.reported_bytes[1:] == found.copied_bytes[1:]
    per_micro_batch = found.copied_bytes[1] // COUNTS[1]
    assert per_micro_batch > 0
    assert found.copied_bytes[1:] == [per_micro_batch * count for count in COUNTS[1:]]


def test_engines_in_graphs_have_the_policy_of_the_model_and_the_settings_of_the_process() -> None:
    config = OffloadConfig(
        offload_backend="cpu",
        offload_release_lag=3,
        offload_prefetch_depth=2,
        offload_nvtx_ranges=True,
    )
    found = _of_one_rank(config, **POLICY)
    planning, *slots = found.options
    assert len(slots) == 1
    for options in (planning, *slots):
        assert options.activation_offload_fraction == 0.75
        assert options.delta_offload_bytes_across_pp_ranks == 64
        assert options.max_inflight_offloads == 0
        assert options.release_lag == 3
        assert options.prefetch_depth == 2
    warned = "offload_nvtx_ranges=True has no effect inside CUDA graphs of chunks"
    assert len(_starting_with(warned, found.messages)) == 1


def test_a_policy_has_every_option_of_the_model() -> None:
    """None has a default: a caller that forgets one fails."""
    assert PassPolicy._field_defaults == {}
    policy = PassPolicy.of(type("Config", (), POLICY))
    assert list(policy) == list(POLICY.values())
    with pytest.raises(TypeError):
        PassPolicy(1, 1.0, 0)  # type: ignore[call-arg]
    changed = policy.applied_to(PolicyOptions(release_lag=7))
    assert changed == PolicyOptions(0.75, 64, release_lag=7, max_inflight_offloads=0)


def test_a_release_without_an_option_has_its_default() -> None:
    options = {
        "min_offloaded_tensor_size": 8,
        "fine_grained_offloading_max_inflight_offloads": None,
    }
    policy = PassPolicy.of(SimpleNamespace(**options))
    assert policy == PassPolicy(8, 1.0, 0, None)


def test_what_comes_back_in_graphs_is_verified_and_that_ends() -> None:
    found = _of_one_rank(OffloadConfig(offload_backend="cpu", offload_verify=1))
    assert found.num_verified > 0
    assert not found.poisons
    assert found.reported_bytes[1:] == found.copied_bytes[1:]
    ends = [message for message in found.messages if "verifying ends" in message]
    assert len(ends) == 3, "the first iteration, the planned pass and the slot's"


@pytest.mark.parametrize("is_verified", [True, False])
def test_damaged_bytes_in_graphs_end_the_run_if_they_are_verified(is_verified: bool) -> None:
    config = OffloadConfig(offload_backend="cpu", offload_verify=100 if is_verified else 0)
    found = _of_one_rank(config, damaged_from=2)
    assert len(found.copied_bytes) == (2 if is_verified else 3)
    assert (found.error is not None) == is_verified
    assert not is_verified or "came back changed" in found.error


def test_a_later_rank_speaks_as_itself() -> None:
    case = dataclasses.replace(DENSE, pp=2)
    everything_stays = {"min_offloaded_tensor_size": 1 << 40}
    results = run_ranks(2, _train, case, CPU, everything_stays)
    assert [set(found.ranks) for found in results] == [{0}, {1}]
    for rank, found in enumerate(results):
        of_graphs = _starting_with("rank ", found.messages)
        assert of_graphs
        assert _starting_with(f"rank {rank}: ", found.messages) == of_graphs
    plans = [_starting_with("plan: ", found.messages) for found in results]
    assert plans[0]
    assert not plans[1]


def _starting_with(text: str, messages: Sequence[str]) -> list[str]:
    return [message for message in messages if message.startswith(text)]


def test_a_limit_is_named_as_it_was_set() -> None:
    config = OffloadConfig(offload_backend="cpu", offload_host_memory_limit_bytes=40_000)
    found = _of_one_rank(config)
    warnings = [m for m in found.messages if "offload_host_memory_limit_bytes" in m and ";" in m]
    assert len(warnings) >= 2, "without graphs, and of the share of a slot"
    for warning in warnings:
        assert warning.startswith("offload_host_memory_limit_bytes=40000 (39.1 KiB)")
    assert any(" of it for this use, is less than" in warning for warning in warnings)


def test_memory_of_slots_counts_in_the_limit_of_the_process() -> None:
    limit = 100_000
    config = OffloadConfig(offload_backend="cpu", offload_host_memory_limit_bytes=limit)
    held, left = _of_one_rank(config).host_bytes
    assert limit // 2 < held <= limit, "more than the half that another engine would get"
    assert left == limit - held


@pytest.mark.gpu
def test_on_a_gpu_passes_before_the_capture_are_verified_and_figures_count_replays() -> None:
    case = ModelCase("dense", num_layers=4, **SMALL_SIZES)
    policy = {"min_offloaded_tensor_size": 1024}
    (found,) = run_ranks(1, _train, case, OffloadConfig(offload_verify=1), policy)
    assert found.error is None
    assert found.num_verified > 0
    assert not found.poisons
    per_micro_batch = found.reported_bytes[1] // COUNTS[1]
    assert per_micro_batch > 0
    assert found.reported_bytes[1:] == [per_micro_batch * count for count in COUNTS[1:]]
    (warning,) = [m for m in found.messages if m.startswith("offload_verify=1 has no effect")]
    assert "inside CUDA graphs of chunks" in warning
