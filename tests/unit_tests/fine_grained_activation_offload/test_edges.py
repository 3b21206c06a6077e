# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Every ordering in the edge table is made where the table says, and each one is needed."""

from __future__ import annotations

import ast
import contextlib
import functools
import re
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hand_driven import LAZY_NATIVE, HandDriven
from race_scenarios import without_edge
from toy_model import SCHEDULES, all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import LazyCpuBackend
from megatron.slipstream.plan import edges
from megatron.slipstream.plan.edges import EDGES, Edge, OtherWait

ROOMS = Path(edges.__file__).parents[1]
ROOM = ROOMS / "fine_grained_activation_offload"


def _schedule_scenario(name: str) -> Callable[[str], bool]:
    def scenario(backend: str) -> bool:
        chunks = make_chunks(2)
        expected = run_schedule(chunks, SCHEDULES[name], None)
        manager = make_manager(backend)
        results = [run_schedule(chunks, SCHEDULES[name], manager) for _ in range(3)]
        return all(all_equal(expected, result) for result in results)

    return scenario


def _buffer_is_reused_before_its_copy_in_has_run(backend: str) -> bool:
    hand = HandDriven(backend)
    first, second = torch.full((4096,), 1.0), torch.full((4096,), 2.0)
    group_a, group_b = hand.group(), hand.group()
    saved_a = hand.save(group_a, first.clone())
    hand.send(group_a)
    # The copy in is started and the buffer in use again before anybody waits for the copy.
    hand.copy_in(group_a)
    saved_b = hand.save(group_b, second.clone())
    hand.send(group_b)
    assert hand.store.host_pool.num_slabs == 1
    return torch.equal(hand.unpack(saved_a), first) and torch.equal(hand.unpack(saved_b), second)


def _returned_memory_that_was_never_read(backend: str) -> bool:
    hand = HandDriven(backend)
    group = hand.group()
    saved = hand.save(group, torch.ones(4096))
    hand.send(group)
    hand.copy_in(group)
    unraisable: list[object] = []
    before, sys.unraisablehook = sys.unraisablehook, unraisable.append
    del saved
    sys.unraisablehook = before
    return not unraisable


def _closed_with_copies_under_way(backend: str) -> bool:
    hand = HandDriven(backend)
    group = hand.group()
    _saved = hand.save(group, torch.ones(4096))
    hand.copy_out(group)
    hand.store.close()
    return True


def _returned_memory_read_on_another_stream(backend: str) -> bool:
    """Whether the allocator is told; the adversary's compute is never late itself."""
    hand = HandDriven(backend)
    group = hand.group()
    saved = hand.save(group, torch.ones(4096))
    hand.send(group)
    hand.copy_in(group)
    other, held = hand.backend.new_stream(), []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hand.backend, "hold", lambda tensor, stream: held.append((tensor, stream)))
        on_its_own = hand.unpack(saved)
        patch.setattr(hand.backend, "current_stream", lambda: other)
        returned = hand.unpack(saved)
    assert on_its_own.data_ptr() == returned.data_ptr()
    return [(tensor.data_ptr(), stream) for tensor, stream in held] == [
        (returned.data_ptr(), other)
    ]


def _read_in_the_graph_after_the_one_that_copies_back(backend: str) -> bool:
    hand = HandDriven(backend)
    group = hand.group()
    streams = hand.store.copy_streams
    streams.begin_graph()
    saved = hand.save(group, torch.ones(4096))
    hand.send(group)
    streams.end_graph()
    streams.begin_graph()
    hand.copy_in(group)
    streams.end_graph()
    streams.begin_graph()
    right = torch.equal(hand.unpack(saved), torch.ones(4096))
    streams.end_graph()
    return right


