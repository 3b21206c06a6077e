# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Files are read back as written; any other content is refused with one error."""

from __future__ import annotations

import dataclasses
import json
import os
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings, strategies as st
from make_trace import Model, interleaved, one_f_one_b, one_pass, trace_of

from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.build import build_plan
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.files import load_plan, load_trace, save_plan, save_trace
from megatron.slipstream.plan.settings import WHOLE
from megatron.slipstream.plan.trace import Bandwidth, MemoryReading, Trace

LABELS = ("a", "b", "c", "d")
MODEL = Model(num_layers=3, modules=("core_attn", "attn_proj"), saves={1: ["a"], 2: ["a", "b"]})


@st.composite
def traces(draw: st.DrawFn) -> Trace:
    """Traces of all sorts of models and schedules, with measurements or without."""
    num_layers = draw(st.integers(1, 3))
    groups = st.sampled_from(range(num_layers * 2))
    model = Model(
        num_layers,
        modules=("core_attn", "größe, \"'\n"),
        encloses=draw(st.booleans()),
        saves=draw(st.dictionaries(groups, st.lists(st.sampled_from(LABELS), unique=True))),
        nbytes=draw(st.dictionaries(st.sampled_from(LABELS), st.integers(0, 1 << 40))),
        one_for_all_passes=draw(st.frozensets(st.sampled_from(LABELS))),
        held_outside=draw(st.frozensets(st.sampled_from(LABELS))),
        without_use=draw(st.frozensets(groups, max_size=1)),
    )
    schedules = [one_f_one_b(2, 0, 3), one_f_one_b(1, 0, 1), interleaved(2, 1, 2, 2)]
    trace = trace_of(draw(st.sampled_from(schedules)), model, draw(st.integers(0, 7)))
    num_steps = len(trace.steps)
    if draw(st.booleans()):
        ms = draw(st.lists(st.floats(0, 1e9), min_size=num_steps, max_size=num_steps))
        rates = st.floats(1e-9, 1e9)
        bandwidth = Bandwidth(*(draw(rates) for _ in range(4)))
        trace = dataclasses.replace(trace, step_ms=tuple(ms), bandwidth=bandwidth)
    if draw(st.booleans()):
        reading = st.builds(MemoryReading, *[st.integers(0, 1 << 50)] * 3)
        memory = draw(st.lists(reading, min_size=num_steps, max_size=num_steps))
        trace = dataclasses.replace(trace, memory=tuple(memory))
    parts = st.frozensets(st.sampled_from(("mlp", "layernorm", "core_attn")))
    assignment = draw(st.lists(parts | st.just(WHOLE), max_size=num_layers))
    return dataclasses.replace(trace, assignment=tuple(assignment))


any_case = settings(
    max_examples=60,
    deadline=None,
    suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large],
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("files")


@any_case
@given(trace=traces())
def test_a_trace_is_read_back_as_it_was(folder: Path, trace: Trace) -> None:
    save_trace(trace, folder / "trace.json")
    again = load_trace(folder / "trace.json")
    assert again == trace
    assert [str(step) for step in again.steps] == [str(step) for step in trace.steps]


@any_case
@given(trace=traces(), fraction=st.floats(0, 1), limit=st.sampled_from([None, 100_000]))
def test_a_plan_is_read_back_as_it_was(
    folder: Path, trace: Trace, fraction: float, limit: int | None
) -> None:
    options = PolicyOptions(fraction, release_lag=2, host_memory_limit_bytes=limit)
    plan = build_plan(trace, options)
    save_plan(plan, folder / "plan.json")
    again = load_plan(folder / "plan.json")
    assert again == plan
    assert again.actions == plan.actions


def the_plan() -> Plan:
    trace = trace_of(one_f_one_b(2, 0, 3), MODEL)
    num_steps = len(trace.steps)
    return build_plan(
        dataclasses.replace(
            trace,
            step_ms=(1.0,) * num_steps,
            memory=(MemoryReading(1, 2, 0),) * num_steps,
            bandwidth=Bandwidth(50.0, 50.0, 40.0, 40.0),
        ),
        PolicyOptions(),
    )


def refused(load: Callable[[Path], object], path: Path) -> str:
    with pytest.raises(ValueError) as caught:
        load(path)
    assert type(caught.value) is ValueError
    message = str(caught.value)
    assert message.startswith(str(path))
    return message


# --- files not written by Slipstream --------------------------------------------------------------


