# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream plan`` of a configuration: output, requirements and refusals."""

from __future__ import annotations

import itertools
import json
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from doc_pages import Block, blocks_of, commands_in

from megatron.slipstream.cli import main
from megatron.slipstream.cli_plan import models
from megatron.slipstream.estimate.gpus import find_speed
from megatron.slipstream.estimate.hugging_face import load_hub_config
from megatron.slipstream.estimate.layers import (
    saved_tensors,
)
from megatron.slipstream.estimate.model_shapes import ModelShape, Parallelism
from megatron.slipstream.estimate.synthetic import Workplan, synthetic_trace
from megatron.slipstream.plan.candidates import PolicyOptions
from megatron.slipstream.plan.files import load_plan
from megatron.slipstream.plan.walk import simulate

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = ROOT / "examples" / "models"
UNITS = {"MiB": 1, "GiB": 1024}
LLAMA = EXAMPLES / "llama3_8b.json"


def show(*arguments: object) -> int:
    return main(["plan", *(str(argument) for argument in arguments)])


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """A model of four small layers."""
    config = json.loads(LLAMA.read_text())
    path = tmp_path / "config.json"
    path.write_text(json.dumps(config | {"num_hidden_layers": 4}))
    return path


def row_of(output: str, first: str) -> list[str]:
    """The cells of the table's row with this start."""
    (line,) = (line for line in output.splitlines() if re.match(rf"{re.escape(first)}\s", line))
    return re.split(r"\s{2,}", line)


