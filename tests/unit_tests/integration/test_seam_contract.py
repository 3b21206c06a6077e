# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The interface is the one that the installed megatron-core uses; differences are reported."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from megatron.slipstream.fine_grained_activation_offload.markers import CommitMark
from megatron.slipstream.integration import install
from megatron.slipstream.integration.seam.compat import defaults_of_later_options
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import releases
from megatron.slipstream.plan.trace import StepKind

pytestmark = pytest.mark.releases

ENGINE_CLASSES = {
    "OffloadTensorPool",
    "OffloadTensorGroup",
    "PipelineOffloadManager",
    "ChunkOffloadHandler",
}
CHUNK_VARIABLES = {"cur_forward_chunk", "cur_backward_chunk", "cpu_offload_handler"}


MANAGER_CONTRACT = frozenset(
    """__enter__ __exit__ cur_forward_chunk d2h_stream disable_offload enable_offload
    flush_delayed_groups h2d_stream init_model_chunk_offload_handler pop_forward_chunk
    push_offload_groups reset""".split()
)
"""Methods of the manager that every release uses, outside of its own engine."""

CHUNK_CONTRACT = frozenset(
    """on_group_commit_backward on_group_commit_forward on_group_start_backward
    on_group_start_forward""".split()
)
"""Methods of the results of ``cur_forward_chunk`` (commit) and ``pop_forward_chunk`` (start). Our
``pop_forward_chunk`` returns None: see [Note: One mark per group]."""


def _manager_contract() -> frozenset[str]:
    """Methods of the manager that the installed release uses, outside of its own engine."""
    if not releases.is_since("0.19"):
        return MANAGER_CONTRACT | {"mark_not_offloadable"}
    names = "_in_replay cuda_graph_event cuda_graph_stream mark_not_offload"
    return MANAGER_CONTRACT | set(names.split())


def _seam_source() -> ast.Module:
    spec = find_spec("megatron.core.pipeline_parallel.fine_grained_activation_offload")
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
    used, known = _names_used_of_manager(), _manager_contract()
    # Entered as a context manager through get_context() as well.
    assert used == known, _explain(used, known)


def test_the_wheel_uses_of_chunks_what_we_know_of() -> None:
    used = _names_used_of_chunks()
    assert used == CHUNK_CONTRACT, _explain(used, CHUNK_CONTRACT)


def test_models_that_pass_no_rank_are_of_a_release_whose_marks_get_no_name() -> None:
    """One fact of the facade decides both in ``compat``."""
    calls = [
        node
        for node in _facade_nodes()
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr == "on_group_commit_forward"
    ]
    assert calls
    for call in calls:
        gets_name = any(isinstance(value, ast.Name) and value.id == "name" for value in call.args)
        assert gets_name == releases.is_since("0.19")


def test_our_manager_and_mark_have_what_the_wheel_uses() -> None:
    manager = install.install(OffloadConfig(offload_backend="cpu"))
    missing = {
        name
        for name in _manager_contract()
        if not hasattr(type(manager), name) and name not in vars(manager)
    }
    assert missing == set()
    starts = {name for name in CHUNK_CONTRACT if "start" in name}
    for name in CHUNK_CONTRACT - starts:
        assert callable(getattr(CommitMark, name))


def _end_group(tensor: torch.Tensor, name: str, **options: bool) -> torch.Tensor:
    """The facade's function under its name of today, or of 0.18."""
    facade = install.mcore_offload
    prefix = "fine_grained_offloading_group_"
    end = getattr(facade, prefix + "offload", None) or getattr(facade, prefix + "commit")
    return end(tensor, name, **options)


VALUES = {
    "pp_rank": 3,
    "vp_size": 2,
    "vp_stage": 1,
    "min_offloaded_tensor_size": 7,
    "delta_offload_bytes_across_pp_ranks": 5,
    "activation_offload_fraction": 0.5,
    "max_inflight_offloads": 4,
}
"""Arguments of models at the start of a pass; new arguments are not among them."""


def _begin_pass(**changed: object) -> None:
    """A model's call, with the arguments that the installed release has."""
    begin = install.mcore_offload.FineGrainedActivationOffloadingInterface.init_chunk_handler
    begin(**{name: (VALUES | changed)[name] for name in inspect.signature(begin).parameters})


@pytest.fixture
def manager() -> PipelineOffloadManager:
    return install.install(OffloadConfig(offload_backend="cpu"))


def test_the_facade_passes_on_a_tensor_that_nothing_marks(manager: PipelineOffloadManager) -> None:
    """[Note: One mark per group]: a start must leave no trace in the graph."""
    _begin_pass(vp_stage=None)
    tensor = torch.ones(4, requires_grad=True)
    start = install.mcore_offload.fine_grained_offloading_group_start
    assert start(tensor, "core_attn") is tensor
    result = _end_group(tensor, "core_attn")
    assert result is not tensor
    assert [str(step) for step in manager.engine.recorder.steps] == [
        "0.0.core_attn:FS",
        "0.0.core_attn:FC",
    ]
    result.sum().backward()
    assert str(manager.engine.recorder.steps[-1]) == "0.0.core_attn:BU"


def test_a_group_ends_by_its_name_not_by_its_place(manager: PipelineOffloadManager) -> None:
    """A layer that recomputes a module marks its end without having marked its start."""
    _begin_pass()
    tensor = torch.ones(4, requires_grad=True)
    start = install.mcore_offload.fine_grained_offloading_group_start
    start(tensor, "attn_norm")
    start(tensor, "attn_proj")
    for name in ("core_attn", "attn_norm", "attn_proj"):
        tensor = _end_group(tensor, name)
    ended = [
        step.name for step in manager.engine.recorder.steps if step.kind is StepKind.FORWARD_COMMIT
    ]
    assert ended == ["attn_norm", "attn_proj"]
    tensor.sum().backward()
    used = [
        step.name for step in manager.engine.recorder.steps if step.kind is StepKind.BACKWARD_USE
    ]
    assert used == ["attn_proj", "attn_norm"]


