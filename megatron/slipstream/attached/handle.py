# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``attach()``: offloads the activations of chosen sub-modules of any PyTorch model."""

from __future__ import annotations

import contextlib
import logging
import weakref
from collections import Counter
from collections.abc import Iterable, Iterator
from typing import Optional, Union

import torch

from megatron.slipstream.attached.engine import AttachedEngine
from megatron.slipstream.attached.forward import ForwardHooks
from megatron.slipstream.attached.names import Match, Pattern, find_modules
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.fine_grained_activation_offload.engine_setup import (
    host_limit,
    open_backend,
)
from megatron.slipstream.fine_grained_activation_offload.report import Report
from megatron.slipstream.fine_grained_activation_offload.run_metadata import environment, settings
from megatron.slipstream.launcher import rank
from megatron.slipstream.options.config_file import config_from_environment, log_settings
from megatron.slipstream.options.engine import ATTACH_RULES
from megatron.slipstream.options.fields import OffloadConfig, check_is_config, check_type
from megatron.slipstream.options.model import MODEL_RULES
from megatron.slipstream.options.rules import check_rules, require
from megatron.slipstream.patches import patching, table
from megatron.slipstream.patches.table import Feature
from megatron.slipstream.plan import files
from megatron.slipstream.plan.render import format_bytes, summarize, why_groups_stay

logger = logging.getLogger(__name__)

DEFAULT_MIN_NUMEL = 1024 * 1024
"""megatron-core's default."""


_OWN_OPTIONS = ("min_offloaded_tensor_size", "activation_offload_fraction")

_attached: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def attach(
    model: torch.nn.Module,
    patterns: Union[Pattern, Iterable[Pattern]],
    config: Optional[OffloadConfig] = None,
    *,
    min_offloaded_tensor_size: int = DEFAULT_MIN_NUMEL,
    activation_offload_fraction: float = 1.0,
) -> Attached:
    """Offload what chosen sub-modules of ``model`` save for backward.

    Call the model, ``backward()`` and the optimizer as before. Loss and gradients are bitwise
    identical to those without offloading. A module saves what autograd keeps: everything its
    operations save, or only its inputs if it runs in ``torch.utils.checkpoint``.

    Args:
        model: Any module whose ``forward`` takes one micro-batch. It may be wrapped by
            ``torch.compile``, DistributedDataParallel or ``fully_shard``, before or after the call.
        patterns: Sub-modules: glob patterns over qualified names such as ``"layers.*.mlp"``
            (``*`` is one part of a name, ``**`` any number), or module types. Each call of such a
            module is a group, offloaded as a whole. Of nested matches, only the outermost counts.
        config: Slipstream's own settings. None: those of the file that the environment variable
            ``SLIPSTREAM_CONFIG`` names, else the defaults.
        min_offloaded_tensor_size: Tensors whose memory has fewer elements stay on the device. A
            small view counts as all the memory that it keeps alive.
        activation_offload_fraction: Fraction of each pass's groups to offload, earliest first.

    Returns:
        A handle that ends or suspends offloading and reports what was offloaded. As a context
        manager it ends offloading on exit. The caller need not keep it.

    Raises:
        ValueError: An argument has the wrong type, a pattern adds no module, an option or its
            value is not supported, a chosen module is already attached, the model is on several
            GPUs, or the file cannot be used.
    """
    if not isinstance(model, torch.nn.Module):
        shown = repr(model) if len(repr(model)) < 80 else f"a {type(model).__name__}"
        raise ValueError(f"model={shown} is no module; give the torch.nn.Module to attach to")
    is_given = config is not None
    config = config_from_environment() if config is None else config
    check_is_config(config)
    require(check_rules(ATTACH_RULES, config))
    check_type("min_offloaded_tensor_size", min_offloaded_tensor_size, int)
    check_type("activation_offload_fraction", activation_offload_fraction, float)
    own = {
        "fine_grained_activation_offloading": True,
        "min_offloaded_tensor_size": min_offloaded_tensor_size,
        "activation_offload_fraction": activation_offload_fraction,
    }
    require(check_rules((rule for rule in MODEL_RULES if rule.name in _OWN_OPTIONS), own))
    if isinstance(patterns, (str, bytes, type, torch.nn.Module)) or not isinstance(
        patterns, Iterable
    ):
        patterns = [patterns]
    matches = find_modules(model, patterns)
    _check_not_attached(model, matches)
    _check_one_gpu(model)
    backend = open_backend(config)
    engine = AttachedEngine(
        backend,
        config.policy_options(),
        rank(),
        config.offload_verify,
        config.offload_native == "auto",
        model=model,
        min_offloaded_tensor_size=min_offloaded_tensor_size,
        activation_offload_fraction=activation_offload_fraction,
    )
    host_limit.join(engine.store.host_pool, config.offload_host_memory_limit_bytes)
    engine.report.settings = settings(own, config)
    attached = Attached(engine, model, matches)
    if isinstance(backend, CudaBackend):
        attached.keep_peak_statistics(model)
    logger.info(
        "Slipstream moves activations of %d modules of %s (backend %s): %s",
        len(matches),
        type(model).__name__,
        backend.name,
        ", ".join(sorted({match.label for match in matches})),
    )
    if not is_given:
        log_settings(config)
    return attached


