# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""No option is without effect in silence: each cell of options and modes is as the rules say.

A new option fails here until it has a row in tools/option_modes.py.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Callable
from typing import Any

import pytest
import torch
from ranks import import_training, run_ranks

from megatron.slipstream.attached.handle import attach
from megatron.slipstream.integration import install
from megatron.slipstream.integration.entry import checks
from megatron.slipstream.options.fields import OffloadConfig, OffloadOptions
from megatron.slipstream.options.rules import Finding, check_rules
from megatron.slipstream.options.training import MACHINE_RULES
from tools.option_modes import OF_ENGINE, TABLE, Effect, Mode, effect

BASE = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --hidden-size 64
    --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32 --micro-batch-size 1
    --global-batch-size 8 --lr 1e-3 --train-iters 20 --eval-interval 100 --eval-iters 1
    --num-layers 2 --attention-dropout 0 --hidden-dropout 0 --bf16 --position-embedding-type rope
    --fine-grained-activation-offloading --offload-modules core_attn --ckpt-format torch
"""
_LAYERS = "--cuda-graph-impl transformer_engine --cuda-graph-modules attn --te-rng-tracker "
_LAYERS += "--cuda-graph-warmup-steps 15"
MODES = {
    Mode.EAGER: "",
    Mode.LAYER_GRAPHS: _LAYERS,
    Mode.PACKED_LAYER_GRAPHS: _LAYERS + " --sequence-packing greedy",
    Mode.CHUNK_GRAPHS: "--cuda-graph-granularity chunk",
    Mode.SYNC_FREE: "--num-experts 4 --moe-sync-free-experts --disable-bias-linear",
    Mode.MEGATRON: "--offload-engine megatron",
    Mode.CPU: "--transformer-impl local",
}
"""Flags of each mode of the training script."""

Found = dict[tuple[str, Mode], tuple[list[Finding], list[Finding]]]


def check(args: Any, words: list[str], has_gpu: bool) -> list[Finding]:
    torch.cuda.is_available = lambda: has_gpu
    try:
        findings = checks.check_options(args, words)
        # A pretended GPU has no driver to ask.
        return findings if has_gpu else findings + check_rules(MACHINE_RULES, args, has_gpu=False)
    finally:
        torch.cuda.is_available = lambda: False


def check_all(rank: int, num_ranks: int, port: int) -> Found:
    """For each cell, the findings without the option and with it."""
    torch.cuda.get_device_capability = lambda *_: (9, 0)
    import_training()
    found: Found = {}
    with checks.as_in_training(CUDA_DEVICE_MAX_CONNECTIONS="1"):
        checks.cpu_only.install_training_shims()
        for mode, flags in MODES.items():
            words = [*BASE.split(), *flags.split()]
            parsed = checks.parse_for(words, 1)
            for option, row in TABLE.items():
                args = copy.copy(parsed)
                before = check(args, words, mode is not Mode.CPU)
                vars(args).update({**row.beside, option: row.value})
                given = [*words, "--" + option.replace("_", "-")]
                found[option, mode] = before, check(args, given, mode is not Mode.CPU)
    return found


@pytest.fixture(scope="module")
def found() -> Found:
    (result,) = run_ranks(1, check_all)
    return result


CELLS = [(option, mode) for option in TABLE for mode in MODES]


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a GPU")
@pytest.mark.parametrize("option, mode", CELLS, ids=str)
def test_an_option_works_or_something_is_said(option: str, mode: Mode, found: Found) -> None:
    before, after = found[option, mode]
    assert [f for f in before if f.severity == "error"] == [], "the mode itself is accepted"
    errors = [f for f in after if f.severity == "error"]
    warnings = [f for f in after if f.severity == "warning" and option in f.text]
    expected, row = effect(option, mode), TABLE[option]
    assert bool(errors) == (expected is Effect.REFUSED), errors
    # With the cure it is the mode itself, which is accepted.
    names = (option, *row.beside)
    assert all(f.cure and any(name in f.text for name in names) for f in errors), errors
    if mode not in row.late:
        assert bool(warnings) == (expected is Effect.WARNED), warnings
    assert all(finding.cure for finding in warnings)


PROBES: dict[str, tuple[Callable[[Any], Any], Any]] = {
    "offload_backend": (lambda e: e.store.backend.name, "cpu-lazy"),
    "offload_release_lag": (lambda e: e.options.release_lag, 3),
    "offload_prefetch_depth": (lambda e: e.options.prefetch_depth, 3),
    "offload_target_memory_gib": (lambda e: e.options.target_memory_bytes, 2**30),
    "offload_max_overhead_percent": (lambda e: e.options.max_overhead_percent, 1.0),
    "activation_memory_budget": (lambda e: getattr(e, "budget", None) is not None, True),
    "offload_host_memory_limit_bytes": (lambda e: e.store.host_pool.limit_bytes, 1 << 30),
    "offload_native": (lambda e: e.store.is_native, False),
    "offload_verify": (lambda e: e.store.verifier is not None, True),
    "offload_nvtx_ranges": (lambda e: e.store.backend.names_ranges, True),
    "offload_checkpoint_inputs": (lambda e: getattr(e, "engine", e).moves_checkpoint_inputs, True),
}
"""What each setting changes in an engine, for the values of the table."""


def engine_of(mode: Mode, config: OffloadConfig) -> Any:
    """The engine that the settings make."""
    if mode is Mode.ATTACH:
        return attach(torch.nn.Sequential(torch.nn.Linear(2, 2)), "0", config).engine
    installed = install.install(config)
    if mode is not Mode.CHUNK_GRAPHS:
        return installed
    limit_bytes = installed.store.host_pool.limit_bytes
    return installed.make_graph_engine(limit_bytes, config.offload_verify)


ENGINES = (Mode.EAGER, Mode.CHUNK_GRAPHS, Mode.ATTACH)


@pytest.mark.parametrize("mode", ENGINES, ids=str)
@pytest.mark.parametrize("option", PROBES)
def test_a_setting_reaches_every_engine(option: str, mode: Mode) -> None:
    if effect(option, mode) is Effect.REFUSED:
        pytest.skip("refused: see test_attach_takes_an_option_refuses_it_or_has_none")
    read, expected = PROBES[option]
    settings = {"offload_backend": "cpu", option: TABLE[option].value}
    assert read(engine_of(mode, OffloadConfig(**settings))) == expected
    # Engines in graphs are Python's in any case.
    if (option, mode) != ("offload_native", Mode.CHUNK_GRAPHS):
        assert read(engine_of(mode, OffloadConfig(offload_backend="cpu"))) != expected


def test_every_setting_of_an_engine_has_a_probe() -> None:
    of_files = {"offload_trace_path", "offload_report_path"}
    assert set(PROBES) == set(OF_ENGINE) - of_files - {"offload_engine"}


def test_each_option_has_a_row() -> None:
    from megatron.slipstream.options.fields import GROUPS

    ours = {field.name for group, _ in GROUPS for field in dataclasses.fields(group)}
    assert set(TABLE) == ours | {*OffloadOptions.__annotations__}
    assert set(OF_ENGINE) == {field.name for field in dataclasses.fields(OffloadConfig)}


@pytest.mark.parametrize("option", TABLE)
def test_attach_takes_an_option_refuses_it_or_has_none(option: str) -> None:
    expected = effect(option, Mode.ATTACH)
    parameters = inspect.signature(attach).parameters
    is_own = option in OF_ENGINE
    assert (expected is Effect.ABSENT) == (not is_own and option not in parameters)
    if expected is Effect.ABSENT:
        return
    value = TABLE[option].value
    settings = {"offload_backend": "cpu", **({option: value} if is_own else {})}
    more = {} if is_own else {option: value}
    model = torch.nn.Sequential(torch.nn.Linear(2, 2))
    if expected is Effect.REFUSED:
        with pytest.raises(ValueError, match=f"{option}=.*; "):
            attach(model, "0", OffloadConfig(**settings))
        return
    attach(model, "0", OffloadConfig(**settings), **more).detach()
