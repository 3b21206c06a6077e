# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The properties of a safe plan, and the error for a plan that violates one."""

from __future__ import annotations

import enum

from megatron.slipstream.plan.actions import Action, Plan
from megatron.slipstream.plan.edges import Edge, safety_by
from megatron.slipstream.plan.render import render_plan
from megatron.slipstream.plan.trace import GroupKey, Step


class SafetyProperty(enum.Enum):
    """The safety properties; those after the gap rest on edges."""

    KNOWN_GROUP = "every group of the trace, and no other, has a plan"
    KNOWN_STEP = "an action is due at a step of the trace"
    KNOWN_STORAGE = "a storage that is named exists"
    KNOWN_USE = "a group that moves is used, at the step that its plan says"
    AFTER_COMMIT = "nothing is done for a group before its commit"
    HELD_OUTSIDE = "a storage that something else holds stays, since copying it frees nothing"
    ALL_RELEASE = "a storage that moves is released by every group that holds it"
    D2H_BEFORE_FREE = "memory is released after the copy out of it was started"
    FREE_BEFORE_H2D = "a copy back starts after the memory was released"
    LEAVES_BEFORE_USE = "a group is copied out and freed only before backward reaches it"
    BACK_BEFORE_USE = "a group is used after its copy back was started"
    ONCE = "a storage moves at most once each way"
    WITHIN_HOST_MEMORY = "no more host memory is in use at once than the options allow"
    WITHIN_INFLIGHT = "no more copies out of a module are ahead of compute than the options allow"
    AS_STATED = "storages and bytes move as the plan states"
    NO_CYCLE = "a queue waits only for operations issued before, so that queues cannot deadlock"

    COPY_OUT_READS_WRITTEN = safety_by(Edge.E1)
    BUFFER_REUSED_AFTER_COPY = safety_by(Edge.E2)
    REUSED_AFTER_COPY_OUT = safety_by(Edge.E3)
    COPY_IN_READS_WRITTEN = safety_by(
        Edge.E3, Edge.E4, text="a copy back reads what its own copy out has written"
    )
    COPY_IN_AFTER_LAST_USE = safety_by(Edge.E4)
    BACKWARD_READS_WRITTEN = safety_by(Edge.E5)
    UNREAD_REUSED_AFTER_COPY_IN = safety_by(Edge.E6)


class PlanError(ValueError):
    """Raised for a plan that is unsafe to run.

    The message has the action, the rule and the plan as a grid with the action's group highlighted.

    Args:
        rule: The rule that is broken.
        action: The first action found to break it (a step if it is a mark; text if it is neither).
        plan: The plan.
        detail: Description of the violation.
    """

    def __init__(
        self, rule: SafetyProperty, action: Action | Step | str, plan: Plan, detail: str
    ) -> None:
        marked: GroupKey | None = None if isinstance(action, str) else action.key
        super().__init__(
            f"plan refused at {action}: {detail}; the rule is: {rule.value}\n"
            + render_plan(plan, marked=marked)
        )
        self.rule = rule
        self.action = str(action)
