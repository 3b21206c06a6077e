# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A user's mistake gives a one-line error before training, exit code 2, and no files.

The shims and megatron's global variables stay in the forked process that each case runs in.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from forked import Done, run_function, run_script
from training_runs import prepare_training

from megatron.slipstream.options import datasets, preflight
from megatron.slipstream.options.rules import check_rules, require
from megatron.slipstream.patches import releases

ROOT = Path(__file__).resolve().parents[3]

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(), reason="the messages are those of a machine without a GPU"
)

MODEL = """
    --num-layers 2 --hidden-size 32 --num-attention-heads 2 --seq-length 16
    --max-position-embeddings 16 --micro-batch-size 1 --global-batch-size 1 --lr 1e-3
    --train-iters 1 --eval-iters 0 --eval-interval 1 --log-interval 1
""".split()
MOCK = "--mock-data --tokenizer-type NullTokenizer --vocab-size 64".split()
OFFLOAD = ["--fine-grained-activation-offloading", "--offload-modules"]


class Outcome(NamedTuple):
    """How a training process ended."""

    code: int
    errors: list[str]
    output: str


def _train(
    folder: Path, flags: Sequence[str], before: Callable[[], None] = lambda: None
) -> Outcome:
    """Run the entry with ``flags`` in a forked process whose working folder is ``folder``."""
    from megatron.slipstream.integration.entry import training

    prepare_training()

    def call() -> int:
        before()
        return training.main(list(flags))

    return _outcome(run_function(call, folder=folder))


def _outcome(done: Done) -> Outcome:
    output = done.stdout + done.stderr
    errors = [line for line in output.splitlines() if line.startswith("error:")]
    return Outcome(done.returncode, errors, output)


def _assert_refused(outcome: Outcome, folder: Path, *words: str) -> None:
    assert outcome.code == 2, outcome.output
    assert len(outcome.errors) == 1, outcome.output
    assert "Traceback" not in outcome.output
    for word in words:
        assert word in outcome.errors[0]
    assert list(folder.iterdir()) == []


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """An empty folder to start training in; a refusal leaves it empty."""
    path = tmp_path / "work"
    path.mkdir()
    return path


