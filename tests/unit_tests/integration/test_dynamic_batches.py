# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""From a corpus on disk through megatron's schedules to gradients, in groups of changing size.

For any layout of ranks, the gradients are those of the same documents one by one.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections import Counter
from functools import partial
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
from ranks import run_ranks
from shared_documents import changed_specs, fill_weights, layer_name
from small_corpora import batches_of, dataset_config, write_corpus
from tiny_gpt import ModelCase, build_chunks, initialize, make_config

from megatron.slipstream.context_parallel.documents import GroupIndex
from megatron.slipstream.integration.packed import dynamic_batches
from megatron.slipstream.options.fields import DynamicContextParallelOptions
from megatron.slipstream.packed_sequences.packing import Piece

pytestmark = pytest.mark.releases

TOKENS_PER_RANK = 64
NUM_MICRO_BATCHES = 3
TOLERANCE = 5e-6
"""Tolerances of the loss (about 5), and of gradients relative to the largest; in float32."""

PER_TOKEN = {"calculate_per_token_loss": True}
ROUTER = {
    "moe_router_load_balancing_type": "none",
    "moe_aux_loss_coeff": 0.0,
    "moe_router_score_function": "sigmoid",
    "moe_router_enable_expert_bias": True,
}
"""No auxiliary losses, which depend on the micro-batch. Routers count tokens for the bias."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Prefix of a corpus of which half of the tokens are in documents longer than a buffer."""
    pick = np.random.RandomState(2)
    documents = []
    for _ in range(80):
        length = int(pick.choice([2, 11, 17, 30, 100, 300], p=[0.1, 0.2, 0.3, 0.2, 0.1, 0.1]))
        documents.append(pick.randint(1, 128, length))
    return write_corpus(tmp_path_factory.mktemp("corpus"), documents)


def case_of(**options: Any) -> ModelCase:
    overrides = {**PER_TOKEN, **options.pop("overrides", {})}
    return ModelCase(
        num_layers=2, seq_length=TOKENS_PER_RANK, micro_batch_size=1, overrides=overrides, **options
    )


LAYOUTS: dict[str, tuple[int, int, ModelCase]] = {
    "2 ranks, static size 2": (2, 2, case_of(overrides={"context_parallel_size": 2})),
    "2 ranks, MoE": (2, 1, case_of(kind="moe", overrides=ROUTER)),
    "2 ranks, 2 stages, MLA": (4, 1, case_of(kind="mla", pp=2)),
    "4 ranks": (4, 1, case_of()),
}
"""Number of processes, static context-parallel size, and model."""


def set_arguments(case: ModelCase, **options: Any) -> Any:
    from megatron.core import mpu
    from megatron.training import global_vars

    data_parallel_size = mpu.get_data_parallel_world_size()
    context_parallel_size = mpu.get_context_parallel_world_size()
    args = SimpleNamespace(
        **dataclasses.asdict(DynamicContextParallelOptions(dynamic_context_parallel=True)),
        sequence_packing="balanced",
        thd_max_packed_sequences=5,
        seq_length=TOKENS_PER_RANK * context_parallel_size,
        context_parallel_size=context_parallel_size,
        data_parallel_size=data_parallel_size,
        global_batch_size=NUM_MICRO_BATCHES * data_parallel_size,
        eval_global_batch_size=data_parallel_size,
        sequence_parallel=False,
        hybrid_layer_pattern=None,
        num_experts=4 if case.kind == "moe" else None,
        moe_router_topk=2,
        moe_ffn_hidden_size=64,
        multi_latent_attention=case.kind == "mla",
        q_lora_rank=32,
        kv_lora_rank=16,
        qk_head_dim=16,
        qk_pos_emb_head_dim=8,
        v_head_dim=16,
        hidden_size=case.hidden_size,
        num_attention_heads=case.num_attention_heads,
        kv_channels=16,
        num_query_groups=2,
        group_query_attention=True,
        swiglu=True,
        ffn_hidden_size=192,
        seed=5,
    )
    vars(args).update(dynamic_context_parallel_verify=True)
    vars(args).update(options)
    global_vars._GLOBAL_ARGS = args
    return args


base_config = partial(dataset_config, TOKENS_PER_RANK)


# --- gradients ------------------------------------------------------------------------------------


class Trained(NamedTuple):
    """State of a rank after the forward and backward passes of an iteration."""

    loss: float
    """Mean over all labels; 0 except on the last stage."""
    gradients: dict[str, np.ndarray]
    """Gradients of the mean loss, by layer number and parameter name."""
    pieces: list[Piece]
    """Number of labels of all micro-batches and ranks."""
    sizes: Counter[int]
    """Number of parts of micro-batches, by size."""
    work: Any
    """Number of tokens and sum of squared lengths of the batch, as megatron logs its throughput."""
    num_routed: int
    """Tokens counted by this rank's routers, once per expert."""


