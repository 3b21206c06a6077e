# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Engines, stores, groups and storages are freed, however offloading ends."""

from __future__ import annotations

import gc
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from expert_layers import in_a_process
from model_case import DENSE_MODULES, ModelCase
from tiny_gpt import build_chunks, make_config, run_step

from megatron.slipstream import attach
from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.chunk import ChunkOffloadHandler
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.fine_grained_activation_offload.native import native_module
from megatron.slipstream.fine_grained_activation_offload.storage import SavedStorage
from megatron.slipstream.integration import install
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import table

CASE = ModelCase("dense", num_layers=2, hidden_size=16, num_attention_heads=2, seq_length=4)
TYPES = (OffloadEngine, ActivationStore, ChunkOffloadHandler, OffloadTensorGroup, SavedStorage)
"""Counted in Python."""
NUM_STEPS = 3
"""The last one follows the plan of the first."""


class Fault(Exception):
    """Raised on purpose."""


def _alive() -> dict[str, int]:
    """The number of living objects of the engine, by type."""
    gc.collect()
    in_python = Counter(
        kind.__name__ for item in gc.get_objects() for kind in TYPES if isinstance(item, kind)
    )
    module = native_module()
    assert module is not None
    return {**in_python, **{f"{name} in C++": n for name, n in module.num_alive().items()}}


def _settings(native: str, **options: Any) -> OffloadConfig:
    return OffloadConfig(offload_backend="cpu-lazy", offload_native=native, **options)


def _train(chunks: Any = None, num_steps: int = NUM_STEPS) -> None:
    config = make_config(CASE, DENSE_MODULES)
    chunks = build_chunks(CASE, config) if chunks is None else chunks
    for step in range(num_steps):
        run_step(CASE, config, chunks, step, 1)


def _uninstall(native: str) -> None:
    install.install(_settings(native))
    _train()
    install.uninstall()


def _uninstall_without_training(native: str) -> None:
    install.install(_settings(native))
    install.uninstall()


def _install_with_other_settings(native: str) -> None:
    for prefetch_depth in (1, 2):
        install.install(_settings(native, offload_prefetch_depth=prefetch_depth))
        _train()


def _fail_in_training(native: str) -> None:
    install.install(_settings(native))
    chunks = build_chunks(CASE, make_config(CASE, DENSE_MODULES))
    _train(chunks)

    def fail(*_: Any) -> None:
        raise Fault

    chunks[0].output_layer.register_forward_pre_hook(fail)
    with pytest.raises(Fault):
        _train(chunks)
    install.uninstall()


def _fail_to_install(native: str) -> None:
    """With and without an engine that stays."""

    def fail(*_: Any) -> None:
        raise Fault

    for before in (None, _settings(native)):
        if before is not None:
            install.install(before)
            _train()
        kept = install.installed()
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(table, "apply", fail)
            with pytest.raises(Fault):
                install.install(_settings(native, offload_prefetch_depth=3))
        assert install.installed() is kept
        if before is not None:
            _train()
            install.uninstall()


def _delete_models(native: str) -> None:
    """Under one engine of the process."""
    install.install(_settings(native))
    first, second = (build_chunks(CASE, make_config(CASE, DENSE_MODULES)) for _ in range(2))
    install.bind(first)
    install.bind(second)
    _train(first)
    _train(second)
    assert len(install.installed().router.managers) == 2  # type: ignore[union-attr]


def _uninstall_before_backward(native: str) -> None:
    """What autograd keeps stays until it goes."""
    model, x = torch.nn.Sequential(torch.nn.Linear(8, 8)), torch.randn(8, 8)
    attached = attach(model, "*", _settings(native), min_offloaded_tensor_size=1)
    outputs = [model(x * 2) for _ in range(2)]
    outputs.pop().sum().backward()
    attached.detach()


def _detach(native: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh(), torch.nn.Linear(8, 8))
    attached = attach(model, ["0", "1"], _settings(native), min_offloaded_tensor_size=1)
    for _ in range(NUM_STEPS):
        model(torch.randn(8, 8)).sum().backward()
    attached.detach()


def _delete_an_attached_model(native: str) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(8, 8), torch.nn.Tanh())
    attach(model, "*", _settings(native), min_offloaded_tensor_size=1)
    for _ in range(NUM_STEPS):
        model(torch.randn(8, 8)).sum().backward()


ENDS: dict[str, Callable[[str], None]] = {
    "uninstall": _uninstall,
    "uninstall without training": _uninstall_without_training,
    "install with other settings": _install_with_other_settings,
    "an exception in training": _fail_in_training,
    "a failed install": _fail_to_install,
    "deleted models": _delete_models,
    "detach": _detach,
    "detach before backward": _uninstall_before_backward,
    "a deleted model": _delete_an_attached_model,
}


@pytest.mark.parametrize("native", ["auto", "off"])
@pytest.mark.parametrize("end", ENDS)
@in_a_process
def test_all_that_an_engine_held_is_freed(end: str, native: str) -> None:
    before = _alive()
    ENDS[end](native)
    after_one = _alive()
    for _ in range(3):
        ENDS[end](native)
    assert _alive() == after_one
    install.uninstall()
    assert _alive() == before


NOT_COLLECTED = {
    "Signal": "holds an event",
    "HostUsage": "holds numbers",
    "HostAllocation": "holds host memory and signals",
    "Layout": "holds host memory and signals",
    "Counters": "holds numbers and names",
    "HostTime": "holds numbers",
    "OffloadTensorGroup": "holds names and a trace",
    "ChunkOffloadHandler": "holds groups and names",
    "SavedStorage": "autograd owns it",
    "SavedTensor": "autograd owns it",
    "PackHook": "autograd owns it",
}
"""Types in C++ that are in no cycle that the garbage collector could free, and why."""


class _Anything:
    """An object with attributes."""

    device_type = name = "cpu"


@in_a_process
def test_cycles_through_objects_in_cpp_are_freed() -> None:
    module = native_module()
    assert module is not None
    has_gc = 1 << 14  # Py_TPFLAGS_HAVE_GC
    types = {name: kind for name, kind in vars(module).items() if isinstance(kind, type)}
    collected = {name for name, kind in types.items() if kind.__flags__ & has_gc}
    assert collected == {"Waits", "Store", "Steps", "Iteration"}
    assert set(types) == collected | set(NOT_COLLECTED)
    before = _alive()
    for name in ("backend", "pool", "copies", "trace"):
        held = {each: _Anything() for each in ("backend", "pool", "copies", "trace")}
        waits = module.Waits(held["backend"])
        store = module.Store(held["backend"], waits, held["pool"], held["copies"], [])
        steps = module.Steps(store, [], [], [], held["trace"])
        now = steps.begin([], None, None, False)
        held[name].cycle = (waits, store, now)  # type: ignore[attr-defined]
        del held, waits, store, steps, now
    assert _alive() == before
    assert not any(isinstance(item, _Anything) for item in gc.get_objects())
