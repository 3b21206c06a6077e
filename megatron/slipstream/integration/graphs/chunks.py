# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Replays megatron-core's model chunks as CUDA graphs.

Only the decoder of a chunk is captured (``TransformerBlock``, or the ``HybridStack`` of a hybrid
model), not the embedding, output layer, multi-token prediction or loss. Its ``forward`` is replaced
on the instance, and so is ``zero_grad_buffer`` of the data-parallel wrapper around it, which the
training loop calls at the start of an iteration. megatron-core's own graphs are off.
"""

from __future__ import annotations

import contextlib
import gc
import logging
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, Optional

import torch
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel
from megatron.core.tensor_parallel.random import (
    get_cuda_rng_tracker,
    is_graph_safe_cuda_rng_tracker,
)
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.transformer_block import TransformerBlock
from megatron.core.utils import get_attr_wrapped_model

from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.experts.capacity import LayerCapacity, step_check
from megatron.slipstream.fine_grained_activation_offload.counted_modules import ReplayedPass
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.graph_capture import ONE_SIZE
from megatron.slipstream.fine_grained_activation_offload.pass_policy import PassPolicy
from megatron.slipstream.graphs.bank import ChunkGraphs
from megatron.slipstream.graphs.capture import CudaGraphs, EagerGraphs, GraphBackend
from megatron.slipstream.graphs.chunk import Chunk
from megatron.slipstream.graphs.offload import ChunkOffloading, share_of_host_memory
from megatron.slipstream.integration.graphs.cp_sizes import sizes_of
from megatron.slipstream.integration.graphs.quantized_weights import (
    quantize_weights_in_every_pass,
    without_fp8_skip_flag,
)
from megatron.slipstream.integration.graphs.rotary_tables import RotaryTables, constant_arguments
from megatron.slipstream.integration.graphs.schedules import chunk_slots
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.integration.seam.model_router import installed, marks_go_to
from megatron.slipstream.launcher import rank
from megatron.slipstream.options.chunk_graphs import CHUNK_GRAPH_RULES
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.model import check_options_in_graphs
from megatron.slipstream.options.rules import check_rules, require, warn_once
from megatron.slipstream.patches import exchanged_tensors, table
from megatron.slipstream.patches.attributes import replace_on
from megatron.slipstream.patches.patching import applied
from megatron.slipstream.patches.table import Feature

logger = logging.getLogger(__name__)


class _ReplayedChunk:
    """The graphs of a chunk and the functions that restore its methods. Owned by the chunk."""

    def __init__(self, graphs: ChunkGraphs, block: Optional[torch.nn.Module] = None) -> None:
        self.graphs = graphs
        self.block = block
        self.undo: list[Callable[[], None]] = []


_replayed: weakref.WeakSet[_ReplayedChunk] = weakref.WeakSet()
"""Graphs of all live models of this process."""


def prepare_arguments(args: Any) -> None:
    """Set the megatron options that chunk graphs need, before megatron validates them."""
    if not torch.cuda.is_available():
        if rank() == 0:
            logger.warning(
                "cuda_graph_granularity=chunk: without a GPU, replays run the chunk eagerly; this "
                "checks the options and is not faster"
            )
    elif not args.te_rng_tracker:
        logger.info("cuda_graph_granularity=chunk: setting te_rng_tracker=True, as graphs need it")
        args.te_rng_tracker = True


def change_model_config(
    model_config: Any, num_warmup_iterations: int, limits: Optional[RankLimits] = None
) -> None:
    """Register :func:`replay_chunks` to run on the model that ``megatron.training`` builds."""

    def replay(chunks: list[torch.nn.Module]) -> list[torch.nn.Module]:
        replay_chunks(chunks, num_warmup_iterations, limits=limits)
        return chunks

    model_config.post_wrap_hooks.append(replay)


def replay_chunks(
    chunks: Sequence[torch.nn.Module],
    num_warmup_iterations: int,
    backend: Optional[GraphBackend] = None,
    limits: Optional[RankLimits] = None,
) -> Sequence[ChunkGraphs]:
    """Replay the model chunks of this rank after some warm-up iterations.

    Args:
        chunks: The rank's model chunks, in the order of their virtual stages, each wrapped in
            megatron-core's ``DistributedDataParallel``.
        num_warmup_iterations: Iterations that run eagerly first.
        backend: Creates the graphs; None: CUDA graphs, or emulated ones without a GPU.
        limits: With dynamic context parallelism, the ranks that share micro-batches: a bank of
            graphs, one for each size, is created, which needs the process groups, a collective over
            all ranks. None: micro-batches have one size.

    Returns:
        The graphs of each chunk; callers may use ``delete`` and ``figures``. A chunk that cannot be
        replayed, or already is, is a ``ValueError``.
    """
    for chunk in chunks:
        _check(chunk)
    blocks = [get_attr_wrapped_model(chunk, "decoder") for chunk in chunks]
    _check_not_replayed(blocks)
    config = get_attr_wrapped_model(chunks[0], "config")
    asked = {
        "cuda_graph_granularity": "chunk",
        "moe_sync_free_experts": all(map(_is_sync_free, chunks)),
        "hybrid_layer_pattern": "|".join(map(_letters, blocks)),
    }
    facts = Facts(config, asked, has_gpu=torch.cuda.is_available())
    require(check_rules(CHUNK_GRAPH_RULES, facts))
    manager = installed()
    if manager is not None:
        warn_once(check_options_in_graphs(Facts(facts, manager.config)))
    if config.fp8:
        for block in blocks:
            quantize_weights_in_every_pass(block)
    table.apply(Feature.FUSED_ROTATION)
    if torch.cuda.is_available():
        table.apply(Feature.PEAK_MEMORY)
    if backend is None and torch.cuda.is_available():
        backend = CudaGraphs(_generators, _transformer_engine_captures, _exchanged_tensors_stay)
    backend = backend or EagerGraphs()
    replayed: list[ChunkGraphs] = []
    slots = chunk_slots(config)
    for index, (wrapper, num_slots) in enumerate(zip(chunks, slots, strict=True)):
        model = get_attr_wrapped_model(wrapper, "decoder", return_model_obj=True)
        sizes = sizes_of(model, limits)
        of_size = {}
        for size in sizes.sizes:
            of = "" if size == ONE_SIZE else f", context-parallel size {size}"
            of_size[size] = _chunk(wrapper, sum(slots), f"model chunk {index}{of}")
        graphs = ChunkGraphs(of_size, num_slots, num_warmup_iterations, backend, sizes)
        _replace_methods(wrapper, graphs)
        replayed.append(graphs)
    return replayed


def graphs_of(block: torch.nn.Module) -> Optional[ChunkGraphs]:
    """Return the graphs of the chunk with this block; None unless :func:`replay_chunks` runs it."""
    return next((chunk.graphs for chunk in _replayed if chunk.block is block), None)


def close_graphs() -> None:
    """Release the graphs of all chunks, which run eagerly afterwards.

    Call before destroying process groups: ``destroy_process_group`` hangs on a communicator whose
    collectives are in a graph.
    """
    for chunk in list(_replayed):
        chunk.graphs.close()
        for undo in chunk.undo:
            undo()
    _replayed.clear()
    gc.collect()


def _check(chunk: torch.nn.Module) -> None:
    if not isinstance(chunk, DistributedDataParallel):
        raise ValueError(
            f"a model chunk in {type(chunk).__name__} is not supported with cuda_graph_granularity="
            "chunk because its gradients have no fixed place in memory; wrap it in megatron-core's "
            "DistributedDataParallel"
        )
    block = get_attr_wrapped_model(chunk, "decoder")
    if not isinstance(block, TransformerBlock) and not _letters(block):
        raise ValueError(
            f"a model of {type(block).__name__} is not supported with cuda_graph_granularity=chunk "
            "because only the decoders of GPTModel and HybridModel are captured; train one of them"
        )
    tracker = get_cuda_rng_tracker()
    if torch.cuda.is_available() and not is_graph_safe_cuda_rng_tracker(tracker):
        raise ValueError(
            "te_rng_tracker=False is not supported with cuda_graph_granularity=chunk because "
            "graphs cannot draw random numbers from other trackers; set te_rng_tracker=True"
        )


def _letters(block: torch.nn.Module) -> str:
    """Return the kinds of a hybrid model's layers; nothing for a ``TransformerBlock``."""
    return "".join(getattr(block, "layer_type_list", ()))


