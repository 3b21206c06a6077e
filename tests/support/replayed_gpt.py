# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small models of megatron-core, wrapped for data parallelism, with and without chunk graphs."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Optional
from unittest.mock import patch

import torch
from captured_layers import capture_layers, with_graphs
from garbage import give_back_unused_memory
from imitated_layer_graphs import imitated_layer_graphs
from megatron_models import forget_expert_metrics, use_gpu, wrap
from quantized_linears import MarksBakedIn, train_in_fp8
from tiny_gpt import ModelCase, build_chunks, first_difference, initialize, make_config, run_step

from megatron.slipstream.graphs.capture import graph_pool_bytes
from megatron.slipstream.graphs.offload import SlotOffloading
from megatron.slipstream.integration import install
from megatron.slipstream.integration.graphs.packed_layers import PackedLayers
from megatron.slipstream.options.fields import OffloadConfig

DROP_AND_PAD = {"moe_expert_capacity_factor": 1.25, "moe_pad_expert_input_to_capacity": True}
"""Experts with static shapes."""
EXPERT_BIAS = {
    "moe_router_enable_expert_bias": True,
    "moe_router_score_function": "sigmoid",
    "moe_router_load_balancing_type": "seq_aux_loss",
}
"""A router whose bias depends on the token counts of earlier iterations."""


def timed_replays() -> Any:
    """Returns a context in which a mock counts the replays whose times are read."""
    read_times = SlotOffloading.read_times
    return patch.object(SlotOffloading, "read_times", autospec=True, side_effect=read_times)


@dataclasses.dataclass(frozen=True)
class Replayed:
    """Result of :func:`compare` on one rank."""

    difference: Optional[str]
    """The first difference between training with and without graphs; None if equal."""
    num_replays: tuple[int, ...]
    """Number of replays of each model chunk."""
    figures: tuple[str, ...]
    """Memory and time of each model chunk's capture."""
    num_experts_metrics: int
    num_poisoned: int
    """Number of times that a free slot's memory was filled."""
    moved_bytes: tuple[int, ...]
    """Bytes of one forward replay, for each model chunk that offloads."""
    host_bytes: tuple[int, int]
    """Host memory of all slots, before and after their graphs were deleted."""
    eager_host_bytes: int = 0
    """Host memory of passes without graphs, at the end."""
    num_timed: int = 0
    """Number of replays whose times were read."""


def compare(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    counts: Sequence[int],
    wrapper: Optional[dict[str, Any]] = None,
    offload_modules: Sequence[str] = (),
    backend: str = "auto",
    host_limit_bytes: Optional[int] = None,
) -> Replayed:
    """Train ``case`` without and with chunk graphs; to be run on every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: The model.
        counts: Number of micro-batches of each iteration.
        wrapper: Options of ``DistributedDataParallelConfig``.
        offload_modules: Modules that move with graphs; nothing moves without graphs.
        backend: Backend of the engine.
        host_limit_bytes: Limit of pinned host memory of this rank.
    """
    case = start(case, rank, world_size, port)
    expected = Training(case, wrapper=wrapper).run(counts)
    if offload_modules:
        install.install(
            OffloadConfig(offload_backend=backend, offload_host_memory_limit_bytes=host_limit_bytes)
        )
    training = Training(case, True, wrapper, offload_modules)
    with timed_replays() as timed:
        actual = training.run(counts)
    graphs = training.graphs
    slots = [slot for graph in graphs for slot in slots_of(graph)]
    host_bytes = [slot.hooks.host_bytes for slot in slots if offload_modules]
    engine = install.installed()
    eager_bytes = 0 if engine is None else engine.store.host_pool.allocated_bytes
    for graph in graphs:
        graph.delete()
    left = [slot.hooks.host_bytes for slot in slots if offload_modules]
    return Replayed(
        difference=first_difference(expected, actual),
        num_replays=tuple(graph.num_replays for graph in graphs),
        figures=tuple(one.render() for graph in graphs for one in graph.figures.values()),
        num_experts_metrics=len(expert_metrics()),
        num_poisoned=training.poison.num_filled,
        moved_bytes=tuple(
            one.chunk.offloading.moved_bytes
            for graph in graphs
            for one in graph.of_size.values()
            if one.chunk.offloading
        ),
        host_bytes=(sum(host_bytes), sum(left)),
        eager_host_bytes=eager_bytes,
        num_timed=timed.call_count,
    )