def test_a_layer_is_shown_part_by_part(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--hf-config", small, "--seq-length", "8k", "--details") == 0
    read = capsys.readouterr()
    shown = read.out
    assert read.err == ""
    shape = ModelShape(seq_length=8192, **load_hub_config(small).fields)
    (output, statistics) = (
        sum(item.nbytes for item in saved_tensors(shape, 0)["core_attn"]),
        8192 * 32 * 4,
    )
    assert row_of(shown, "core_attn")[1] == f"{output / 2**20:.1f} MiB"
    assert row_of(shown, "core_attn")[3] == f"{(output - statistics) / 2**20:.1f} MiB"
    assert row_of(shown, "attn_proj")[1:] == ["0 B", "0.0%", "-"]
    assert row_of(shown, "mlp_act")[1:] == ["448.0 MiB", "41.1%", "-"]
    copy_ms = 160 * 2**20 / find_speed("h200").bandwidth.d2h_gb_per_s / 1e6
    assert row_of(shown, "core_attn")[4] == f"{copy_ms:.2f} ms"
    assert "all of it hides" in shown


def test_what_does_not_hide_is_said(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--seq-length", 2048, "--gb-per-s", 8, "--details")
    assert show("--hf-config", small, *arguments) == 0
    assert "of it hides behind the layer itself" in capsys.readouterr().out


def test_every_pipeline_rank_is_planned(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--hf-config", small, "--seq-length", 2048, "--pp", 2, "--details")
    assert show(*arguments, "--state-gib", 3) == 0
    shown = capsys.readouterr().out
    rows = [row_of(shown, str(rank)) for rank in range(2)]
    assert [row[:4] for row in rows] == [["0", "0-1", "2", "3.0 GiB"], ["1", "2-3", "1", "3.0 GiB"]]
    assert all(row[-1].endswith("%") and row[-2].endswith("ms") for row in rows)
    assert "Plan of pipeline rank 0" in shown
    assert show(*arguments, "--rank", 1) == 0
    shown = capsys.readouterr().out
    assert "Plan of pipeline rank 1" in shown
    assert not re.search(r"^0\s+0-1", shown, re.MULTILINE)


@pytest.mark.parametrize(
    "arguments, num_gpus, of_host",
    [
        ([], 1, 1),
        (["--tp", 2, "--pp", 2], 4, 4),
        (["--cp", 8, "--dp", 8], 64, 8),
    ],
)
def test_gpus_and_host_memory_are_counted(
    small: Path,
    arguments: list[object],
    num_gpus: int,
    of_host: int,
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert show("--hf-config", small, "--seq-length", 8192, "--details", *arguments) == 0
    shown = capsys.readouterr().out
    plural = "s" if num_gpus > 1 else ""
    assert shown.startswith("config.json (llama): the highest peak falls from ")
    assert f"config.json (llama) on {num_gpus} GPU{plural}: 4 layers" in shown
    line = re.search(r"^host memory: (.+) per rank at most, (.+) per node of (\d+) rank", shown,
                     re.MULTILINE)  # fmt: skip
    assert line
    of_rank, of_node = (
        float(text.split()[0]) * UNITS[text.split()[1]] for text in line.groups()[:2]
    )
    assert of_node == pytest.approx(of_rank * of_host, rel=0.05)
    assert int(line[3]) == of_host
    assert f"{line[1]} of this rank in use at most" in shown


def test_the_plan_of_a_rank_is_shown_on_request(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--hf-config", small, "--seq-length", 2048)
    assert show(*arguments) == 0
    shown = capsys.readouterr().out
    assert "Plan of pipeline rank" not in shown
    assert "--details shows every group" in shown
    for more in (("--max-overhead", 1), ("--output", tmp_path / "plan.json"), ("--details",)):
        assert show(*arguments, *more) == 0
        assert "Plan of pipeline rank 0" in capsys.readouterr().out


def test_experts_alone_decide_the_fewest_gpus(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--seq-length", 128, "--ep", 8, "--num-micro-batches", 1)
    assert show("--hf-config", EXAMPLES / "mixtral_8x7b.json", *arguments, "--cp", 4) == 0
    assert "on 8 GPUs" in capsys.readouterr().out


def test_the_plan_is_that_of_the_shapes_trace(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    output = tmp_path / "plan.json"
    arguments = ("--seq-length", 4096, "--tp", 2, "--pp", 2, "--vpp", 2, "--sequence-parallel",
                 "--num-micro-batches", 6, "--offload-modules", "core_attn", "attn_proj",
                 "--state-gib", 0, "--gpu", "h100", "--tflops", 300)  # fmt: skip
    assert show("--hf-config", small, *arguments, "--max-overhead", 2, "--output", output) == 0
    parallelism = Parallelism(tp=2, pp=2, vpp=2, sequence_parallel=True)
    shape = ModelShape(seq_length=4096, parallelism=parallelism, **load_hub_config(small).fields)
    speed = find_speed("h100", tflops=300)
    work = Workplan(shape, speed, ("core_attn", "attn_proj"), 6)
    plan = load_plan(output)
    assert plan.trace == synthetic_trace(work, 0)
    assert plan.options.max_overhead_percent == 2
    assert simulate(plan).render() in capsys.readouterr().out


GOALS = ("target_memory_bytes", "max_overhead_percent", "activation_offload_fraction")


@pytest.mark.parametrize(
    "options, expected",
    [
        ([], (2**30, None, 0.5)),
        (["--target-memory", "2"], (2**31, None, 0.5)),
        (["--max-overhead", "3"], (None, 3.0, 0.5)),
        (["--fraction", "0.25"], (2**30, None, 0.25)),
    ],
    ids=str,
)
def test_options_of_the_plan_win_over_those_of_the_training(
    options: list[str],
    expected: tuple[object, ...],
    small: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A training's goal is replaced as a whole: two goals exclude each other."""
    training = PolicyOptions(0.5, release_lag=3, target_memory_bytes=2**30)
    read = models.configured_by
    name = "megatron.slipstream.cli_plan.main.configured_by"
    monkeypatch.setattr(name, lambda *given: replace(read(*given), policy=training))
    output = tmp_path / "plan.json"
    show("--hf-config", small, "--seq-length", 1024, "--output", output, *options)
    policy = load_plan(output).options
    assert tuple(getattr(policy, name) for name in GOALS) == expected
    assert policy.release_lag == 3


def test_a_frontier_and_a_timeline_are_written(
    small: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    frontier, timeline = tmp_path / "frontier.json", tmp_path / "timeline.json"
    # One module and one micro-batch, since every plan of the sweep takes time.
    arguments = ("--seq-length", 2048, "--offload-modules", "qkv_linear", "--num-micro-batches", 1)
    arguments = (*arguments, "--frontier", frontier, "--timeline", timeline)
    assert show("--hf-config", small, *arguments) == 0
    assert "Memory against time" in capsys.readouterr().out
    found = json.loads(frontier.read_text())
    assert {point["option"] for point in found["points"]} == {"activation_memory_budget"}
    assert [marker[0] for marker in found["markers"]] == ["off", "selective", "full", "built-in"]
    assert timeline.read_bytes().startswith(b"{")


def test_uneven_stages_are_planned(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    uneven = ("--pp", 2, "--decoder-first-pipeline-num-layers", 1)
    assert show("--hf-config", small, "--seq-length", 2048, *uneven, "--rank", 1) == 0
    assert row_of(capsys.readouterr().out, "1")[1] == "1-3"


def test_a_stage_of_one_layer_has_one_number(
    small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--seq-length", 2048, "--pp", 4, "--num-micro-batches", 4, "--rank", 3)
    assert show("--hf-config", small, *arguments) == 0
    assert row_of(capsys.readouterr().out, "3")[1:3] == ["3", "1"]


def test_whole_layers_are_recomputed(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    training = ("--hf-config", small, "--seq-length", "8k", "--details")
    assert show(*training, "--recompute-granularity", "full") == 0
    shown = capsys.readouterr().out
    assert "recomputing 4 whole layers" in shown
    assert "Saved by a dense layer, recomputed as a whole (4 of them)" in shown
    # The input of a layer, 8192 tokens of 4096 elements.
    assert row_of(shown, "checkpoint_inputs")[1:4] == ["64.0 MiB", "100.0%", "64.0 MiB"]
    assert "of 8 groups move" in shown  # of two micro-batches


def test_a_plan_that_does_not_fit_says_so(small: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--hf-config", small, "--seq-length", 2048, "--state-gib", 500) == 0
    assert "rank 0 needs more than the GPU's 140 GiB" in capsys.readouterr().out


@pytest.mark.parametrize(
    "modules", [("core_attn",), ("core_attn", "mlp_norm"), ("core_attn", "mlp_act")], ids=str
)
def test_a_module_that_no_layer_has_is_told(
    modules: tuple[str, ...], small: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--seq-length", 2048, "--offload-modules", *modules)
    assert show("--hf-config", small, *arguments) == 0
    out = capsys.readouterr().out
    assert ("Note: no layer has mlp_norm to move" in out) == ("mlp_norm" in modules)
    assert ("Note: no layer has" in out) == ("mlp_norm" in modules)


def test_a_rank_without_a_chosen_module_is_shown_all_the_same(
    capsys: pytest.CaptureFixture[str],
) -> None:
    # The first pipeline rank of this model has only dense layers.
    arguments = ("--seq-length", 4096, "--pp", 2, "--decoder-first-pipeline-num-layers", 3)
    options = ("--ep", 64, "--offload-modules", "expert_fc1", "--rank", 0)
    assert show("--hf-config", EXAMPLES / "deepseek_v3.json", *arguments, *options) == 0
    shown = capsys.readouterr().out
    assert "Pipeline rank 0 has no layer with one of --offload-modules; --details" in shown
    assert row_of(shown, "0")[:3] == ["0", "0-2", "2"]


@pytest.mark.parametrize(
    "arguments, message",
    [
        ([], "nothing to plan is given; name one of a trace, --hf-config"),
        (["t.json", "--hf-config", LLAMA], "a trace and --hf-config is given"),
        (["--args-file", "a", "--", "--x"], "flags after -- and --args-file is given"),
        (["--args-file", "nofile"], "--args-file=nofile does not exist; give a file of megatron's"),
        (["--args-file", "."], "--args-file=. is a folder; give a file of megatron's flags"),
        (["--hf-config", "."], "--hf-config=config.json does not exist; give the config.json of a"),
        (
            ["--hf-config", f"{LLAMA}/x"],
            f"--hf-config={LLAMA}/x is not in a folder: a part of its path is a file; give",
        ),
        (["t.json", "--gpu", "h200"], "--gpu is not supported with a trace"),
        (["t.json", "--tp", "8"], "--tp is not supported with a trace"),
        (
            ["--tp", "2", "--", "--num-layers", "2"],
            "--tp is not supported with flags after -- because that has its own; leave --tp out",
        ),
        (["--hf-config", LLAMA], "--seq-length is not set"),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--recompute-granularity", "full",
             "--recompute-modules", "mlp"],
            "--recompute-modules is not supported with --recompute-granularity=full because",
        ),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--target-memory", "20",
             "--max-overhead", "1"],
            "--target-memory=20.0 is not supported with --max-overhead=1.0",
        ),
        (["--hf-config", LLAMA, "--seq-length", "8", "--gpu", "x"], "--gpu=x is not in the table"),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--offload-modules", "core_atn"],
            "contains 'core_atn', which is not a module that can move; did you mean 'core_at",
        ),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--offload-modules", "attn_proj"],
            "contains 'attn_proj' without 'core_attn'",
        ),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--offload-modules", "moe_act"],
            "names expert modules, but the model has no experts",
        ),
        (
            ["--hf-config", EXAMPLES / "mixtral_8x7b.json", "--seq-length", "8",
             "--offload-modules", "fused_group_mlp"],
            "'fused_group_mlp', whose sizes are not modelled",
        ),
        (
            ["--hf-config", EXAMPLES / "mixtral_8x7b.json", "--seq-length", "8",
             "--recompute-modules", "moe", "--offload-modules", "moe_act"],
            "expert modules, which is not supported with 'moe' in --recompute-modules",
        ),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--pp", "4", "--vpp", "2",
             "--num-micro-batches", "3"],
            "--num-micro-batches=3 is not supported with microbatch_group_size_per_vp_stage=4 and",
        ),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--num-micro-batches", "0"],
            "--num-micro-batches=0 must be positive; set 1 or more",
        ),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--rank", "1"],
            "--rank=1 must be a pipeline rank, 0 to 0",
        ),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--precision", "fp32",
             "--attention-backend", "unfused"],
            "precision=fp32 is not supported without --tflops",
        ),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--pp", "4",
             "--decoder-last-pipeline-num-layers", "3"],
            "--decoder-last-pipeline-num-layers=3 leaves 29 layers for 3 pipeline ranks",
        ),
        (
            ["--hf-config", LLAMA, "--seq-length", "8", "--pp", "2", "--vpp", "2",
             "--decoder-last-pipeline-num-layers", "3"],
            "are not multiples of --vpp=2",
        ),
    ],
)  # fmt: skip
def test_wrong_calls_say_what_is_wrong(
    capsys: pytest.CaptureFixture[str], arguments: list[object], message: str
) -> None:
    assert show(*arguments) == 2
    shown = capsys.readouterr()
    assert message in shown.err
    assert shown.err.startswith("error: ")
    assert shown.out == ""