REFUSALS = {
    "unknown module": ([*OFFLOAD, "core_atn"], ["'core_atn'", "did you mean 'core_attn'?"]),
    "attn_proj alone": ([*OFFLOAD, "attn_proj"], ["'attn_proj'", "add 'core_attn'"]),
    "no module": (["--fine-grained-activation-offloading"], ["set offload_modules"]),
    "fraction": (
        [*OFFLOAD, "core_attn", "--activation-offload-fraction", "1.5"],
        ["activation_offload_fraction=1.5", "[0, 1]"],
    ),
    "experts of a dense model": ([*OFFLOAD, "moe_act"], ["num_moe_experts is not set"]),
    "negative lag": (["--offload-release-lag", "-1"], ["offload_release_lag=-1"]),
    "megatron's engine": (
        [*OFFLOAD, "core_attn", "--offload-engine", "megatron"],
        ["offload_engine=megatron", "set offload_engine=slipstream"],
    ),
    "cuda backend": (
        [*OFFLOAD, "core_attn", "--offload-backend", "cuda"],
        ["offload_backend=cuda", "set offload_backend=auto"],
    ),
    "flag with a typo": (
        ["--fine-grained-activation-offloding"],
        ["did you mean --fine-grained-activation-offloading?"],
    ),
    "value of another type": (["--hidden-size", "big"], ["--hidden-size", "'big'"]),
    "unknown engine": (["--offload-engine", "other"], ["--offload-engine", "slipstream"]),
    "megatron's bare assertion": (
        ["--num-attention-heads", "5"],
        ["hidden_size % args.num_attention_heads"],
    ),
    "layers of Transformer Engine": (
        ["--transformer-impl", "transformer_engine"],
        ["transformer_impl=transformer_engine", "set --transformer-impl local"],
    ),
    "hybrid model": (["--hybrid-layer-pattern", "M*"], ["hybrid_layer_pattern='M*'"]),
    "tokenizer file": (["--tokenizer-json", "no.json"], ["tokenizer_json=no.json", "No such file"]),
    "no iteration": (["--train-iters", "0"], ["train_iters=0", "set --train-iters to 1"]),
    "fewer than none": (["--train-iters", "-3"], ["train_iters=-3", "set --train-iters to 1"]),
    "no layer": (["--num-layers", "0"], ["num_layers=0", "set --num-layers to 1"]),
    "no token": (["--vocab-size", "0"], ["vocab_size=0", "set --vocab-size to 1"]),
    "a line every 0": (["--log-interval", "0"], ["log_interval=0", "set --log-interval to 1"]),
    "two sources": (["--data-path", "text"], ["data_path=", "mock_data=True", "leave --mock-data"]),
    "YAML": (["--yaml-cfg", "no.yaml"], ["yaml_cfg", "give the settings as flags"]),
    "packed rows": (
        ["--sequence-packing", "greedy", "--micro-batch-size", "2"],
        ["micro_batch_size=2", "sequence_packing=greedy", "set 1 and a larger seq_length"],
    ),
    "inputs of checkpoints that keep none": (
        [
            *(*OFFLOAD, "core_attn", "--offload-checkpoint-inputs"),
            *("--recompute-granularity", "selective", "--recompute-modules", "layernorm"),
        ],
        ["offload_checkpoint_inputs=True", "['layernorm']", "name one of core_attn, mlp"],
    ),
    "sequence parallelism": (
        ["--tensor-model-parallel-size", "2", "--sequence-parallel"],
        ["sequence_parallel=True", "without a GPU", "leave --sequence-parallel out"],
    ),
    "sharded grouped experts": (
        ["--num-experts", "2", "--moe-grouped-gemm", "--ckpt-format", "torch_dist"],
        ["moe_grouped_gemm=True", "without a GPU", "set --ckpt-format torch"],
    ),
    "nothing to evaluate first": (
        ["--eval-before-training"],
        ["eval_before_training=True", "eval_iters=0", "set --eval-iters to 1"],
    ),
    "nothing to evaluate before": (
        ["--eval-before-training", "--skip-train", "--eval-iters", "1"],
        ["eval_before_training=True", "skip_train=True", "leave --eval-before-training out"],
    ),
    "packing by another name": (
        ["--sequence-packing", "greedy", "--enable-cuda-graph"],
        ["cuda_graph_impl=local", "sequence_packing=greedy", "leave it out"],
    ),
}


@pytest.mark.releases
@pytest.mark.parametrize("case", REFUSALS)
def test_a_mistake_is_one_line_that_names_option_and_cure(case: str, folder: Path) -> None:
    flags, words = REFUSALS[case]
    if case == "fraction" and not releases.models_pass_their_rank():
        pytest.skip(f"{releases.release()} has no activation_offload_fraction")
    save = ["--save", "checkpoints", "--save-interval", "1", "--offload-report-path", "report.json"]
    _assert_refused(_train(folder, [*MODEL, *MOCK, *save, *flags]), folder, *words)


@pytest.mark.parametrize("packing, refused", [("balanced", True), ("greedy", False)])
def test_packs_of_several_corpora_are_not_balanced(
    packing: str, refused: bool, folder: Path, tmp_path: Path
) -> None:
    prefixes = [str(tmp_path / name) for name in "ab"]
    for prefix in prefixes:
        _write_dataset(Path(prefix))
    flags = [*MODEL, *MOCK[1:], "--data-path", *prefixes, "--split", "1,0,0"]
    flags += ["--data-cache-path", str(tmp_path / "cache"), "--sequence-packing", packing]
    outcome = _train(folder, flags)
    if refused:
        words = ["data_path with 2 corpora", "sequence_packing=balanced", "set data_path"]
        _assert_refused(outcome, folder, *words)
    else:
        assert outcome.code == 0, outcome.output