@pytest.mark.parametrize(
    "content, match",
    [
        (b"", "invalid JSON: EOF"),
        (b"\x93NUMPY\x01\x00", "invalid JSON"),
        (b"\xff\xfe{\x00}\x00", "invalid JSON"),
        (b"[]", "should be an object"),
        (b"3", "should be an object"),
        (b"null", "should be an object"),
        (b"{}", "schema: field required"),
        (b'{"ranks": []}', "schema: field required"),
        (b'{"schema": "slipstream-trace"}', "version: field required"),
        (b'{"schema": "other", "version": 1}', "holds a 'other', not a slipstream-trace"),
        (b'{"schema": "slipstream-plan", "version": 1}', "holds a 'slipstream-plan'"),
        (b'{"schema": "slipstream-trace", "version": 2}', "has version 2 .* reads version 1"),
        (b'{"schema": "slipstream-trace", "version": "1"}', "version: input should be a valid int"),
        (b'{"schema": "slipstream-trace", "version": 1}', "trace: field required"),
    ],
)
def test_a_foreign_file_is_named(tmp_path: Path, content: bytes, match: str) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(content)
    message = refused(load_trace, path)
    assert re.search(match, message), message
    assert "\n" not in message


def test_a_truncated_file_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_trace(one_pass(Model()), path)
    whole = path.read_bytes().rstrip()
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        assert "invalid JSON" in refused(load_trace, path)