def hybrid_and_gpt(
    rank: int, world_size: int, port: int, case: ModelCase, counts: Sequence[int]
) -> list[Optional[str]]:
    """Train a transformer as a GPTModel, and as a HybridModel without and with chunk graphs.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: The GPTModel, of layers of one kind.
        counts: Number of micro-batches of each iteration.

    Returns:
        The first difference of each HybridModel from the GPTModel; None if equal.
    """
    case = start(case, rank, world_size, port)
    pattern = "*E" if case.kind == "moe" else "*-"
    hybrid = dataclasses.replace(
        case, kind="hybrid", pattern=pattern, num_layers=2 * case.num_layers
    )
    # The statistics of experts have a row for each layer, of which a HybridModel has twice as many.
    with patch(f"{__name__}.expert_metrics", list):
        gpt = Training(case).run(counts)
        return [
            first_difference(gpt, Training(hybrid, replays).run(counts))
            for replays in (False, True)
        ]


@dataclasses.dataclass(frozen=True)
class LayersReplayed:
    """Result of :func:`compare_layers` on one rank."""

    difference: Optional[str]
    """The first difference between training with and without graphs; None if equal."""
    num_sets: int
    """Sets of graphs of all model chunks."""
    were_too_few: bool
    """Whether a micro-batch ran eagerly because it found all sets in use."""
    num_host_pools: int
    """Pools of host memory of all graphs."""
    moved_bytes: int
    """Bytes that one replay of all graphs copies out."""
    reported_bytes: int
    """Bytes that graphs copied out in the last iteration, as the report has it."""
    num_poisoned: int
    """Number of times that graphs' memory was filled."""
    graph_bytes: dict[int, int]
    """Device memory of all graphs after the capture of each size, from the largest (GPU)."""
    allocated_bytes: tuple[int, ...]
    """Device memory of tensors after each iteration with graphs (GPU)."""


def compare_layers(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    scope: Sequence[str],
    counts: Sequence[int],
    offload_modules: Sequence[str] = (),
    backend: str = "auto",
) -> LayersReplayed:
    """Train ``case`` without graphs and with those of layers; to be run on every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: The model.
        scope: The parts of each layer that are captured; the whole layer if empty.
        counts: Number of micro-batches of each iteration; the first runs eagerly.
        offload_modules: Modules that move with graphs; nothing moves without graphs.
        backend: Backend of the engine.
    """
    case = start(case, rank, world_size, port)
    return layers_and_eager(Training, case, scope, counts, offload_modules, backend)