@pytest.mark.parametrize(
    "packing, implementation, has_gpu, refused",
    [
        ("greedy", "local", True, True),
        ("greedy", "local", False, False),
        ("greedy", "transformer_engine", True, False),
        (None, "local", True, False),
    ],
)
def test_megatron_s_own_attention_on_a_gpu_takes_no_packed_sequences(
    packing: Any,
    implementation: str,
    has_gpu: bool,
    refused: bool,
) -> None:
    from megatron.slipstream.integration.entry import checks

    args = types.SimpleNamespace(
        has_gpu=has_gpu,
        sequence_packing=packing,
        transformer_impl=implementation,
        fine_grained_activation_offloading=False,
        activation_memory_budget=None,
        eval_interval=1,
        full_validation=False,
        skip_train=False,
        output_interval=0,
        train_iters=1,
        train_samples=None,
        log_interval=1,
        num_layers=2,
        vocab_size=None,
        mock_data=False,
        data_path=None,
        tensor_model_parallel_size=1,
        num_experts=None,
        eval_before_training=False,
    )
    findings = check_rules(checks.MACHINE_RULES, args)
    if refused:
        with pytest.raises(ValueError, match="transformer_impl=local .*=greedy.*; set --transf"):
            require(findings)
    else:
        assert findings == []


# Options that an older release lacks

LATER: dict[str, tuple[Callable[[], bool], list[str], list[str]]] = {
    "fraction": (
        releases.models_pass_their_rank,
        [*OFFLOAD, "core_attn", "--activation-offload-fraction", "0.5"],
        ["activation_offload_fraction", "set offload_target_memory_gib"],
    ),
    "delta": (
        releases.models_pass_their_rank,
        [*OFFLOAD, "core_attn", "--delta-offload-bytes-across-pp-ranks", "1"],
        ["delta_offload_bytes_across_pp_ranks", "set offload_target_memory_gib"],
    ),
    "fused experts": (
        releases.models_pass_their_rank,
        [*OFFLOAD, "fused_group_mlp", "--num-experts", "2"],
        ["offload_modules", "fused_group_mlp", "leave it out"],
    ),
    "CUDA graphs": (
        releases.models_pass_their_rank,
        [*OFFLOAD, "core_attn", "--cuda-graph-impl", "local"],
        ["cuda_graph_impl=local", "set cuda_graph_impl=transformer_engine or none"],
    ),
    "delay": (
        releases.models_pass_their_rank,
        [*OFFLOAD, "core_attn", "--delay-offload-until-cuda-graph"],
        ["delay_offload_until_cuda_graph", "leave it out"],
    ),
    "multi-token prediction": (
        releases.has_gpt_builder,
        ["--mtp-num-layers", "1"],
        ["mtp_num_layers=1", "a script of your own"],
    ),
}
"""Test for the release; flags that need it; words of the refusal."""


@pytest.mark.releases
@pytest.mark.parametrize("case", LATER)
def test_what_a_later_release_has_is_refused_with_what_to_do_instead(
    case: str, folder: Path
) -> None:
    is_there, flags, words = LATER[case]
    if is_there():
        pytest.skip(f"{releases.release()} has it")
    outcome = _train(folder, [*MODEL, *MOCK, *flags])
    _assert_refused(outcome, folder, releases.release(), "or install megatron-core 0.1", *words)


@pytest.mark.releases
def test_training_with_a_tokenizer_file(folder: Path) -> None:
    flags = [*MODEL, "--mock-data", "--tokenizer-json", _write_tokenizer(folder)]
    outcome = _train(folder, flags)
    assert outcome.code == 0, outcome.output


def _write_tokenizer(folder: Path) -> str:
    """A tokenizer whose end-of-document token is 0, outside of the training's folder."""
    path = folder.parent / "tokenizer.json"
    special = {"content": "<|endoftext|>", "id": 0}
    path.write_text(json.dumps({"model": {"vocab": {"a": 63}}, "added_tokens": [special]}))
    return str(path)


