# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream plan`` refuses options without effect, and its exit status reports the goal."""

from __future__ import annotations

import argparse
import io
import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from reported_runs import make_trace

from megatron.slipstream.cli import main
from megatron.slipstream.cli_plan import models
from megatron.slipstream.cli_plan.models import speed_for
from megatron.slipstream.estimate.hugging_face import load_hub_config
from megatron.slipstream.plan.files import load_plan, save_trace

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "models"
DENSE = EXAMPLES / "llama3_8b.json"


def show(*arguments: str) -> int:
    return main(["plan", "--hf-config", str(DENSE), "--seq-length", "128", *arguments])


@pytest.mark.parametrize(
    "flag", ["--ep", "--expert-model-parallel-size", "--etp", "--expert-tensor-parallel-size"]
)
def test_experts_of_a_dense_model_are_not_divided(
    flag: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show(flag, "2") == 2
    assert capsys.readouterr().err == (
        f"error: {flag} is not supported with a model without experts because there are "
        f"no experts to divide; leave {flag} out\n"
    )
    assert show(flag, "1") == 0


@pytest.mark.parametrize(
    "goal, status",
    [
        ([], 0),
        (["--target-memory", "500"], 0),
        (["--target-memory", "0.001"], 3),
        (["--max-overhead", "0"], 0),
    ],
)
def test_a_target_that_cannot_be_met_has_a_status_of_its_own(goal: list[str], status: int) -> None:
    assert show(*goal) == status
    assert show("--pp", "2", *goal) == status


@pytest.mark.parametrize("goal", [["--target-memory", "0.001"], ["--max-overhead", "1"]])
def test_a_goal_that_a_trace_cannot_decide_has_a_status_of_its_own(
    goal: list[str], tmp_path: Path
) -> None:
    trace, output = tmp_path / "trace.json", tmp_path / "plan.json"
    save_trace(replace(make_trace(), step_ms=(), bandwidth=None), trace)
    assert main(["plan", str(trace)]) == 0
    assert main(["plan", str(trace), *goal, "--output", str(output)]) == 4
    assert load_plan(output).notes


def refused(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    """The single line of output of a refused command."""
    assert main(["plan", *arguments]) == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    (line,) = shown.err.splitlines()
    return line


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["--tp", "3"], "num_attention_heads=32 is not a multiple of --tp=3; set --tp to 2"),
        (
            ["--tensor-model-parallel-size", "3"],
            "num_attention_heads=32 is not a multiple of --tensor-model-parallel-size=3; set",
        ),
        (["--tp", "0"], "--tp=0 must be positive; set 1 or more"),
        (
            ["--cp", "3"],
            "--seq-length=128 is not a multiple of 2 * --cp=6; set --seq-length to 132",
        ),
        (
            ["--pp", "3"],
            "num_hidden_layers=32 cannot be divided evenly among --pp=3 times 1 chunks",
        ),
        (["--pp", "4", "--vpp", "3"], "among --pp=4 times 3 chunks; set --decoder-first-pipeline"),
        (
            ["--pp", "2", "--decoder-last-pipeline-num-layers", "-4"],
            "--decoder-last-pipeline-num-layers=-4 must be positive; set 1 or more",
        ),
        (["--recompute-modules", "foo"], "--recompute-modules contains 'foo', which is not model"),
        (["--precision", "fp32"], "--attention-backend='fused' is not supported with --precision="),
        (
            ["--pp", "100000000", "--decoder-first-pipeline-num-layers", "32"],
            "--decoder-first-pipeline-num-layers=32 leaves 0 layers for 99999999 pipeline ranks",
        ),
        (
            ["--decoder-first-pipeline-num-layers", "5"],
            "--decoder-first-pipeline-num-layers=5 leaves 27 layers for 0 pipeline ranks",
        ),
        (
            ["--recorded-seq-length", "4k"],
            "--recorded-seq-length is not supported with --hf-config because nothing was recorded",
        ),
        (["--gb-per-s", "1e-300"], "--gb-per-s=1e-300 must be 0.1 or more"),
        (["--target-memory", "1e300"], "--target-memory=1e+300 must be above 0 GiB, to 1073741824"),
        (["--state-gib", "1e300"], "--state-gib=1e+300 must be 0 to 1073741824"),
    ],
)
def test_messages_name_the_option_as_it_was_typed(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    given = ["--hf-config", str(DENSE), "--seq-length", "128", *arguments]
    assert message in refused(capsys, *given)


MIXED_UP = [
    ("mixtral_8x7b", {"num_experts_per_tok": 9}, [], "num_experts_per_tok=9 is not supported with "
     "num_local_experts=8 because a token is sent to an expert at most once"),
    ("deepseek_v3", {"num_experts_per_tok": 257}, [], "num_experts_per_tok=257 is not supported "
     "with n_routed_experts=256"),
    ("deepseek_v3", {"n_group": 8, "topk_group": 9}, [], "topk_group=9 is not supported with"),
    ("deepseek_v3", {"n_group": 7}, [], "n_routed_experts=256 is not a multiple of n_group=7"),
    ("deepseek_v3", {"n_group": 256, "topk_group": 4}, [], "num_experts_per_tok=8 is not supp"),
    ("mixtral_8x7b", {}, ["--ep", "3"], "num_local_experts=8 is not a multiple of --ep=3"),
    ("mixtral_8x7b", {}, ["--ep", "8", "--dp", "3"], "--dp=3 is not supported with --ep=8 because "
     "experts are divided among 8 ranks, and a pipeline stage has 3; set --dp=8, or a multiple"),
    ("llama3_8b", {"num_key_value_heads": 64}, [], "num_attention_heads=32 is not a multiple of "
     "num_key_value_heads=64"),
    ("llama3_8b", {"num_key_value_heads": 0}, [], "num_key_value_heads=0 is less than 1"),
    ("llama3_8b", {"hidden_size": 4095}, [], "hidden_size=4095 is not a multiple of num_attention"),
    ("llama3_8b", {"head_dim": 0}, [], "head_dim=0 is less than 1; correct the config.json"),
    ("llama3_8b", {"hidden_size": -4096}, [], "hidden_size=-4096 is less than 1; correct the"),
    ("llama3_8b", {}, ["--tp", "64"], "num_attention_heads=32 is not a multiple of --tp=64"),
    ("llama3_8b", {"intermediate_size": 14337}, ["--tp", "2"], "intermediate_size=14337 is not a "
     "multiple of --tp=2"),
]  # fmt: skip


@pytest.mark.parametrize("model, changes, arguments, message", MIXED_UP)
def test_a_mixed_up_config_is_refused_by_the_names_of_its_fields(
    model: str,
    changes: dict[str, int],
    arguments: list[str],
    message: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads((EXAMPLES / f"{model}.json").read_text()) | changes))
    line = refused(capsys, "--hf-config", str(path), "--seq-length", "128", *arguments)
    assert message in line
    assert ";" in line, "no cure"