SCENARIOS: dict[Edge, Callable[[str], bool]] = {
    Edge.E1: _schedule_scenario("one micro-batch"),
    Edge.E2: _buffer_is_reused_before_its_copy_in_has_run,
    Edge.E3: _schedule_scenario("accumulation"),
    Edge.E4: _schedule_scenario("1F1B first of two"),
    Edge.E5: _schedule_scenario("interleaved first of two"),
    Edge.E6: _returned_memory_that_was_never_read,
    Edge.E7: _closed_with_copies_under_way,
    Edge.E8: _returned_memory_read_on_another_stream,
    Edge.E9: _read_in_the_graph_after_the_one_that_copies_back,
}
"""Of E1 to E9; those of E10 to E12 are in ``graphs/test_tail.py``."""


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
@pytest.mark.parametrize("edge", SCENARIOS, ids=lambda edge: edge.name)
def test_scenario_is_right_with_every_edge(edge: Edge, backend: str) -> None:
    assert SCENARIOS[edge](backend)


def _is_right(scenario: Callable[[str], bool], backend: str) -> bool:
    """False for wrong numbers and for the backend's own complaint."""
    try:
        return scenario(backend)
    except RuntimeError as error:
        if "memory" not in str(error):
            raise
        return False


@pytest.mark.parametrize("backend", ["cpu-lazy", LAZY_NATIVE])
@pytest.mark.parametrize("edge", SCENARIOS, ids=lambda edge: edge.name)
def test_scenario_is_wrong_without_its_edge(edge: Edge, backend: str) -> None:
    with without_edge(edge):
        right = _is_right(SCENARIOS[edge], backend)
    assert not right, f"nothing noticed that {edge.name} is gone: {edge.value.without}"


IDS = {*Edge.__members__, *OtherWait.__members__}
WAITS = {
    *("wait", "_wait", "wait_event", "wait_stream", "wait_on_host", "_wait_on_host"),
    *("synchronize", "record_stream", "hold", "_hold_for"),
}
"""Names of functions that make a stream, the host or the allocator wait."""
IN_CPP = (
    r"(?:->|\.)wait\w*\(|attr\(\"wait|\bcu\w*(?:Wait|Synchronize)|record_?[sS]tream|synchronize"
)


def waits_in_python(path: Path) -> Iterator[tuple[str, str]]:
    """Each wait that a file issues: its place, and its source."""
    lines = path.read_text().splitlines()

    def found(node: ast.AST) -> Iterator[tuple[str, str]]:
        if isinstance(node, ast.FunctionDef) and _forwards(node, path):
            return
        if isinstance(node, ast.Call):
            called = node.func
            name = called.attr if isinstance(called, ast.Attribute) else getattr(called, "id", "")
            if name in WAITS and (name != "hold" or "backend" in ast.unparse(called)):
                text = "\n".join(lines[node.lineno - 1 : node.end_lineno])
                yield f"{path.name}:{node.lineno}", text
        for child in ast.iter_child_nodes(node):
            yield from found(child)

    return found(ast.parse(path.read_text()))


def _forwards(function: ast.FunctionDef, path: Path) -> bool:
    """Whether the function is a wait itself or is given the edge, so that its callers count."""
    if function.name == "wait":  # outside of backends, a method that knows its edge
        return path.name.endswith("backend.py") and path.parent == ROOM
    return function.name in WAITS or any(given.arg == "edge" for given in function.args.args)


def waits_in_cpp(path: Path) -> Iterator[tuple[str, str]]:
    """The same in C++, where only ``driver.h`` calls the driver or the backend."""
    if path.name == "driver.h":
        return
    for number, line in enumerate(path.read_text().splitlines(), start=1):
        is_forwarded = re.search(r"wait\((?:Edge )?edge, ", line)
        if not is_forwarded and re.search(IN_CPP, line):
            yield f"{path.name}:{number}", line


@functools.cache
def all_waits() -> list[tuple[str, str]]:
    python = [wait for path in ROOMS.rglob("*.py") for wait in waits_in_python(path)]
    sources = [*ROOMS.rglob("*.h"), *ROOMS.rglob("*.cpp")]
    cpp = [wait for path in sources for wait in waits_in_cpp(path)]
    assert python
    assert cpp
    return python + cpp


def test_each_wait_of_the_package_is_a_row_of_the_table() -> None:
    unknown = [
        (place, text)
        for place, text in all_waits()
        if not (ids := set(re.findall(r"\b[EH]\d+\b", text))) or not ids <= IDS
    ]
    assert unknown == []