class Attached:
    """Result of :func:`attach` for one model. Lives as long as the model does."""

    def __init__(
        self, engine: AttachedEngine, model: torch.nn.Module, matches: list[Match]
    ) -> None:
        self.engine = engine
        self.modules = tuple(match.name for match in matches)
        """Qualified names of the chosen modules, in the model's order."""
        self._model_name = type(model).__name__
        self._labels = tuple(match.label for match in matches)
        self._hooked = weakref.WeakSet([model, *(match.module for match in matches)])
        self._hooks = ForwardHooks(engine, model, matches)
        self._undo_patches: Optional[weakref.finalize] = None
        _attached.update(self._hooked)

    def keep_peak_statistics(self, model: torch.nn.Module) -> None:
        """Keep torch's peak memory statistics true until :meth:`detach`, or while the model is."""
        user = object()
        patching.apply(table.TABLE[Feature.PEAK_MEMORY], user)
        self._undo_patches = weakref.finalize(model, patching.undo, user)

    def __repr__(self) -> str:
        """List the chosen modules by pattern, and what moved in the last complete iteration."""
        rank = self.report().ranks[0]
        lines = [f"Attached to {self._model_name}, backend {self.engine.store.backend.name}"]
        if self.is_detached:
            lines[0] += ", detached"
        if "" in rank.reasons:
            lines.append(f"  {rank.reasons['']}")
        labels = Counter(self._labels)
        for label, count in labels.items():
            moved = rank.modules.get(label)
            lines.append(f"  {label}: {count} module{'s' * (count > 1)}")
            if moved is not None:
                lines[-1] += (
                    f", {moved.num_groups_moved} of {moved.num_groups} groups and "
                    f"{format_bytes(moved.d2h_bytes)} moved in the last iteration"
                )
            if label in rank.reasons:
                lines.append(f"    {rank.reasons[label]}")
        plan = self.engine.plan
        if plan is None:
            lines.append("  no plan yet: it is made after the first forward and backward")
        else:
            plan_line = f"{rank.num_iterations} iterations, plan: {summarize(plan)}"
            lines += [f"  {line}" for line in plan_line.splitlines()]
            lines += [f"    {reason}" for reason in why_groups_stay(plan.groups)]
        return "\n".join(lines)

    @property
    def is_detached(self) -> bool:
        return self._hooks.are_removed

    def detach(self) -> None:
        """Stop offloading; offloaded tensors are still reloaded for their backward. Idempotent.

        Raises ``RuntimeError`` while another thread runs the model with gradients, or its backward.
        """
        self._hooks.remove()
        _attached.difference_update(self._hooked)
        self.engine.close_when_done()
        if self._undo_patches is not None:
            self._undo_patches()

    @contextlib.contextmanager
    def suspended(self) -> Iterator[None]:
        """Context in which this thread offloads nothing; passes without gradients never do."""
        before = self.engine.do_offload
        self.engine.do_offload = False
        try:
            yield
        finally:
            self.engine.do_offload = before

    def report(self) -> Report:
        """Return this rank's figures for its last complete iteration.

        An iteration ends when no forward waits for its backward: with gradient accumulation, after
        each micro-batch.
        """
        self.engine.finish_report()
        self.engine.report.environment = environment()
        self.engine.report.reasons = dict(self._hooks.reasons)
        return Report([self.engine.report])

    def save_trace(self, path: str) -> None:
        """Write the trace of this rank's last complete iteration, for ``slipstream plan``.

        Raises ``RuntimeError`` if no iteration has been recorded, ``OSError`` if the file cannot be
        written.
        """
        if self.engine.plan is None:
            raise RuntimeError("no iteration has been recorded; train with the model first")
        files.save_trace(self.engine.plan.trace, path)

    def __enter__(self) -> Attached:
        if self.is_detached:
            raise RuntimeError("the handle is detached, so nothing would move; call attach() again")
        return self

    def __exit__(self, *_: object) -> None:
        self.detach()


def _check_not_attached(model: torch.nn.Module, matches: list[Match]) -> None:
    taken = [match.name for match in matches if match.module in _attached]
    if model in _attached:
        taken.insert(0, f"the model ({type(model).__name__})")
    if taken:
        raise ValueError(
            f"attach() is not supported for {taken[0]} because it is attached already; call "
            "detach() of the first attach(), or give all patterns to one call"
        )


def _check_one_gpu(model: torch.nn.Module) -> None:
    """Refuse models on several GPUs: the engine's copies follow the current GPU's stream."""
    devices = sorted({tensor.device.index for tensor in model.parameters() if tensor.is_cuda})
    if len(devices) > 1:
        raise ValueError(
            f"attach() is not supported with a model on several GPUs ({devices}) of one process "
            "because copies follow the stream of one; use one process for each GPU"
        )
