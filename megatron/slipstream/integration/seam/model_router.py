# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One engine for each model that a process trains.

[Note: Which model a mark belongs to]
megatron-core holds one engine, and its marks do not identify the model. With one engine for two
models (a policy and its critic), each switch between them would deviate from the plan, and a
schedule that ran a reference model would end the iteration of the trained one. So each model has
its own engine, and megatron-core holds that of the model whose chunk was last called with
gradients. A patch of ``LanguageModule.__call__`` observes the calls: every GPT and hybrid model is
called through it, whatever its ``forward``. A call without gradients changes nothing.

[Note: Models with a forward of their own]
megatron-core's ``forward`` first announces the pass to the engine. A replacement (mcore-bridge's
models, verl's fused kernels) does not, so nothing would move. So the pass begins when the chunk is
called, and a later announcement by ``forward`` is ignored.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any, Optional, Protocol

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload

from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.engine_setup import host_limit
from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.integration.seam.gradients import Gradients
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.integration.seam.p2p_sync import disable_p2p_host_sync
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.options.model import moves_in_layer_graphs
from megatron.slipstream.patches.marks import marking_engine
from megatron.slipstream.patches.model_calls import tensors_in
from megatron.slipstream.plan.trace import StepKind

Prepare = Callable[[torch.nn.Module, Callable[[], "RoutedManager"]], list[Callable[[], None]]]
"""Prepares a model chunk before it runs, and returns functions that undo it. Its second argument
returns the engine of the chunk's model."""


_PrepareChunk = Callable[[torch.nn.Module], list[Callable[[], None]]]


class Budget(Protocol):
    """What keeps the iterations of a model within a limit on memory: ``MemoryBudget``."""

    @property
    def is_settled(self) -> bool: ...
    def call(self, chunk: torch.nn.Module, inputs: Any, attempt: Callable[[], Any]) -> Any: ...
    def enter(
        self, chunk: torch.nn.Module, tensors: Sequence[torch.Tensor], is_first: bool
    ) -> None: ...
    def leave(self, chunk: torch.nn.Module) -> None: ...
    def rescue(self, chunk: torch.nn.Module, failure: torch.OutOfMemoryError) -> None: ...
    def before_end(self) -> None: ...
    def after_end(self) -> None: ...
    def out_of_memory(
        self, failure: torch.OutOfMemoryError, because: str
    ) -> torch.OutOfMemoryError: ...
    def fill(self, report: RankReport) -> None: ...
    def close(self) -> None: ...


