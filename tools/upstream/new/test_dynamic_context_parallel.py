# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Documents that ranks share in groups of changing size train like documents one by one."""

from __future__ import annotations

import multiprocessing
import sys
import traceback
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch

# Helpers of planned offloading, whose tests need no GPU either.
sys.path.insert(0, str(Path(__file__).parents[1] / "pipeline_parallel" / "offload_support"))

from megatron.core.pipeline_parallel.offload_engine.select import deselect, select
from offloaded_models import (
    MODULES,
    VOCAB_SIZE,
    Arguments,
    Batches,
    build,
    capture_layers,
    initialize,
    pack,
    same,
    train,
    wrap,  # since chunks
)
from small_corpora import END_OF_DOCUMENT, batches_of, dataset_config, write_corpus

from megatron.slipstream.context_parallel.documents import SIZE_KEY, shared_sample
from megatron.slipstream.context_parallel.limits import RankLimits
from megatron.slipstream.context_parallel.scheduler import Share
from megatron.slipstream.integration.packed import dynamic_batches
from megatron.slipstream.integration.packed.batch_group import uses_batch_group
from megatron.slipstream.integration.packed.context_parallel_groups import context_parallel_groups
from megatron.slipstream.integration.packed.packed_sequences import packed_seq_params
from megatron.slipstream.options.context_parallel import check_dynamic_context_parallel
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.options.rules import require
from megatron.slipstream.packed_sequences.packing import PackLimits, Piece

pytestmark = pytest.mark.skipif(
    torch.cuda.is_available(),
    reason="trains in float32, which fused attention does not take",
)
LIMITS = RankLimits(num_ranks=2, tokens_per_rank=32, max_sequences=4)
LENGTHS = (61, 17, 9, 30)
MICRO_BATCHES = (
    ((1, (1,)), (1, (2,))),
    ((2, (0,)),),
    ((2, (3, 2)),),
    ((1, (3,)), (1, (1, 2))),
)
"""The groups of each, in the order of their ranks: number of ranks, and documents."""
TOLERANCE = 5e-6
FULL = {
    "recompute_granularity": "full",
    "recompute_method": "uniform",
    "recompute_num_layers": 1,
}


def texts() -> list[np.ndarray]:
    draw = np.random.RandomState(3)
    return [draw.randint(1, VOCAB_SIZE, length + 1) for length in LENGTHS]


def shared(rank: int) -> Iterator[dict[str, Any]]:
    """A rank's parts of the micro-batches: arguments of the model, and ``loss_mask``."""
    groups, documents = context_parallel_groups(LIMITS), texts()
    for groups_of_ranks in MICRO_BATCHES:
        ranks = [
            Share(size, index, [Piece(n, 0, LENGTHS[n]) for n in numbers])
            for size, numbers in groups_of_ranks
            for index in range(size)
        ]
        share = ranks[rank]
        mine = [documents[piece.document] for piece in share.pack]
        sample = shared_sample(mine, share, LIMITS.of(share.size))
        offsets = (sample["cu_seqlens"], sample["cu_seqlens_padded"])
        params = packed_seq_params(*offsets, share.size * LIMITS.tokens_per_rank)
        params.cp_group = groups.of_size[share.size]
        yield {
            "input_ids": sample["tokens"].unsqueeze(0),
            "position_ids": sample["position_ids"].unsqueeze(0),
            "attention_mask": None,
            "labels": sample["labels"].unsqueeze(0),
            "loss_mask": sample["loss_mask"].unsqueeze(0),
            "packed_seq_params": params,
        }


def alone() -> Iterator[dict[str, Any]]:
    """The same documents, each a micro-batch of this rank."""
    documents = texts()
    for groups_of_ranks in MICRO_BATCHES:
        for number in (number for _, numbers in groups_of_ranks for number in numbers):
            batch = pack([documents[number]], PackLimits(LENGTHS[number], 1))
            yield {name: value for name, value in batch.items() if name != "padding_mask"}


def summed(model: Any, batches: Iterator[dict[str, Any]]) -> list[torch.Tensor]:
    """The sum of the losses and its gradients; all forward passes run before a backward."""
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        counts = batch.pop("loss_mask")
        losses.append((model(**batch).float() * counts).sum())
    for loss in losses:
        loss.backward()
    total = torch.stack([loss.detach() for loss in losses]).sum()
    return [total, *(p.grad.clone() for p in model.parameters() if p.grad is not None)]


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[tuple[Any, Any, Any]]:
    """What each of two ranks has trained, trained with offloading, and read.

    They are forked from a new process, which imports once for both: forked from this one, they
    would hang in what earlier tests have started.
    """
    folder = tmp_path_factory.mktemp("ranks")
    written = [np.append(text, END_OF_DOCUMENT).astype(np.uint16) for text in texts() * 8]
    write_corpus(folder, written)
    parent = multiprocessing.get_context("spawn").Process(target=_on_both_ranks, args=(folder,))
    parent.start()
    parent.join()
    files = [folder / f"result{rank}" for rank in range(2)]
    results = [torch.load(file, weights_only=False) for file in files if file.exists()]
    errors = [result for result in results if isinstance(result, str)]
    assert len(results) == 2, f"a rank has no result: {errors}"
    assert not errors, errors[0]
    return results