def layers_and_eager(
    make_training: Callable[..., Training],
    case: ModelCase,
    scope: Sequence[str],
    steps: Sequence[Any],
    offload_modules: Sequence[str],
    backend: str,
) -> LayersReplayed:
    """Compare trainings without and with graphs of layers; see :func:`compare_layers`."""
    expected = make_training(case).run(steps)
    engine = None
    if offload_modules:
        engine = install.install(OffloadConfig(offload_backend=backend))
    poison, graphed = Poison(), with_graphs(case, scope, 1)
    with imitated_layer_graphs():
        layers = LayerGraphs(graphed, poison)
        actual = make_training(graphed, offload_modules=offload_modules, layers=layers).run(steps)
        reported = () if engine is None else engine.report.graphs.values()
        found = LayersReplayed(
            difference=first_difference(expected, actual),
            num_sets=sum(len(packed.sets) for packed in layers.packed),
            were_too_few=any(packed.sets.were_too_few for packed in layers.packed),
            num_host_pools=0 if engine is None else len(engine.graphs.pools),
            moved_bytes=moved_by_graphs(engine),
            reported_bytes=sum(item.d2h_bytes for item in reported),
            num_poisoned=poison.num_filled,
            graph_bytes=layers.graph_bytes,
            allocated_bytes=tuple(layers.allocated_bytes),
        )
        # In either order. Graphs copy to memory of the engine, so none outlives it.
        if engine is not None:
            install.uninstall()
            assert not any(layer.cuda_graphs for layer in layers.helper.flattened_callables)
        memories = [memory for packed in layers.packed for memory in packed.sets]
        layers.helper.delete_cuda_graphs()
        assert not any(memory.host_pool for memory in memories)
    return found


def compare_two_models(
    rank: int,
    world_size: int,
    port: int,
    cases: Sequence[tuple[ModelCase, Sequence[str], Sequence[str]]],
    counts: Sequence[int],
    backend: str = "auto",
) -> tuple[list[Optional[str]], list[list[str]]]:
    """Train packed models in turn, without graphs and with those of layers.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        cases: The models, with the captured parts of each layer, and modules that move with graphs;
            nothing moves without graphs.
        counts: Number of micro-batches of each iteration; the first runs eagerly.
        backend: Backend of the engines.

    Returns:
        For each model the first difference, None if equal, and the modules that move in graphs.
    """
    start(cases[0][0], rank, world_size, port)
    models = [dataclasses.replace(case, te_rng_tracker=True) for case, _, _ in cases]
    expected = _train_in_turn([Training(case) for case in models], counts)
    manager = install.install(OffloadConfig(offload_backend=backend))
    pairs = zip(models, cases, strict=True)
    graphed = [with_graphs(case, scope, 1) for case, (_, scope, _) in pairs]
    layers = [LayerGraphs(case, Poison()) for case in graphed]
    with imitated_layer_graphs():
        trainings = [
            Training(case, offload_modules=modules, layers=graphs)
            for case, (_, _, modules), graphs in zip(graphed, cases, layers, strict=True)
        ]
        actual = _train_in_turn(trainings, counts)
        engines = manager.router.managers
        assert len(engines) == len(models)
        counters = [engine.graphs.modules for engine in engines]
        moved = [sorted(name for name in one if one[name].d2h_bytes) for one in counters]
        for one in layers:
            one.helper.delete_cuda_graphs()
    install.uninstall()
    differences = [first_difference(*pair) for pair in zip(expected, actual, strict=True)]
    return differences, moved


def _train_in_turn(
    trainings: Sequence[Training], counts: Sequence[int]
) -> list[list[list[torch.Tensor]]]:
    """The results of each model's iterations; graphs are captured after the first ones."""
    results: list[list[list[torch.Tensor]]] = [[] for _ in trainings]
    for step, count in enumerate(counts):
        for training, result in zip(trainings, results, strict=True):
            result.append(training.iterate(step, count))
    return results


def start(case: ModelCase, rank: int, world_size: int, port: int) -> ModelCase:
    """Initialise a rank that trains with and without graphs.

    Returns:
        The case, with random numbers that graphs can use.
    """
    case = dataclasses.replace(case, te_rng_tracker=True)
    initialize(case, rank, world_size, port)
    if not use_gpu():
        torch.compiler.set_stance("force_eager")  # megatron-core's fused functions take long
    return case


def moved_by_graphs(engine: Any) -> int:
    """Bytes that one replay of all graphs of layers copies out; 0 without an engine."""
    if engine is None:
        return 0
    return sum(counters.d2h_bytes for counters in engine.graphs.modules.values())


