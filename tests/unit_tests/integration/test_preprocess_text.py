# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Text in, tokenizer and dataset out: nothing lost, nothing random, nothing half-written."""

from __future__ import annotations

import importlib.util
import json
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from hypothesis import given, strategies as st

from megatron.slipstream.options import datasets

ROOT = Path(__file__).resolve().parents[3]

TEXT = "\n\n".join(
    f"Scene {n}. Enter two Gentlemen, whispering of the {n}th Moone." for n in range(40)
)
UNUSUAL = "Cæsar, ünïcode, 日本語, \t tabs  and   spaces, and an emoji \N{GHOST}.\n\nEnd"


def _load_tool() -> ModuleType:
    spec = importlib.util.spec_from_file_location(
        "preprocess_text", ROOT / "tools" / "preprocess_text.py"
    )
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules["preprocess_text"] = module
    spec.loader.exec_module(module)
    return module


tool = _load_tool()


@pytest.fixture
def text_file(tmp_path: Path) -> Path:
    path = tmp_path / "play.txt"
    path.write_text(TEXT + "\n\n" + UNUSUAL, encoding="utf-8")
    return path


def _documents(prefix: Path) -> list[str]:
    """The decoded text of a dataset, without end-of-document tokens."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(f"{prefix}-tokenizer.json")
    end = tokenizer.token_to_id(tool.END_OF_DOCUMENT)
    dataset = IndexedDataset(str(prefix))
    documents = []
    for index in range(len(dataset)):
        ids = dataset[index].tolist()
        assert ids[-1] == end
        documents.append(tokenizer.decode(ids[:-1], skip_special_tokens=False))
    return documents


def test_tokens_decode_to_the_text(text_file: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "out" / "data"
    summary = tool.preprocess([text_file], prefix, vocab_size=300, min_document_chars=200)
    documents = _documents(prefix)
    assert "\n\n".join(documents) == text_file.read_text(encoding="utf-8")
    assert len(documents) == summary.num_documents > 5


def test_training_accepts_what_was_written(text_file: Path, tmp_path: Path) -> None:
    from megatron.slipstream.options.datasets import read_tokenizer

    prefix = tmp_path / "data"
    summary = tool.preprocess([text_file], prefix, vocab_size=300)
    vocab_size, end = read_tokenizer(Path(f"{prefix}-tokenizer.json"))
    assert vocab_size == summary.vocab_size == 300
    assert 0 <= end < vocab_size
    assert datasets.check_dataset(str(prefix), vocab_size) == []


def test_the_same_text_gives_the_same_files(text_file: Path, tmp_path: Path) -> None:
    prefixes = [tmp_path / "a", tmp_path / "b"]
    for prefix in prefixes:
        tool.preprocess([text_file], prefix, vocab_size=300)
    for end in (".bin", ".idx", "-tokenizer.json"):
        first, second = (Path(f"{prefix}{end}").read_bytes() for prefix in prefixes)
        assert first == second


def test_a_json_line_is_a_document(tmp_path: Path) -> None:
    documents = ["one document\n\nwith a blank line", "another"]
    path = tmp_path / "text.jsonl"
    path.write_text("".join(json.dumps({"body": text}) + "\n" for text in documents))
    tool.preprocess([path], tmp_path / "data", vocab_size=260, json_key="body")
    assert _documents(tmp_path / "data") == documents


def test_an_existing_tokenizer_is_used_unchanged(text_file: Path, tmp_path: Path) -> None:
    tool.preprocess([text_file], tmp_path / "a", vocab_size=300)
    existing = tmp_path / "a-tokenizer.json"
    other = tmp_path / "other.txt"
    other.write_text("Words that the tokenizer has not seen: zyzzyva.")
    tool.preprocess([other], tmp_path / "b", tokenizer_json=existing)
    assert _documents(tmp_path / "b") == [other.read_text()]
    assert json.loads((tmp_path / "b-tokenizer.json").read_text()) == json.loads(
        existing.read_text()
    )


@given(
    text=st.text(alphabet="ab\n", max_size=200),
    min_chars=st.integers(min_value=1, max_value=50),
)
def test_blocks_keep_the_text_and_their_length(text: str, min_chars: int) -> None:
    pieces = list(tool.blocks(text, min_chars))
    joined = "\n\n".join(pieces)
    assert text.startswith(joined)
    assert not text[len(joined) :].strip()
    assert all(len(piece) + 2 >= min_chars for piece in pieces[:-1])


def _refusals(tmp_path: Path) -> dict[str, tuple[dict[str, Any], str]]:
    good = tmp_path / "good.txt"
    good.write_text(TEXT)
    empty = tmp_path / "empty.txt"
    empty.write_text("\n \n")
    binary = tmp_path / "binary.txt"
    binary.write_bytes(b"abc\xff\xfe")
    jsonl = tmp_path / "bad.jsonl"
    jsonl.write_text('{"text": "fine"}\n{"title": "no text"}\n')
    folder = tmp_path / "a-file"
    folder.write_text("where a folder should be")
    return {
        "missing input": ({"inputs": [tmp_path / "no.txt"]}, "no.txt cannot be read"),
        "empty": ({"inputs": [empty]}, "no text"),
        "not text": ({"inputs": [binary]}, "not UTF-8 text (byte 3)"),
        "json": ({"inputs": [jsonl]}, "line 2 of"),
        "vocabulary": ({"inputs": [good], "vocab_size": 256}, "set at least 257"),
        "folder": (
            {"inputs": [good], "output_prefix": folder / "data", "vocab_size": 260},
            "cannot be written",
        ),
        "tokenizer": ({"inputs": [good], "tokenizer_json": empty}, "is not a tokenizer file"),
    }


@pytest.mark.parametrize(
    "case", ["missing input", "empty", "not text", "json", "vocabulary", "folder", "tokenizer"]
)
def test_a_refusal_names_the_cause_and_leaves_nothing(case: str, tmp_path: Path) -> None:
    arguments, message = _refusals(tmp_path)[case]
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError) as refusal:
        tool.preprocess(**{"output_prefix": tmp_path / "data", **arguments})
    assert message in str(refusal.value)
    assert sorted(tmp_path.rglob("*")) == before


def test_a_failure_while_writing_leaves_nothing(
    text_file: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full_disk(tokenizer: Any, documents: Any, tokens: Path, index: Path) -> int:
        tokens.write_bytes(b"half of the tokens")
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(tool, "_write_dataset", full_disk)
    before = sorted(tmp_path.rglob("*"))
    with pytest.raises(ValueError, match="No space left on device"):
        tool.preprocess([text_file], tmp_path / "data", vocab_size=260)
    assert sorted(tmp_path.rglob("*")) == before


def test_files_that_exist_are_replaced_only_on_request(text_file: Path, tmp_path: Path) -> None:
    prefix = tmp_path / "data"
    tool.preprocess([text_file], prefix, vocab_size=260)
    before = Path(f"{prefix}.bin").read_bytes()
    with pytest.raises(ValueError, match="exists already"):
        tool.preprocess([text_file], prefix, vocab_size=300)
    assert Path(f"{prefix}.bin").read_bytes() == before
    tool.preprocess([text_file], prefix, vocab_size=300, overwrite=True)
    assert Path(f"{prefix}.bin").read_bytes() != before


def test_the_command_line_says_an_error_in_one_line(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = tool.main([str(tmp_path / "no.txt"), "--output-prefix", str(tmp_path / "data")])
    assert code == 2
    assert capsys.readouterr().err.count("\n") == 1