def test_a_file_of_flags_that_is_no_text_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "model.bin"
    path.write_bytes(b"--num-layers\xff 4")
    assert show("--args-file", path) == 2
    assert f"--args-file={path} is not a text file: " in capsys.readouterr().err


@pytest.mark.parametrize(
    "arguments, needing",
    [
        (["--", "--num-layers", "2"], "flags after -- need"),
        (["--args-file", "flags.txt"], "--args-file=flags.txt needs"),
    ],
)
def test_flags_without_megatron_core_say_what_is_missing(
    tmp_path: Path, arguments: list[str], needing: str
) -> None:
    (tmp_path / "flags.txt").write_text("--num-layers 2")
    # As if it were not installed: a folder earlier on the path shadows it.
    code = (
        "import sys\n"
        "sys.modules['torch'] = None\n"
        "from megatron.slipstream.cli import main\n"
        "sys.exit(main(['plan', *sys.argv[1:]]))\n"
    )
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60,
        check=False, cwd=tmp_path, env=os.environ | {"PYTHONPATH": str(ROOT)},
    )  # fmt: skip
    assert result.returncode == 2
    assert result.stderr.startswith(f"error: {needing} megatron-core, whose parser reads flags,")
    assert "give --hf-config" in result.stderr


def test_a_config_is_planned_without_importing_torch(small: Path) -> None:
    code = (
        "import sys\n"
        "from megatron.slipstream.cli import main\n"
        "status = main(sys.argv[1:])\n"
        "assert 'torch' not in sys.modules and 'megatron.core' not in sys.modules\n"
        "sys.exit(status)\n"
    )
    arguments = ["plan", "--hf-config", str(small), "--seq-length", "2048"]
    result = subprocess.run(
        [sys.executable, "-c", code, *arguments], capture_output=True, text=True, timeout=60,
        check=False, cwd=ROOT,
    )  # fmt: skip
    assert result.returncode == 0, result.stderr


