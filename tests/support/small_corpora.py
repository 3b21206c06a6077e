# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small corpora on disk for megatron's datasets, and a matching tokenizer."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, Optional

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


def dataset_config(
    sequence_length: int, *prefixes: str, cache: Optional[Path] = None, **options: Any
) -> Any:
    """megatron's configuration of datasets of these corpora; ``options`` replace its fields."""
    from megatron.core.datasets.gpt_dataset import GPTDatasetConfig

    given: dict[str, Any] = {
        "random_seed": 5,
        "sequence_length": sequence_length,
        "blend": (list(prefixes), None),
        "split": "80,20,0",
        "path_to_cache": None if cache is None else str(cache),
        "tokenizer": Tokenizer(),
        "reset_position_ids": False,
        "reset_attention_mask": False,
        "eod_mask_loss": False,
        "create_attention_mask": False,
    }
    return GPTDatasetConfig(**given | options)


def batches_of(dataset: Any, consumed_samples: int = 0) -> Iterator[dict[str, torch.Tensor]]:
    """A rank's batches, as from megatron's loader with ``--dataloader-type single``."""
    from megatron.core import mpu
    from megatron.training.datasets.data_samplers import MegatronPretrainingSampler

    sampler = MegatronPretrainingSampler(
        total_samples=len(dataset),
        consumed_samples=consumed_samples,
        micro_batch_size=1,
        data_parallel_rank=mpu.get_data_parallel_rank(),
        data_parallel_size=mpu.get_data_parallel_world_size(),
    )
    return iter(torch.utils.data.DataLoader(dataset, batch_sampler=sampler))
