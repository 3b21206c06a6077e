# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Saves and loads traces and plans: recorded on a GPU, planned and read on any machine.

A file is JSON: ``{"schema": ..., "version": ..., "trace" or "plan": ...}`` with the dataclass
fields by name, in the same units; a :class:`NamedTuple` is a list. Files contain only data, never
code, and are not trusted: types and references are checked, and a plan is proved again.

[Note: Versions of files]
The version identifies the meaning of a file. Adding a field whose default keeps the old meaning
does not change the version; any other change increments it. Unknown fields are errors, so that an
older Slipstream rejects a newer file instead of reading part of it.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from pydantic import TypeAdapter, ValidationError
from pydantic.dataclasses import dataclass as checked_dataclass

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.check import check_plan
from megatron.slipstream.plan.safety import PlanError
from megatron.slipstream.plan.trace import Step, StepKind, Trace
from megatron.slipstream.plan.whole_files import write_whole

TRACE_SCHEMA = "slipstream-trace"
PLAN_SCHEMA = "slipstream-plan"
VERSION = 1
"""See [Note: Versions of files]."""


@checked_dataclass
class _Header:
    schema: str
    version: int


@checked_dataclass
class _TraceFile:
    schema: str
    version: int
    trace: Trace


@checked_dataclass
class _PlanFile:
    schema: str
    version: int
    plan: Plan


def save_trace(trace: Trace, path: str | Path) -> None:
    """Write a trace atomically.

    Raises:
        ValueError: :func:`load_trace` would reject the trace.
        OSError: The file cannot be written.
    """
    _refuse(path, _trace_problems(trace), f"a {TRACE_SCHEMA} that can be written")
    content = _TraceFile(TRACE_SCHEMA, VERSION, trace)
    write_whole(path, _adapter(_TraceFile).dump_json(content) + b"\n")


def save_plan(plan: Plan, path: str | Path) -> None:
    """Write a plan, with the trace it was built from, atomically.

    Raises:
        ValueError: The plan refers to something that does not exist, or its trace is invalid.
        OSError: The file cannot be written.
    """
    _refuse(path, _plan_problems(plan), f"a {PLAN_SCHEMA} that can be written")
    content = _PlanFile(PLAN_SCHEMA, VERSION, plan)
    write_whole(path, _adapter(_PlanFile).dump_json(content) + b"\n")


def load_trace(path: str | Path) -> Trace:
    """Read a trace written by :func:`save_trace`.

    Raises:
        ValueError: The file is not a complete trace of this version. The message names the file and
            the location in it.
        OSError: The file cannot be read.
    """
    data = Path(path).read_bytes()
    trace = parse(data, path, _TraceFile, TRACE_SCHEMA, VERSION, "--offload-trace-path").trace
    _refuse(path, _trace_problems(trace), f"a whole {TRACE_SCHEMA}")
    return trace


def load_plan(path: str | Path) -> Plan:
    """Read a plan written by :func:`save_plan`, and prove it safe with ``check_plan``.

    Raises:
        ValueError: The file is not a complete plan of this version, or the plan is unsafe. The
            message names the file, and the location in it or the broken rule.
        OSError: The file cannot be read.
    """
    data = Path(path).read_bytes()
    plan = parse(data, path, _PlanFile, PLAN_SCHEMA, VERSION, "'slipstream plan --output'").plan
    _refuse(path, _plan_problems(plan), f"a whole {PLAN_SCHEMA}")
    try:
        check_plan(plan)
    except PlanError as error:
        raise ValueError(f"{path}: {error}") from error
    return plan


@cache
def _adapter(kind: type) -> TypeAdapter[Any]:
    # Building an adapter takes tens of milliseconds, so do not do it at import.
    return TypeAdapter(kind)


def parse(data: bytes, name: str | Path, kind: type, schema: str, version: int, writer: str) -> Any:
    """Parse the content of a file and check its types.

    Args:
        data: UTF-8 JSON.
        name: Name of the file, for errors.
        kind: Dataclass of the file's fields, including ``schema`` and ``version``.
        schema: Schema that the file must name.
        version: Version that the file must have.
        writer: The option that writes such files, for errors.

    Raises:
        ValueError: The content does not match the schema or the version. The message names the
            file, the location in it and the remedy.
    """
    cure = f"give a file that {writer} wrote"
    try:
        header = _adapter(_Header).validate_json(data, strict=True, extra="ignore")
    except ValidationError as error:
        raise ValueError(f"{name} is not a whole {schema}: {describe(error)}; {cure}") from error
    if header.schema != schema:
        raise ValueError(f"{name} holds a {header.schema!r}, not a {schema}; {cure}")
    if header.version != version:
        raise ValueError(
            f"{name} has version {header.version} of {schema}, this Slipstream reads version "
            f"{version}; write it again with this Slipstream, or read it with the one that wrote it"
        )
    try:
        return _adapter(kind).validate_json(data, strict=True, extra="forbid")
    except ValidationError as error:
        raise ValueError(f"{name} is not a whole {schema}: {describe(error)}; {cure}") from error