def _train(
    rank: int,
    num_ranks: int,
    port: int,
    corpus: str,
    cache: Path,
    static_size: int,
    case: ModelCase,
) -> Trained:
    from megatron.core import parallel_state as ps
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.distributed.finalize_model_grads import finalize_model_grads
    from megatron.core.pipeline_parallel import get_forward_backward_func
    from megatron.training import training

    from megatron.slipstream.integration.packed.dynamic_context_parallel import (
        with_dynamic_context_parallelism,
    )

    initialize(case, rank, num_ranks, port, static_size)
    args = set_arguments(case)
    train, *_ = dynamic_batches.datasets((8, 2, 0), base_config(corpus, cache=cache))
    config = make_config(case)
    with changed_specs(with_dynamic_context_parallelism):
        (chunk,) = build_chunks(case, config)
    fill_weights(chunk)
    model = DistributedDataParallel(config, DistributedDataParallelConfig(), chunk)
    model.zero_grad_buffer()
    num_routed: list[int] = []

    def finalize(*arguments: Any, **options: Any) -> None:
        counts = (getattr(m, "local_tokens_per_expert", None) for m in chunk.modules())
        num_routed.extend(int(count.sum()) for count in counts if count is not None)
        finalize_model_grads(*arguments, **options)

    config.finalize_model_grads_func = finalize

    def forward_step(data: Any, model: torch.nn.Module) -> Any:
        output, loss_mask = dynamic_batches.forward(data, model)
        return output, partial(loss, loss_mask)

    def loss(mask: torch.Tensor, per_token: torch.Tensor) -> Any:
        total = (per_token * mask).sum()
        return total, mask.sum().int(), {"loss": torch.stack([total.detach(), mask.sum()])}

    results = get_forward_backward_func()(
        forward_step_func=forward_step,
        data_iterator=batches_of(train),
        model=model,
        num_microbatches=NUM_MICRO_BATCHES,
        seq_length=args.seq_length,
        micro_batch_size=1,
    )
    sums = sum((result["loss"] for result in results), torch.zeros(2))
    torch.distributed.all_reduce(sums, group=ps.get_data_parallel_group(with_context_parallel=True))
    num_slots = NUM_MICRO_BATCHES * ps.get_data_parallel_world_size() * static_size
    shares = [train.samples.index[slot] for slot in range(num_slots)]
    consume = getattr(training, "consume_seqlen_stats_in_iteration", lambda: (None, None))
    return Trained(
        float(sums[0] / sums[1].clamp(min=1)),
        {
            layer_name(chunk, name): parameter.main_grad.numpy().copy()
            for name, parameter in chunk.named_parameters()
        },
        [piece for share in shares if share.rank == 0 for piece in share.pack],
        Counter(share.size for share in shares),
        consume(),
        sum(num_routed),
    )


def _alone(
    rank: int, num_ranks: int, port: int, corpus: str, case: ModelCase, pieces: list[Piece]
) -> tuple[float, dict[str, np.ndarray]]:
    """Mean loss and gradients of documents one by one, with megatron-core's own attention."""
    from megatron.core.datasets.indexed_dataset import IndexedDataset

    overrides = {key: case.overrides[key] for key in ROUTER if key in case.overrides}
    whole = case_of(kind=case.kind, overrides=overrides)
    initialize(whole, rank, num_ranks, port)
    (chunk,) = build_chunks(whole, make_config(whole))
    fill_weights(chunk)
    texts = IndexedDataset(corpus)
    losses = []
    for document, offset, length in pieces:
        tokens = torch.from_numpy(texts.get(document, offset, length + 1).astype(np.int64))
        mask = torch.ones(1, 1, length, length, dtype=torch.bool).triu(1)
        positions = torch.arange(length).unsqueeze(0)
        losses.append(chunk(tokens[None, :-1], positions, mask, labels=tokens[None, 1:]).flatten())
    mean = torch.cat(losses).mean()
    mean.backward()
    gradients = {
        layer_name(chunk, name): parameter.grad.numpy().copy()
        for name, parameter in chunk.named_parameters()
    }
    return float(mean), gradients


@pytest.mark.parametrize("name", LAYOUTS)
def test_gradients_are_those_of_the_documents_one_by_one(
    name: str, corpus: str, tmp_path: Path
) -> None:
    num_ranks, static_size, case = LAYOUTS[name]
    ranks = run_ranks(num_ranks, _train, corpus, tmp_path, static_size, case)
    ((loss, gradients),) = run_ranks(1, _alone, corpus, case, ranks[0].pieces)
    sharing = num_ranks // case.pp
    assert len(ranks[0].sizes) > 1  # the batch has groups of different sizes
    assert sum(ranks[0].sizes.values()) == NUM_MICRO_BATCHES * sharing
    scale = max(abs(gradient).max() for gradient in gradients.values())
    seen = set()
    for number, trained in enumerate(ranks):
        assert trained.pieces == ranks[0].pieces
        assert trained.sizes == ranks[0].sizes
        if number // sharing == case.pp - 1:
            assert trained.loss == pytest.approx(loss, abs=TOLERANCE)
        for parameter, gradient in trained.gradients.items():
            seen.add(parameter)
            assert abs(gradient - gradients[parameter]).max() <= TOLERANCE * scale, parameter
    assert seen == set(gradients)
    lengths = [piece.length for piece in ranks[0].pieces]
    if case.kind == "moe":  # two layers, two experts for each token, and none for padding
        assert sum(trained.num_routed for trained in ranks) == 4 * sum(lengths)
    if hasattr(import_module("megatron.training.training"), "consume_seqlen_stats_in_iteration"):
        assert {trained.work for trained in ranks} == {
            (sum(lengths), sum(length**2 for length in lengths))
        }


