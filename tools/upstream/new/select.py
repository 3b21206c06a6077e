# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Put an engine of this package behind fine_grained_activation_offload."""

from __future__ import annotations

import logging
from collections.abc import Callable
from functools import partial
from typing import Any, Optional

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as facade
from megatron.core.transformer.module import GraphableMegatronModule

from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.engine_setup import (
    host_limit,
    open_backend,
)
from megatron.slipstream.fine_grained_activation_offload.regions import RegionFlag
from megatron.slipstream.integration.budget.memory_budget import MemoryBudget
from megatron.slipstream.integration.graphs.layer_copies import offload_layers
from megatron.slipstream.integration.seam import model_router
from megatron.slipstream.launcher import rank
from megatron.slipstream.options.budget import BUDGET_RULES
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.options.model import (
    LAYER_GRAPH_RULES,
    check_options_in_graphs,
    moves_in_layer_graphs,
)
from megatron.slipstream.options.rules import check_rules, require, warn_once
from megatron.slipstream.patches.model_calls import set_before_first_call

logger = logging.getLogger(__name__)

NOT_HERE = (
    "activation_memory_budget",  # before budget
    "offload_checkpoint_inputs",  # before budget
    "offload_report_path",
    "offload_trace_path",
)
"""Settings without effect: what they need is not part of this package."""
WITHOUT_WEIGHTS = frozenset(("core_attn", "moe_act", "mlp_act"))
"""Modules in which Transformer Engine's flag only sets marks that no code reads."""


def select(config: OffloadConfig) -> model_router.RoutedManager:
    """Make this engine the one that marks of layers go to, from the next iteration on.

    Args:
        config: Its settings. With those of the current engine nothing changes.

    Returns:
        The engine of the first model.

    Raises:
        ValueError: A setting is not supported, or the backend is not available.
    """
    for name in NOT_HERE:
        if getattr(config, name):
            value = getattr(config, name)
            raise ValueError(
                f"{name}={value} is not supported with offload_engine=slipstream because nothing "
                "here reads it; leave it out"
            )
    set_before_first_call(None)
    current = facade.PipelineOffloadManager.OFFLOAD_MGR
    if isinstance(current, model_router.RoutedManager):
        if current.config == config:
            return current.router.default
        current.router.close()
    backend = open_backend(config)
    router = model_router.Router(partial(_make_manager, config, backend), partial(_prepare, config))
    facade.PipelineOffloadManager.OFFLOAD_MGR = router.default
    logger.info("planned offloading moves activations (backend %s)", backend.name)
    return router.default


def deselect() -> None:
    """Give the marks of layers to the built-in engine again, and free the host memory."""
    set_before_first_call(None)
    current = facade.PipelineOffloadManager.OFFLOAD_MGR
    if isinstance(current, model_router.RoutedManager):
        facade.PipelineOffloadManager.OFFLOAD_MGR = None
        current.router.close()


def select_at_first_call(options: Any) -> None:
    """Check the settings, and :func:`select` the engine when a model with offloading is called.

    Args:
        options: Has the settings as attributes; defaults hold for those that it lacks.

    Raises:
        ValueError: A setting is wrong.
    """
    defaults = OffloadConfig()
    given = {name: getattr(options, name, value) for name, value in vars(defaults).items()}
    config = OffloadConfig(**given)
    if getattr(options, "cuda_graph_impl", None) not in (None, "none"):  # before graphs
        raise ValueError(
            f"cuda_graph_impl={options.cuda_graph_impl} is not supported with "
            "offload_engine=slipstream because its copies would not be part of the graphs; set "
            "offload_engine=megatron or cuda_graph_impl=none"
        )
    require(check_rules(LAYER_GRAPH_RULES, options))  # since graphs
    require(check_rules(BUDGET_RULES, Facts(options, config)))  # since budget
    set_before_first_call(partial(select, config))


def _prepare(
    config: OffloadConfig, chunk: Any, find_engine: Callable[[], model_router.RoutedManager]
) -> list[Callable[[], None]]:
    """Prepare a model chunk before it runs; return functions that undo it."""
    undo: list[Callable[[], None]] = []
    facts = Facts(chunk.config, config, has_gpu=torch.cuda.is_available())
    require(check_rules(BUDGET_RULES, facts))  # since budget
    if moves_in_layer_graphs(facts):  # since graphs
        warn_once(check_options_in_graphs(facts))
        layers = [one for one in chunk.modules() if isinstance(one, GraphableMegatronModule)]
        undo += offload_layers(layers, getattr(chunk, "vp_stage", None) or 0, find_engine)
    return undo


def _make_manager(
    config: OffloadConfig, backend: Backend, router: model_router.Router
) -> model_router.RoutedManager:
    is_native = config.offload_native == "auto"
    arguments = (backend, config.policy_options(), rank(), config.offload_verify, is_native)
    manager = model_router.RoutedManager(router, *arguments)
    host_limit.join(manager.store.host_pool, config.offload_host_memory_limit_bytes)
    manager.config = config
    manager.engine.regions.flag = _region_flag()
    manager.engine.moves_checkpoint_inputs = config.moves_checkpoint_inputs
    if config.activation_memory_budget is not None:  # since budget
        manager.budget = MemoryBudget(manager.engine, config.activation_memory_budget)
    return manager


def _region_flag() -> Optional[RegionFlag]:
    """Return Transformer Engine's flag that lets its modules' saved tensors move, or None."""
    if not torch.cuda.is_available():
        return None
    try:
        from megatron.core.extensions.transformer_engine import cpu_offload
    except ImportError:
        return None
    return (
        None
        if cpu_offload is None
        else RegionFlag(cpu_offload, "CPUOffloadEnabled", WITHOUT_WEIGHTS)
    )
