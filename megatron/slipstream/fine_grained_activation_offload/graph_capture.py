# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Groups inside CUDA graphs that are captured layer by layer.

A captured layer runs no Python when it is replayed, so copies are captured too. A graph must join
its copies before it ends (edge E9), and the next graph begins after that. To overlap copies with a
whole layer, each graph begins with its neighbour's copies: the next captured graph offloads the
tensors that a layer saved, and the backward graph captured before a layer's own reloads the tensors
that the layer's backward needs. An event recorded before the end of a graph lets work outside the
graphs continue while the last copies run.

Graphs move the same groups as the plan of the iterations before the capture.

Host memory addresses are baked into graphs, so their host memory comes from a separate pool that
serves nothing else while the graphs exist.

[Note: Sets of graphs]
Graphs are captured in replay order, so a graph may reuse host memory that an earlier one has read
back. If a model chunk has several sets of graphs, which micro-batches use in turn, that order holds
only within a set, so each set has its own pool. Graphs for other context-parallel sizes in the same
set share the pool, since they are never in use at the same time.
"""

from __future__ import annotations

import contextlib
import logging
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.activation_store import (
    ActivationStore,
    CaptureContext,
)
from megatron.slipstream.fine_grained_activation_offload.chunk import ChunkOffloadHandler
from megatron.slipstream.fine_grained_activation_offload.counted_modules import (
    ReplayedGraph,
    Replays,
    sum_of,
)
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.host_pool import HostPool
from megatron.slipstream.fine_grained_activation_offload.report import ModuleCounters
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage, memory_of
from megatron.slipstream.fine_grained_activation_offload.verify import nothing_poisoned
from megatron.slipstream.plan.actions import GroupPlan, Plan, StoragePlan, peak_host_bytes
from megatron.slipstream.plan.host_layout import size_class_bytes
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.trace import KINDS_OF_BACKWARD, GroupKey

logger = logging.getLogger(__name__)

SLACK = 1 / 8
"""Extra host memory, as a fraction of the plan's, since the buffer layout differs."""


ONE_SIZE = 0
"""The context-parallel size in a :class:`GraphId` if it never changes."""


class GraphId(NamedTuple):
    """Identifies the forward and backward graph of a layer."""

    vp_stage: int
    layer_number: int
    number: int
    """Number of the set, or of the micro-batch if each one has its own graphs."""
    cp_size: int
    """Context-parallel size; :data:`ONE_SIZE` if it never changes."""


class GraphedLayer:
    """The forward and backward graphs of one layer and one micro-batch."""

    def __init__(self, before: Optional[GraphedLayer]) -> None:
        self.before = before
        """The layer whose backward runs next; None for the first layer of a model chunk."""
        self.groups: list[OffloadTensorGroup] = []
        self.counters: defaultdict[str, ModuleCounters] = defaultdict(ModuleCounters)
        """Counters of one replay, by module name."""
        self.static: frozenset[Optional[int]] = frozenset()
        """Addresses of torch's storage objects of its inputs, which the graph keeps alive."""


class _Leaving(NamedTuple):
    group: OffloadTensorGroup
    layer: GraphedLayer


class _Set(NamedTuple):
    vp_stage: int
    number: int


class _Decided(NamedTuple):
    """The plan of a traced group, with the properties that identify it during a capture."""

    key: GroupKey
    vp_stage: int
    micro_batch: int
    name: str
    layer: int
    plan: GroupPlan


