# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""No option is without effect in silence: each cell of options and modes is as the rules say.

A new option fails here until it has a row in tools/option_modes.py.
"""

from __future__ import annotations

import ast
import copy
import dataclasses
import inspect
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from ranks import run_ranks
from training_runs import prepare_training

from megatron.slipstream.attached.handle import attach
from megatron.slipstream.integration import install
from megatron.slipstream.integration.entry import checks
from megatron.slipstream.options.fields import OffloadConfig, OffloadOptions
from megatron.slipstream.options.rules import Finding, check_rules
from megatron.slipstream.options.training import MACHINE_RULES
from tools.option_modes import OF_ENGINE, TABLE, Effect, Mode, effect

TESTS = Path(__file__).parents[1]
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


TESTED_BY = {
    "fine_grained_activation_offloading": "fine_grained_activation_offload/test_manager.py::"
    "test_gradients_are_those_without_the_engine",
    "offload_modules": "integration/test_recorded_shapes.py::test_as_much_leaves_as_planned",
    "min_offloaded_tensor_size": "integration/test_seam_contract.py::"
    "test_what_models_say_when_a_pass_begins_arrives",
    "activation_offload_fraction": "plan/test_candidates.py::"
    "test_the_fraction_keeps_the_latest_groups_of_a_pass_rounded_down",
    "delta_offload_bytes_across_pp_ranks": "plan/test_candidates.py::"
    "test_delta_keeps_whole_groups_until_rank_times_delta_bytes_stay",
    "fine_grained_offloading_max_inflight_offloads": "plan/test_inflight.py::"
    "test_a_plan_keeps_to_the_limit",
    "delay_offload_until_cuda_graph": "integration/test_seam_contract.py::"
    "test_commits_are_delayed_while_a_graph_is_launched_and_keep_their_order",
    "offload_engine": "integration/test_seam_contract.py::"
    "test_the_built_in_engine_needs_no_install",
    "offload_backend": "attached/test_attach.py::test_loss_and_gradients_are_those_without",
    "offload_release_lag": "plan/test_build.py::"
    "test_memory_is_let_go_release_lag_commits_after_its_own",
    "offload_prefetch_depth": "plan/test_build.py::"
    "test_a_copy_back_starts_prefetch_depth_uses_ahead_of_its_own",
    "offload_target_memory_gib": "plan/test_search.py::test_a_target_moves_as_little_as_it_takes",
    "offload_max_overhead_percent": "plan/test_search.py::test_what_hides_moves_at_no_overhead",
    "activation_memory_budget": "integration/test_memory_budget.py::"
    "test_training_is_bitwise_that_without_and_never_above_the_budget",
    "offload_host_memory_limit_bytes": "integration/test_shared_host_limit.py::"
    "test_models_of_several_attach_calls_stay_within_one_limit",
    "offload_native": "fine_grained_activation_offload/test_native.py::"
    "test_both_issue_the_same_operations",
    "offload_checkpoint_inputs": "integration/test_checkpointed_modules.py::"
    "test_the_rule_says_what_happens",
    "offload_verify": "fine_grained_activation_offload/test_verify.py::"
    "test_a_correct_engine_passes_and_the_guard_ends",
    "offload_trace_path": "integration/test_installed_files.py::"
    "test_files_are_written_once_when_training_ends",
    "offload_report_path": "integration/test_installed_files.py::"
    "test_files_are_written_once_when_training_ends",
    "offload_nvtx_ranges": "fine_grained_activation_offload/test_ranges.py::"
    "test_each_action_has_a_range_of_its_name",
    "sequence_packing": "packed_sequences/test_training_path.py::"
    "test_the_loss_of_a_batch_is_that_of_its_documents_one_by_one",
    "thd_max_packed_sequences": "packed_sequences/test_batch.py::"
    "test_more_than_the_limits_allow_is_refused",
    "thd_max_tokens": "options/test_rules.py::test_what_goes_together",
    "dynamic_context_parallel": "integration/test_dynamic_context_parallel.py::"
    "test_documents_train_alike_in_groups_of_any_size",
    "min_dynamic_context_parallel_size": "integration/test_dynamic_batches.py::"
    "test_gradients_are_those_of_the_documents_one_by_one",
    "max_dynamic_context_parallel_size": "context_parallel/test_options.py::"
    "test_no_group_holds_a_document_longer_than_all_buffers",
    "dynamic_context_parallel_verify": "integration/test_dynamic_context_parallel.py::"
    "test_ranks_that_disagree_are_told_instead_of_waiting",
    "moe_sync_free_experts": "integration/test_sync_free_experts.py::"
    "test_results_are_those_of_experts_one_by_one",
    "moe_sync_free_capacity_factor": "integration/test_sync_free_ranks.py::"
    "test_the_factor_that_it_asks_for_is_enough",
    "loss_sequence_tiles": "integration/test_tiled_model.py::"
    "test_nothing_inside_is_larger_than_a_tile",
    "mlp_sequence_tiles": "integration/test_tiled_model.py::"
    "test_nothing_inside_is_larger_than_a_tile",
    "cuda_graph_granularity": "integration/test_chunk_graph_options.py::"
    "test_figures_of_replays_are_those_of_the_iteration",
    "tokenizer_json": "integration/test_training_errors.py::test_training_with_a_tokenizer_file",
    "megatron_output_path": "integration/test_megatron_output.py::test_a_dash_shows_it",
    "eval_before_training": "options/test_rules.py::"
    "test_a_rule_refuses_what_breaks_it_and_accepts_its_cures",
    "run_record_path": "integration/test_run_files.py::"
    "test_the_files_are_there_however_a_training_ends",
    "output_interval": "integration/test_run_files.py::"
    "test_the_files_are_there_however_a_training_ends",
}
"""The test of each option's effect."""


TOLD_LATER = {
    "offload_target_memory_gib": "fine_grained_activation_offload/test_run_facts.py::"
    "test_that_an_option_wants_times_is_told_where_none_will_come",
    "offload_max_overhead_percent": "fine_grained_activation_offload/test_run_facts.py::"
    "test_that_an_option_wants_times_is_told_where_none_will_come",
    "activation_memory_budget": "integration/test_memory_budget.py::"
    "test_without_readings_of_memory_layers_stay_recomputed_and_a_warning_says_so",
    "offload_nvtx_ranges": "fine_grained_activation_offload/test_ranges.py::"
    "test_without_a_gpu_it_is_said_that_there_are_none",
}
"""The test of each warning that comes after the start."""


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
    prepare_training()
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
    assert set(TABLE) == set(TESTED_BY)
    assert set(TABLE) == ours | {*OffloadOptions.__annotations__}
    assert set(OF_ENGINE) == {field.name for field in dataclasses.fields(OffloadConfig)}


def test_each_late_warning_has_a_test() -> None:
    assert {name for name, row in TABLE.items() if row.late} == set(TOLD_LATER)


@pytest.mark.parametrize("test", sorted({*TESTED_BY.values(), *TOLD_LATER.values()}))
def test_the_tests_named_here_exist(test: str) -> None:
    file, _, name = test.partition("::")
    tree = ast.parse((TESTS / file).read_text())
    assert name in {node.name for node in tree.body if isinstance(node, ast.FunctionDef)}


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