class RoutedManager(PipelineOffloadManager):
    """The engine of one of several models; ``router`` holds the others."""

    def __init__(self, router: Router, *arguments: Any) -> None:
        self.router = router
        super().__init__(OffloadEngine(*arguments))
        self.engine.switch = router
        self.config = OffloadConfig()
        """The settings from which it was created."""
        self.budget: Optional[Budget] = None
        """Keeps to ``activation_memory_budget``; None without one."""
        self.fill_report: Callable[[RankReport, Sequence[torch.nn.Module]], None] = lambda *_: None
        """Adds what is known of the model's chunks to its report."""

    @property
    def do_offload(self) -> bool:
        """False while offloading is suspended, for all models of the process."""
        return self.router.is_on

    @do_offload.setter
    def do_offload(self, is_on: bool) -> None:
        self.router.is_on = is_on
        for manager in self.router.managers:
            manager.engine.follow_in_python()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Suspend offloading for all models of the process."""
        before = self.do_offload
        self.disable_offload()
        try:
            yield
        finally:
            self.do_offload = before

    def init_model_chunk_offload_handler(self, *arguments: Any, **options: Any) -> None:
        """Begin a pass unless it has begun: [Note: Models with a forward of their own]."""
        if self.router.begins_pass:
            self.router.note_call()
            arguments = (*compat.missing_pass_arguments(), *arguments)
            super().init_model_chunk_offload_handler(*arguments, **options)

    def reset(self, **options: Any) -> None:
        """End the iteration of the model that a schedule ran; called when the schedule ends."""
        for manager in self.router.ended_by_schedule(self):
            # The schedule of an evaluation, too, ends with a reset.
            budget = manager.budget if manager.engine.now.has_begun else None
            if budget is not None:
                budget.before_end()
            super(RoutedManager, manager).reset(**options)
            if budget is not None:
                budget.after_end()
        self.router.num_iterations += 1
        self.router.after_iteration(self.router.num_iterations)

    def finish_report(self) -> None:
        """Complete the report, which also says how the model is divided into tiles and settings."""
        super().finish_report()
        if self.budget is not None:
            self.budget.fill(self.report)
        self.fill_report(self.report, self.router.chunks_of(self))

    @property
    def is_settled(self) -> bool:
        """Whether neither the plan nor the settings of layers will change."""
        return super().is_settled and (self.budget is None or self.budget.is_settled)

    def close(self) -> None:
        if self.budget is not None:
            self.budget.close()
        super().close()
        host_limit.leave(self.store.host_pool)

    def make_graph_engine(self, limit_bytes: Optional[int], num_verified: int) -> OffloadEngine:
        """Create an engine with the same settings for passes in graphs of whole chunks.

        It works in Python: a replay runs neither Python nor C++. ``num_verified`` passes of it are
        verified, and it has ``limit_bytes`` of host memory (None: no limit).
        """
        options = replace(self.options, host_memory_limit_bytes=limit_bytes)
        engine = OffloadEngine(self.store.backend, options, self.report.rank, num_verified)
        pool = engine.store.host_pool
        pool.part_of, pool.process_limit = self.store.host_pool, self.store.host_pool.process_limit
        engine.moves_checkpoint_inputs = self.engine.moves_checkpoint_inputs
        engine.regions.flag = self.engine.regions.flag
        return engine


class _Model:
    def __init__(self) -> None:
        self.manager: Optional[RoutedManager] = None
        """None until the model is trained: a reference model needs no host memory."""
        self._chunks: list[weakref.ref[torch.nn.Module]] = []
        self._undo: list[Callable[[], None]] = []

    def add(
        self, chunk: torch.nn.Module, copies_beside_compute: bool, prepare: _PrepareChunk
    ) -> None:
        """Add a chunk; if ``copies_beside_compute``, let the host run ahead of its exchanges."""
        self._chunks.append(weakref.ref(chunk))
        if copies_beside_compute:
            self._undo.append(disable_p2p_host_sync(chunk))
        output_layer = getattr(chunk, "output_layer", None)
        # Engines that alternate on one model, as in benchmarks, share its hooks.
        if (
            isinstance(output_layer, torch.nn.Module)
            and _output_begins not in output_layer._forward_pre_hooks.values()
        ):
            self._undo += [
                output_layer.register_forward_pre_hook(_output_begins).remove,
                output_layer.register_forward_hook(_output_ends).remove,
            ]
        # Last, so that a group that contains the output layer's product lies inside its marks.
        self._undo += prepare(chunk)

    def remove_hooks(self) -> None:
        """Remove all hooks of the chunks and restore their configurations."""
        while self._undo:
            self._undo.pop()()

    @property
    def chunks(self) -> list[torch.nn.Module]:
        return [chunk for chunk in (reference() for reference in self._chunks) if chunk is not None]

    def can_add(self, chunk: Any) -> bool:
        """Whether ``chunk`` can be another virtual pipeline stage of this model."""
        return all(
            _num_stages(other) == _num_stages(chunk) and stage_of(other) != stage_of(chunk)
            for other in self.chunks
        )


class Router:
    """Holds the models of a process and activates the engine of the one that runs."""

    def __init__(self, make_manager: Callable[[Router], RoutedManager], prepare: Prepare) -> None:
        self.is_on = True
        """False while offloading is suspended."""
        self._make_manager = make_manager
        self._prepare = prepare
        self._models: list[_Model] = []
        self._model_of: weakref.WeakKeyDictionary[torch.nn.Module, _Model] = (
            weakref.WeakKeyDictionary()
        )
        self._calls: list[Optional[RoutedManager]] = []
        """The running calls of chunks, innermost last; None for one without gradients."""
        self._steps_before: dict[RoutedManager, int] = {}
        """Mark count of each engine when a chunk was last called."""
        self.begins_pass = True
        """False while a model's announcement of a pass is ignored."""
        self.num_iterations = 0
        """Number of iterations that schedules have ended."""
        self.after_iteration: Callable[[int], None] = lambda num_iterations: None
        """Called after each of them with their number."""
        self.default = make_manager(self)
        """The engine of the first model."""
        self.default.store.backend.gradients = Gradients(lambda: self.chunks)

    @property
    def is_training(self) -> bool:
        """Whether the current forward may be followed by backward."""
        # A forward inside an autograd graph task is a recomputation.
        is_recomputed = torch._C._current_graph_task_id() != -1
        return self.is_on and torch.is_grad_enabled() and not is_recomputed

    @property
    def managers(self) -> list[RoutedManager]:
        """All engines, the default one first."""
        managers = [model.manager for model in self._models if model.manager is not None]
        return [self.default, *(one for one in managers if one is not self.default)]

    @property
    def chunks(self) -> list[torch.nn.Module]:
        return [chunk for model in self._models for chunk in model.chunks]

    def chunks_of(self, manager: RoutedManager) -> list[torch.nn.Module]:
        models = (model for model in self._models if model.manager is manager)
        return [chunk for model in models for chunk in model.chunks]

    def bind(self, chunks: Sequence[torch.nn.Module]) -> None:
        model = next((self._model_of[one] for one in chunks if one in self._model_of), None)
        if model is None:
            self._drop_dead_models()
            self._models.append(model := _Model())
        for chunk in chunks:
            if chunk not in self._model_of:
                self._model_of[chunk] = model
                copies_beside_compute = isinstance(self.default.store.backend, CudaBackend)
                model.add(chunk, copies_beside_compute, self._prepare_chunk)

    def _prepare_chunk(self, chunk: torch.nn.Module) -> list[Callable[[], None]]:
        reference = weakref.ref(chunk)

        def find_engine() -> RoutedManager:
            known = reference()
            assert known is not None
            return self.manager_of(known)

        return self._prepare(chunk, find_engine)

    def manager_of(self, chunk: torch.nn.Module) -> RoutedManager:
        """Return the engine of the model of ``chunk``; create one if needed.

        An unbound chunk is its own model. A virtual pipeline stage belongs to the newest model
        without that stage, preferably one built from the same configuration.
        """
        if chunk not in self._model_of:
            candidates = [model for model in reversed(self._models) if model.can_add(chunk)]
            config: Any = chunk.config
            alike = [m for m in candidates if any(other.config is config for other in m.chunks)]
            siblings = [*alike, *candidates][:1]
            self.bind([*(other for model in siblings for other in model.chunks), chunk])
        model = self._model_of[chunk]
        if model.manager is None:
            model.manager = self._new_manager()
            if moves_in_layer_graphs(chunk.config):
                # A replay costs the host nothing for each group, which a trial would measure.
                model.manager.engine.lifecycle.tries_plans = False
        return model.manager

    def known_manager(self, model: torch.nn.Module) -> RoutedManager:
        """Return the engine of a model, wrapped or not; ``ValueError`` if it was not trained."""
        for module in model.modules():
            known = self._model_of.get(module)
            if known is not None and known.manager is not None:
                return known.manager
        raise ValueError(
            f"model={type(model).__name__} has no engine because it has not been trained with "
            "fine_grained_activation_offloading=True; train it first"
        )

    def plan_nodes(self, chunk: Any, build: Callable[[], Any]) -> Any:
        """Run ``build``, which creates the nodes of a pass: [Note: Layers that run in nodes]."""
        with self.calling(chunk):
            nodes = build()
            manager = self._calls[-1]
            if manager is not None:
                manager.engine.run_in_nodes()
            return nodes

    def call(self, chunk: Any, inputs: Any, run: Callable[[], Any]) -> Any:
        """Call ``chunk`` by ``run``; the model's budget may repeat it."""

        def attempt() -> Any:
            with self.calling(chunk, inputs):
                return run()

        manager = self.manager_of(chunk) if self.is_training else None
        if manager is None or manager.budget is None:
            return attempt()
        return manager.budget.call(chunk, inputs, attempt)

    def out_of_memory(self, failure: torch.OutOfMemoryError) -> torch.OutOfMemoryError:
        """Return the error for a backward that ran out of memory, with settings that would fit."""
        for manager in self.managers:
            if manager.budget is not None and manager.engine.now.has_begun:
                return manager.budget.out_of_memory(failure, "a backward cannot be repeated")
        return failure

    @contextlib.contextmanager
    def calling(self, chunk: Any, inputs: Any = ()) -> Iterator[None]:
        """Context of a call of ``chunk``, with these arguments."""
        manager = self.manager_of(chunk) if self.is_training else None
        budget = None if manager is None else manager.budget
        seam = mcore_offload.PipelineOffloadManager
        before, began = seam.OFFLOAD_MGR, self.begins_pass
        self.note_call()
        self._calls.append(manager)
        try:
            if manager is not None:
                seam.OFFLOAD_MGR = manager
                manager.engine.wanted_modules = tuple(chunk.config.offload_modules or ())
                if budget is not None:
                    budget.enter(
                        chunk, tensors_in(inputs), is_first=not manager.engine.now.has_begun
                    )
                self.begins_pass = True
                if hasattr(chunk, "preprocess_for_fine_grained_offloading"):
                    chunk.preprocess_for_fine_grained_offloading()
            self.begins_pass = False
            yield
            if budget is not None:
                budget.leave(chunk)
        except BaseException:
            if manager is not None:
                manager.engine.regions.leave_open()
            raise
        finally:
            self.begins_pass = began
            self._calls.pop()
            if any(outer is not None for outer in self._calls):
                seam.OFFLOAD_MGR = before

    def note_call(self) -> None:
        self._steps_before = {manager: manager.engine.now.num_steps for manager in self.managers}

    def ended_by_schedule(self, current: RoutedManager) -> list[RoutedManager]:
        """Return the engines whose iteration ends with the schedule that notified ``current``.

        The schedule does not identify its model. A training schedule ends with backward, or the
        forward before it, so its model has passed marks since a chunk was last called. A model in
        the middle of its own iteration, whose loss or forward step runs the schedule, has not.
        """
        under_way = [manager for manager in self.managers if manager.engine.now.num_steps > 0]
        if not under_way:
            return [current]
        return [m for m in under_way if m.engine.now.num_steps != self._steps_before.get(m, 0)]

    def close(self) -> None:
        for manager in self.managers:
            manager.close()
        gradients = self.default.store.backend.gradients
        if gradients is not None:
            gradients.end()
        for model in self._models:
            model.remove_hooks()

    # Lifetime of models.

    def _new_manager(self) -> RoutedManager:
        self._drop_dead_models()
        trained = [model for model in self._models if model.manager is not None]
        if all(model.manager is not self.default for model in trained):
            return self.default
        return self._make_manager(self)

    def _drop_dead_models(self) -> None:
        for model in list(self._models):
            if model.chunks or (model.manager is not None and model.manager.engine.is_needed):
                continue
            self._models.remove(model)
            if model.manager is not None and model.manager is not self.default:
                model.manager.close()


