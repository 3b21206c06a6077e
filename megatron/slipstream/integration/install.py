# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Install the engine behind megatron-core's own offloading options.

megatron-core sends every mark of its layers to the object in the class attribute
``PipelineOffloadManager.OFFLOAD_MGR``. :func:`install` sets it to our engine, so every model, flag
and framework with ``fine_grained_activation_offloading`` uses it. :mod:`compat` handles differences
between releases; :mod:`model_router` gives each of several models its own engine.
"""

from __future__ import annotations

import atexit
import contextlib
import logging
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any, Optional

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.fine_grained_activation_offload.engine_setup import (
    host_limit,
    open_backend,
)
from megatron.slipstream.fine_grained_activation_offload.regions import RegionFlag
from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.fine_grained_activation_offload.run_metadata import environment, settings
from megatron.slipstream.integration.layers.tiled_model import fill_tiles, tiles_of
from megatron.slipstream.integration.record.run_files import RunFiles
from megatron.slipstream.integration.seam import compat, model_router, module_groups
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.launcher import rank
from megatron.slipstream.options import preflight
from megatron.slipstream.options.budget import BUDGET_RULES
from megatron.slipstream.options.config_file import config_from_environment, log_settings
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.fields import OffloadConfig, check_is_config
from megatron.slipstream.options.model import (
    CHECKPOINT_RULES,
    check_options_in_graphs,
    moves_in_layer_graphs,
)
from megatron.slipstream.options.rules import check_rules, require, warn_once
from megatron.slipstream.patches import table
from megatron.slipstream.patches.model_calls import set_before_first_call
from megatron.slipstream.patches.patching import resolve
from megatron.slipstream.patches.table import Feature
from megatron.slipstream.plan import files
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.candidates import PolicyOptions

logger = logging.getLogger(__name__)

FLAG = "CPUOffloadEnabled"
WITHOUT_WEIGHTS = frozenset(("core_attn", "moe_act", "mlp_act"))
"""Modules in which :data:`FLAG` only makes Transformer Engine set marks that no code reads."""

_FEATURES = (
    *(Feature.ENGINE, Feature.ENGINE_ON_GPU, Feature.PEAK_MEMORY, Feature.CHECKPOINT_INPUTS),
    *(Feature.MODEL_CALLS, Feature.MODULE_NAMES, Feature.SYNC_FREE_DISPATCH),
)
"""Features that :func:`uninstall` undoes. The others belong to a model or a training run."""


def install(config: Optional[OffloadConfig] = None) -> PipelineOffloadManager:
    """Make Slipstream the engine behind megatron-core's offloading options in this process.

    Call it before the first training step; calling it again with the same config changes nothing.

    Args:
        config: Slipstream's own settings. None: those of the file that the environment variable
            ``SLIPSTREAM_CONFIG`` names, else the defaults.

    Returns:
        The engine. If the process trains several models, it is the first model's; each other model
        gets its own.

    Raises:
        ValueError: ``config`` has the wrong type, its ``offload_engine`` is 'megatron', its backend
            is not available, or the file cannot be used.
    """
    is_given = config is not None
    config = config_from_environment() if config is None else config
    check_is_config(config)
    if config.offload_engine != "slipstream":
        raise ValueError(
            f"offload_engine={config.offload_engine!r} is not supported with install() because "
            "that engine needs none; set offload_engine='slipstream' or do not call install()"
        )
    seam = mcore_offload.PipelineOffloadManager
    current = seam.OFFLOAD_MGR
    if isinstance(current, model_router.RoutedManager) and current.config == config:
        return current.router.default
    backend = open_backend(config)
    features = [Feature.ENGINE, Feature.MODULE_NAMES, Feature.SYNC_FREE_DISPATCH]
    if isinstance(backend, CudaBackend):
        features += [Feature.ENGINE_ON_GPU, Feature.PEAK_MEMORY]
    if config.moves_checkpoint_inputs:
        features.append(Feature.CHECKPOINT_INPUTS)
    options = config.policy_options()
    make_manager = partial(_make_manager, config, backend, options)
    manager = model_router.Router(make_manager, partial(_prepare_chunk, config)).default
    try:
        compat.check_models_announce_passes()
        compat.check_layers_are_graphed()
        table.apply(*features)
    except BaseException:
        manager.router.close()  # The current engine stays, and gets the host memory back.
        raise
    if isinstance(current, model_router.RoutedManager):
        _write_files()
        current.router.close()
    table.undo(*(feature for feature in _FEATURES if feature not in features))
    set_before_first_call(None)
    seam.OFFLOAD_MGR = manager
    if config.offload_report_path is not None or config.offload_trace_path is not None:
        global _files
        _files = RunFiles(config, rank(), sys.modules[__name__])
        manager.router.after_iteration = partial(_files.write_between, None)
    logger.info("Slipstream moves activations (backend %s)", manager.store.backend.name)
    if not is_given:
        log_settings(config)
    return manager


_files: Optional[RunFiles] = None
"""The files that the settings name, to be written at the end; None if they name none."""


@atexit.register
def _write_files() -> None:
    """Write the files when the engine is uninstalled, or at the latest when Python exits."""
    global _files
    files, _files = _files, None
    if files is not None:
        files.write_alone()


def _prepare_chunk(
    config: OffloadConfig,
    chunk: torch.nn.Module,
    find_engine: Callable[[], model_router.RoutedManager],
) -> list[Callable[[], None]]:
    """Prepare a model chunk before it runs; return functions that undo it."""
    patterns = (getattr(module, "hybrid_layer_pattern", None) for module in chunk.modules())
    own = {
        "has_gpu": torch.cuda.is_available(),
        "hybrid_layer_pattern": next(filter(None, patterns), None),
    }
    facts = Facts(chunk.config, config, tiles_of(chunk), own)
    require(check_rules(BUDGET_RULES, facts))
    undo = module_groups.mark_modules(chunk)
    if config.offload_checkpoint_inputs:
        # Not an error: the settings apply to all models, and some may recompute nothing.
        warn_once(check_rules(CHECKPOINT_RULES, facts))
    if not moves_in_layer_graphs(chunk.config):
        return undo
    warn_once(check_options_in_graphs(facts))
    from megatron.slipstream.integration.graphs.layers import (
        offload_in_graphs,
        take_packed_sequences,
    )

    # Only decoder layers are captured.
    if hasattr(chunk, "decoder"):
        undo += take_packed_sequences([chunk])
    return [*undo, *offload_in_graphs(chunk, find_engine)]


def _make_manager(
    config: OffloadConfig, backend: Backend, options: PolicyOptions, router: model_router.Router
) -> model_router.RoutedManager:
    is_native = config.offload_native == "auto"
    arguments = (backend, options, rank(), config.offload_verify, is_native)
    manager = model_router.RoutedManager(router, *arguments)
    host_limit.join(manager.store.host_pool, config.offload_host_memory_limit_bytes)
    manager.config = config
    manager.report.settings = settings(config)
    manager.engine.moves_checkpoint_inputs = config.moves_checkpoint_inputs
    manager.engine.regions.flag = _region_flag()
    manager.fill_report = fill_tiles
    if config.activation_memory_budget is not None:
        from megatron.slipstream.integration.budget.memory_budget import MemoryBudget

        manager.budget = MemoryBudget(manager.engine, config.activation_memory_budget)
    return manager


def install_at_first_call(
    config: Optional[OffloadConfig], before: Callable[[], None] = lambda: None
) -> None:
    """Call :func:`install` when a model with offloading is first called.

    For code that also runs in processes without a model, and before a process selects its GPU.
    ``before`` is called right before; its exceptions propagate from that call. Raises
    ``ValueError`` if ``config`` has the wrong type.
    """
    if config is not None:
        check_is_config(config)

    def install_now() -> None:
        before()
        install(config)

    if installed() is None:
        set_before_first_call(install_now)
        table.apply(Feature.MODEL_CALLS, Feature.MODULE_NAMES)


def uninstall() -> None:
    """Restore megatron-core's own engine, undo all patches and free the host memory."""
    seam = mcore_offload.PipelineOffloadManager
    current = seam.OFFLOAD_MGR
    set_before_first_call(None)
    _write_files()
    table.undo(*_FEATURES)
    if isinstance(current, model_router.RoutedManager):
        seam.OFFLOAD_MGR = None
        current.router.close()


