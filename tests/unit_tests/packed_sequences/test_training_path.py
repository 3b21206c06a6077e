# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""From a corpus on disk through megatron's datasets, samplers and schedules to losses."""

from __future__ import annotations

import re
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional
from unittest import mock

import numpy as np
import pytest
import torch
from megatron.core.datasets.utils import Split
from ranks import run_ranks
from shared_documents import fill_weights
from small_corpora import END_OF_DOCUMENT, batches_of, dataset_config, write_corpus
from tiny_gpt import ModelCase, build_chunks, initialize, make_config

from megatron.slipstream.integration.entry import providers
from megatron.slipstream.integration.packed import packed_sequences
from megatron.slipstream.integration.record.monitor import Monitor
from megatron.slipstream.packed_sequences.dataset import PackIndex, PackingPlan

pytestmark = pytest.mark.releases

SEQ_LENGTH = 64
NUM_MICRO_BATCHES = 4


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a corpus of 60 documents, mostly short, that end with token 0."""
    pick = np.random.RandomState(2)
    documents = []
    for _ in range(60):
        length = int(pick.choice([5, 11, 17, 30, 90]))
        documents.append(np.append(pick.randint(1, 128, length), END_OF_DOCUMENT))
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents)


def case_of(**options: Any) -> ModelCase:
    return ModelCase(num_layers=4, seq_length=SEQ_LENGTH, micro_batch_size=1, **options)


def set_arguments(case: ModelCase, **options: Any) -> Any:
    from megatron.core import mpu
    from megatron.training import global_vars

    args = SimpleNamespace(
        sequence_packing="balanced",
        dynamic_context_parallel=False,
        thd_max_packed_sequences=5,
        seq_length=SEQ_LENGTH,
        context_parallel_size=1,
        sequence_parallel=False,
        num_experts=4 if case.kind == "moe" else None,
        hybrid_layer_pattern=None,
        check_for_nan_in_loss_and_grad=False,
        global_batch_size=NUM_MICRO_BATCHES * mpu.get_data_parallel_world_size(),
        eval_global_batch_size=mpu.get_data_parallel_world_size(),
        data_parallel_size=mpu.get_data_parallel_world_size(),
        seed=5,
    )
    vars(args).update(options)
    global_vars._GLOBAL_ARGS = args
    return args


base_config = partial(dataset_config, SEQ_LENGTH)


# --- losses ---------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """State of a rank after the forward and backward passes of an iteration."""

    losses: list[tuple[float, float]]
    """Summed loss and number of labels of each micro-batch; empty except on the last stage."""
    num_routed: list[int]
    """Tokens that each MoE layer's router counted."""
    work: tuple[float, float]
    """Number of tokens and sum of squared lengths of the batch, as megatron logs its throughput."""


def _train(
    rank: int, num_ranks: int, port: int, corpus: str, cache: Path, case: ModelCase
) -> Trained:
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import training

    initialize(case, rank, num_ranks, port)
    set_arguments(case)
    train, *_ = packed_sequences.datasets((8, 2, 0), base_config(corpus, cache=cache))
    chunks = build_chunks(case, make_config(case))
    for chunk in chunks:
        fill_weights(chunk)
    data = batches_of(train) if train is not None else None
    monitor = Monitor(num_iterations=1, iteration=lambda: 1, shows=False, record=False)
    results = get_forward_backward_func()(
        forward_step_func=partial(providers.forward_step, monitor=monitor),
        data_iterator=[batches_of(train) for _ in chunks] if case.vpp else data,
        model=chunks if case.vpp else chunks[0],
        num_microbatches=NUM_MICRO_BATCHES,
        seq_length=SEQ_LENGTH,
        micro_batch_size=1,
    )
    gradients = [p.grad for chunk in chunks for p in chunk.parameters()]
    assert all(gradient is not None and gradient.isfinite().all() for gradient in gradients)
    routers = [module for chunk in chunks for module in chunk.modules()]
    counts = [getattr(module, "local_tokens_per_expert", None) for module in routers]
    consume = getattr(training, "consume_seqlen_stats_in_iteration", lambda: (0.0, 0.0))
    return Trained(
        [tuple(result["lm loss"].tolist()) for result in results],
        [int(count.sum()) for count in counts if count is not None],
        consume(),
    )


COUNTED = {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True}
LAYOUTS = {
    "PP2": case_of(pp=2),
    "PP2 VPP2": case_of(pp=2, vpp=2),
    "PP2, MoE": case_of(kind="moe", pp=2, overrides=COUNTED),
}


