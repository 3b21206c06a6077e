# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares the engines in one process, on the same weights, gradients and data.

Layers read the offloading options when they are built, so there are two models: one built without
them ('off') and one with them. The second shares the first one's parameters. Both engines serve the
second; the one to run is put behind megatron-core's seam for the duration of a step.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
from garbage import give_back_unused_memory
from megatron_models import build_chunks, make_config, micro_batches, run_schedule, use_gpu, wrap
from model_case import ModelCase

from benchmarks.case import Case, Variant
from benchmarks.ways import Way

Chunks = Sequence[torch.nn.Module]

SIZE_LIMIT = {"min_offloaded_tensor_size": 1024 * 1024}
"""megatron-core's default, for each engine unless the case sets another value."""
NUM_DATA = 4
"""Number of iterations with different data; routing, and so what experts save, differs."""


class BaseModel:
    """The model without offloading, and the data of all engines; lives as long as its case.

    [Note: One wrapper for data parallelism]
    All engines share parameters and so gradients, which are reduced by one
    ``DistributedDataParallel`` whose hooks see the backward of every engine. It wraps the model
    without offloading and is never called: when gradients are reduced after the last micro-batch,
    its forward does nothing itself.
    """

    def __init__(self, case: Case) -> None:
        from megatron.core import parallel_state

        self.case = case
        config = make_config(case.model)
        self.chunks: Chunks = build_chunks(case.model, config)
        self._wrapped = wrap(config, self.chunks) if case.model.dp > 1 else []
        self.reduce_with(config)
        dp_rank = parallel_state.get_data_parallel_rank()
        self._data = [
            list(micro_batches(case.model, step, case.num_micro_batches, dp_rank))
            for step in range(NUM_DATA)
        ]

    def reduce_with(self, config: Any) -> None:
        """Make schedules that run with ``config`` reduce gradients over data-parallel ranks."""
        if self._wrapped:
            config.finalize_model_grads_func = self._finalize

    def _finalize(self, _: Any, *arguments: Any, **options: Any) -> None:
        from megatron.core.distributed import finalize_model_grads

        finalize_model_grads(self._wrapped, *arguments, **options)

    def run(self, chunks: Chunks, iteration: int) -> list[torch.Tensor]:
        """Run forward and backward of one iteration, with data parallelism up to reduced gradients.

        Without it gradients accumulate.

        Returns:
            The losses.
        """
        for wrapper in self._wrapped:
            wrapper.zero_grad_buffer()  # type: ignore[operator]
        return run_schedule(self.case.model, chunks, self._data[iteration % NUM_DATA])


class Engine(Way):
    """An engine behind megatron-core's seam. ``manager`` is None for 'off'."""

    has_marks = True

    def __init__(self, label: str, base: BaseModel, chunks: Chunks, manager: Any = None) -> None:
        self.label = label
        self.manager = manager
        self.is_ours = label.startswith("slipstream")
        self._base = base
        self._chunks = chunks

    def run(self, iteration: int) -> list[torch.Tensor]:
        """Run one iteration with this engine behind the seam; return its losses."""
        with behind_the_seam(self.manager, self._chunks):
            return self._base.run(self._chunks, iteration)

    def close(self) -> None:
        """Free the host memory."""
        if self.is_ours:
            self.manager.close()
        self.manager = None


class Comparison:
    """Engines on two models that share parameters: one without offloading, one for the others.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self._base = BaseModel(case)
        self._chunks: Chunks = ()
        self._built_for: Optional[Variant] = None

    def build(self, variant: Variant, label: str, options: Mapping[str, Any]) -> Way:
        """See :class:`benchmarks.ways.Comparison`."""
        if label != "off" and self._built_for != variant:
            self._chunks = ()
            self._chunks = build_twin(self._base, self._base.case.model, variant.modules)[0]
            self._built_for = variant
        return make_engine(self._base, label, self._chunks, options)


def seam() -> Any:
    """Return the class whose ``OFFLOAD_MGR`` is the engine behind megatron-core's options."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload

    return fine_grained_activation_offload.PipelineOffloadManager