def test_commits_are_delayed_while_a_graph_is_launched_and_keep_their_order(
    manager: PipelineOffloadManager,
) -> None:
    """delay_offload_until_cuda_graph: the host launches the next graph first."""
    if "_in_replay" not in _manager_contract():
        pytest.skip(f"{releases.release()} does not say whether a graph is being launched")
    facade = install.mcore_offload.FineGrainedActivationOffloadingInterface
    _begin_pass()
    tensor, names = torch.ones(4, requires_grad=True), ["expert_fc1", "moe_act"]
    for name in names:
        install.mcore_offload.fine_grained_offloading_group_start(tensor, name)
    facade.enter_replay()
    for name in names:
        tensor = _end_group(tensor, name, delay_offload=True)
    facade.exit_replay()

    def named(kind: StepKind) -> list[str]:
        return [step.name for step in manager.engine.recorder.steps if step.kind is kind]

    assert named(StepKind.FORWARD_COMMIT) == []
    facade.flush_delayed_groups()
    assert named(StepKind.FORWARD_COMMIT) == names
    facade.flush_delayed_groups()
    assert named(StepKind.FORWARD_COMMIT) == names, "once"
    tensor.sum().backward()
    assert named(StepKind.BACKWARD_USE) == names[::-1]


def test_what_models_say_when_a_pass_begins_arrives(manager: PipelineOffloadManager) -> None:
    _begin_pass()
    (chunk,) = manager.engine.now.passes
    assert (chunk.vp_stage, chunk.min_offloaded_tensor_size) == (1, 7)
    options, defaults = manager.engine.options, defaults_of_later_options()
    for name in defaults.keys() & VALUES.keys():
        said = VALUES if releases.is_since("0.19") else defaults
        assert getattr(options, name) == said[name]


def test_what_later_models_say_is_a_warning_and_no_error(
    manager: PipelineOffloadManager, caplog: pytest.LogCaptureFixture
) -> None:
    begin = manager.init_model_chunk_offload_handler
    pass_arguments = (0, None, 0, 1)[not releases.is_since("0.19") :]
    for _ in range(2):
        begin(*pass_arguments, later=None)
        begin(*pass_arguments, buffer_size_gib=4)
    assert [record.getMessage() for record in caplog.records] == [
        "buffer_size_gib=4 has no effect with Slipstream's engine, which does not know it; set "
        "offload_host_memory_limit_bytes to limit host memory"
    ]


def test_the_pipeline_rank_is_known_though_a_model_does_not_say_it(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    from megatron.core import parallel_state

    monkeypatch.setattr(parallel_state, "model_parallel_is_initialized", lambda: True)
    monkeypatch.setattr(parallel_state, "get_pipeline_model_parallel_rank", lambda: 3)
    _begin_pass()
    assert manager.report.pp_rank == 3


def test_uninstalling_gives_megatrons_own_marks_back(manager: PipelineOffloadManager) -> None:
    install.uninstall()
    for name in ("group_start", "group_offload", "group_commit"):
        function = getattr(install.mcore_offload, f"fine_grained_offloading_{name}", None)
        assert function is None or not hasattr(function, "__wrapped__")


def test_marks_of_megatrons_own_engine_are_its_own(
    manager: PipelineOffloadManager, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An engine that replaces ours without uninstall() gets its marks as before."""
    ended = []
    mark = SimpleNamespace(on_group_commit_forward=lambda *arguments: ended.append(arguments))
    other = SimpleNamespace(cur_forward_chunk=lambda: mark)
    monkeypatch.setattr(install.mcore_offload.PipelineOffloadManager, "OFFLOAD_MGR", other)
    _end_group(torch.ones(4, requires_grad=True), "core_attn")
    assert len(ended) == 1
    assert ended[0][-1] == []


def test_installing_twice_keeps_the_engine_and_another_config_replaces_it() -> None:
    first = install.install(OffloadConfig(offload_backend="cpu"))
    assert install.install(OffloadConfig(offload_backend="cpu")) is first
    second = install.install(OffloadConfig(offload_backend="cpu", offload_release_lag=2))
    assert second is not first
    assert install.installed() is second
    install.uninstall()
    assert install.installed() is None
    assert install.mcore_offload.PipelineOffloadManager.OFFLOAD_MGR is None


def test_the_built_in_engine_needs_no_install() -> None:
    with pytest.raises(ValueError, match=r"offload_engine='megatron' is not supported.*set"):
        install.install(OffloadConfig(offload_engine="megatron"))


def test_suspended_ends_as_it_began() -> None:
    manager = install.install(OffloadConfig(offload_backend="cpu"))
    with install.suspended():
        assert not manager.do_offload
        with install.suspended():
            assert not manager.do_offload
        assert not manager.do_offload
    assert manager.do_offload


def test_the_guard_that_nemo_rl_puts_around_forward_only_passes_works() -> None:
    """It uses OFFLOAD_MGR, do_offload, disable_offload() and enable_offload()."""
    install.install(OffloadConfig(offload_backend="cpu"))
    engine = install.mcore_offload.PipelineOffloadManager.OFFLOAD_MGR
    assert engine.do_offload
    engine.disable_offload()
    assert not engine.do_offload
    engine.enable_offload()
    assert engine.do_offload


def test_a_report_without_an_engine_says_what_to_call() -> None:
    with pytest.raises(RuntimeError, match=r"call install\(\) first"):
        install.report()
