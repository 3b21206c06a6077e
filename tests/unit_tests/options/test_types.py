# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A value of a wrong type, or an invalid launcher variable, is one error that names it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from forked import run_module, run_script

from megatron.slipstream import launcher
from megatron.slipstream.launcher import check_launcher, num_local_ranks
from megatron.slipstream.options.fields import OffloadConfig

ROOT = Path(__file__).resolve().parents[3]

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 64 --num-layers 2 --hidden-size 32
    --num-attention-heads 2 --seq-length 16 --max-position-embeddings 16 --micro-batch-size 1
    --global-batch-size 1 --lr 1e-3 --train-iters 1 --eval-iters 0 --log-interval 1
""".split()

no_gpu = pytest.mark.skipif(torch.cuda.is_available(), reason="the flags are those without a GPU")


@pytest.mark.parametrize(
    "name, value, cure",
    [
        ("offload_release_lag", "2", "has the wrong type; set a valid integer"),
        ("offload_release_lag", 1.5, "has the wrong type; set a valid integer"),
        ("offload_release_lag", True, "has the wrong type; set a valid integer"),
        ("offload_host_memory_limit_bytes", "10GB", "has the wrong type; set a valid integer"),
        ("offload_nvtx_ranges", "no", "has the wrong type; set a valid boolean"),
        ("offload_trace_path", 3, "has the wrong type; set a valid string"),
        ("offload_target_memory_gib", "3", "has the wrong type; set a valid number"),
        ("offload_target_memory_gib", float("inf"), "is no device peak; set the GiB"),
        ("offload_target_memory_gib", float("nan"), "is no device peak; set the GiB"),
        ("offload_max_overhead_percent", True, "is no limit; set by how many percent"),
        ("offload_max_overhead_percent", float("inf"), "is no limit; set by how many percent"),
        ("offload_backend", None, "is not a choice; set 'auto', 'cuda', 'cpu' or 'cpu-lazy'"),
        ("offload_native", "on", "is not a choice; set 'auto' or 'off'"),
        ("offload_engine", "slip", "is not a choice; set 'slipstream' or 'megatron'"),
        ("offload_native", True, "is not a choice; set 'auto' or 'off'"),
    ],
)
def test_a_value_of_another_type_is_an_error_that_names_it(
    name: str, value: Any, cure: str
) -> None:
    given = "(" + "|".join(re.escape(f"{name}={text}") for text in (repr(value), str(value))) + ")"
    with pytest.raises(ValueError, match=f"^{given} {cure}"):
        OffloadConfig(**{name: value})


@pytest.mark.parametrize(
    "variable, value",
    [
        ("RANK", "zero"),
        ("RANK", "-1"),
        ("LOCAL_RANK", "1.5"),
        ("WORLD_SIZE", "0"),
        *(("LOCAL_WORLD_SIZE", text) for text in ("many", "0", "-1", "1.5", "")),
    ],
)
def test_a_variable_of_a_launcher_that_is_no_number_is_named(
    variable: str, value: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    check_launcher()
    monkeypatch.setenv(variable, value)
    message = f"^{variable}='{value}' is not supported because it is no number of "
    with pytest.raises(ValueError, match=message):
        check_launcher()
    if variable == "LOCAL_WORLD_SIZE":
        with pytest.raises(ValueError, match=message):
            num_local_ranks()
    if variable == "RANK":
        with pytest.raises(ValueError, match=message):
            launcher.rank()


def test_the_number_of_processes_on_the_node(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "8")
    assert num_local_ranks() == 8
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert num_local_ranks() == 1


@no_gpu
@pytest.mark.releases
def test_a_training_needs_an_interval_of_evaluation_or_has_a_default(tmp_path: Path) -> None:
    done = run_script(ROOT / "pretrain_gpt.py", *FLAGS, folder=tmp_path)
    if done.returncode == 0:
        return  # Older releases have a default.
    assert done.returncode == 2, done.stderr
    assert "error: eval_interval is not set" in done.stderr
    assert "Traceback" not in done.stderr
    words = ["doctor", "--no-bandwidth", "--", *FLAGS]
    seen = run_module("megatron.slipstream.cli", *words, folder=tmp_path)
    assert "eval_interval is not set" in " ".join(seen.stdout.split())
    cured = [*FLAGS, "--eval-interval", "10"]
    assert run_script(ROOT / "pretrain_gpt.py", *cured, folder=tmp_path).returncode == 0