class LayerGraphs:
    """The graphs of a model's layers, captured after the first iteration."""

    def __init__(self, case: ModelCase, poison: Poison) -> None:
        self._case, self._poison = case, poison
        self.helper: Any = None
        self.packed: list[Any] = []
        """The ``PackedLayers`` of each chunk."""
        self.allocated_bytes: list[int] = []
        self.graph_bytes: dict[int, int] = {}
        """Device memory of all graphs after the capture of each size (GPU)."""

    def capture(self, config: Any, chunks: Sequence[Any], num_micro_batches: int) -> None:
        """Capture, as ``megatron.training`` does between two iterations."""
        with self._memory_by_size():
            self.helper = capture_layers(self._case, config, chunks, num_micro_batches)
        layers = [get_block(chunk).layers[0] for chunk in chunks]
        packed = [(layer, layer.packed) for layer in layers if layer.packed is not None]
        self.packed = [one for _, one in packed if one.is_captured]
        assert self.packed or not any(one.has_learned(layer) for layer, one in packed)
        if self._case.pp == 1:  # Then no set is in use when a forward pass begins.
            for chunk in chunks:
                self._poison.fill_pools_before_forward(chunk, self.packed)

    @contextlib.contextmanager
    def _memory_by_size(self) -> Iterator[None]:
        original = PackedLayers.capture_size

        def measured(packed: Any, size: int, *arguments: Any) -> None:
            original(packed, size, *arguments)
            if use_gpu():
                give_back_unused_memory()
                self.graph_bytes[size] = graph_pool_bytes()

        with patch.object(PackedLayers, "capture_size", measured):
            yield

    def end_iteration(self) -> None:
        """Note the memory of tensors."""
        if use_gpu() and self.helper is not None:
            self.allocated_bytes.append(torch.cuda.memory_allocated())


def train_and_leave(
    rank: int, world_size: int, port: int, case: ModelCase, counts: Sequence[int]
) -> tuple[int, ...]:
    """Train with chunk graphs, and leave the process groups. Returns each chunk's replays."""
    from megatron.slipstream.integration.graphs.chunks import close_graphs

    case = start(case, rank, world_size, port)
    training = Training(case, True)
    training.run(counts)
    graphs = training.graphs
    num_replays = tuple(graph.num_replays for graph in graphs)
    close_graphs()
    assert not any(graph.is_captured for graph in graphs)
    torch.distributed.destroy_process_group()
    return num_replays


def replay_again(
    rank: int, world_size: int, port: int, case: ModelCase
) -> tuple[list[str], list[bool]]:
    """The errors of replaying a chunk twice, and whether it is unpatched after each step."""
    from megatron.slipstream.integration.graphs.chunks import close_graphs, replay_chunks

    case = start(case, rank, world_size, port)
    config = make_config(case, ())
    (chunk,) = wrap(config, build_chunks(case, config))

    def has_own_methods() -> bool:
        return "forward" not in vars(get_block(chunk)) and "zero_grad_buffer" not in vars(chunk)

    errors, states = [], []
    for chunks in ([chunk, chunk], [chunk], [chunk]):
        try:
            replay_chunks(chunks, 1)
        except ValueError as error:
            errors.append(str(error))
        states.append(has_own_methods())
    close_graphs()
    states.append(has_own_methods())
    replay_chunks([chunk], 1)
    states.append(has_own_methods())
    close_graphs()
    return errors, states