# Transformer Engine's switch


def _pretend_transformer_engine(read_as: bool, environment: str) -> None:
    """Put a Transformer Engine into this process that read its switch as ``read_as``."""
    for name in ("", ".pytorch", ".pytorch.cpu_offload"):
        sys.modules[f"transformer_engine{name}"] = types.ModuleType(f"transformer_engine{name}")
    sys.modules["transformer_engine.pytorch.cpu_offload"].NVTE_CPU_OFFLOAD_V1 = read_as
    os.environ["NVTE_CPU_OFFLOAD_V1"] = environment


def test_a_switch_set_after_transformer_engine_read_it_is_refused(folder: Path) -> None:
    flags = [*MODEL, *MOCK, *OFFLOAD, "core_attn"]
    outcome = _train(folder, flags, lambda: _pretend_transformer_engine(False, "1"))
    _assert_refused(outcome, folder, "NVTE_CPU_OFFLOAD_V1", "after Transformer Engine was imported")


def test_a_switch_that_transformer_engine_read_counts_whatever_the_environment_says(
    folder: Path,
) -> None:
    flags = [*MODEL, *MOCK, *OFFLOAD, "core_attn", "--num-attention-heads", "5"]
    outcome = _train(folder, flags, lambda: _pretend_transformer_engine(True, "0"))
    # Our check accepts it; megatron refuses it.
    _assert_refused(outcome, folder, "num_attention_heads")


def test_the_switch_does_not_matter_without_offloading() -> None:
    facts = preflight.Facts("3.12", None, None, "2.20", None, False, "0", None, True)
    assert preflight.check_process(facts, offloading=False) == []
    assert [f.severity for f in preflight.check_process(facts, offloading=True)] == ["error"]


def test_a_transformer_engine_that_does_not_import_is_refused() -> None:
    facts = preflight.Facts("3.12", None, None, "2.20", "OSError: no lib", None, None, None, True)
    with pytest.raises(ValueError, match="does not import"):
        require(preflight.check_process(facts, offloading=False))


# Data


def _write_dataset(prefix: Path, lengths: Sequence[int] = (5, 7), token: int = 1) -> None:
    """A dataset in the format of megatron's index, of uint16 tokens, written independently."""
    offsets = [2 * sum(lengths[:n]) for n in range(len(lengths))]
    index = struct.pack("<9sQBQQ", b"MMIDIDX\x00\x00", 1, 8, len(lengths), len(lengths) + 1)
    index += struct.pack(f"<{len(lengths)}i", *lengths)
    index += struct.pack(f"<{len(lengths)}q", *offsets)
    index += struct.pack(f"<{len(lengths) + 1}q", *range(len(lengths) + 1))
    Path(f"{prefix}.idx").write_bytes(index)
    Path(f"{prefix}.bin").write_bytes(struct.pack("<H", token) * sum(lengths))


def _damage(kind: str, prefix: Path) -> None:
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    content = index.read_bytes()
    damages: dict[str, Callable[[], object]] = {
        "no index": index.unlink,
        "no tokens": tokens.unlink,
        "not an index": lambda: index.write_bytes(b"PK" + content[2:]),
        "header cut": lambda: index.write_bytes(content[:20]),
        "index cut": lambda: index.write_bytes(content[:-8]),
        "unknown dtype": lambda: index.write_bytes(content[:17] + b"\x63" + content[18:]),
        "tokens cut": lambda: tokens.write_bytes(tokens.read_bytes()[:-2]),
        "empty": lambda: _write_dataset(prefix, lengths=()),
    }
    damages[kind]()


DAMAGES = {
    "no index": "no {prefix}.idx",
    "no tokens": "no {prefix}.bin",
    "not an index": "does not begin with the marks",
    "header cut": "shorter than its header",
    "index cut": "its header says",
    "unknown dtype": "dtype code 99",
    "tokens cut": "its index says 24",
    "empty": "lists no sequences",
}