class GraphCaptures:
    """The sets of graphs of one engine: at most one is in use.

    Handles group marks in place of the manager while a graph is captured.
    """

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self.min_numel = 1
        """Tensors of fewer elements stay on the device."""
        self.of_layers: dict[GraphId, ReplayedGraph] = {}
        """The graphs, with the counters of their replays."""
        self.moves_anything = False
        """Whether any graph has copies."""
        self._pools: dict[Optional[_Set], HostPool] = {}
        """The host memory of the graphs, by set."""
        self._set: Optional[_Set] = None
        """The set being captured; None if each micro-batch has its own graphs."""
        self._num_sets: Optional[Sequence[int]] = None
        """Number of sets of each model chunk."""
        self._numbered: Optional[tuple[int, int]] = None
        """Number and context-parallel size of the set being captured; None if each micro-batch has
        its own graphs."""
        self.is_open = False
        """Whether a set of graphs is being warmed up or captured."""
        self._plan: Optional[Plan] = None
        self._decisions: dict[tuple[int, int, str, int], list[GroupPlan]] = {}
        self._names: set[str] = set()
        """Modules whose groups ran during the warm-up of the graphs."""
        self._passes: dict[int, tuple[ChunkOffloadHandler, int, GraphedLayer]] = {}
        """By model chunk: the captured pass, its last layer's number, and that layer."""
        self._num_passes: Counter[int] = Counter()
        self._last_layers: dict[int, int] = {}
        """The number of the last captured layer of each model chunk."""
        self.layer: Optional[GraphedLayer] = None
        """The layer whose graph is being captured."""
        self._pending: list[_Leaving] = []
        """Captured groups to be offloaded by the next graph."""
        self._leaving: list[_Leaving] = []
        """Groups offloaded by the graph being captured."""
        self._during_capture = contextlib.ExitStack()
        """Restores what the capture of a graph changes."""

    @property
    def is_capturing(self) -> bool:
        """Whether marks currently belong to a graph being captured."""
        return self.layer is not None

    @property
    def pools(self) -> list[HostPool]:
        return list(self._pools.values())

    @property
    def host_bytes(self) -> int:
        return sum(pool.allocated_bytes for pool in self._pools.values())

    @property
    def modules(self) -> dict[str, ModuleCounters]:
        """The counters of one replay of each graph of the largest context-parallel size."""
        largest = max((graph.cp_size for graph in self.of_layers), default=ONE_SIZE)
        return sum_of(
            Replays(graph.modules, 1)
            for number, graph in self.of_layers.items()
            if number.cp_size == largest
        )

    def note_replay(self, graph: GraphId) -> None:
        if graph in self.of_layers:
            self.of_layers[graph].num_replays += 1

    def is_last(self, vp_stage: int, layer_number: int) -> bool:
        """Return whether this is the chunk's last captured layer; False if unknown."""
        return self._last_layers.get(vp_stage) == layer_number

    # A set of graphs.

    def open(self, plan: Optional[Plan], num_sets: Optional[Sequence[int]] = None) -> None:
        """Prepare to warm up and capture graphs that follow a plan; no-op if already open.

        ``num_sets`` has the number of sets of each model chunk; None if each micro-batch has its
        own graphs. See [Note: Sets of graphs].
        """
        if self.is_open:
            return
        self.is_open = True
        self._plan = plan
        self.of_layers, self.moves_anything, self._numbered = {}, False, None
        self._store.copy_streams.finish()  # edge E7
        while self._pools:  # Their graphs have been deleted.
            self._pools.popitem()[1].close()
        if self._store.host_pool.in_use_bytes == 0:
            # It mostly served groups that run in graphs from now on.
            self._store.close()
        self._names.clear()
        self._passes.clear()
        self._num_passes.clear()
        if num_sets is None and plan is not None and _takes_turns(plan):
            num_sets = (1,)  # Then megatron-core captures graphs for only one micro-batch.
        self._num_sets = num_sets
        self._set = None if num_sets is None else _Set(0, 0)
        self._decisions = {}
        for item in _decided(plan) if plan is not None else ():
            at = self._set_of(item.vp_stage, item.micro_batch)
            number = item.micro_batch if at is None else at.number
            key = (item.vp_stage, number, item.name, item.layer)
            self._decisions.setdefault(key, []).append(item.plan)
        if plan is None:
            logger.warning(
                "no iteration was planned before CUDA graphs are captured, so nothing inside them "
                "moves; set cuda_graph_warmup_steps to at least 1"
            )

    def begin_set(self, vp_stage: int, number: int, cp_size: int, pool: HostPool) -> None:
        """Begin the warm-up and capture of one set of graphs of a model chunk.

        ``pool`` is its host memory, from :func:`pool_for_graphs`.
        """
        self._set = _Set(vp_stage, number)
        self._pools[self._set] = pool
        self._numbered = (number, cp_size)
        self._passes.pop(vp_stage, None)

    def _set_of(self, vp_stage: int, micro_batch: int) -> Optional[_Set]:
        if self._num_sets is None:
            return None
        return _Set(vp_stage, micro_batch % self._num_sets[vp_stage])

    def note_warmup(self, name: str) -> None:
        self._names.add(name)

    def close(self) -> None:
        """Finish the capture of the set of graphs."""
        if not self.is_open:
            return
        self.is_open = False
        self._plan, self._decisions = None, {}
        self._last_layers = {stage: number for stage, (_, number, _) in self._passes.items()}
        self._passes.clear()
        self._pending.clear()
        modules = self.modules.values()
        total = sum(counters.d2h_bytes for counters in modules)
        kept = sum(counters.num_kept_for_host_memory for counters in modules)
        if total:
            logger.info(
                "CUDA graphs move %s in each replay of all of them (host memory: %s)%s",
                format_bytes(total),
                format_bytes(self.host_bytes),
                f"; {kept} groups stay: too little host memory" if kept else "",
            )

    def reserve(self) -> None:
        """Reserve host memory for the warmed-up layers: none can be pinned during a capture.

        Called after each layer's warm-up, which may have added modules.
        """
        if self._set not in self._pools:
            self._pools[self._set] = pool_for_graphs(self._store)
        hold(self._pools[self._set], self._needed_bytes())

    def _needed_bytes(self) -> int:
        if self._plan is None:
            return 0
        moved = _moved_bytes(self._plan, self._names)
        if self._set is None:
            storages = [item.storage for items in moved.values() for item in items]
            return peak_host_bytes(len(self._plan.trace.steps), storages)
        # All groups of a micro-batch are on the host between forward and backward. Graphs move
        # every group that moves in any micro-batch that they are replayed for.
        largest: Counter[tuple[str, int, int]] = Counter()
        for item in _decided(self._plan):
            if self._set == self._set_of(item.vp_stage, item.micro_batch):
                for position, nbytes, _ in moved.get(item.key, ()):
                    at = (item.name, item.layer, position)
                    largest[at] = max(largest[at], nbytes)
        return sum(largest.values())

    # One graph.

    def begin_forward(
        self, vp_stage: int, layer_number: int, inputs: Iterable[torch.Tensor]
    ) -> GraphedLayer:
        """Begin capturing a forward graph with these static inputs from the current stream.

        Layer numbers ascend in the chunk.
        """
        chunk, before = self._pass_of(vp_stage, layer_number)
        number, cp_size = self._numbered or (chunk.micro_batch, ONE_SIZE)
        layer = GraphedLayer(before)
        graph = GraphId(vp_stage, layer_number, number, cp_size)
        self.of_layers[graph] = ReplayedGraph(layer.counters)
        layer.static = frozenset(memory_of(tensor) for tensor in inputs)
        self._passes[vp_stage] = (chunk, layer_number, layer)
        self._chunk = chunk
        self._enter(layer)
        return layer

    def end_forward(self, let_others_go_on: Callable[[], None]) -> None:
        """End the capture of the layer's forward graph; call back when only copies remain in it."""
        let_others_go_on()
        self._leave()

    def begin_backward(self, layer: GraphedLayer) -> None:
        """Begin capturing the layer's backward graph from the current stream."""
        # Groups that backward needs immediately stay on the device.
        self._pending = [item for item in self._pending if item.layer is not layer]
        self._enter(layer)
        for group in reversed(layer.groups):
            self._store.copy_in(group.storages(), late=True)
        if layer.before is not None:
            for group in reversed(layer.before.groups):
                self._store.copy_in(group.storages())

    def end_backward(self, let_others_go_on: Callable[[], None]) -> None:
        layer = self.layer
        assert layer is not None
        let_others_go_on()
        layer.before, layer.groups = None, []
        self._leave()

    def _enter(self, layer: GraphedLayer) -> None:
        if self._set not in self._pools:
            raise RuntimeError("a graph is captured that has not been warmed up")
        store = self._store
        self._during_capture.enter_context(nothing_poisoned(store.backend))
        # Without a verifier, which blocks the host: a capture forbids that.
        store.begin_capture(CaptureContext(self._pools[self._set], layer.counters))
        store.copy_streams.begin_graph()
        self.layer = layer
        self._leaving, self._pending = self._pending, []
        for item in self._leaving:
            self._copy_out(item)

    def _leave(self) -> None:
        store = self._store
        for item in self._leaving:
            store.release(item.group)
        self._leaving.clear()
        store.copy_streams.end_graph()
        assert self.layer is not None
        store.end_capture()
        counters = self.layer.counters.values()
        self.moves_anything |= any(counter.d2h_copies for counter in counters)
        self._during_capture.close()
        self.layer = None

    def _pass_of(
        self, vp_stage: int, layer_number: int
    ) -> tuple[ChunkOffloadHandler, Optional[GraphedLayer]]:
        """Return the pass that a layer's forward graph belongs to, and the layer before it."""
        known = self._passes.get(vp_stage)
        if known is not None and known[1] < layer_number:
            return known[0], known[2]
        passes = (sum(self._num_passes.values()), self._num_passes[vp_stage])
        chunk = self._store.make_pass(passes[0], vp_stage, self.min_numel, passes[1])
        self._num_passes[vp_stage] += 1
        return chunk, None

    def _copy_out(self, item: _Leaving) -> None:
        plans = self._plans_of(item.group)

        def may_move(position: int, storage: SavedStorage) -> bool:
            # A graph keeps its inputs, so releasing them frees nothing.
            memory = storage.source_bytes().storage._cdata
            return memory not in item.layer.static and any(
                position not in plan.kept_storages for plan in plans
            )

        self._store.copy_out(item.group, may_move)

    # The marks inside a graph.

    def start_group(self, name: str) -> Optional[OffloadTensorGroup]:
        """Begin a group. Return it if its saved tensors must be tracked, else None."""
        assert self.layer is not None
        group = self._chunk.open_group(name)
        self.layer.groups.append(group)
        self._store.modules[name].num_groups += 1
        return group if self._plans_of(group) else None

    def commit_group(
        self, name: str, given_up: Sequence[torch.Tensor] = ()
    ) -> Optional[OffloadTensorGroup]:
        """Commit the open group called ``name``; None if none is open."""
        group = self._chunk.commit_group(name)
        if group is not None and group.held:
            assert self.layer is not None
            self._store.commit(group)
            self._pending.append(_Leaving(group, self.layer))
        return group

    def use_group(self, group: OffloadTensorGroup) -> None:
        """Do nothing: all groups of a layer are reloaded before its backward graph begins."""

    def _plans_of(self, group: OffloadTensorGroup) -> list[GroupPlan]:
        """Return the plans of the traced groups that ``group`` represents and that move."""
        label = group.label
        number = label.micro_batch if self._set is None else self._set.number
        plans = self._decisions.get((label.vp_stage, number, label.name, label.layer), [])
        return [plan for plan in plans if plan.moves]