def without_files(command: list[str]) -> list[str]:
    """Arguments of the command, with the repository's files, and no output files."""
    if "--frontier" in command:
        place = command.index("--frontier")
        command = command[:place] + command[place + 2 :]
    return [str(ROOT / word) if word.startswith("examples/") else word for word in command[2:]]


def missing_part(example: str, output: str) -> str:
    """The first part of an example, between lines of dots, that is missing in the output."""
    rest = " ".join(output.split())
    for part in re.split(r"^\.\.\.$", example, flags=re.MULTILINE):
        words = " ".join(part.split())
        if words not in rest:
            return part
        rest = rest[rest.index(words) + len(words) :]
    return ""


PLANNING = list(blocks_of(ROOT / "docs" / "user-guide" / "planning.md"))
EXAMPLES_WITH_OUTPUT = [
    (command, output)
    for command, output in itertools.pairwise(PLANNING)
    if (command.language, output.language) == ("bash", "text")
]


def test_every_output_of_the_planning_page_is_that_of_a_command() -> None:
    outputs = [block for block in PLANNING if block.language == "text"]
    assert [output for _, output in EXAMPLES_WITH_OUTPUT] == outputs
    # There is no heading, and so no other topic, between the two.
    for command, output in EXAMPLES_WITH_OUTPUT:
        assert output.line == command.line + command.text.count("\n") + 3
    text = "".join(command.text for command, _ in EXAMPLES_WITH_OUTPUT)
    assert set(re.findall(r"examples/models/(\S+)", text)) == {
        path.name for path in EXAMPLES.glob("*.json")
    }


@pytest.mark.parametrize("command, output", EXAMPLES_WITH_OUTPUT, ids=lambda block: block.line)
def test_the_commands_of_the_planning_page_print_what_it_shows(
    command: Block, output: Block, capsys: pytest.CaptureFixture[str]
) -> None:
    (words,) = commands_in(command.text)
    shown = {"": output.text}
    if ["--pp", "16"] in map(list, itertools.pairwise(words)):
        # Of sixteen ranks, those that are shown are planned.
        header, *rows = output.text.splitlines()
        shown = {f"--rank={row.split()[0]}": f"{header}\n{row}" for row in rows}
    for rank, text in shown.items():
        assert main(["plan", *without_files(words), *filter(None, [rank])]) == 0
        assert missing_part(text, capsys.readouterr().out) == ""