def describe(error: ValidationError) -> str:
    """Return the first error in the content of a file, with its location."""
    first, *others = error.errors(include_url=False, include_context=False)
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    text = first["msg"][:1].lower() + first["msg"][1:]
    if first["type"] == "unexpected_keyword_argument":
        text = "unknown field"
    if place:
        text = f"{place.lstrip('.')}: {text}"
    return f"{text} (and {len(others)} more)" if others else text


# Checks beyond the types.


def _refuse(path: str | Path, problems: Iterator[str], wanted: str) -> None:
    for problem in problems:
        raise ValueError(f"{path} is not {wanted}: {problem}")


def _plan_problems(plan: Plan) -> Iterator[str]:
    """Yield violations of what ``check_plan`` needs in order to check and render a plan."""
    yield from _trace_problems(plan.trace)
    num_steps = len(plan.trace.steps)
    for place, storage in enumerate(plan.storages):
        for name in ("d2h_step", "free_step", "h2d_step", "use_step"):
            step = getattr(storage, name)
            if not 0 <= step < num_steps:
                yield f"plan.storages[{place}].{name} is {step}, the trace has {num_steps} steps"


def _trace_problems(trace: Trace) -> Iterator[str]:
    yield from _step_problems(trace)
    yield from _storage_problems(trace)
    if trace.seq_length < 0:
        yield f"seq_length is {trace.seq_length}"
    num_steps = len(trace.steps)
    for name in ("memory", "step_ms"):
        if len(getattr(trace, name)) not in (0, num_steps):
            yield f"{name} has {len(getattr(trace, name))} entries for {num_steps} steps"
    for place, ms in enumerate(trace.step_ms):
        if not 0 <= ms < math.inf:
            yield f"step_ms[{place}] is {ms}; durations are finite and 0 or more"
    for name, gb_per_s in trace.bandwidth._asdict().items() if trace.bandwidth else ():
        if not 0 < gb_per_s < math.inf:  # JSON has no infinity.
            yield f"bandwidth.{name} is {gb_per_s}, not above 0 and finite"


_ORDER = (
    StepKind.FORWARD_START,
    StepKind.FORWARD_COMMIT,
    StepKind.BACKWARD_USE,
    StepKind.BACKWARD_END,
)


def _step_problems(trace: Trace) -> Iterator[str]:
    """Yield violations of: each group exists once, and its marks are in order."""
    if len(trace.group_by_key) != len(trace.groups):
        keys = [group.key for group in trace.groups]
        yield f"two groups have the key {next(key for key in keys if keys.count(key) > 1)}"
    for place, step in enumerate(trace.steps):
        group = trace.group_by_key.get(step.key)
        if trace.step_index[step.kind, step.key] != place:
            yield f"steps[{place}], {step}: the same mark comes twice"
        elif step.is_of_group is (step.kind not in _ORDER):
            yield f"steps[{place}], {step}: a mark of this kind cannot have the key {step.key!r}"
        elif group is None and step.is_of_group:
            yield f"steps[{place}], {step}: there is no group {step.key}"
        elif group is not None and group.name != step.name:
            yield f"steps[{place}], {step}: group {step.key} has the name {group.name!r}"
    for group in trace.groups:
        places = [trace.step_index.get((kind, group.key)) for kind in _ORDER]
        if places[1] is None:
            commit = Step(StepKind.FORWARD_COMMIT, group.key, group.name)
            yield f"group {group.key} has no mark {commit}"
        found = [place for place in places if place is not None]
        if found != sorted(found):
            yield f"the marks of group {group.key} are not in order: steps {found}"


def _storage_problems(trace: Trace) -> Iterator[str]:
    """Yield violations of: groups and storages refer to each other."""
    num_storages = len(trace.storages)
    for group in trace.groups:
        if len(set(group.storages)) != len(group.storages):
            yield f"group {group.key} names a storage twice"
        for index in group.storages:
            if not 0 <= index < num_storages:
                yield f"group {group.key} names storage {index} of {num_storages}"
            elif group.key not in trace.storages[index].holders:
                yield f"group {group.key} names storage {index}, which is not held by it"
    for index, storage in enumerate(trace.storages):
        if storage.nbytes < 0:
            yield f"storages[{index}].nbytes is {storage.nbytes}"
        if not storage.holders:
            yield f"storages[{index}] has no holder"
        for key in storage.holders:
            holder = trace.group_by_key.get(key)
            if holder is None:
                yield f"storages[{index}] is held by group {key}, which does not exist"
            elif index not in holder.storages:
                yield f"storages[{index}] is held by group {key}, which does not name it"