def test_each_row_of_the_table_is_a_wait_of_the_package() -> None:
    ids = {name for _, text in all_waits() for name in re.findall(r"\b[EH]\d+\b", text)}
    assert ids == IDS


def test_rules_are_named_like_their_edges() -> None:
    assert [rule.id for rule in EDGES] == [edge.name for edge in Edge if edge.rule]


def test_cpp_has_the_edges_of_plans_and_issues_each() -> None:
    source = (ROOM / "native" / "driver.h").read_text()
    (members,) = re.findall(r"enum class Edge \{ NONE, (.*) \};", source)
    issued = {
        name
        for path in (ROOM / "native").glob("*.h")
        for _, line in waits_in_cpp(path)
        for name in re.findall(r"Edge::(E\d)", line)
    }
    assert members.split(", ") == [rule.id for rule in EDGES] == sorted(issued)


def test_a_copy_out_waits_for_every_copy_of_the_bytes_it_writes() -> None:
    """A buffer may lie where several lay, each of which a copy in has yet to read (E2)."""
    hand = HandDriven()
    halves = [torch.full((4096,), value) for value in (1.0, 2.0)]
    groups = [hand.group() for _ in halves]
    saved = [hand.save(group, half.clone()) for group, half in zip(groups, halves, strict=True)]
    for group in groups:
        hand.send(group)
    address = saved[0].storage.allocation.buffer.address
    for group in groups:
        hand.store.copy_in(group.storages())
    long, longer_group = torch.full((8192,), 3.0), hand.group()
    saved_long = hand.save(longer_group, long.clone())
    hand.send(longer_group)
    assert saved_long.storage.allocation.buffer.address == address, "it lies where both lay"
    for item, expected in zip([*saved, saved_long], [*halves, long], strict=True):
        assert torch.equal(hand.store.read(item), expected)


# Several compute streams. On this backend all computation is on one, so the waits are looked at.

KINDS = pytest.mark.parametrize("kind", ["cpu-lazy", LAZY_NATIVE])


class TwoStreams(HandDriven):
    """Notes who waits for whom, and which memory the allocator is told of."""

    def __init__(self, kind: str) -> None:
        super().__init__(kind)
        self.first, self.second = self.backend.current_stream(), self.backend.new_stream()
        self._current = self.first
        self.waits: list[tuple[Any, Any]] = []
        """The stream that waits, and the one for which it does."""
        self.held: list[tuple[int, Any]] = []
        wait = self.backend.wait

        def noted(stream: Any, event: Any) -> None:
            self.waits.append((stream, event.stream))
            wait(stream, event)

        self.backend.wait = noted  # type: ignore[method-assign]
        self.backend.current_stream = lambda: self._current  # type: ignore[method-assign]
        self.backend.hold = lambda tensor, stream: self.held.append(  # type: ignore[method-assign]
            (tensor.data_ptr(), stream)
        )

    @contextlib.contextmanager
    def on_second(self) -> Iterator[None]:
        """Context in which the second stream is the current one."""
        self._current = self.second
        yield
        self._current = self.first

    @property
    def d2h(self) -> Any:
        """The stream of copies out."""
        return self.store.copy_streams.d2h


@KINDS
def test_a_copy_out_follows_all_streams_that_saved(kind: str) -> None:
    hand = TwoStreams(kind)
    group, tensor = hand.group(), torch.ones(4096)
    with hand.on_second():
        _saved = hand.save(group, tensor)
    hand.copy_out(group)
    assert set(hand.waits) == {(hand.d2h, hand.first), (hand.d2h, hand.second)}


@KINDS
@pytest.mark.parametrize("is_second_first", [True, False])
def test_all_streams_that_saved_wait_before_the_memory_is_released(
    kind: str, is_second_first: bool
) -> None:
    hand = TwoStreams(kind)
    group, tensor = hand.group(), torch.ones(4096)
    saved = [] if is_second_first else [hand.save(group, tensor)]
    with hand.on_second():
        saved.append(hand.save(group, tensor))
    hand.copy_out(group)
    hand.waits.clear()
    hand.store.release(group)
    assert sorted(hand.waits, key=str) == sorted(
        [(hand.first, hand.d2h), (hand.second, hand.d2h)], key=str
    )