def pool_for_graphs(store: ActivationStore) -> HostPool:
    """Return host memory for graphs that copy by this store, within the share of its engine."""
    pool = store.new_host_pool(0)
    pool.become_part_of(store.host_pool.part_of or store.host_pool)
    return pool


def hold(pool: HostPool, needed_bytes: int, largest_bytes: int = 0) -> None:
    """Grow the host memory of graphs until it has room for all that is on the host at once.

    A buffer lies in one slab, and the end of an earlier one may be too short for the largest.
    """
    more = needed_bytes + int(SLACK * needed_bytes) - pool.allocated_bytes
    if more > 0:
        pool.reserve(more + (largest_bytes if pool.allocated_bytes else 0))


def _decided(plan: Plan) -> Iterable[_Decided]:
    num_passes: Counter[int] = Counter()
    micro_batches: dict[int, int] = {}
    layers: Counter[tuple[int, str]] = Counter()
    for group in plan.trace.groups:
        chunk_pass = group.key.chunk_pass
        if chunk_pass not in micro_batches:
            micro_batches[chunk_pass] = num_passes[group.vp_stage]
            num_passes[group.vp_stage] += 1
        layer = layers[chunk_pass, group.name]
        layers[chunk_pass, group.name] += 1
        yield _Decided(
            group.key,
            group.vp_stage,
            micro_batches[chunk_pass],
            group.name,
            layer,
            plan.group_by_key[group.key],
        )


def _takes_turns(plan: Plan) -> bool:
    """Return whether no pass begins before the backward of the previous one has begun."""
    last_pass, has_been_used = -1, True
    for step in plan.trace.steps:
        if step.kind in KINDS_OF_BACKWARD:
            has_been_used = has_been_used or step.key.chunk_pass == last_pass
        elif step.key.chunk_pass != last_pass:
            if not has_been_used:
                return False
            last_pass, has_been_used = step.key.chunk_pass, False
    return True


class _Moved(NamedTuple):
    position: int
    """Position of the storage in its group."""
    nbytes: int
    storage: StoragePlan


def _moved_bytes(plan: Plan, names: set[str]) -> dict[GroupKey, list[_Moved]]:
    """Return the storages that move in the groups with these names, by owner."""
    moved: defaultdict[GroupKey, list[_Moved]] = defaultdict(list)
    for storage in plan.storages:
        owner = plan.trace.storages[storage.index].holders[0]
        if plan.group_by_key[owner].name in names:
            position = plan.trace.group_by_key[owner].storages.index(storage.index)
            moved[owner].append(_Moved(position, size_class_bytes(storage.nbytes), storage))
    return moved
