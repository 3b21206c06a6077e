# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small corpora on disk, as megatron's datasets read them, and a tokenizer that fits."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch

END_OF_DOCUMENT = 0


class Tokenizer:
    """The parts of a tokenizer that megatron's configuration of datasets reads."""

    eod = END_OF_DOCUMENT
    vocab_size = 128
    unique_identifiers = "none"


def write_corpus(folder: Path, documents: Iterable[np.ndarray]) -> str:
    """Write the tokens of documents; returns the prefix of the two files."""
    from megatron.core.datasets.indexed_dataset import IndexedDatasetBuilder

    prefix = str(folder / "text")
    builder = IndexedDatasetBuilder(prefix + ".bin", dtype=np.uint16)
    for document in documents:
        builder.add_document(torch.from_numpy(document), [len(document)])
    builder.finalize(prefix + ".idx")
    return prefix
