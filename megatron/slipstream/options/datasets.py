# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Checks of tokenised datasets and of their tokenizer before training starts."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Optional

from megatron.slipstream.options.rules import Finding, Rule

# Datasets. Layout of an index: magic, version (u64), dtype code (u8), number of sequences (u64),
# number of document ends (u64), then lengths (i32 each), byte offsets (i64 each), document ends
# (i64 each). The tokens themselves are in the .bin file, back to back.

_MAGIC = b"MMIDIDX\x00\x00"
_HEADER = struct.Struct("<9sQBQQ")
_ITEM_TYPES = {1: "u1", 2: "i1", 3: "<i2", 4: "<i4", 5: "<i8", 6: "<f8", 7: "<f4", 8: "<u2"}
"""Numpy's names for the dtype codes of an index."""

_MAX_BYTES_TO_SCAN = 64 * 2**20

DATASET_MISSING = Rule(
    "dataset-missing",
    "error",
    "data_path={prefix} does not exist (no {missing})",
    "set the prefix without .bin or .idx, or make it with tools/preprocess_text.py",
)

DATASET_CORRUPT = Rule(
    "dataset-corrupt",
    "error",
    "data_path={prefix} is corrupt: {what}",
    "make it again with tools/preprocess_text.py",
)

TOKEN_OUTSIDE_VOCABULARY = Rule(
    "token-outside-vocabulary",
    "error",
    "vocab_size={vocab_size} is not supported with data_path={prefix} because the data contains "
    "token {largest}",
    "set tokenizer_json to the file written with the data, or vocab_size to at least {needed}",
)


def check_dataset(prefix: str, vocab_size: Optional[int] = None) -> list[Finding]:
    """Check a tokenised dataset ``<prefix>.bin`` and ``<prefix>.idx``, and its tokens.

    Reads the index's header, its last sequence, and the first 64 MiB of tokens. Prefixes in object
    storage ('s3://...') are not checked.
    """
    if "://" in prefix:
        return []
    index, tokens = Path(f"{prefix}.idx"), Path(f"{prefix}.bin")
    missing = [str(path) for path in (index, tokens) if not path.is_file()]
    if missing:
        return [DATASET_MISSING.found(prefix=prefix, missing=" and no ".join(missing))]
    problem = _index_problem(index, tokens)
    if problem is not None:
        return [DATASET_CORRUPT.found(prefix=prefix, what=problem)]
    if vocab_size is None:
        return []
    import numpy

    with index.open("rb") as stream:
        item_type = numpy.dtype(_ITEM_TYPES[_HEADER.unpack(stream.read(_HEADER.size))[2]])
    count = _MAX_BYTES_TO_SCAN // item_type.itemsize
    largest = int(numpy.fromfile(tokens, dtype=item_type, count=count).max(initial=0))
    if largest < vocab_size:
        return []
    return [
        TOKEN_OUTSIDE_VOCABULARY.found(
            prefix=prefix, vocab_size=vocab_size, largest=largest, needed=largest + 1
        )
    ]


def _index_problem(index: Path, tokens: Path) -> Optional[str]:
    try:
        index_bytes, token_bytes = index.stat().st_size, tokens.stat().st_size
        with index.open("rb") as stream:
            header = stream.read(_HEADER.size)
            if len(header) < _HEADER.size:
                return f"{index} is {index_bytes} bytes long, shorter than its header"
            magic, version, dtype_code, num_sequences, num_documents = _HEADER.unpack(header)
            if magic != _MAGIC:
                return f"{index} does not begin with the marks of an index file"
            if version != 1 or dtype_code not in _ITEM_TYPES:
                return f"{index} has unknown version {version} or dtype code {dtype_code}"
            expected = _HEADER.size + 12 * num_sequences + 8 * num_documents
            # A multimodal index adds one byte per sequence.
            if index_bytes not in (expected, expected + num_sequences):
                return f"{index} is {index_bytes} bytes long, its header says {expected}"
            if num_sequences == 0:
                return f"{index} lists no sequences"
            stream.seek(_HEADER.size + 4 * (num_sequences - 1))
            (last_length,) = struct.unpack("<i", stream.read(4))
            stream.seek(_HEADER.size + 4 * num_sequences + 8 * (num_sequences - 1))
            (last_offset,) = struct.unpack("<q", stream.read(8))
    except OSError as error:
        return f"{error.filename} cannot be read ({error.strerror})"
    end = last_offset + last_length * int(_ITEM_TYPES[dtype_code][-1])
    if end != token_bytes:
        return f"{tokens} is {token_bytes} bytes long, its index says {end}"
    return None


END_OF_DOCUMENT = "<|endoftext|>"
"""Special token that ``tools/preprocess_text.py`` inserts between documents."""


def read_tokenizer(path: Path) -> tuple[int, int]:
    """Return the number of tokens and the end-of-document token's id from a tokenizer file.

    Raises ``ValueError`` if the file does not exist or is not one of ours.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        vocabulary: dict[str, int] = dict(content["model"]["vocab"])
        vocabulary.update({token["content"]: token["id"] for token in content["added_tokens"]})
        return max(vocabulary.values()) + 1, vocabulary[END_OF_DOCUMENT]
    except OSError as error:
        raise ValueError(
            f"tokenizer_json={path} cannot be read ({error.strerror}); set it to the "
            "<prefix>-tokenizer.json that tools/preprocess_text.py wrote"
        ) from error
    except (ValueError, KeyError, TypeError) as error:
        raise ValueError(
            f"tokenizer_json={path} is not a tokenizer with a {END_OF_DOCUMENT} token; make it "
            "again with tools/preprocess_text.py"
        ) from error