def test_a_missing_file_is_an_error_of_the_system(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        load_trace(tmp_path / "none.json")


# --- inconsistent content -------------------------------------------------------------------------


def change(data: dict[str, Any], place: str, value: object) -> None:
    """Set ``data`` at a dotted path; a value of ``...`` deletes the entry."""
    *parents, last = (int(part) if part.isdigit() else part for part in place.split("."))
    at: Any = data
    for part in parents:
        at = at[part]
    if value is ...:
        del at[last]
    else:
        at[last] = value


@pytest.mark.parametrize(
    "place, value, match",
    [
        (
            "steps.0.0",
            "XX",
            "trace.steps[0][0]: input should be 'FS', 'FC', 'BU', 'BE', 'OS', 'OE', 'BS', 'OB' or "
            "'OD'",
        ),
        ("steps.0.1.0", "0", "trace.steps[0][1][0]: input should be a valid integer"),
        ("steps.0.1", [0], "trace.steps[0][1][1]: field required"),
        ("steps", ..., "trace.steps: field required"),
        ("steps", None, "trace.steps: input should be a valid"),
        ("stepms", [], "trace.stepms: unknown field"),
        ("groups.0.colour", "red", "trace.groups[0].colour: unknown field"),
        ("storages.0.nbytes", 1.5, "trace.storages[0].nbytes: input should be a valid integer"),
        ("storages.0.nbytes", True, "trace.storages[0].nbytes: input should be a valid integer"),
        ("storages.0.nbytes", -1, "storages[0].nbytes is -1"),
        ("storages.0.held_outside", 1, "input should be a valid boolean"),
        ("storages.0.holders", [], "group 0.0 names storage 0, which is not held by it"),
        ("storages.0.holders.0", [9, 9], "group 0.0 names storage 0, which is not held by it"),
        ("groups.0.storages", [99], "group 0.0 names storage 99 of"),
        ("groups.0.storages", [-1], "group 0.0 names storage -1 of"),
        ("groups.0.storages", [0, 0], "group 0.0 names a storage twice"),
        ("groups.0.storages", [], "storages[0] is held by group 0.0, which does not name it"),
        ("groups.0.name", "moe_act", "group 0.0 has the name 'moe_act'"),
        ("groups.0.key", [0, 1], "two groups have the key 0.1"),
        ("groups.0.key", [7, 7], "there is no group 0.0"),
        ("steps.0.1", [7, 7], "steps[0], 7.7.core_attn:FS: there is no group 7.7"),
        ("steps.0.0", "FC", "steps[0], 0.0.core_attn:FC: the same mark comes twice"),
        ("steps.0.0", "OS", "steps[0], 0.0.core_attn:OS: a mark of this kind cannot have the key"),
        ("steps.0.1", [0, -1], "steps[0], 0.core_attn:FS: a mark of this kind cannot have the key"),
        ("steps.1.0", "BU", "steps[1], 0.0.core_attn:BU: the same mark comes twice"),
        ("step_ms", [1.0], "step_ms has 1 entries"),
        ("step_ms.0", -1.0, "step_ms[0] is -1.0; durations are finite and 0 or more"),
        ("step_ms.0", float("nan"), "step_ms[0] is nan; durations are finite and 0 or more"),
        ("step_ms.0", float("inf"), "step_ms[0] is inf; durations are finite and 0 or more"),
        ("memory", [], None),
        ("memory.0", ..., "memory has"),
        ("bandwidth.0", 0.0, "bandwidth.d2h_gb_per_s is 0.0, not above 0"),
        ("bandwidth", [1.0, 1.0], "trace.bandwidth[2]: field required"),
        ("bandwidth", None, None),
        ("seq_length", -1, "seq_length is -1"),
    ],
)
def test_a_trace_that_contradicts_itself_is_refused(
    tmp_path: Path, place: str, value: object, match: str | None
) -> None:
    path = tmp_path / "trace.json"
    save_trace(the_plan().trace, path)
    data = json.loads(path.read_bytes())
    change(data["trace"], place, value)
    path.write_text(json.dumps(data))
    if match is None:
        load_trace(path)
    else:
        assert match in refused(load_trace, path)


def test_a_group_without_a_commit_is_refused(tmp_path: Path) -> None:
    trace = one_pass(Model())
    broken = dataclasses.replace(trace, steps=(trace.steps[0], *trace.steps[2:]))
    with pytest.raises(ValueError, match=r"group 0\.0 has no mark 0\.0\.core_attn:FC"):
        save_trace(broken, tmp_path / "trace.json")


def test_marks_out_of_order_are_refused(tmp_path: Path) -> None:
    trace = one_pass(Model())
    broken = dataclasses.replace(trace, steps=trace.steps[::-1])
    with pytest.raises(ValueError, match=r"marks of group 0\.0 are not in order"):
        save_trace(broken, tmp_path / "trace.json")


@pytest.mark.parametrize(
    "place, value, match",
    [
        ("groups.0.free_step", 10**6, "plan refused at 0.0.core_attn:FREE: step 1000000 is none"),
        ("groups.0.h2d_step", 1, "plan refused at 0.0.core_attn:H2D"),
        ("groups.0.kept_storages", {"9": "why"}, "storage 9 stays, but the group has"),
        ("groups.0.kept_storages", {"x": "why"}, "should be a valid integer"),
        ("groups.0.moved_nbytes", 1, "stated are 1 bytes"),
        ("groups.1", ..., "the plan has no such group"),
        ("groups.0.key", [9, 9], "the trace has no such group"),
        ("storages.0.index", 99, "there is no storage 99"),
        ("storages.0.nbytes", 5, "stated is StoragePlan"),
        ("storages.0.free_step", 10**6, "plan.storages[0].free_step is 1000000, the trace has"),
        ("storages.0.free_step", -1, "plan.storages[0].free_step is -1, the trace has"),
        ("storages.0", ..., "stated is None"),
        ("options.release_lag", "1", "plan.options.release_lag: input should be a valid integer"),
        ("options.host_memory_limit_bytes", 1, "1 are allowed"),
        ("options.warp", 9, "plan.options.warp: unknown field"),
        ("trace.groups.0.storages", [99], "group 0.0 names storage 99 of"),
    ],
)
def test_a_plan_that_is_not_safe_is_refused(
    tmp_path: Path, place: str, value: object, match: str
) -> None:
    path = tmp_path / "plan.json"
    save_plan(the_plan(), path)
    data = json.loads(path.read_bytes())
    change(data["plan"], place, value)
    path.write_text(json.dumps(data))
    assert match in refused(load_plan, path)


def plan_or_error(path: Path) -> Plan | ValueError:
    try:
        return load_plan(path)
    except ValueError as error:
        return error


@any_case
@given(data=st.data())
def test_no_single_changed_value_gets_further_than_an_error(
    folder: Path, data: st.DataObject
) -> None:
    # A trace that is read can be planned, and a plan was proved; any other exception is a bug.
    path = folder / "changed.json"
    save_plan(the_plan(), path)
    content = json.loads(path.read_bytes())
    at: Any = content["plan"]
    while True:
        keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if not isinstance(at[key], dict | list) or not at[key]:
            break
        at = at[key]
    at[key] = data.draw(
        st.one_of(st.integers(-2, 100), st.none(), st.text(max_size=3), st.just([]), st.booleans())
    )
    path.write_text(json.dumps(content))
    plan = plan_or_error(path)
    if isinstance(plan, Plan):
        build_plan(plan.trace, PolicyOptions())
    else:
        assert str(plan).startswith(str(path))


# --- writing --------------------------------------------------------------------------------------


def test_what_would_not_be_read_is_not_written(tmp_path: Path) -> None:
    path = tmp_path / "trace.json"
    save_trace(the_plan().trace, path)
    before = path.read_bytes()
    infinite = dataclasses.replace(
        the_plan().trace, bandwidth=Bandwidth(float("inf"), 1.0, 1.0, 1.0)
    )
    with pytest.raises(ValueError, match=r"d2h_gb_per_s is inf, not above 0 and finite"):
        save_trace(infinite, path)
    assert path.read_bytes() == before


def test_folders_are_made(tmp_path: Path) -> None:
    path = tmp_path / "new" / "folder" / "trace.json"
    save_trace(one_pass(Model()), path)
    assert os.listdir(path.parent) == ["trace.json"]