class Poison:
    """Fills the memory of every free slot before each forward pass: a replay that reads memory
    which it has not written gives NaN."""

    def __init__(self) -> None:
        self.num_filled = 0

    def fill_before_forward(self, chunk: Any, graphs: Any) -> None:
        """Fill before each forward pass of this chunk from now on."""
        block = get_block(chunk)
        forward = block.forward

        def poisoned(*arguments: Any, **options: Any) -> Any:
            for slot in slots_of(graphs):
                if slot.memory.is_free:
                    self._fill(slot)
            return forward(*arguments, **options)

        block.forward = poisoned

    def fill_pools_before_forward(self, chunk: Any, of_chunks: Sequence[Any]) -> None:
        """Fill the memory of all graphs of layers before each training pass of this chunk."""
        block = get_block(chunk)
        forward = block.forward

        def poisoned(*arguments: Any, **options: Any) -> Any:
            if torch.is_grad_enabled():
                self.num_filled += 1
                for packed in of_chunks:
                    for memory in packed.sets if use_gpu() else ():
                        self._fill_pool(memory.pool)
            return forward(*arguments, **options)

        block.forward = poisoned

    @torch.no_grad()
    def _fill(self, slot: Any) -> None:
        self.num_filled += 1
        for tensor in (slot.hidden, slot.output, slot.grad_output, slot.grad_hidden):
            tensor.fill_(float("nan"))
        if use_gpu():
            self._fill_pool(slot.memory.pool)

    @torch.no_grad()
    def _fill_pool(self, pool: Any) -> None:
        pieces = [
            piece
            for piece in torch.cuda.memory_snapshot()
            if tuple(piece["segment_pool_id"]) == tuple(pool)
        ]
        assert pieces, "the memory of the graphs was not found"
        for piece in pieces:
            storage = torch._C._construct_storage_from_data_pointer(
                piece["address"], torch.device("cuda", piece["device"]), piece["total_size"]
            )
            # All bits set is NaN in every floating type, and -1 in integers.
            torch.empty(0, dtype=torch.uint8, device="cuda").set_(storage).fill_(255)


def slots_of(graphs: Any) -> list[Any]:
    """All slots of a chunk's graphs of each size."""
    return [slot for one in graphs.of_size.values() for slot in one.slots]


def get_block(chunk: Any) -> Any:
    """The ``TransformerBlock`` of a wrapped model chunk."""
    from megatron.core.utils import get_attr_wrapped_model

    return get_attr_wrapped_model(chunk, "decoder")


class Training:
    """A model and its training, with graphs of chunks, of layers, or none.

    Args:
        case: The model.
        replays: Whether its chunks are replayed.
        wrapper: Options of ``DistributedDataParallelConfig``.
        offload_modules: Modules that move.
        layers: Graphs of its layers, captured after the first iteration.
    """

    evaluates_every = 2
    """The number of iterations between evaluations."""

    def __init__(
        self,
        case: ModelCase,
        replays: bool = False,
        wrapper: Optional[dict[str, Any]] = None,
        offload_modules: Sequence[str] = (),
        layers: Optional[LayerGraphs] = None,
    ) -> None:
        forget_expert_metrics()
        self.case, self.layers = case, layers
        self.config = make_config(case, offload_modules)
        self.chunks: list[Any] = wrap(self.config, self.build(), **wrapper or {})
        self.seed()
        if (wrapper or {}).get("overlap_grad_reduce"):
            no_sync = [chunk.no_sync for chunk in self.chunks]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
            self.config.grad_sync_func = None
        self.poison = Poison()
        self.allocated_bytes: list[int] = []
        """Device memory of tensors after each iteration with graphs (GPU)."""
        self.graphs: list[Any] = list(self.replay()) if replays else []
        for chunk, graphs in zip(self.chunks, self.graphs, strict=False):
            self.poison.fill_before_forward(chunk, graphs)

    def build(self) -> list[Any]:
        """Build the model chunks."""
        chunks = build_chunks(self.case, self.config)
        for chunk in chunks if self.config.fp8 else ():
            train_in_fp8(get_block(chunk))
        return chunks

    def seed(self) -> None:
        """Seed as build_chunks does with the tracker, which modules keep."""
        torch.manual_seed(11)

    def replay(self) -> Sequence[Any]:
        """Replay the chunks from the second iteration."""
        from megatron.slipstream.integration.graphs.chunks import replay_chunks

        backend = MarksBakedIn(self.chunks) if self.config.fp8 and not use_gpu() else None
        return replay_chunks(self.chunks, 1, backend)

    def passes(self, step: int, item: Any, forward_only: bool = False) -> list[torch.Tensor]:
        """The losses of an iteration, whose number of micro-batches is ``item``."""
        step += 1000 * forward_only
        return run_step(self.case, self.config, self.chunks, step, item, forward_only=forward_only)

    def state(self) -> list[torch.Tensor]:
        """The results of an iteration other than its losses."""
        return gradients_and_state(self.chunks)

    def update(self) -> None:
        """Change weights after an iteration."""
        update(self.chunks)

    def run(self, steps: Sequence[Any]) -> list[list[torch.Tensor]]:
        """Run iterations. Returns the losses, gradients and state of each."""
        return [self.iterate(step, item) for step, item in enumerate(steps)]

    def iterate(self, step: int, item: Any) -> list[torch.Tensor]:
        """Run an iteration, after which weights change, and maybe an evaluation."""
        if self.layers is not None and step == 1:
            count = item if isinstance(item, int) else len(item)
            self.layers.capture(self.config, self.chunks, count)
        for chunk in self.chunks:
            chunk.zero_grad_buffer()
        result = self.passes(step, item)
        for chunk in self.chunks:
            chunk.finish_grad_sync()
        result += self.state()
        self.update()
        forget_counts(self.chunks)
        if step % self.evaluates_every == 1:
            with torch.no_grad():
                result += self.passes(step, item, forward_only=True)
        kept = [tensor.to("cpu", copy=True) for tensor in result]
        del result
        if use_gpu() and self.graphs and step:
            self.allocated_bytes.append(torch.cuda.memory_allocated())
        if self.layers is not None:
            self.layers.end_iteration()
        return kept


