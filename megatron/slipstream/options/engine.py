# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Requirements on ``OffloadConfig`` itself, and on one that is given to ``attach()``."""

from __future__ import annotations

import math
from typing import Any

from megatron.slipstream.options.rules import Condition, Rule, always, option_rule, value_rule


def _is_at_least_0(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


RULES: tuple[Rule, ...] = (
    value_rule(
        "offload_release_lag",
        _is_at_least_0,
        "is negative",
        "set the number of group commits (0 or more) that device memory outlives its own",
    ),
    value_rule(
        "offload_prefetch_depth",
        _is_at_least_0,
        "is negative",
        "set how many groups ahead (0 or more) a copy back starts",
    ),
    value_rule(
        "offload_target_memory_gib",
        lambda gib: gib is None or 0 < gib < math.inf,
        "is no device peak",
        "set the GiB (above 0, and finite) that each rank may use at most, or leave it out to "
        "move everything that may",
    ),
    value_rule(
        "offload_max_overhead_percent",
        lambda percent: percent in (None, "auto") or _is_at_least_0(percent),
        "is no limit",
        "set by how many percent (0 or more, or 'auto') copies may slow an iteration down, or "
        "leave it out to move everything that may",
    ),
    option_rule(
        "offload_max_overhead_percent",
        lambda f: f.offload_target_memory_gib is not None,
        lambda f: f.offload_max_overhead_percent is None,
        "offload_max_overhead_percent={offload_max_overhead_percent} is not supported with "
        "offload_target_memory_gib={offload_target_memory_gib} because each alone decides how "
        "much moves",
        "set one of them",
    ),
    value_rule(
        "activation_memory_budget",
        lambda gib: gib in (None, "auto") or (_is_at_least_0(gib) and gib > 0),
        "is no amount of memory",
        "set the GiB (above 0, and finite) that activations may use, 'auto', or leave it out",
    ),
    option_rule(
        "activation_memory_budget",
        lambda f: f.activation_memory_budget is not None,
        lambda f: f.offload_target_memory_gib is None and f.offload_max_overhead_percent is None,
        "activation_memory_budget={activation_memory_budget} is not supported with "
        "offload_target_memory_gib={offload_target_memory_gib} and offload_max_overhead_percent="
        "{offload_max_overhead_percent} because each alone decides how much moves",
        "set one of them",
    ),
    value_rule(
        "offload_host_memory_limit_bytes",
        lambda limit: limit is None or limit > 0,
        "leaves no host memory to move activations to",
        "set a number of bytes above 0, or leave it out for 80% of the node's available memory, "
        "shared by its processes",
    ),
    value_rule(
        "offload_verify",
        _is_at_least_0,
        "is negative",
        "set how many iterations (0 or more) to check",
    ),
)
"""Requirements on :class:`~megatron.slipstream.options.fields.OffloadConfig`, beside its types."""

ATTACH_RULES: tuple[Rule, ...] = Condition("with attach()", always).rows("""
    offload_engine in slipstream: that engine knows megatron-core's layers only;
        set offload_engine=slipstream
    offload_report_path: it cannot see when training ends;
        leave it out and call report().save(path)
    offload_trace_path: it cannot see when training ends; leave it out and call save_trace(path)
    offload_checkpoint_inputs: the inputs that checkpoints of the chosen modules keep always move
    activation_memory_budget: only megatron-core's layers can be told what to recompute;
        leave it out, or set offload_target_memory_gib
""")
"""Requirements on an ``OffloadConfig`` that is given to ``attach()``."""