def _on_both_ranks(folder: Path) -> None:
    context = multiprocessing.get_context("fork")
    processes = [context.Process(target=_on_rank, args=(rank, folder)) for rank in range(2)]
    for process in processes:
        process.start()
    for process in processes:
        process.join(300)
        process.kill()


def _on_rank(rank: int, folder: Path) -> None:
    result: Any
    try:
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2
        )
        initialize()
        from megatron.slipstream.integration.cpu import cpu_modules
        from megatron.slipstream.integration.cpu.gathering_attention import GatheringCoreAttention

        cpu_modules.LatentCoreAttention = GatheringCoreAttention  # in this process
        result = [_train_both(rank), _train_offloading(rank), _read(rank, folder)]
        result.append(_train_replayed(rank))  # since chunks
        result.append(_train_layers(rank))  # since packed_layers
    except Exception:
        result = traceback.format_exc()
    torch.save(result, folder / f"result{rank}")


def _train_both(rank: int) -> list[list[Any]]:
    results = [summed(build("dense"), alone())]
    for options in ({}, FULL):
        results.append(summed(build("dense", **options), shared(rank)))
        for tensor in results[-1]:
            torch.distributed.all_reduce(tensor)
    return results


def test_documents_train_alike_in_groups_of_any_size(ranks: list[Any]) -> None:
    for (expected, found, recomputed), *_ in ranks:
        assert all(map(torch.equal, found, recomputed))
        torch.testing.assert_close(found[0], expected[0], rtol=TOLERANCE, atol=0)
        largest = max(float(gradient.abs().max()) for gradient in expected[1:])
        for one, other in zip(expected[1:], found[1:], strict=True):
            assert float((one - other).abs().max()) <= TOLERANCE * largest


def batches_of_rank(rank: int) -> Batches:
    """Micro-batches of both sizes in each iteration."""

    def batches(step: int) -> Iterator[dict[str, Any]]:
        made = list(shared(rank))
        return iter(made[:2] if step % 2 else made[2:])

    return batches


def _train_offloading(rank: int) -> tuple[list[Any], list[Any], int]:
    batches = batches_of_rank(rank)
    expected = train(build("moe"), batches=batches)
    manager = select(OffloadConfig(offload_backend="cpu-lazy", offload_native="off"))
    found = train(build("moe", MODULES["moe"]), batches=batches)
    moved = manager.report.d2h_bytes
    deselect()
    return expected, found, moved


def test_offloading_changes_no_bit(ranks: list[Any]) -> None:
    for _, (expected, found, moved), *_ in ranks:
        assert same(expected, found)
        assert moved > 0


def _train_replayed(rank: int) -> tuple[list[Any], list[Any], dict[int, int]]:  # since chunks
    import megatron.training
    from megatron.core.pipeline_parallel.chunk_graphs.model_chunks import graphs_of
    from megatron.training.captured_models import captures_model

    megatron.training.get_args = arguments  # in this process
    batches = batches_of_rank(rank)

    @captures_model
    def loop(forward_step: None, models: list[Any]) -> tuple[list[Any], dict[int, int]]:
        graphs = graphs_of(models[0].module.decoder)
        found = train(models[0], batches=batches)
        return found, {size: one.num_replays for size, one in graphs.of_size.items()}

    options = {"cuda_graph_granularity": "chunk", "cuda_graph_warmup_steps": 1}
    model = wrap(build("dense", MODULES["dense"], **ON, **options))
    expected = train(wrap(build("dense")), batches=batches)
    found = loop(None, [model])
    deselect()
    return expected, *found


def test_chunk_graphs_of_each_size_change_no_bit(ranks: list[Any]) -> None:  # since chunks
    for _, _, _, (expected, found, num_replays), *_ in ranks:
        assert same(expected, found)
        assert num_replays == {1: 2, 2: 2}