def _is_sync_free(chunk: torch.nn.Module) -> bool:
    """Whether no expert layer makes the host wait for token counts."""
    layers = (layer for layer in chunk.modules() if isinstance(layer, MoELayer))
    return all(getattr(layer, "is_sync_free", False) for layer in layers)


def _capacities(block: torch.nn.Module) -> list[LayerCapacity]:
    """Return the slot usage of each layer's sync-free experts that span several ranks."""
    layers: list[Any] = [m for m in block.modules() if getattr(m, "is_sync_free", False)]
    dispatchers = [layer.token_dispatcher for layer in layers]
    return [dispatcher.capacity_use for dispatcher in dispatchers if dispatcher.ep_size > 1]


def _check_not_replayed(blocks: Sequence[torch.nn.Module]) -> None:
    """Refuse chunks already replayed: replacements could be undone in the wrong order."""
    known = {chunk.block for chunk in _replayed}
    if len(set(blocks)) < len(blocks) or not known.isdisjoint(blocks):
        raise ValueError(
            "replay_chunks() is not supported with a model chunk that it replays already because "
            "its graphs hold the chunk's own methods; give each chunk once, or call close_graphs() "
            "first"
        )


def _chunk(wrapper: Any, num_slots: int, name: str) -> Chunk:
    model: Any = get_attr_wrapped_model(wrapper, "decoder", return_model_obj=True)
    block = model.decoder
    parallel = _DataParallel(wrapper, block)
    checks_capacity = bool(_capacities(block))

    def after_replay() -> None:
        parallel.start_reducing()
        if checks_capacity:
            step_check.at_end_of_replay(block.config)

    return Chunk(
        name=name,
        module=block,
        run=partial(_run, block, block.forward),
        before_replay=parallel.wait_for_parameters,
        after_replay=after_replay,
        save_state=partial(_save_state, block),
        offloading=_offloading(wrapper, num_slots, name),
        hold_constants=lambda: RotaryTables(block).in_place,
        constant_arguments=constant_arguments(model),
    )