@pytest.mark.parametrize("kind", DAMAGES)
def test_a_damaged_dataset_is_one_error(kind: str, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    _write_dataset(prefix)
    assert datasets.check_dataset(str(prefix), vocab_size=64) == []
    _damage(kind, prefix)
    findings = datasets.check_dataset(str(prefix), vocab_size=64)
    assert [finding.severity for finding in findings] == ["error"]
    assert DAMAGES[kind].format(prefix=prefix) in findings[0].message
    assert f"data_path={prefix}" in findings[0].message


@pytest.mark.parametrize("kind", ["no index", "tokens cut"])
def test_training_refuses_a_damaged_dataset(kind: str, folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    _write_dataset(prefix)
    _damage(kind, prefix)
    flags = [*MODEL, *MOCK[1:], "--data-path", str(prefix), "--split", "1,0,0"]
    _assert_refused(_train(folder, flags), folder, f"data_path={prefix}")


def test_tokens_outside_the_vocabulary_are_refused(folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    _write_dataset(prefix, token=64)
    flags = [*MODEL, *MOCK[1:], "--data-path", str(prefix), "--split", "1,0,0"]
    _assert_refused(_train(folder, flags), folder, "vocab_size=64", "token 64", "at least 65")


LAUNCHES = {
    "a rank alone": ({"RANK": "1"}, ["RANK is set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"]),
    "a size alone": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE is set without RANK, MASTER_ADDR", "unset"]),
    "a rank too many": ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_half_a_launcher_is_refused(case: str, folder: Path) -> None:
    variables, words = LAUNCHES[case]

    def launch() -> None:
        for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
            os.environ.pop(name, None)
        os.environ.update(variables)

    _assert_refused(_train(folder, [*MODEL, *MOCK], before=launch), folder, *words)


def test_training_without_data_is_refused(folder: Path) -> None:
    _assert_refused(_train(folder, [*MODEL, *MOCK[1:]]), folder, "data_path is not set")


# The script itself


def test_the_script_exits_with_2_and_one_line(folder: Path) -> None:
    arguments = [*MODEL, *MOCK, *OFFLOAD, "attn_proj"]
    done = run_script(ROOT / "pretrain_gpt.py", *arguments, folder=folder)
    assert "error:" not in done.stdout
    _assert_refused(_outcome(done), folder)


@pytest.mark.releases
def test_help_teaches_our_flags_and_the_modules(folder: Path) -> None:
    outcome = _train(folder, ["--help"])
    assert outcome.code == 0
    for word in (
        "--offload-engine",
        "--sequence-packing",
        "--tokenizer-json",
        "core_attn",
        "examples:",
        "--help-all",
    ):
        assert word in outcome.output
    assert "--num-layers" not in outcome.output.split("examples:")[0]
    assert "--tensor-model-parallel-size" in _train(folder, ["--help-all"]).output


def test_flags_of_an_engine_that_is_off_are_told(folder: Path) -> None:
    outcome = _train(folder, [*MODEL, *MOCK, "--offload-modules", "core_attn"])
    assert outcome.code == 0, outcome.output
    told = "offload_modules: no effect without fine_grained_activation_offloading; add --fine-"
    assert outcome.output.count(told) == 1


def test_layers_that_are_recomputed_as_a_whole_are_told(folder: Path) -> None:
    recompute = ["--recompute-granularity", "full", "--recompute-method", "uniform"]
    recompute += ["--recompute-num-layers", "1"]
    outcome = _train(folder, [*MODEL, *MOCK, *OFFLOAD, "core_attn", *recompute])
    assert outcome.code == 0, outcome.output
    told = "recompute_granularity=full: a layer that is recomputed as a whole saves its input only"
    assert outcome.output.count(told) == 1
    # The cure, which needs no module to be named.
    offload = [*OFFLOAD[:-1], "--offload-checkpoint-inputs"]
    outcome = _train(folder, [*MODEL, *MOCK, *offload, *recompute])
    assert outcome.code == 0, outcome.output
    assert told not in outcome.output


def test_inputs_of_checkpoints_that_there_are_not_are_refused(folder: Path) -> None:
    flags = [*MODEL, *MOCK, *OFFLOAD, "core_attn", "--offload-checkpoint-inputs"]
    message = "offload_checkpoint_inputs=True is not supported without recomputation"
    _assert_refused(_train(folder, flags), folder, message, "set recompute_granularity='full'")


def test_a_file_that_cannot_be_written_is_refused_before_training(folder: Path) -> None:
    flags = [*MODEL, *MOCK, "--run-record-path", "/dev/null/record.json"]
    _assert_refused(_train(folder, flags), folder, "run_record_path=/dev/null/", "name a file")


SHOWN = ["--megatron-output-path", "-"]


def test_a_checkpoint_of_another_schedule_is_refused(folder: Path) -> None:
    def refuse_to_load() -> None:
        from megatron.training import training

        def load(*_: object, **__: object) -> None:
            raise AssertionError(
                "OptimizerParamScheduler: class input value 9 and checkpointvalue 500 for total "
                "number of iterations do not match"
            )

        training.load_checkpoint = load

    flags = [*MODEL, *MOCK, *SHOWN, "--load", "checkpoints", "--run-record-path", "record.json"]
    outcome = _train(folder, flags, before=refuse_to_load)
    words = ("load=checkpoints has another schedule", "set --override-opt_param-scheduler")
    _assert_refused(outcome, folder, *words)


def test_a_disk_that_is_full_at_the_end_is_told_and_loses_one_file(folder: Path) -> None:
    from megatron.slipstream.fine_grained_activation_offload.report import Report

    def fill_the_disk() -> None:
        def fail(*_: object) -> None:
            raise OSError(28, "No space left on device")

        Report.save = fail

    paths = ["--run-record-path", "record.json", "--offload-report-path", "report.json", *SHOWN]
    flags = [*MODEL, *MOCK, *paths, *OFFLOAD, "core_attn", "attn_proj"]
    outcome = _train(folder, flags, before=fill_the_disk)
    assert outcome.code == 0, outcome.output
    assert "offload_report_path=report.json cannot be written: no space left" in outcome.output
    assert "; free space there, or name a file on another disk" in outcome.output
    assert [path.name for path in folder.iterdir()] == ["record.json"]


@pytest.mark.releases
def test_training_runs_and_says_so(folder: Path) -> None:
    """The same flags without a mistake train, so the mistake causes the refusals above."""
    record = ["--run-record-path", "record.json", "--offload-report-path", "report.json"]
    outcome = _train(folder, [*MODEL, *MOCK, *record, *OFFLOAD, "core_attn", "attn_proj"])
    assert outcome.code == 0, outcome.output
    assert outcome.errors == []
    names = sorted(path.name for path in folder.iterdir())
    assert names == ["megatron-output.log", "record.json", "report.json"]


@pytest.mark.parametrize(
    "has_apex, given, added",
    [
        (False, [], ["--no-gradient-accumulation-fusion"]),
        (False, ["--no-gradient-accumulation-fusion"], []),
        (True, [], []),
    ],
    ids=["without Apex", "without Apex, given", "with Apex"],
)
def test_a_gpu_run_asks_apex_for_its_fused_weight_gradient_only_if_it_is_there(
    monkeypatch: pytest.MonkeyPatch, has_apex: bool, given: list[str], added: list[str]
) -> None:
    from megatron.slipstream.integration.entry import arguments

    def is_installed(module: str) -> bool:
        return has_apex if module == "fused_weight_gradient_mlp_cuda" else True

    monkeypatch.setattr(arguments.preflight, "is_installed", is_installed)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    assert arguments.defaults_of_machine(given) == added