installed = model_router.installed


def bind(model_chunks: Sequence[torch.nn.Module]) -> list[torch.nn.Module]:
    """Register chunks (virtual pipeline stages) as one model, with its own engine and plan.

    Needed only if a process trains several models; their chunks are otherwise assigned when first
    called. For megatron's ``ModelConfig.pre_wrap_hooks`` and Megatron-Bridge's
    ``register_pre_wrap_hook``. Calls :func:`install` if needed. Models whose configuration does not
    enable offloading are ignored.

    Args:
        model_chunks: All chunks of the model on this rank, wrapped or not.

    Returns:
        The same chunks.

    Raises:
        ValueError: The engine cannot be installed, or ``model_chunks`` is not a list of modules.
    """
    if not isinstance(model_chunks, Sequence) or not all(
        isinstance(chunk, torch.nn.Module) for chunk in model_chunks
    ):
        shown = type(model_chunks).__name__
        raise ValueError(f"model_chunks is a {shown}, not a list of modules; give [model]")
    from megatron.core.models.common.language_module.language_module import LanguageModule

    chunks = [
        module
        for chunk in model_chunks
        for module in chunk.modules()
        if isinstance(module, LanguageModule) and module.config.fine_grained_activation_offloading
    ]
    if chunks:
        if installed() is None:
            install()
        installed().router.bind(chunks)  # type: ignore[union-attr]
    return list(model_chunks)