def test_layers_that_a_config_does_not_have_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "config.json"
    config = {
        "hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2, "vocab_size": 128,
        "intermediate_size": 64, "moe_intermediate_size": 64, "num_experts": 4,
        "num_experts_per_tok": 2, "model_type": "qwen3_moe",
    }  # fmt: skip
    for changes, message in (
        ({"mlp_only_layers": [2]}, "names layer 2, but num_hidden_layers=2"),
        ({"decoder_sparse_step": 0}, "decoder_sparse_step=0 is less than 1"),
    ):
        path.write_text(json.dumps(config | changes))
        with pytest.raises(ValueError, match=message):
            load_hub_config(path)


@pytest.mark.parametrize(
    "arguments, message, largest",
    [
        (["--num-micro-batches", "5000"], "because 5000 times 96 groups would be planned", 1041),
        (
            ["--num-micro-batches", "5000", "--pp", "4", "--vpp", "2"],
            "; set --num-micro-batches to 1040 or less, or plan one pipeline rank with --rank",
            1040,
        ),
    ],
)
def test_a_plan_that_would_take_minutes_names_the_most_that_is_planned(
    arguments: list[str],
    message: str,
    largest: int,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    given = ["--hf-config", str(DENSE), "--seq-length", "128", *arguments]
    line = refused(capsys, *given)
    assert message in line
    assert f"; set --num-micro-batches to {largest} or less" in line

    def planned(*_: object) -> None:
        raise ValueError("it is planned")

    monkeypatch.setattr("megatron.slipstream.cli_plan.main.synthetic_trace", planned)
    given[given.index("5000")] = str(largest)
    assert refused(capsys, *given) == "error: it is planned"


@pytest.mark.parametrize(
    "arguments, message",
    [
        (
            ["--seq-length", "8192000000000000000"],
            "--seq-length=8192000000000000000 is too large to plan",
        ),
        (
            ["--seq-length", "1000000000"],
            "--seq-length=1000000000 is too large to plan; set 134217728 or less",
        ),
        (
            ["--seq-length", "100000000", "--micro-batch-size", "10000"],
            "--seq-length=100000000, --micro-batch-size=10000, --num-micro-batches=2: the activati",
        ),
    ],
)
def test_sizes_that_no_machine_has_are_refused(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, "--hf-config", str(DENSE), *arguments)


def test_layers_that_are_too_many_are_what_to_shrink(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "config.json"
    path.write_text(DENSE.read_text().replace('"num_hidden_layers": 32', '"num_hidden_layers": 60'))
    monkeypatch.setattr(models, "MAX_GROUPS", 100)
    line = refused(capsys, "--hf-config", str(path), "--seq-length", "128", "--pp", "2")
    assert line.endswith(
        "the limit is 100; plan one pipeline rank with --rank, or name fewer modules "
        "(--offload-modules), or fewer layers (num_layers=60)"
    )


@pytest.mark.parametrize(
    "arguments, message",
    [
        (["bash"], "'bash' is not supported because a training's flags are not read from a shell"),
        (["--", "./train.sh"], "'./train.sh' is not supported because a training's flags are not"),
        (["--", "sh", "train.sh", "--x"], "'sh train.sh' is not supported because"),
        (["--", "torchrun"], "'torchrun' names no script (NAME.py or -m MODULE)"),
        (["a.json", "b.json"], "2 traces are given, but a plan is for one rank; name one of them"),
        (
            ["--", "--num-layers", "2", "--target-memory=20"],
            "--target-memory is an option of 'slipstream plan', not of a training; put it before",
        ),
    ],
)
def test_commands_that_cannot_be_planned_say_why(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert message in refused(capsys, *arguments)


def test_flags_without_two_dashes_have_a_hint(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit, match="2"):
        main(["plan", "torchrun", "pretrain_gpt.py", "--num-layers", "2"])
    shown = capsys.readouterr().err
    assert "unrecognized arguments: --num-layers 2" in shown
    assert shown.endswith("; put megatron's flags after '--'\n")


def test_what_takes_long_is_shown_on_a_terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", "TTY_INTERACTIVE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("TERM", "xterm-256color")
    assert show("--pp", "2", "--details") == 0
    for stage in ("reading the configuration", "planning pipeline ranks", "proving the plan safe"):
        assert stage in shown.getvalue()


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("names", [("output", "timeline"), ("timeline", "frontier")])
def test_two_outputs_in_one_file_are_refused(
    names: tuple[str, str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "one.json"
    assert show(*(word for name in names for word in (f"--{name}", str(path)))) == 2
    message = f"--{names[1]}={path} is not supported with --{names[0]}={path} because each would"
    assert message in capsys.readouterr().err
    assert not path.exists()


def test_a_plan_does_not_replace_the_trace_that_it_is_made_of(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    trace = tmp_path / "trace.json"
    save_trace(make_trace(), trace)
    before = trace.read_bytes()
    assert main(["plan", str(trace), "--output", str(tmp_path / "." / "trace.json")]) == 2
    assert "not supported with TRACE=" in capsys.readouterr().err
    assert trace.read_bytes() == before


def test_a_gpu_without_the_recipe_is_refused() -> None:
    configured: Any = SimpleNamespace(shape=SimpleNamespace(precision="bf16", fp8_recipe="mxfp8"))
    options = argparse.Namespace(gpu="h100", tflops=None, gb_per_s=None, memory=None)
    with pytest.raises(ValueError, match=r"--gpu=h100 because .*; set --gpu to b200 or gb200"):
        speed_for(configured, options)
    options.gpu = "gb200"
    assert speed_for(configured, options).name == "gb200"


def test_module_names_with_commas_are_told_apart(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--offload-modules", "core_attn,attn_proj") == 2
    assert "separate names by spaces: core_attn attn_proj. Known" in capsys.readouterr().err
    assert show("--offload-modules", "core_attn", "attn_proj") == 0
