# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``max_inflight_offloads``: the number of copies out of a module that compute may run ahead of."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
import torch
from make_trace import Model, one_f_one_b, one_pass, timed, trace_of

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.storage import Residence
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.actions import ActionKind, Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.check import PlanError, SafetyProperty, check_plan
from megatron.slipstream.plan.trace import Trace

LAG = 4
ONE_MODULE = one_pass(Model(num_layers=7))
TWO_MODULES = one_pass(Model(num_layers=7, modules=("core_attn", "mlp_norm")))
MICRO_BATCHES = trace_of(one_f_one_b(2, 0, 4), Model(num_layers=4))
SLOW_COPIES = timed(TWO_MODULES, 1.0, 0.0000004)
"""A copy takes two and a half steps."""


def most_in_flight(plan: Plan) -> int:
    """Groups of one module whose copies out have started and whose memory is not released."""
    in_flight: Counter[str] = Counter()
    most = 0
    for actions in plan.actions:
        for action in actions:
            in_flight[action.name] += action.kind is ActionKind.D2H
            in_flight[action.name] -= action.kind is ActionKind.FREE
        most = max([most, *in_flight.values()])
    return most


def plan_for(trace: Trace, limit: int | None, lag: int = LAG) -> Plan:
    plan = build_plan(trace, PolicyOptions(release_lag=lag, max_inflight_offloads=limit))
    check_plan(plan)
    return plan


@pytest.mark.parametrize(
    "trace",
    [ONE_MODULE, TWO_MODULES, MICRO_BATCHES, SLOW_COPIES],
    ids=["one module", "two modules", "micro-batches", "slow copies"],
)
@pytest.mark.parametrize("limit", [0, 1])
def test_a_plan_keeps_to_the_limit(trace: Trace, limit: int) -> None:
    without = plan_for(trace, None)
    assert most_in_flight(without) > limit
    plan = plan_for(trace, limit)
    assert most_in_flight(plan) == limit
    assert plan.moved_nbytes == without.moved_nbytes > 0


def test_a_limit_above_what_the_plan_does_changes_nothing() -> None:
    plans = [plan_for(ONE_MODULE, limit, lag=1) for limit in (None, 1, 5)]
    assert plans[0].groups == plans[1].groups == plans[2].groups


def test_a_plan_beyond_the_limit_is_refused() -> None:
    plan = plan_for(ONE_MODULE, None)
    beyond = replace(plan, options=replace(plan.options, max_inflight_offloads=2))
    with pytest.raises(PlanError) as refused:
        check_plan(beyond)
    assert refused.value.rule is SafetyProperty.WITHIN_INFLIGHT
    assert "copies out of core_attn are in flight" in str(refused.value)


@pytest.mark.parametrize("limit", [None, 0, 1, 2])
def test_the_iteration_before_the_first_plan_keeps_to_it(limit: int | None) -> None:
    manager = PipelineOffloadManager(OffloadEngine(CpuBackend(), PolicyOptions(release_lag=3)))
    manager.init_model_chunk_offload_handler(0, 1, 0, 1, max_inflight_offloads=limit)
    weight = torch.ones(8, requires_grad=True)
    output = weight * 1
    most: Counter[str] = Counter()
    for name in ("core_attn", "mlp_norm") * 5:
        manager.pop_forward_chunk(name)
        with manager:
            output = output * torch.randn(8)
        mark = manager.cur_forward_chunk()
        assert mark is not None
        mark.on_group_commit_forward(name)
        leaving = Counter(
            group.name
            for group in manager.engine.now.groups.values()
            for storage in group.storages()
            if storage.residence is Residence.OFFLOADING
        )
        most |= leaving
    # With a lag of three groups, two of them are of one module, or one of each.
    assert most == Counter(core_attn=2, mlp_norm=2) & Counter(
        core_attn=2 if limit is None else limit, mlp_norm=2 if limit is None else limit
    )
    assert manager.options.max_inflight_offloads == limit