@contextlib.contextmanager
def suspended() -> Iterator[None]:
    """Suspend offloading. Not needed for passes without gradients, which never offload."""
    manager = installed()
    with contextlib.nullcontext() if manager is None else manager.suspended():
        yield


def report(model: Optional[torch.nn.Module] = None) -> Report:
    """Return this rank's figures for its last complete iteration.

    Args:
        model: A chunk of the model, wrapped or not; None for the model trained last.

    Raises:
        RuntimeError: :func:`install` has not been called.
        ValueError: The model has not been trained with offloading.
    """
    manager = installed()
    if manager is None:
        raise RuntimeError("Slipstream is not installed in this process; call install() first")
    if model is not None:
        manager = manager.router.known_manager(model)
    manager.finish_report()
    manager.report.environment = environment()
    return Report([manager.report])


def save_trace(path: str) -> None:
    """Write the trace of this rank's last complete iteration, for ``slipstream plan``.

    Raises ``RuntimeError`` if :func:`install` has not been called, or nothing is recorded, and
    ``OSError`` if the file cannot be written.
    """
    manager = installed()
    if manager is None or manager.plan is None:
        raise RuntimeError("no iteration has been recorded; train with offloading first")
    seq_length = manager.report.settings.get("seq_length", 0)
    files.save_trace(replace(manager.plan.trace, seq_length=seq_length), path)


def plans() -> dict[int, Plan]:
    """Return ``{rank: plan}`` of this rank, for the report page; empty before it is recorded."""
    manager = installed()
    if manager is None or manager.plan is None:
        return {}
    return {manager.report.rank: manager.plan}


def gather_report() -> Report:
    """Return every rank's figures. A collective over the default process group."""
    mine = report()
    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return mine
    reports: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(reports, mine)
    return Report.merge(reports)


def _region_flag() -> Optional[RegionFlag]:
    """Return Transformer Engine's flag that lets its modules' saved tensors move, or None.

    If set, modules keep weights (and their ``main_grad``) by reference instead of saving them, and
    allocate each expert's input separately instead of as one block.
    """
    if not preflight.is_installed("transformer_engine"):
        return None
    owner, name = resolve(
        f"megatron.core.extensions.transformer_engine.cpu_offload.{FLAG}",
        "what Transformer Engine's modules save would stay",
    )
    return RegionFlag(owner, name, WITHOUT_WEIGHTS)
