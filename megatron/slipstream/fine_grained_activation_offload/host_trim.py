# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Frees host memory that is no longer needed.

The first iterations move every group that may move, and the pool grows by slabs of many buffers. A
plan for a target or an allowed overhead may need a tenth of that, or nothing. Its need is known to
the byte, so once plans are settled, one slab of that size replaces all others.
"""

from __future__ import annotations

import logging
from typing import Optional

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.plan_cache import PlanCache
from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.fine_grained_activation_offload.tuner import Tuner
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.host_layout import slab_bytes_for
from megatron.slipstream.plan.operations import derive_schedule
from megatron.slipstream.plan.render import format_bytes

logger = logging.getLogger(__name__)

MIN_SHARE = 0.2
"""Minimum unused fraction of host memory to trim, since re-pinning the rest takes a while."""
MAX_TIMES = 3
"""Maximum number of trims, to bound the time spent re-pinning if plans never settle."""
NUM_ALIKE = 3
"""Number of consecutive iterations that must use exactly the planned memory. If sizes vary, the
need of the next iteration is unknown, and the pool is not trimmed."""


class HostTrimmer:
    """Checks at the end of each iteration whether host memory can be freed.

    Args:
        store: Holds the host memory.
        cache: Holds the plans.
        tuner: Knows whether the plans are settled.
        report: Has the number of plans made.
    """

    def __init__(
        self, store: ActivationStore, cache: PlanCache, tuner: Tuner, report: RankReport
    ) -> None:
        self._store = store
        self._cache = cache
        self._tuner = tuner
        self._report = report
        self._num_times = 0
        self._num_alike = 0
        self._num_plans = 0
        self._is_decided = False
        """Whether the current plans have been handled."""

    def end_iteration(self, plan: Optional[Plan]) -> None:
        """End an iteration with the steps of ``plan``, trimming host memory if possible."""
        if self._is_decided and self._num_plans == self._report.num_plans:
            return
        pool = self._store.host_pool
        peak_in_use = pool.take_peak_in_use()
        if self._num_plans != self._report.num_plans:
            self._num_plans = self._report.num_plans
            self._is_decided = self._num_times == MAX_TIMES
            self._num_alike = 0
        elif plan is not None:
            self._num_alike = self._num_alike + 1 if peak_in_use == plan.peak_host_bytes else 0
            if (
                self._num_alike >= NUM_ALIKE
                and self._tuner.is_settled(plan)
                and not pool.in_use_bytes
            ):
                self._is_decided = True
                self._trim()

    def _trim(self) -> None:
        held = self._store.host_pool.allocated_bytes
        needed = slab_bytes_for(
            [derive_schedule(plan).host_requests() for plan in self._cache.plans()]
        )
        if held - needed < max(MIN_SHARE * held, self._store.backend.host_slab_bytes):
            return
        self._num_times += 1
        self._store.trim_host_memory(needed)
        logger.info(
            "rank %d: the plans need %s of host memory; the rest of the %s held is freed",
            self._report.rank,
            format_bytes(needed),
            format_bytes(held),
        )
