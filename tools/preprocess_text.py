# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Convert text to what Megatron trains on: a tokenizer and a tokenised dataset.

Works offline: the tokenizer (byte-level BPE, so that every text can be encoded) is trained on the
input itself, and the same input gives the same files. Output is complete or absent: files get their
final names only when all of them are written, the index last.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
import warnings
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

END_OF_DOCUMENT = "<|endoftext|>"
MIN_VOCAB_SIZE = 256 + 1
"""All bytes and the end-of-document token; a byte-level vocabulary cannot be smaller."""

_EXAMPLES = f"""\
documents:
  A .txt file is cut at blank lines into documents of at least --min-document-chars characters; 0
  makes the whole file one document. In a .jsonl file every line is a JSON object and one document,
  its text under --json-key. Every document ends with {END_OF_DOCUMENT}. Training holds out whole
  documents from the end (--split 95,5,0), so the order of the inputs decides which.

examples:
  python tools/preprocess_text.py examples/data/first_folio/*.txt --output-prefix .cache/first_folio
  python tools/preprocess_text.py more.jsonl --output-prefix .cache/more \\
      --tokenizer-json .cache/first_folio-tokenizer.json

writes:
  PREFIX.bin PREFIX.idx      the tokens; train with --data-path PREFIX
  PREFIX-tokenizer.json      the tokenizer; train with --tokenizer-json PREFIX-tokenizer.json
"""


class Summary(NamedTuple):
    """Size of the written dataset."""

    num_documents: int
    num_tokens: int
    num_characters: int
    vocab_size: int


def main(argv: Sequence[str] | None = None) -> int:
    args = _parser().parse_args(argv)
    try:
        summary = preprocess(
            inputs=[Path(name) for name in args.inputs],
            output_prefix=Path(args.output_prefix),
            vocab_size=args.vocab_size,
            tokenizer_json=Path(args.tokenizer_json) if args.tokenizer_json else None,
            min_document_chars=args.min_document_chars,
            json_key=args.json_key,
            overwrite=args.overwrite,
        )
    except ValueError as error:
        sys.stderr.write(f"error: {error}\n")
        return 2
    print(
        f"{summary.num_documents} documents, {summary.num_tokens} tokens "
        f"({summary.num_characters / max(summary.num_tokens, 1):.2f} characters each), vocabulary "
        f"{summary.vocab_size}: {args.output_prefix}.bin, .idx and -tokenizer.json"
    )
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, epilog=_EXAMPLES, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("inputs", nargs="+", metavar="FILE", help="text: .jsonl, or plain text")
    add("--output-prefix", required=True, metavar="PREFIX", help="path and first part of the names")
    about = "tokens in the vocabulary (%(default)s); more make sequences shorter"
    add("--vocab-size", type=int, default=2048, help=about)
    add("--tokenizer-json", metavar="FILE", help="use this tokenizer instead of training one")
    about = "shortest document cut from a .txt file (%(default)s); 0 keeps files whole"
    add("--min-document-chars", type=int, default=2000, metavar="N", help=about)
    add("--json-key", default="text", help="key of the text (%(default)s)")
    add("--overwrite", action="store_true", help="replace files that exist")
    return parser


def preprocess(
    inputs: Sequence[Path],
    output_prefix: Path,
    vocab_size: int = 2048,
    tokenizer_json: Path | None = None,
    min_document_chars: int = 2000,
    json_key: str = "text",
    overwrite: bool = False,
) -> Summary:
    """Tokenise ``inputs`` into ``<output_prefix>.bin``, ``.idx`` and ``-tokenizer.json``.

    Raises:
        ValueError: An argument is invalid; the message names it and the cure. Nothing is written.
    """
    if tokenizer_json is None and vocab_size < MIN_VOCAB_SIZE:
        raise ValueError(
            f"vocab_size={vocab_size} is too small because a byte-level vocabulary holds all 256 "
            f"bytes and {END_OF_DOCUMENT}; set at least {MIN_VOCAB_SIZE}"
        )
    targets = [Path(f"{output_prefix}{end}") for end in ("-tokenizer.json", ".bin", ".idx")]
    existing = [str(path) for path in targets if path.exists()]
    if existing and not overwrite:
        raise ValueError(f"{existing[0]} exists already; set --overwrite or another prefix")
    documents = list(read_documents(inputs, min_document_chars, json_key))
    if not documents:
        raise ValueError("the inputs contain no text, so there is nothing to tokenise")
    folder = output_prefix.parent
    try:
        folder.mkdir(parents=True, exist_ok=True)
        # In the same folder, hence the same file system: renaming is atomic.
        with tempfile.TemporaryDirectory(prefix=".preprocess-", dir=folder) as scratch:
            tokenizer = _tokenizer(documents, vocab_size, tokenizer_json)
            written = [Path(scratch) / name for name in ("tokenizer.json", "data.bin", "data.idx")]
            tokenizer.save(str(written[0]))
            num_tokens = _write_dataset(tokenizer, documents, written[1], written[2])
            for source, target in zip(written, targets, strict=True):
                source.replace(target)
    except OSError as error:
        raise ValueError(
            f"output_prefix={output_prefix} cannot be written ({error.strerror}); set a folder "
            "where you may write and that has room"
        ) from error
    characters = sum(map(len, documents))
    return Summary(len(documents), num_tokens, characters, tokenizer.get_vocab_size())


