# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Forked commands and ranks inherit nothing of earlier tests."""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import random
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import new_process
import numpy
import pytest
import torch
from compile_extensions import remove_left_lock
from forked import run_function
from ranks import run_ranks

# What a fork inherits


def _settings(*_: Any) -> list[Any]:
    warnings.warn("not an error", UserWarning, stacklevel=1)
    drawn = [random.random(), float(numpy.random.rand()), torch.rand(1).item()]
    logger = logging.getLogger("megatron.slipstream")
    return [*drawn, str(torch.ones(1).dtype), logger.propagate, logger.level, gc.isenabled()]


def _settings_of_a_command() -> list[Any]:
    done = run_function(lambda: print(json.dumps(_settings())) or 0)  # type: ignore[func-returns-value]
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process is not forked with a GPU")
@pytest.mark.parametrize(
    "read", [_settings_of_a_command, lambda: run_ranks(1, _settings)[0]], ids=["command", "rank"]
)
def test_a_forked_process_inherits_no_settings_of_earlier_tests(
    read: Callable[[], list[Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    at_first = read()
    assert at_first[3:] == ["torch.float32", True, 0, True]
    logger = logging.getLogger("megatron.slipstream")
    monkeypatch.setattr(logger, "propagate", False)
    monkeypatch.setattr(logger, "level", logging.ERROR)
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(action="error"):
            for draw in (random.random, numpy.random.rand, lambda: torch.rand(1)):
                draw()
            assert read() == at_first
    finally:
        torch.set_default_dtype(torch.float32)


def _module(name: str, **attributes: Any) -> Callable[[pytest.MonkeyPatch], None]:
    def change(patch: pytest.MonkeyPatch) -> None:
        module = importlib.import_module(name)
        for attribute, value in attributes.items():
            patch.setattr(module, attribute, value)

    return change


CANNOT_BE_UNDONE = {
    "a process group": _module("torch.distributed", is_initialized=lambda: True),
    "megatron-core's groups": _module("megatron.core.parallel_state", _DATA_PARALLEL_GROUP=1),
    "megatron's arguments": _module("megatron.training.global_vars", _GLOBAL_ARGS=1),
    "megatron's number of micro-batches": _module(
        "megatron.core.num_microbatches_calculator", _GLOBAL_NUM_MICROBATCHES_CALCULATOR=1
    ),
    "patches": _module("megatron.slipstream.patches.patching", _applied={1: 1}),
}


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process is not forked with a GPU")
@pytest.mark.parametrize("name", [*CANNOT_BE_UNDONE, "hooks of saved tensors"])
def test_a_process_that_would_pass_on_more_is_not_forked(
    name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    new_process.check_can_fork()
    assert {*CANNOT_BE_UNDONE, "hooks of saved tensors"} == new_process.CANNOT_BE_UNDONE.keys()
    with contextlib.ExitStack() as stack:
        if name in CANNOT_BE_UNDONE:
            CANNOT_BE_UNDONE[name](monkeypatch)
        else:
            stack.enter_context(torch.autograd.graph.saved_tensors_hooks(id, id))
        for fork in (partial(run_function, lambda: 0), partial(run_ranks, 1, print)):
            with pytest.raises(AssertionError, match=f"would inherit {name} from this one"):
                fork()
    monkeypatch.undo()


@pytest.mark.skipif(torch.cuda.is_available(), reason="this process is not forked with a GPU")
def test_ranks_inherit_the_extension_whose_lock_they_would_take() -> None:
    from megatron.core.tensor_parallel import random

    if not hasattr(random, "_get_share_storage"):
        pytest.skip("this megatron-core has no such extension")
    assert run_ranks(1, lambda *_: random._share_storage_ext is not None) == [True]


def test_a_lock_that_a_killed_process_left_is_removed(tmp_path: Path) -> None:
    assert not remove_left_lock(tmp_path)
    lock = tmp_path / "lock"
    with lock.open("w"):
        assert not remove_left_lock(tmp_path)
        assert lock.exists()
    assert remove_left_lock(tmp_path)
    assert not lock.exists()


def test_a_patch_that_a_test_leaves() -> None:
    from megatron.slipstream.patches import patching, table

    table.apply(table.Feature.PADDED_ROUTING)
    assert patching.active() != []


def test_is_undone_before_the_next() -> None:
    from megatron.slipstream.patches import patching

    assert patching.active() == []