def gradients_and_state(chunks: Sequence[Any]) -> list[torch.Tensor]:
    """The results of an iteration other than its losses."""
    return gradients_and_buffers(chunks) + random_states()


def gradients_and_buffers(chunks: Sequence[Any]) -> list[torch.Tensor]:
    found: list[torch.Tensor] = [
        parameter.main_grad.clone()
        for chunk in chunks
        for parameter in chunk.parameters()
        if parameter.requires_grad
    ]
    # Rotary tables are not state: graphs may hold their own, so the module's are not updated.
    found += [
        buffer.clone()
        for chunk in chunks
        for name, buffer in chunk.module.named_buffers()
        if not name.endswith(("cos_cached", "sin_cached"))
    ]
    return found + [values.clone() for values in expert_metrics()]


def random_states() -> list[torch.Tensor]:
    from megatron.core.tensor_parallel.random import get_cuda_rng_tracker

    found = []
    for state in (torch.get_rng_state(), *get_cuda_rng_tracker().get_states().values()):
        found.append(state if torch.is_tensor(state) else state.get_state())
    if use_gpu():
        found.append(torch.cuda.get_rng_state())
    return found


def expert_metrics() -> list[torch.Tensor]:
    """megatron-core's expert statistics since its last log line."""
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    return [entry.values for entry in get_moe_metrics_tracker().metrics.values()]


@torch.no_grad()
def update(chunks: Sequence[torch.nn.Module]) -> None:
    """Replaces an optimizer."""
    for chunk in chunks:
        for parameter in chunk.parameters():
            gradient: Any = getattr(parameter, "main_grad", None)
            if gradient is not None:
                parameter.sub_(0.1 * gradient.to(parameter.dtype))


def forget_counts(chunks: Sequence[torch.nn.Module]) -> None:
    """Reset the counts of routers and metrics, as training does after an iteration."""
    for chunk in chunks:
        for module in chunk.modules():
            if getattr(module, "local_tokens_per_expert", None) is not None:
                module.local_tokens_per_expert.zero_()
    for values in expert_metrics():
        values.zero_()
