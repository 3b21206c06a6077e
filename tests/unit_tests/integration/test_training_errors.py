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
from typing import NamedTuple

import pytest
import torch
from forked import Done, run_function, run_script
from ranks import import_training

from megatron.slipstream.integration.seam import compat
from megatron.slipstream.launcher import check_launcher, set_launcher_defaults
from megatron.slipstream.options import datasets, preflight
from megatron.slipstream.options.rules import require
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

    import_training()

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
    "fraction": (
        [*OFFLOAD, "core_attn", "--activation-offload-fraction", "1.5"],
        ["activation_offload_fraction=1.5", "[0, 1]"],
    ),
    "flag with a typo": (
        ["--fine-grained-activation-offloding"],
        ["did you mean --fine-grained-activation-offloading?"],
    ),
    "value of another type": (["--hidden-size", "big"], ["--hidden-size", "'big'"]),
    "megatron's bare assertion": (
        ["--num-attention-heads", "5"],
        ["hidden_size % args.num_attention_heads"],
    ),
    "hybrid model": (["--hybrid-layer-pattern", "M*"], ["hybrid_layer_pattern=M*", "use only *"]),
    "tokenizer file": (["--tokenizer-json", "no.json"], ["tokenizer_json=no.json", "No such file"]),
    "YAML": (["--yaml-cfg", "no.yaml"], ["yaml_cfg", "give the settings as flags"]),
    "packing by another name": (
        ["--sequence-packing", "greedy", "--enable-cuda-graph"],
        ["cuda_graph_impl=local", "sequence_packing=greedy", "leave it out"],
    ),
}
"""One for each place that refuses; tests/unit_tests/options has a case for every rule."""


@pytest.mark.releases
@pytest.mark.parametrize("case", REFUSALS)
def test_a_mistake_is_one_line_that_names_option_and_cure(case: str, folder: Path) -> None:
    flags, words = REFUSALS[case]
    if case == "fraction" and not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has no activation_offload_fraction")
    save = ["--save", "checkpoints", "--save-interval", "1", "--offload-report-path", "report.json"]
    _assert_refused(_train(folder, [*MODEL, *MOCK, *save, *flags]), folder, *words)


def test_packs_of_several_corpora_are_not_balanced(folder: Path, tmp_path: Path) -> None:
    prefixes = [str(tmp_path / name) for name in "ab"]
    for prefix in prefixes:
        _write_dataset(Path(prefix))
    flags = [*MODEL, *MOCK[1:], "--data-path", *prefixes, "--split", "1,0,0"]
    outcome = _train(folder, [*flags, "--sequence-packing", "balanced"])
    words = ["data_path with 2 corpora", "sequence_packing=balanced", "set data_path"]
    _assert_refused(outcome, folder, *words)


# Options that an older release lacks


@pytest.mark.releases
def test_a_flag_of_a_later_release_is_refused_with_what_to_do_instead(folder: Path) -> None:
    if releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has it")
    flags = [*OFFLOAD, "core_attn", "--delta-offload-bytes-across-pp-ranks", "1"]
    words = [releases.release(), "delta_offload_bytes_across_pp_ranks", "install megatron-core 0.1"]
    outcome = _train(folder, [*MODEL, *MOCK, *flags])
    _assert_refused(outcome, folder, *words, "set offload_target_memory_gib")


@pytest.mark.parametrize("name", compat.LATER_OPTIONS)
def test_an_option_of_a_later_release_names_the_alternative(name: str) -> None:
    with pytest.raises(
        ValueError, match=f"^{name} is not supported .*; {compat.LATER_OPTIONS[name]}"
    ):
        compat.refuse_later_flags(f"unrecognized arguments: --{name.replace('_', '-')} 1")


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


def test_a_switch_that_transformer_engine_read_counts_whatever_the_environment_says() -> None:
    facts = preflight.ProcessFacts("3.12", None, None, "2.20", None, True, "0", None)
    assert preflight.check_process(facts, offloading=True) == []


def test_the_switch_does_not_matter_without_offloading() -> None:
    facts = preflight.ProcessFacts("3.12", None, None, "2.20", None, False, "0", None)
    assert preflight.check_process(facts, offloading=False) == []
    assert [f.severity for f in preflight.check_process(facts, offloading=True)] == ["error"]


def test_a_transformer_engine_that_does_not_import_is_refused() -> None:
    facts = preflight.ProcessFacts("3.12", None, None, "2.20", "OSError: no lib", None, None, None)
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


def test_training_refuses_a_damaged_dataset(folder: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    _write_dataset(prefix)
    _damage("tokens cut", prefix)
    flags = [*MODEL, *MOCK[1:], "--data-path", str(prefix), "--split", "1,0,0"]
    _assert_refused(_train(folder, flags), folder, f"data_path={prefix}")


def test_tokens_outside_the_vocabulary_are_refused(tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    _write_dataset(prefix, token=64)
    (finding,) = datasets.check_dataset(str(prefix), vocab_size=64)
    assert "vocab_size=64" in finding.text
    assert "token 64" in finding.text
    assert "at least 65" in finding.text
    assert datasets.check_dataset(str(prefix), vocab_size=65) == []


LAUNCHES = {
    "a rank alone": ({"RANK": "1"}, ["RANK is set without WORLD_SIZE, MASTER_ADDR, MASTER_PORT"]),
    "a size alone": ({"WORLD_SIZE": "2"}, ["WORLD_SIZE is set without RANK, MASTER_ADDR", "unset"]),
    "a rank too many": ({"RANK": "2", "WORLD_SIZE": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
}


@pytest.mark.parametrize("case", LAUNCHES)
def test_half_a_launcher_is_refused(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    variables, words = LAUNCHES[case]
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    def check() -> None:
        check_launcher()
        set_launcher_defaults()

    with pytest.raises(ValueError) as refused:
        check()
    assert all(word in str(refused.value) for word in words)


def test_training_checks_its_launcher(folder: Path) -> None:
    outcome = _train(folder, [*MODEL, *MOCK], before=lambda: os.environ.update(RANK="2"))
    _assert_refused(outcome, folder, "RANK")


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


def test_inputs_of_checkpoints_need_no_module_to_be_named(folder: Path) -> None:
    flags = [OFFLOAD[0], "--offload-checkpoint-inputs", "--recompute-granularity", "full"]
    flags += ["--recompute-method", "uniform", "--recompute-num-layers", "1"]
    outcome = _train(folder, [*MODEL, *MOCK, *flags])
    assert outcome.code == 0, outcome.output
    assert "a layer that is recomputed as a whole" not in outcome.output


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


@pytest.mark.parametrize(
    "given, before, after",
    [
        ([], None, "1"),
        ([], "8", "8"),
        (["--use-torch-fsdp2"], None, None),
        (["--use-megatron-fsdp=true"], None, None),
        (["--overlap-moe-expert-parallel-comm"], "32", "32"),
        (["--pipeline-model-parallel-comm-backend", "ucc"], None, None),
    ],
)
def test_training_has_one_device_queue_unless_told_otherwise(
    monkeypatch: pytest.MonkeyPatch, given: list[str], before: str | None, after: str | None
) -> None:
    from megatron.slipstream.integration.entry import arguments

    name = "CUDA_DEVICE_MAX_CONNECTIONS"
    monkeypatch.setattr(os, "environ", {} if before is None else {name: before})
    arguments.use_one_device_queue(given)
    assert os.environ.get(name) == after