@pytest.mark.parametrize("case", LAYOUTS.values(), ids=LAYOUTS)
def test_every_stage_sees_documents_and_padding(
    case: ModelCase, corpus: str, tmp_path: Path
) -> None:
    whole = case_of(kind=case.kind, overrides=case.overrides)
    (expected,) = run_ranks(1, _train, corpus, tmp_path, whole)
    stages = run_ranks(2, _train, corpus, tmp_path, case)
    assert len(expected.losses) == NUM_MICRO_BATCHES
    assert stages[-1].losses == expected.losses
    num_tokens = sum(num_labels for _, num_labels in expected.losses)
    assert num_tokens < SEQ_LENGTH * NUM_MICRO_BATCHES
    num_layers = 4 if case.kind == "moe" else 0
    assert sum((stage.num_routed for stage in stages), []) == [2 * num_tokens] * num_layers
    if hasattr(import_module("megatron.training.training"), "consume_seqlen_stats_in_iteration"):
        assert expected.work[0] == num_tokens < expected.work[1]
    assert [stage.work for stage in stages] == [expected.work] * 2


def _packed_and_alone(
    rank: int, num_ranks: int, port: int, corpus: str, cache: Path
) -> list[tuple[list[float], list[float]]]:
    """Summed loss and number of labels of some batches, packed and document by document."""
    initialize(case_of(), rank, num_ranks, port)
    set_arguments(case_of())
    train, *_ = packed_sequences.datasets((8, 2, 0), base_config(corpus, cache=cache))
    (model,) = build_chunks(case_of(), make_config(case_of()))
    fill_weights(model)
    monitor = Monitor(num_iterations=1, iteration=lambda: 1, shows=False, record=False)
    data = batches_of(train)
    found = []
    for number in range(4):
        output, loss = providers.forward_step(data, model, monitor=monitor)
        packed = loss(output)[2]["lm loss"].tolist()
        alone = [0.0, 0.0]
        for piece in train.samples.index[number]:
            text = train.samples.corpus.get(piece.document, piece.offset, piece.length + 1)
            tokens = torch.from_numpy(text.astype(np.int64)).unsqueeze(0)
            mask = torch.ones(1, 1, piece.length, piece.length, dtype=torch.bool).triu(1)
            places = torch.arange(piece.length).unsqueeze(0)
            losses = model(tokens[:, :-1], places, mask, labels=tokens[:, 1:])
            alone = [alone[0] + losses.sum().item(), alone[1] + piece.length]
        found.append((packed, alone))
    return found


def test_the_loss_of_a_batch_is_that_of_its_documents_one_by_one(
    corpus: str, tmp_path: Path
) -> None:
    (batches,) = run_ranks(1, _packed_and_alone, corpus, tmp_path)
    assert min(num_packed for (_, num_packed), _ in batches) < SEQ_LENGTH
    for (packed, num_packed), (alone, num_alone) in batches:
        assert num_packed == num_alone
        assert packed / num_packed == pytest.approx(alone / num_alone, rel=1e-6)


def _tokens_of_rank(
    rank: int, num_ranks: int, port: int, corpus: str, cache: Path
) -> tuple[list[Any], list[Any]]:
    initialize(case_of(), rank, num_ranks, port)
    set_arguments(case_of())
    train, *_ = packed_sequences.datasets((16, 2, 0), base_config(corpus, cache=cache))
    own = [batch["tokens"][0].tolist() for batch in batches_of(train)]
    return own, [train[number]["tokens"].tolist() for number in range(16)]


def test_data_parallel_ranks_take_turns(corpus: str, tmp_path: Path) -> None:
    (first, samples), (second, same_samples) = run_ranks(2, _tokens_of_rank, corpus, tmp_path)
    assert same_samples == samples
    assert first == samples[0::2]
    assert second == samples[1::2]


# --- batches --------------------------------------------------------------------------------------


def _batch_of_each_rank(
    rank: int, num_ranks: int, port: int, corpus: str, cache: Path
) -> dict[str, list[Any]]:
    from megatron.slipstream.packed_sequences.batch import OFFSET_KEYS, SEQUENCE_KEYS

    initialize(case_of(tp=2), rank, num_ranks, port)
    args = set_arguments(case_of(tp=2))
    train, *_ = packed_sequences.datasets((8, 2, 0), base_config(corpus, cache=cache))
    assert (train is None) == (rank > 0)
    data = None if train is None else batches_of(train)
    needed = {*OFFSET_KEYS, *SEQUENCE_KEYS}
    batch = packed_sequences._batch(data, needed, args)
    args.sequence_parallel = True
    masks = {}
    for model, pattern in (("GPT", None), ("hybrid", "*E")):
        args.hybrid_layer_pattern = pattern
        for is_first in (True, False):
            mask = packed_sequences._padding_mask_for(batch["padding_mask"], is_first, args)
            masks[f"{model}, {is_first}"] = mask[0].tolist()
    return {"masks": masks, **{key: batch[key].tolist() for key in sorted(needed)}}


def test_tensor_parallel_ranks_share_a_batch(corpus: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _batch_of_each_rank, corpus, tmp_path)
    masks, other_masks = first.pop("masks"), second.pop("masks")
    # With sequence parallelism each rank gets its own tokens, unless the model divides them.
    assert masks.pop("GPT, True") == other_masks.pop("GPT, True") == first["padding_mask"][0]
    for where, mask in masks.items():
        assert mask + other_masks[where] == first["padding_mask"][0], where
        assert len(mask) == SEQ_LENGTH // 2
    assert first == second
    assert first["cu_seqlens"][0][1] > 0