def _replace_methods(wrapper: Any, graphs: ChunkGraphs) -> None:
    block = get_attr_wrapped_model(wrapper, "decoder")
    parallel = _DataParallel(wrapper, block)
    replayed = _ReplayedChunk(graphs, block)

    def forward(hidden_states: Optional[torch.Tensor], **arguments: Any) -> torch.Tensor:
        # On later stages, the schedule has passed the received input to the block.
        hidden = hidden_states if block.pre_process else block.input_tensor
        assert hidden is not None
        return replayed.graphs(hidden, arguments)

    zero_grad_buffer = wrapper.zero_grad_buffer

    def begin_iteration() -> None:
        with parallel.hooks_off(), step_check.off():
            graphs.begin_iteration()
        zero_grad_buffer()

    replayed.undo = [
        replace_on(block, "forward", forward),
        replace_on(wrapper, "zero_grad_buffer", begin_iteration),
    ]
    _replayed.add(replayed)


def _run(
    block: Any, forward: Callable[..., torch.Tensor], hidden: torch.Tensor, **arguments: Any
) -> torch.Tensor:
    if block.pre_process:
        return forward(hidden, **arguments)
    arrived = block.input_tensor
    block.set_input_tensor(hidden)
    try:
        return forward(None, **arguments)
    finally:
        block.set_input_tensor(arrived)


def _offloading(wrapper: Any, num_slots: int, name: str) -> Optional[ChunkOffloading]:
    """Create offloading inside a chunk's graphs, if its model's configuration enables it.

    Each of the ``num_slots`` slots of this rank's chunks has its own host memory. The engine
    reports what it offloads under ``name``. Megatron-core's engine is a ``ValueError``.
    """
    config = get_attr_wrapped_model(wrapper, "config")
    if not config.fine_grained_activation_offloading:
        return None
    manager = installed()
    if manager is None:
        raise ValueError(
            "offloading by megatron-core's own engine is not supported with cuda_graph_granularity="
            "chunk because it cannot be captured with a whole chunk; call install() before the "
            "model is built"
        )

    def make_engine(num_verified: int) -> OffloadEngine:
        pool = manager.store.host_pool
        if pool.in_use_bytes == 0:
            # It served iterations without graphs; graphs have their own host memory.
            manager.store.close()
        limit_bytes = share_of_host_memory(pool, num_slots)
        engine = manager.make_graph_engine(limit_bytes, num_verified)
        engine.change_assignment(
            manager.router.known_manager(wrapper).engine.lifecycle.plans.assignment
        )
        return engine

    def begin_pass(engine: OffloadEngine) -> None:
        pp_rank = parallel_state.get_pipeline_model_parallel_rank()
        engine.begin_pass(0, PassPolicy.of(config), pp_rank)

    def note_replayed(replayed: ReplayedPass) -> Callable[[], object]:
        # Looked up now: an engine may be uninstalled before its graphs are deleted.
        noted = manager.router.known_manager(wrapper).engine.replayed
        noted[name] = replayed
        return partial(noted.pop, name, None)

    def marks_of_chunk_go_to(engine: OffloadEngine) -> contextlib.AbstractContextManager[None]:
        return marks_go_to(PipelineOffloadManager(engine))

    contexts = (begin_pass, marks_of_chunk_go_to)
    return ChunkOffloading(make_engine, *contexts, note_replayed, manager.config.offload_verify)