@contextlib.contextmanager
def marks_go_to(manager: PipelineOffloadManager) -> Iterator[None]:
    """Send the marks of layers to this engine during a capture."""
    seam = mcore_offload.PipelineOffloadManager
    before, seam.OFFLOAD_MGR = seam.OFFLOAD_MGR, manager
    try:
        yield
    finally:
        seam.OFFLOAD_MGR = before


def installed() -> Optional[RoutedManager]:
    """Return the engine of the model trained last; None before ``install()`` is called."""
    current = mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
    return current if isinstance(current, RoutedManager) else None


def _output_begins(_: torch.nn.Module, inputs: tuple[Any, ...]) -> None:
    engine = marking_engine()
    if engine is not None:
        engine.mark_output(StepKind.OUTPUT_START)
        engine.mark_gradient(StepKind.OUTPUT_BACKWARD_END, tensors_in(inputs))


def _output_ends(_: torch.nn.Module, __: Any, logits: Any) -> None:
    engine = marking_engine()
    if engine is not None:
        engine.mark_output(StepKind.OUTPUT_END)
        engine.mark_gradient(StepKind.OUTPUT_BACKWARD_START, tensors_in(logits))


def _num_stages(chunk: Any) -> int:
    return getattr(chunk.config, "virtual_pipeline_model_parallel_size", None) or 1


def stage_of(chunk: Any) -> int:
    """Return the virtual pipeline stage of a chunk."""
    return getattr(chunk, "vp_stage", None) or 0