@contextlib.contextmanager
def behind_the_seam(manager: Any, chunks: Chunks = ()) -> Iterator[None]:
    """Put ``manager`` behind megatron-core's offloading options, as ``install()`` does.

    Args:
        manager: The engine; None for none.
        chunks: The chunks that run inside the context.
    """
    from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
    from megatron.slipstream.integration.seam.p2p_sync import disable_p2p_host_sync
    from megatron.slipstream.patches import table
    from megatron.slipstream.patches.table import Feature

    holder = seam()
    before, holder.OFFLOAD_MGR = holder.OFFLOAD_MGR, manager
    undo: list[Callable[[], None]] = []
    if use_gpu() and isinstance(manager, PipelineOffloadManager):
        table.apply(Feature.ENGINE_ON_GPU)
        undo = [disable_p2p_host_sync(chunk) for chunk in chunks]
    try:
        yield
    finally:
        holder.OFFLOAD_MGR = before
        table.undo(Feature.ENGINE_ON_GPU)
        for restore in undo:
            restore()


def build_twin(
    base: BaseModel, model: ModelCase, modules: Sequence[str], **offload: Any
) -> tuple[list[torch.nn.Module], Any]:
    """Build the model again with other settings and the parameters of ``base``.

    Args:
        base: The model.
        model: Its new settings.
        modules: Modules to mark.
        offload: Options of megatron-core in addition to those of the case.

    Returns:
        Its chunks and their ``TransformerConfig``.

    Raises:
        ValueError: megatron-core refuses the modules.
    """
    # Its own initial values are discarded at once.
    model = dataclasses.replace(
        model, overrides=model.overrides | {"perform_initialization": False}
    )
    offload = {**SIZE_LIMIT, **base.case.offload, **offload}
    with own_module_names():
        config = make_config(model, modules, **offload)
        base.reduce_with(config)
        chunks = build_chunks(model, config)
    for chunk, twin in zip(base.chunks, chunks, strict=True):
        share_parameters(chunk, twin)
    give_back_unused_memory()
    return chunks, config


@contextlib.contextmanager
def own_module_names() -> Iterator[None]:
    """Context in which a configuration may name modules that only our engine moves."""
    from megatron.slipstream.patches import table
    from megatron.slipstream.patches.table import Feature

    table.apply(Feature.MODULE_NAMES)
    try:
        yield
    finally:
        table.undo(Feature.MODULE_NAMES)


def share_parameters(source: torch.nn.Module, target: torch.nn.Module) -> None:
    """Make ``target`` use the parameters of ``source`` (and so their gradients).

    Raises:
        ValueError: The two have different parameters.
    """
    modules = dict(target.named_modules())
    for path, module in source.named_modules():
        twin = modules[path]
        for name, parameter in module._parameters.items():
            own = twin._parameters[name]
            if (parameter is None) != (own is None) or (
                parameter is not None and own is not None and parameter.shape != own.shape
            ):
                raise ValueError(f"{path}.{name} differs between the two models")
            # Not by assignment, which Transformer Engine's modules intercept.
            twin._parameters[name] = parameter


def make_engine(base: BaseModel, label: str, chunks: Chunks, options: Mapping[str, Any]) -> Engine:
    """Create the engine called ``label``; ``options`` are Slipstream's (``OffloadConfig``).

    Raises:
        ValueError: An option is unknown or not supported.
        RuntimeError: The engine cannot run here.
    """
    if label == "off":
        return Engine(label, base, base.chunks)
    if label == "megatron":
        if not use_gpu():
            raise RuntimeError(
                "megatron-core's own engine moves CUDA tensors only, and torch sees no GPU"
            )
        return Engine(label, base, chunks, seam()())
    return Engine(label, base, chunks, make_slipstream(options))


def make_slipstream(options: Mapping[str, Any]) -> Any:
    """Create Slipstream's engine with these ``OffloadConfig`` options, for :func:`behind_the_seam`.

    Raises:
        ValueError: An option is unknown or not supported.
    """
    from megatron.slipstream.integration import install

    # install() would replace and close an engine that it finds at the seam.
    with behind_the_seam(None):
        return install.install(offload_config(options))  # behind_the_seam() enables it


def offload_config(options: Mapping[str, Any]) -> Any:
    """Return the ``OffloadConfig`` with these options.

    Raises:
        ValueError: An option is unknown; the message names the nearest.
    """
    from megatron.slipstream.options.fields import OffloadConfig
    from megatron.slipstream.options.rules import nearest_flags

    names = [field.name for field in dataclasses.fields(OffloadConfig)]
    for name in options:
        if name not in names:
            hint = nearest_flags([name], names)
            raise ValueError(f"OffloadConfig has no option {name!r}{hint}")
    return OffloadConfig(**options)
