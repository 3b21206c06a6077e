# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The seam is what megatron-core's wheel uses today; a difference is named before it bites."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch

from megatron.slipstream.config import OffloadConfig
from megatron.slipstream.fine_grained_activation_offload.manager import PipelineOffloadManager
from megatron.slipstream.fine_grained_activation_offload.markers import CommitMark
from megatron.slipstream.integration import mcore

ENGINE_CLASSES = {
    "OffloadTensorPool",
    "OffloadTensorGroup",
    "PipelineOffloadManager",
    "ChunkOffloadHandler",
}
CHUNK_VARIABLES = {"cur_forward_chunk", "cur_backward_chunk", "cpu_offload_handler"}


def _seam_source() -> ast.Module:
    spec = find_spec("megatron.core.pipeline_parallel.fine_grained_activation_offload")
    assert spec is not None
    assert spec.origin is not None
    return ast.parse(Path(spec.origin).read_text())


def _facade_nodes() -> Iterator[ast.AST]:
    """Everything in the module that is not megatron-core's own engine."""
    for node in _seam_source().body:
        if not (isinstance(node, ast.ClassDef) and node.name in ENGINE_CLASSES):
            yield from ast.walk(node)


def _is_instance_call(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "get_instance"
    )


def _names_used_of_manager() -> set[str]:
    names = set()
    for node in _facade_nodes():
        if isinstance(node, ast.Attribute) and (
            _is_instance_call(node.value)
            or (isinstance(node.value, ast.Name) and node.value.id == "mgr")
        ):
            names.add(node.attr)
    return names


def _names_used_of_chunks() -> set[str]:
    names = set()
    for node in _facade_nodes():
        if not isinstance(node, ast.Attribute):
            continue
        owner = node.value
        name = owner.id if isinstance(owner, ast.Name) else getattr(owner, "attr", None)
        if name in CHUNK_VARIABLES and node.attr not in CHUNK_VARIABLES:
            names.add(node.attr)
    return names


def _explain(used: set[str], known: frozenset[str]) -> str:
    lines = [f"  + {name} is used now" for name in sorted(used - known)]
    lines += [f"  - {name} is not used any more" for name in sorted(known - used)]
    return "megatron-core's use of the offload manager has changed:\n" + "\n".join(lines)


def test_the_wheel_uses_of_the_manager_what_we_know_of() -> None:
    used = _names_used_of_manager()
    # Entered as a context manager through get_context() as well.
    assert used == mcore.MANAGER_CONTRACT, _explain(used, mcore.MANAGER_CONTRACT)


def test_the_wheel_uses_of_chunks_what_we_know_of() -> None:
    used = _names_used_of_chunks()
    assert used == mcore.CHUNK_CONTRACT, _explain(used, mcore.CHUNK_CONTRACT)


def test_our_manager_and_mark_have_what_the_wheel_uses() -> None:
    manager = mcore.install(OffloadConfig(offload_backend="cpu"))
    try:
        missing = {
            name
            for name in mcore.MANAGER_CONTRACT
            if not hasattr(type(manager), name) and name not in vars(manager)
        }
        assert missing == set()
        starts = {name for name in mcore.CHUNK_CONTRACT if "start" in name}
        for name in mcore.CHUNK_CONTRACT - starts:
            assert callable(getattr(CommitMark, name))
    finally:
        mcore.uninstall()


def test_the_facade_passes_on_a_tensor_that_nothing_marks() -> None:
    """[Note: One mark per group]: a start must leave no trace in the graph."""
    facade = mcore.mcore_offload
    manager = mcore.install(OffloadConfig(offload_backend="cpu"))
    try:
        manager.init_model_chunk_offload_handler(0, None, None, 1)
        tensor = torch.ones(4, requires_grad=True)
        assert facade.fine_grained_offloading_group_start(tensor, "core_attn") is tensor
        result = facade.fine_grained_offloading_group_offload(tensor, "core_attn")
        assert result is not tensor
        assert [str(step) for step in manager._recorder.steps] == [
            "0.0.core_attn:FS",
            "0.0.core_attn:FC",
        ]
        result.sum().backward()
        assert str(manager._recorder.steps[-1]) == "0.0.core_attn:BU"
    finally:
        mcore.uninstall()


def test_init_takes_what_the_models_pass() -> None:
    """Read off the facade's own call, so that a new argument shows."""
    ours = set(
        inspect.signature(PipelineOffloadManager.init_model_chunk_offload_handler).parameters
    )
    for cls in _seam_source().body:
        if isinstance(cls, ast.ClassDef) and cls.name == "FineGrainedActivationOffloadingInterface":
            (method,) = [
                item
                for item in cls.body
                if isinstance(item, ast.FunctionDef) and item.name == "init_chunk_handler"
            ]
            assert {argument.arg for argument in method.args.args} <= ours
            return
    pytest.fail("the wheel has no FineGrainedActivationOffloadingInterface")


def test_installing_twice_keeps_the_engine_and_another_config_replaces_it() -> None:
    first = mcore.install(OffloadConfig(offload_backend="cpu"))
    assert mcore.install(OffloadConfig(offload_backend="cpu")) is first
    second = mcore.install(OffloadConfig(offload_backend="cpu", offload_release_lag=2))
    assert second is not first
    assert mcore.installed() is second
    mcore.uninstall()
    assert mcore.installed() is None
    assert mcore.mcore_offload.PipelineOffloadManager.OFFLOAD_MGR is None


def test_the_built_in_engine_needs_no_install() -> None:
    with pytest.raises(ValueError, match=r"offload_engine='megatron' is not supported.*set"):
        mcore.install(OffloadConfig(offload_engine="megatron"))


def test_suspended_ends_as_it_began() -> None:
    manager = mcore.install(OffloadConfig(offload_backend="cpu"))
    try:
        with mcore.suspended():
            assert not manager.do_offload
            with mcore.suspended():
                assert not manager.do_offload
            assert not manager.do_offload
        assert manager.do_offload
    finally:
        mcore.uninstall()


def test_the_guard_that_nemo_rl_puts_around_forward_only_passes_works() -> None:
    """It reaches for OFFLOAD_MGR, do_offload, disable_offload() and enable_offload()."""
    mcore.install(OffloadConfig(offload_backend="cpu"))
    try:
        engine = mcore.mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
        assert engine.do_offload
        engine.disable_offload()
        assert not engine.do_offload
        engine.enable_offload()
        assert engine.do_offload
    finally:
        mcore.uninstall()


def test_a_report_without_an_engine_says_what_to_call() -> None:
    mcore.uninstall()
    with pytest.raises(RuntimeError, match=r"call install\(\) first"):
        mcore.report()
