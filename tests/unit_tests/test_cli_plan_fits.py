# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream plan --longest-sequence`` and ``--largest-micro-batch``: answers and refusals."""

from __future__ import annotations

import argparse
import json
import re
from pathlib import Path

import pytest

from megatron.slipstream.cli import main
from megatron.slipstream.cli_plan.options import parse_tokens

EXAMPLES = Path(__file__).resolve().parents[2] / "examples" / "models"
LLAMA = EXAMPLES / "llama3_8b.json"
TE = ("--cross-entropy-fusion-impl", "te")
H100 = ("--gpu", "h100", "--state-gib", 30, "--host-memory", 120, *TE)


@pytest.fixture
def four_layers(tmp_path: Path) -> Path:
    """A folder with the configuration of a model of four layers, of which planning takes less."""
    text = json.dumps(json.loads(LLAMA.read_text()) | {"num_hidden_layers": 4})
    (tmp_path / "config.json").write_text(text)
    return tmp_path


def show(*arguments: object) -> int:
    return main(["plan", *(str(argument) for argument in arguments)])


@pytest.mark.parametrize(
    "text, tokens",
    [("8192", 8192), ("8k", 8192), ("128K", 131_072), (" 1m ", 1 << 20), ("2M", 2 << 20), ("0", 0)],
)
def test_tokens_have_units(text: str, tokens: int) -> None:
    assert parse_tokens(text) == tokens


@pytest.mark.parametrize("text", ["", "k", "8.5k", "8kb", "8 k", "1e6", "8g"])
def test_what_is_no_number_of_tokens_is_refused(text: str) -> None:
    with pytest.raises(argparse.ArgumentTypeError, match=r"such as 8192, 8k or 1m"):
        parse_tokens(text)


def test_the_answer_comes_first_and_details_last(capsys: pytest.CaptureFixture[str]) -> None:
    options = ("--seq-length", "40k", "--details")
    assert show("--hf-config", LLAMA, "--longest-sequence", *H100, *options) == 0
    read = capsys.readouterr()
    assert read.err == ""
    first, blank, head, *rows = read.out.splitlines()
    found = re.fullmatch(
        r"llama3_8b.json \(llama\) on one h100 GPU: ([\d,]+) tokens with a memory budget; "
        r"off ([\d,]+), selective recomputation ([\d,]+), full recomputation ([\d,]+), "
        r"built-in engine ([\d,]+) at most",
        first,
    )
    assert found
    ours, off, selective, full, _ = (int(text.replace(",", "")) for text in found.groups())
    assert off < selective < full < ours
    assert blank == ""
    assert "step at 40,960" in head
    walls = [re.split(r"\s{2,}", row)[-1] for row in rows[:5]]
    assert walls == ["layers' saved bytes"] * 2 + ["logits and loss"] * 2 + ["host memory"]
    assert rows[5] == (
        "For the last row, train with --activation-memory-budget auto --mlp-sequence-tiles auto "
        "--loss-sequence-tiles auto"
    )
    assert "78.4 GiB" in rows[6]
    assert rows[8] == "off, 10,240 tokens: everything kept on the device"
    assert re.match(r"  peak: state 30.0 GiB, layers \d", rows[9])
    assert re.match(r"  next size: state 30.0 GiB, layers \d", rows[10])


def test_micro_batches_are_counted_in_sequences(
    four_layers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ("--hf-config", four_layers, "--largest-micro-batch", "--seq-length", "2k", *H100)
    assert show(*arguments) == 0
    shown = capsys.readouterr().out
    assert re.search(r": \d+ sequences with a memory budget; off 23, ", shown)
    assert "--details" in shown.splitlines()[-1]


def test_nothing_fits(capsys: pytest.CaptureFixture[str]) -> None:
    assert show("--hf-config", LLAMA, "--longest-sequence", "--gpu", "h100") == 3
    shown = capsys.readouterr().out
    assert re.match(r".* no size fits: 1024 would take 135.\d GiB of 78.4 GiB, .*--dp", shown)


@pytest.mark.parametrize(
    "parallel, step", [((), 1024), (("--cp", 2), 2048), (("--tp", 2, "--sequence-parallel"), 2048)]
)
def test_sizes_can_be_divided_among_ranks(
    parallel: tuple[object, ...], step: int, four_layers: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert show("--hf-config", four_layers, "--longest-sequence", *H100, *parallel) == 0
    rows = capsys.readouterr().out.splitlines()[3:8]
    sizes = [int(re.split(r"\s{2,}", row)[1].replace(",", "")) for row in rows]
    assert all(size and size % step == 0 for size in sizes)


FLAGS = """--num-layers 2 --hidden-size 4096 --num-attention-heads 32 --seq-length 8192 --swiglu
    --ffn-hidden-size 16384 --untie-embeddings-and-output-weights
    --max-position-embeddings 8192 --micro-batch-size 1 --global-batch-size 4 --vocab-size 32000
    --tokenizer-type NullTokenizer --bf16 --use-distributed-optimizer --optimizer-cpu-offload
    --optimizer-offload-fraction 1.0 --use-precision-aware-optimizer""".split()


def test_an_optimizer_on_the_host_leaves_less_of_it(capsys: pytest.CaptureFixture[str]) -> None:
    arguments = ("--largest-micro-batch", "--gpu", "h100", "--host-memory")
    assert show(*arguments, 20, "--", *FLAGS) == 0
    found = re.search(r"host memory of a rank ([\d.]+) GiB", capsys.readouterr().out)
    assert found
    # Two layers and two embeddings: 16 bytes for each parameter.
    parameters = 2 * (4 * 4096 * 4096 + 3 * 4096 * 4 * 4096) + 2 * 32_000 * 4096
    assert float(found[1]) == pytest.approx(20 - 16 * parameters / 2**30, abs=0.1)
    assert show(*arguments, 5, "--", *FLAGS) == 2
    assert "is not supported with optimizer_cpu_offload because" in capsys.readouterr().err


LONGEST = ("--hf-config", LLAMA, "--longest-sequence")


@pytest.mark.parametrize(
    "arguments, message",
    [
        ((*LONGEST, "--target-memory", 40), "--target-memory is not supported with --longest-seq"),
        ((*LONGEST, "--frontier", "f.png"), "--frontier is not supported with --longest-sequence"),
        ((*LONGEST, "--memory", 0), "--memory=0.0 must be above 0 GiB"),
        ((*LONGEST, "--host-memory", -1), "--host-memory=-1.0 must be above 0 GiB"),
        ((*LONGEST, "--memory", 10, "--margin", 10), "--margin=10.0 must be from 0"),
        ((*LONGEST, "--tp", 3), "num_attention_heads=32 is not a multiple of --tp=3"),
        (
            ("--hf-config", LLAMA, "--seq-length", "8k", "--memory", 40),
            "--memory is not supported without --longest-sequence",
        ),
        (("--hf-config", LLAMA, "--largest-micro-batch"), "--seq-length is not set"),
        (("trace.json", "--longest-sequence"), "--longest-sequence is not supported with a trace"),
    ],
)
def test_what_cannot_be_searched_is_refused(
    arguments: tuple[object, ...],
    message: str,
    capsys: pytest.CaptureFixture[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    assert show(*arguments) == 2
    assert message in capsys.readouterr().err