@KINDS
@pytest.mark.parametrize("is_on_second", [False, True])
def test_a_copy_in_on_another_stream_follows_the_copy_out(kind: str, is_on_second: bool) -> None:
    """[Note: A copy in follows its own copy out]: the second stream waits by E3 as well."""
    hand = TwoStreams(kind)
    group = hand.group()
    _saved = hand.save(group, torch.ones(4096))
    hand.send(group)
    hand.waits.clear()
    with hand.on_second() if is_on_second else contextlib.nullcontext():
        hand.copy_in(group)
    assert ((hand.second, hand.d2h) in hand.waits) is is_on_second
    assert (hand.first, hand.d2h) not in hand.waits, "it has waited before the release"
    hand.store.copy_streams.finish()  # The second stream computes nothing that could wait.


@KINDS
def test_streams_wait_for_the_copy_out_of_what_is_dropped(kind: str) -> None:
    """Its memory is free at once, and d2h still reads it."""
    hand = TwoStreams(kind)
    group = hand.group()
    with hand.on_second():
        saved = hand.save(group, torch.ones(4096))
    hand.copy_out(group)
    hand.waits.clear()
    del saved
    assert set(hand.waits) == {(hand.first, hand.d2h), (hand.second, hand.d2h)}


@KINDS
@pytest.mark.parametrize("crosses_streams", [True, False])
def test_the_allocator_is_told_of_copies_out_of_memory_of_other_streams(
    kind: str, crosses_streams: bool
) -> None:
    """[Note: Layers that run in nodes]."""
    hand = TwoStreams(kind)
    hand.store.crosses_streams = crosses_streams
    group, tensor = hand.group(), torch.ones(4096)
    _saved = hand.save(group, tensor)
    hand.copy_out(group)
    assert hand.held == ([(tensor.data_ptr(), hand.d2h)] if crosses_streams else [])


def test_memory_read_while_it_leaves_is_given_to_no_stream_before_its_copy_has_ended(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Backward, on another stream, frees it when it likes, for the stream that allocated it."""
    hand = HandDriven()
    group = hand.group()
    saved = hand.save(group, torch.ones(4096))
    hand.copy_out(group)
    allocated_on = hand.backend.current_stream()
    other = hand.backend.new_stream()
    waiting = []
    with monkeypatch.context() as patch:
        patch.setattr(hand.backend, "current_stream", lambda: other)
        patch.setattr(hand.backend, "wait", lambda stream, event: waiting.append(stream))
        hand.store.read(saved)
    assert waiting == [other, allocated_on]


def test_streams_belong_to_the_device_that_is_current_at_the_first_copy(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """An engine is installed before a rank has chosen its GPU; its streams must not be made yet."""
    made: list[object] = []
    new_stream = LazyCpuBackend.new_stream

    def making(backend: LazyCpuBackend) -> object:
        made.append(None)
        return new_stream(backend)

    monkeypatch.setattr(LazyCpuBackend, "new_stream", making)
    hand = HandDriven()
    assert made == []
    group = hand.group()
    _saved = hand.save(group, torch.ones(64))
    hand.copy_out(group)
    assert len(made) == 1
    assert hand.store.copy_streams.d2h is hand.store.copy_streams.d2h


def test_a_graph_waits_for_nothing_that_another_engine_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Graphs of several engines may have host memory in common, and with it signals of its use."""
    one, other = HandDriven(), HandDriven()
    signals = []
    for hand in (one, other):
        streams = hand.store.copy_streams
        streams.begin_graph()
        signals.append(streams._signal(streams.d2h, "d2h"))
        streams.end_graph()
    assert signals[0].graph != signals[1].graph
    waited: list[object] = []
    monkeypatch.setattr(other.backend, "wait", lambda _, event: waited.append(event))
    streams = other.store.copy_streams
    streams.begin_graph()
    mine = streams._signal(streams.d2h, "d2h")
    for signal in (*signals, mine):
        streams._wait(Edge.E2, streams.h2d, "h2d", signal)
    assert waited == [mine.event]
    streams.end_graph()
