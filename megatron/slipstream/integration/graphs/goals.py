# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A target for memory or overhead inside the graphs of layers.

Graphs move what the plan of the iterations before the capture moves. Until iterations have been
timed, a plan moves everything that may move, whatever the goal. So the capture has to come later
than megatron-core's default of three iterations: training sets ``cuda_graph_warmup_steps``, and
other callers are warned.
"""

from __future__ import annotations

import logging
from typing import Any, Optional

from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.plan_cache import NUM_UNTIL_TIMED
from megatron.slipstream.launcher import rank
from megatron.slipstream.options.model import moves_in_layer_graphs
from megatron.slipstream.plan.candidates import PolicyOptions

logger = logging.getLogger(__name__)

_GOALS = ("offload_target_memory_gib", "offload_max_overhead_percent")


def prepare_arguments(args: Any) -> None:
    """Capture late enough for a plan that follows the goal, if there is one."""
    goal = next((name for name in _GOALS if getattr(args, name) is not None), None)
    if goal is None or not moves_in_layer_graphs(args) or args.offload_engine != "slipstream":
        return
    if args.cuda_graph_warmup_steps < NUM_UNTIL_TIMED:
        if rank() == 0:
            logger.warning(
                "%s=%s: setting cuda_graph_warmup_steps=%d instead of %d, since graphs of layers "
                "keep the plan of the iterations before them, which have to be timed",
                goal,
                getattr(args, goal),
                NUM_UNTIL_TIMED,
                args.cuda_graph_warmup_steps,
            )
        args.cuda_graph_warmup_steps = NUM_UNTIL_TIMED


def warn_of_untimed_plan(engine: OffloadEngine) -> None:
    """Warn if graphs are about to keep a plan that does not follow the engine's goal."""
    plan, goal = engine.plan, _goal(engine.options)
    # Without times of the device, another warning says that the goal is not followed.
    if plan is None or goal is None or plan.trace.step_ms or not engine.store.backend.takes_time:
        return
    logger.warning(
        "rank %d: %s is not followed inside CUDA graphs of layers, because they are captured after "
        "%d iterations, and too few of them had the same number of micro-batches to be timed: all "
        "%d groups that may move do; set cuda_graph_warmup_steps to at least %d",
        engine.report.rank,
        goal,
        engine.report.num_iterations,
        sum(group.moves for group in plan.groups),
        NUM_UNTIL_TIMED,
    )


def _goal(options: PolicyOptions) -> Optional[str]:
    if options.target_memory_bytes is not None:
        return f"offload_target_memory_gib={options.target_memory_bytes / 2**30:g}"
    if options.max_overhead_percent is not None:
        return f"offload_max_overhead_percent={options.max_overhead_percent:g}"
    return None
