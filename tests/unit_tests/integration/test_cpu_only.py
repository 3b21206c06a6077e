# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The shims that let megatron-core run without a GPU replace existing names only, never silently.

Replacing changes the whole process, so installs run in separate processes.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_script

from megatron.slipstream.integration.cpu import cpu_only
from megatron.slipstream.patches import patching
from megatron.slipstream.patches.patching import Patch
from megatron.slipstream.patches.releases import release

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.releases

needs_no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here")

_FACTS = """
import json, sys, warnings
warnings.simplefilter("ignore")
import torch
from megatron.slipstream.integration.cpu import cpu_only

def type_as_seen_from(module):
    names = {"__name__": module, "torch": torch}
    exec("def ask(): return torch.zeros(1).type()", names)
    return names["ask"]()

def device_count_as_seen_from(module):
    names = {"__name__": module, "torch": torch}
    exec("def ask(): return torch.cuda.device_count()", names)
    return names["ask"]()

facts = {"core": cpu_only.install_cpu_shims()}
once = torch.zeros
facts["core_again"] = cpu_only.install_cpu_shims()
facts["idempotent"] = torch.zeros is once
facts["training"] = cpu_only.install_training_shims()
facts["helpers"] = cpu_only.skip_helper_compilation()
facts["is_available"] = torch.cuda.is_available()
facts["devices"] = sorted({
    str(torch.zeros(2, device="cuda").device),
    str(torch.tensor([1], device=torch.device("cuda", 0)).device),
    str(torch.empty_like(torch.ones(1), device="cuda:0").device),
    str(torch.ones(1).to("cuda").device),
    str(torch.ones(1).to(device="cuda", dtype=torch.float64).device),
    str(torch.ones(1).cuda().device),
    str(torch.nn.Linear(1, 1).cuda().weight.device),
    str(torch.cuda.current_device()),
})
facts["meta_stays_meta"] = str(torch.zeros(1, device="meta").device)
facts["type_for_optimizer"] = type_as_seen_from("megatron.core.optimizer.clip_grads")
facts["type_for_others"] = type_as_seen_from("megatron.core.utils")
facts["count_for_initialize"] = device_count_as_seen_from("megatron.training.initialize")
facts["count_for_others"] = device_count_as_seen_from("megatron.training.training")

state = torch.cuda.get_rng_state()
first = torch.rand(3)
torch.cuda.set_rng_state(state)
facts["rng_restores"] = torch.equal(first, torch.rand(3))
torch.cuda.manual_seed(7)
first = torch.rand(3)
torch.manual_seed(7)
facts["rng_seeds"] = torch.equal(first, torch.rand(3))

from megatron.core.tensor_parallel.random import get_cuda_rng_tracker
tracker = get_cuda_rng_tracker()
tracker.add("drop", 99)
with tracker.fork("drop"):
    inside = torch.rand(3)
torch.manual_seed(99)
facts["tracker_forks"] = torch.equal(inside, torch.rand(3))

from megatron.core.transformer.moe import token_dispatcher
moved = token_dispatcher.maybe_move_tensor_to_cpu(torch.ones(2), as_numpy=True)
facts["numpy"] = type(moved).__name__

stream, event = torch.cuda.Stream(), torch.cuda.Event()
with torch.cuda.stream(stream):
    event.record(stream)
    torch.cuda.current_stream().wait_stream(stream)
    stream.wait_event(event)
torch.cuda.synchronize()
facts["events_complete"] = event.query()

from megatron.core.datasets import utils
utils.compile_helpers()  # would run make and exit the process
print("FACTS" + json.dumps(facts))
"""


@pytest.fixture(scope="module")
def facts(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The state of a process that has installed the shims."""
    script = tmp_path_factory.mktemp("facts") / "facts.py"
    script.write_text(_FACTS)
    done = run_script(script)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.split("FACTS")[1])


@needs_no_gpu
def test_installing_twice_replaces_once(facts: dict[str, Any]) -> None:
    assert facts["core"] is True
    assert facts["core_again"] is True
    assert facts["training"] is True
    assert facts["idempotent"] is True


@needs_no_gpu
def test_code_that_asks_for_a_gpu_gets_the_truth(facts: dict[str, Any]) -> None:
    assert facts["is_available"] is False
    assert facts["count_for_others"] == 0
    assert facts["type_for_others"] == "torch.FloatTensor"


@needs_no_gpu
def test_the_device_literal_means_the_cpu_everywhere(facts: dict[str, Any]) -> None:
    assert facts["devices"] == ["cpu"]
    assert facts["meta_stays_meta"] == "meta"


@needs_no_gpu
def test_optimizer_and_initialisation_see_a_gpu(facts: dict[str, Any]) -> None:
    assert facts["type_for_optimizer"] == "torch.cuda.FloatTensor"
    assert facts["count_for_initialize"] == 1


@needs_no_gpu
@pytest.mark.parametrize("fact", ["rng_restores", "rng_seeds", "tracker_forks"])
def test_the_cuda_generator_is_the_default_one(facts: dict[str, Any], fact: str) -> None:
    assert facts[fact] is True


@needs_no_gpu
def test_streams_and_events_order_nothing_and_never_block(facts: dict[str, Any]) -> None:
    assert facts["events_complete"] is True


@needs_no_gpu
def test_the_dispatcher_gets_numpy_when_it_asks(facts: dict[str, Any]) -> None:
    assert facts["numpy"] == "ndarray"


@needs_no_gpu
def test_helpers_are_not_compiled_where_there_is_no_makefile(facts: dict[str, Any]) -> None:
    assert facts["helpers"] is True


@pytest.mark.parametrize(
    "patch", [*cpu_only.CORE_SHIMS, *cpu_only.TRAINING_SHIMS], ids=lambda patch: patch.target
)
def test_every_replaced_symbol_exists_and_says_why(patch: Patch) -> None:
    if not patch.is_needed():
        pytest.skip(f"{release()} needs no {patch.target} replaced")
    patch.check()
    assert len(patch.reason) > 20


def test_nothing_is_replaced_on_a_machine_with_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    active = patching.active()
    before = torch.zeros
    assert cpu_only.install_cpu_shims() is False
    assert cpu_only.install_training_shims() is False
    assert torch.zeros is before
    assert patching.active() == active


def test_missing_affinity_tools_become_a_warning(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.core.pipeline_parallel import utils

    monkeypatch.setattr(utils, "set_ideal_affinity_for_current_gpu", lambda: 1 / 0)
    monkeypatch.setattr(cpu_only, "_importable", lambda module: module != "pynvml")
    monkeypatch.setattr(cpu_only.logger, "propagate", True)
    assert cpu_only.tolerate_missing_affinity_tools() is True
    utils.set_ideal_affinity_for_current_gpu()
    assert "nvidia-ml-py" in caplog.text
    patching.undo("training without affinity tools")
    with pytest.raises(ZeroDivisionError):
        utils.set_ideal_affinity_for_current_gpu()
    monkeypatch.setattr(cpu_only, "_importable", lambda module: True)
    assert cpu_only.tolerate_missing_affinity_tools() is False