# --- datasets and batches -------------------------------------------------------------------------


def _datasets(rank: int, num_ranks: int, port: int, corpus: str, cache: Path) -> dict[str, Any]:
    from megatron.core import mpu

    def never(*_: Any) -> Any:
        raise AssertionError("scheduled again")

    initialize(case_of(), rank, num_ranks, port)
    set_arguments(case_of())
    data_rank = mpu.get_data_parallel_rank()
    base = base_config(corpus, cache=cache)
    train, valid, test = dynamic_batches.datasets((20, 2, 0), base)
    with mock.patch.object(GroupIndex, "build", never):
        again, *_ = dynamic_batches.datasets((20, 2, 0), base)
    set_arguments(case_of(), seed=6)
    other, *_ = dynamic_batches.datasets((20, 2, 0), base)
    base.eod_mask_loss = True
    masked, *_ = dynamic_batches.datasets((20, 2, 0), base)

    def slots(dataset: Any) -> list[Any]:
        return [dataset.samples.index[slot] for slot in range(20)]

    def tokens(dataset: Any) -> list[list[int]]:
        return [dataset[number]["tokens"].tolist() for number in range(data_rank, 20, num_ranks)]

    return {
        "sizes": (len(train), len(valid), test),
        "slots": slots(train),
        "again": slots(again) == slots(train) and tokens(again) == tokens(train),
        "other seed": slots(other) == slots(train),
        "documents": {row[0] for row in train.samples.index.pieces.tolist()},
        "valid documents": {row[0] for row in valid.samples.index.pieces.tolist()},
        "masked token": (train.samples.masked_token, masked.samples.masked_token),
    }


def test_ranks_have_one_schedule_which_is_made_once(corpus: str, tmp_path: Path) -> None:
    first, second = run_ranks(2, _datasets, corpus, tmp_path)
    assert first == second
    # A set ends with a complete batch: of 3 micro-batches for training, of 1 for evaluation.
    assert first["sizes"] == (24, 2, None)
    assert first["again"]
    assert not first["other seed"]
    assert first["documents"] <= set(range(64))
    assert first["valid documents"] <= set(range(64, 80))
    assert first["masked token"] == (None, 0)
    names = {path.name.split("-", 1)[1] for path in tmp_path.iterdir()}
    assert "SharedGPTDataset-train-sizes.npy" in names


def _batch_of_each_rank(
    rank: int, num_ranks: int, port: int, corpus: str, cache: Path
) -> list[tuple[list[int], list[int], list[int]]]:
    case = case_of(tp=2)
    initialize(case, rank, num_ranks, port)
    args = set_arguments(case)
    train, *_ = dynamic_batches.datasets((8, 2, 0), base_config(corpus, cache=cache))
    found = []
    for loaded in itertools.islice(batches_of(train), NUM_MICRO_BATCHES):
        params = dynamic_batches.micro_batch_params(loaded, args)
        ranks = torch.distributed.get_process_group_ranks(params.cp_group)
        assert params.max_seqlen_q == len(ranks) * TOKENS_PER_RANK
        found.append((loaded["tokens"][0].tolist(), params.cu_seqlens_q.tolist(), ranks))
    return found


def test_tensor_parallel_ranks_have_one_batch_and_groups_of_their_own(
    corpus: str, tmp_path: Path
) -> None:
    ranks = run_ranks(4, _batch_of_each_rank, corpus, tmp_path)
    sizes = set()
    for micro_batch in zip(*ranks, strict=True):
        for first, second in (micro_batch[:2], micro_batch[2:]):
            tokens, offsets, members = first
            assert second == (tokens, offsets, [member + 1 for member in members])
            sizes.add(len(members))
    assert sizes == {1, 2}


def _different_corpora(rank: int, num_ranks: int, port: int, corpus: str, cache: Path) -> list[str]:
    """Errors of a rank whose documents differ from its neighbour's, with the check and without."""
    initialize(case_of(), rank, num_ranks, port)
    args = set_arguments(case_of(), seed=5 + rank)
    train, *_ = dynamic_batches.datasets((8, 2, 0), base_config(corpus, cache=cache / str(rank)))
    said = []
    for loaded in itertools.islice(batches_of(train), NUM_MICRO_BATCHES):
        try:
            dynamic_batches.micro_batch_params(loaded, args)
        except RuntimeError as error:
            said.append(str(error))
            args.dynamic_context_parallel_verify = False
    return said


def test_a_rank_with_other_documents_is_told_when_it_is_asked_for(
    corpus: str, tmp_path: Path
) -> None:
    for said in run_ranks(2, _different_corpora, corpus, tmp_path):
        (message,) = said  # what came after it was not compared
        assert re.match("data-parallel ranks 0 and 1 were to share .*; make sure that", message)