class _DataParallel:
    def __init__(self, wrapper: Any, block: torch.nn.Module) -> None:
        self._wrapper = wrapper
        group_of = wrapper.param_to_bucket_group
        grouped = [(p, group_of[p]) for p in block.parameters() if p in group_of]
        self._groups = list({id(group): group for _, group in grouped}.values())
        """Bucket groups in the order in which the forward pass needs their parameters."""
        self._gradients = grouped[::-1]
        """Parameters and bucket groups in the order in which backward computes gradients."""

    @property
    def _gathers_late(self) -> bool:
        """Whether parameters are still being gathered when the forward pass begins."""
        return self._wrapper.use_forward_hook and bool(
            self._wrapper.remove_forward_pre_hook_handles
        )

    def wait_for_parameters(self) -> None:
        if not self._gathers_late:
            return
        wrapper = self._wrapper
        is_dispatched_elsewhere = (
            wrapper.ddp_config.align_param_gather
            or wrapper.overlap_param_gather_with_optimizer_step
        )
        for group in self._groups:
            if group.param_gather_handle is not None or not group.param_gather_dispatched:
                group.finish_param_sync(skip_next_bucket_dispatch=is_dispatched_elsewhere)

    def start_reducing(self) -> None:
        """Start the gradient reduction, after the last micro-batch's backward."""
        if not self._wrapper.ddp_config.overlap_grad_reduce:
            return
        if not any(group.is_last_microbatch for group in self._groups):
            return  # Groups are few, parameters are many.
        for parameter, group in self._gradients:
            if group.is_last_microbatch:
                # Recomputation can add to a gradient in several parts, each of which is counted.
                for _ in range(group.golden_per_param_grad_ready_counts.get(parameter, 1)):
                    group.register_grad_ready(parameter, self._wrapper.force_all_reduce)

    @contextlib.contextmanager
    def hooks_off(self) -> Iterator[None]:
        """Disable the parameter-gathering hooks, for a capture between iterations."""
        if not self._gathers_late:
            yield
            return
        self._wrapper.disable_forward_pre_hook(param_sync=False)
        try:
            yield
        finally:
            self._wrapper.enable_forward_pre_hook()


def _save_state(block: torch.nn.Module) -> Callable[[], None]:
    """Copy the state that a forward pass changes; return a function that restores it.

    It includes buffers (counts of expert bias), expert metrics, slot usage of sync-free experts
    and RNG states that are tensors, but not gradients. The backend saves generators.
    """
    from megatron.core.transformer.moe.moe_logging import get_moe_metrics_tracker

    tensors = [*block.buffers()]
    tensors += [entry.values for entry in get_moe_metrics_tracker().metrics.values()]
    tensors += [capacity.largest for capacity in _capacities(block)]
    saved = [tensor.clone() for tensor in tensors]
    tracker = get_cuda_rng_tracker()
    states = tracker.get_states()

    @torch.no_grad()
    def put_back() -> None:
        tracker.set_states(states)
        for tensor, value in zip(tensors, saved, strict=True):
            tensor.copy_(value)

    return put_back


@contextlib.contextmanager
def _exchanged_tensors_stay() -> Iterator[None]:
    with applied(table.EXCHANGES), exchanged_tensors.kept():
        yield


def _generators() -> list[torch.Generator]:
    from megatron.core.tensor_parallel.random import get_all_rng_states

    return list(get_all_rng_states().values())


@contextlib.contextmanager
def _transformer_engine_captures() -> Iterator[None]:
    """Set Transformer Engine's capture flag: otherwise some kernels wait for the GPU."""
    from transformer_engine.pytorch.graph import set_capture_end, set_capture_start

    set_capture_start()
    try:
        with without_fp8_skip_flag():
            yield
    finally:
        set_capture_end()