# Documents


def read_documents(inputs: Iterable[Path], min_document_chars: int, json_key: str) -> Iterator[str]:
    """Yield the documents of all inputs, in order.

    Raises:
        ValueError: An input cannot be read, is not UTF-8, or does not match its file extension.
    """
    for path in inputs:
        try:
            text = path.read_text(encoding="utf-8")
        except OSError as error:
            raise ValueError(f"input {path} cannot be read ({error.strerror})") from error
        except UnicodeDecodeError as error:
            raise ValueError(
                f"input {path} is not UTF-8 text (byte {error.start}); convert it"
            ) from error
        if path.suffix == ".jsonl":
            yield from _json_documents(path, text, json_key)
        else:
            yield from blocks(text, min_document_chars)


def _json_documents(path: Path, text: str, key: str) -> Iterator[str]:
    for number, line in enumerate(text.splitlines(), start=1):
        if not line.strip():
            continue
        try:
            document = json.loads(line)[key]
        except (ValueError, KeyError, TypeError) as error:
            raise ValueError(
                f"line {number} of {path} is not a JSON object with the key {key!r}; "
                "correct the line or set --json-key"
            ) from error
        if not isinstance(document, str):
            raise ValueError(f"line {number} of {path}: the value of {key!r} is not a text")
        if document:
            yield document


def blocks(text: str, min_chars: int) -> Iterator[str]:
    """Cut ``text`` at blank lines into pieces of at least ``min_chars`` characters.

    The last piece may be shorter; 0 does not cut. Joined with blank lines, the pieces are the text.
    """
    if min_chars <= 0:
        if text.strip():
            yield text
        return
    piece: list[str] = []
    length = 0
    for paragraph in text.split("\n\n"):
        piece.append(paragraph)
        length += len(paragraph) + 2
        if length >= min_chars:
            yield "\n\n".join(piece)
            piece, length = [], 0
    if "".join(piece).strip():
        yield "\n\n".join(piece)


# Tokens


def _tokenizer(documents: Sequence[str], vocab_size: int, existing: Path | None) -> Any:
    try:
        from tokenizers import Tokenizer
        from tokenizers.decoders import ByteLevel as ByteLevelDecoder
        from tokenizers.models import BPE
        from tokenizers.pre_tokenizers import ByteLevel
        from tokenizers.trainers import BpeTrainer
    except ImportError as error:
        raise ValueError(
            "the package 'tokenizers' is not installed; pip install tokenizers"
        ) from error
    if existing is not None:
        return _load_tokenizer(Tokenizer, existing)
    tokenizer = Tokenizer(BPE())
    tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
    tokenizer.decoder = ByteLevelDecoder()
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[END_OF_DOCUMENT],
        initial_alphabet=ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(documents, trainer)
    return tokenizer


def _load_tokenizer(tokenizer_class: Any, path: Path) -> Any:
    try:
        tokenizer = tokenizer_class.from_str(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(f"tokenizer_json={path} cannot be read ({error.strerror})") from error
    except Exception as error:  # the library raises bare Exception for a malformed file
        raise ValueError(f"tokenizer_json={path} is not a tokenizer file ({error})") from error
    if tokenizer.token_to_id(END_OF_DOCUMENT) is None:
        raise ValueError(f"tokenizer_json={path} has no token {END_OF_DOCUMENT}; train another")
    return tokenizer


def _write_dataset(tokenizer: Any, documents: Sequence[str], tokens: Path, index: Path) -> int:
    """Encode and write all documents; return the number of tokens."""
    import numpy
    import torch

    import megatron.slipstream  # noqa: F401  # silences the messages that ./run disables

    with warnings.catch_warnings():
        # Megatron warns about every missing optional package; none matters here.
        warnings.simplefilter("ignore")
        from megatron.core.datasets.indexed_dataset import DType, IndexedDatasetBuilder

    vocab_size = tokenizer.get_vocab_size()
    dtype = DType.optimal_dtype(vocab_size)
    end = tokenizer.token_to_id(END_OF_DOCUMENT)
    builder = IndexedDatasetBuilder(str(tokens), dtype=dtype)
    num_tokens = 0
    for document in _progress(documents):
        ids = [*tokenizer.encode(document).ids, end]
        builder.add_document(torch.from_numpy(numpy.array(ids, dtype=numpy.int64)), [len(ids)])
        num_tokens += len(ids)
    builder.finalize(str(index))
    return num_tokens


def _progress(documents: Sequence[str]) -> Iterable[str]:
    """Return the documents, with a progress bar on stderr if it is a terminal."""
    if not sys.stderr.isatty():
        return documents
    from rich.console import Console
    from rich.progress import track

    return track(documents, "tokenising", console=Console(stderr=True))


if __name__ == "__main__":
    sys.exit(main())