# --- datasets -------------------------------------------------------------------------------------


def _datasets(
    rank: int, num_ranks: int, port: int, corpus: str, cache: Optional[Path]
) -> dict[str, Any]:
    def never(*_: Any) -> Any:
        raise AssertionError("packed again")

    initialize(case_of(), rank, num_ranks, port)
    set_arguments(case_of())
    train, valid, test = packed_sequences.datasets((8, 2, 0), base_config(corpus, cache=cache))
    resumed = next(batches_of(train, consumed_samples=3))
    with mock.patch.object(PackIndex, "build", never):
        again, *_ = packed_sequences.datasets((8, 2, 0), base_config(corpus, cache=cache))
    longer, *_ = packed_sequences.datasets((30, 2, 0), base_config(corpus, cache=cache))
    set_arguments(case_of(), seed=6)
    other, *_ = packed_sequences.datasets((8, 2, 0), base_config(corpus, cache=cache))
    masked, *_ = packed_sequences.datasets((8, 2, 0), base_config(corpus, eod_mask_loss=True))

    def tokens(dataset: Any) -> list[list[int]]:
        return [dataset[number]["tokens"].tolist() for number in range(8)]

    return {
        "sizes": (len(train), len(valid), test),
        "again": tokens(again) == tokens(train),
        "longer": tokens(longer) == tokens(train) and len(longer) == 30,
        "other seed": tokens(other) == tokens(train),
        "documents": {row[0] for row in train.samples.index.pieces.tolist()},
        "valid documents": {row[0] for row in valid.samples.index.pieces.tolist()},
        "resumed": resumed["tokens"][0].tolist() == train[3]["tokens"].tolist(),
        "masked token": (train.samples.masked_token, masked.samples.masked_token),
    }


def check_datasets(found: dict[str, Any]) -> None:
    assert found["sizes"] == (8, 2, None)
    assert found["again"]
    assert found["longer"]
    assert not found["other seed"]
    assert found["documents"] <= set(range(48))
    assert found["valid documents"] <= set(range(48, 60))
    assert found["resumed"]
    assert found["masked token"] == (None, END_OF_DOCUMENT)


def test_samples_are_packed_once_and_read_from_the_cache(corpus: str, tmp_path: Path) -> None:
    (found,) = run_ranks(1, _datasets, corpus, tmp_path / "cache")
    check_datasets(found)
    names = {path.name.split("-", 1)[1] for path in (tmp_path / "cache").iterdir()}
    assert "PackedGPTDataset-train-pieces.npy" in names


def test_without_a_cache_folder_the_index_lies_beside_the_corpus(corpus: str) -> None:
    (found,) = run_ranks(1, _datasets, corpus, None)
    check_datasets(found)
    assert (Path(corpus) / "cache" / "PackedGPTDataset_indices").is_dir()


def _mock_and_refused(rank: int, num_ranks: int, port: int, corpus: str) -> list[str]:
    initialize(case_of(), rank, num_ranks, port)
    set_arguments(case_of())
    base, mock = base_config(corpus), base_config(blend=None, split=None)
    train, _, test = packed_sequences.datasets((8, 2, 0), mock)
    said = [f"{len(train)} mock samples"]
    assert len(test) == 1  # none was requested, but megatron needs one
    try:
        packed_sequences.dataset_config(base_config(corpus, corpus), set_arguments(case_of()))
    except ValueError as error:
        said.append(str(error))
    greedy = set_arguments(case_of(), sequence_packing="greedy")
    packed_sequences.dataset_config(base_config(corpus, corpus), greedy)
    assert packed_sequences.dataset_config(base, greedy).blend == base.blend
    return said


def test_mock_data_is_packed_and_a_blend_is_not_balanced(corpus: str) -> None:
    ((mock, refusal),) = run_ranks(1, _mock_and_refused, corpus)
    assert mock == "8 mock samples"
    assert re.match("data_path with 2 corpora is not .* sequence_packing=balanced.*; set", refusal)


@pytest.mark.parametrize(
    "most, length, is_told",
    [(2, 20, True), (3, 20, False), (8, 20, False), (8, 40, False)],
    ids=["too low", "as many as fit", "more than fit", "long documents"],
)
def test_a_limit_that_leaves_buffers_empty_is_told(
    most: int, length: int, is_told: bool, caplog: pytest.LogCaptureFixture
) -> None:
    from megatron.slipstream.packed_sequences.packing import PackLimits

    plan = PackingPlan(PackLimits(60, most))
    index = PackIndex.build(np.full(24, length + 1), np.arange(24), plan)
    with caplog.at_level("WARNING", logger="megatron.slipstream"):
        dataset = SimpleNamespace(index_split=Split.train)
        packed_sequences.PackedGPTDataset._log_index(dataset, index, plan)
    ours = [r.getMessage() for r in caplog.records if r.name.startswith("megatron.slipstream")]
    told = [f"thd_max_packed_sequences={most} leaves 33.3%" in message for message in ours]
    assert told == [True] * is_told