def _train_layers(rank: int) -> tuple[list[Any], set[int]]:  # since packed_layers
    from imitated_layer_graphs import imitated_layer_graphs
    from megatron.core.pipeline_parallel.chunk_graphs.packed_layers import PackedLayers
    from megatron.training.captured_models import captures_model

    batches, replay, sizes = batches_of_rank(rank), PackedLayers.replay, set()
    options = {"cuda_graph_impl": "transformer_engine", "sequence_packing": "balanced"}

    def note_size(packed: Any, *inputs: Any, **named: Any) -> Any:
        outputs = replay(packed, *inputs, **named)
        sizes.add(packed.size)
        return outputs

    @captures_model
    def loop(forward_step: None, models: list[Any]) -> list[Any]:
        def capture(step: int) -> None:
            if step == 1:
                capture_layers(models[0])

        return train(models[0], before=capture, batches=batches)

    with imitated_layer_graphs(), patch.object(PackedLayers, "replay", note_size):
        found = loop(None, [build("dense", MODULES["dense"], **ON, **options)])
    deselect()
    return found, sizes


def test_layer_graphs_of_each_size_change_no_bit(ranks: list[Any]) -> None:  # since packed_layers
    for _, _, _, (expected, *_), (found, sizes) in ranks:
        assert same(expected, found)
        assert sizes == {1, 2}


ON = {
    "dynamic_context_parallel": True,
    "offload_engine": "slipstream",
    "offload_backend": "cpu",
    "offload_native": "off",
}


def arguments(**more: Any) -> Arguments:
    given = {
        "dynamic_context_parallel": True,
        "dynamic_context_parallel_verify": True,
        "min_dynamic_context_parallel_size": 1,
        "sequence_packing": "balanced",
        "thd_max_packed_sequences": 4,
        "calculate_per_token_loss": True,
        "cp_comm_type": "p2p",
        "seq_length": 32,
        "micro_batch_size": 1,
        "eval_micro_batch_size": 1,
        "context_parallel_size": 1,
        "data_parallel_size": 2,
        "transformer_impl": "local",
        "seed": 5,
        "global_batch_size": 8,
        "eval_global_batch_size": 8,
        "hidden_size": 32,
        "num_attention_heads": 4,
        "kv_channels": 8,
        "ffn_hidden_size": 128,
    }
    return Arguments(**given | more)


def _read(rank: int, folder: Path) -> list[tuple[int, list[int], int]]:
    args = arguments()
    dynamic_batches.get_args = lambda: args
    dynamic_batches.packed_sequences.get_args = lambda: args
    dynamic_batches.packed_sequences.report_sequence_lengths = lambda lengths: None
    base = dataset_config(args.seq_length, str(folder / "text"), cache=folder)
    train_set, *_ = dynamic_batches.datasets((16, 8, 0), base)
    model = build("dense")
    model.vp_stage = None
    found = []
    for sample in batches_of(train_set):
        output, mask = dynamic_batches.forward(iter([sample]), model)
        assert output.shape == mask.shape == (1, args.seq_length)
        found.append((int(sample[SIZE_KEY]), sample["tokens"][mask.bool()].tolist()))
    return found


def test_training_reads_each_document_in_a_group_that_holds_it(ranks: list[Any]) -> None:
    (_, _, first, *_), (_, _, second, *_) = ranks
    assert [size for size, _ in first] == [size for size, _ in second]
    assert {size for size, _ in first} == {1, 2}
    short = {tuple(text) for text in texts() if len(text) <= 32}
    read = [tokens for size, tokens in (*first, *second) if size == 1]
    assert any(tuple(tokens[: len(words)]) == words for tokens in read for words in short)


class Layer:
    """What attention has of its group."""

    def __init__(self) -> None:
        self.pg_collection = SimpleNamespace(cp="static")
        self.config = SimpleNamespace(context_parallel_size=1)


def test_the_group_is_of_the_micro_batch_only() -> None:
    layer = Layer()
    run = uses_batch_group(lambda layer, **options: (layer, layer.pg_collection.cp))
    group = SimpleNamespace(size=lambda: 2)
    params = SimpleNamespace(cp_group=group, local_cp_size=None)
    twin, used = run(layer, packed_seq_params=params)
    assert (used, twin.config.context_parallel_size) == (group, 2)
    assert twin is not layer
    assert layer.pg_collection.cp == "static"
    # Hybrid context parallelism, and no packed sequences: as before.
    for others in ({"packed_seq_params": None}, {}):
        assert run(layer, **others) == (layer, "static")
    params.local_cp_size = 2
    assert run(layer, packed_seq_params=params) == (layer, "static")


def test_what_is_not_supported_is_an_error() -> None:
    require(check_dynamic_context_parallel(arguments()))
    with pytest.raises(ValueError, match="sequence_packing=greedy"):
        require(check_dynamic_context_parallel(arguments(sequence_packing="greedy")))
    with pytest.raises(ValueError, match="max_dynamic_context_parallel_size=3"):
        require(check_dynamic_context_parallel(arguments(max_dynamic_context_parallel_size=3)))
