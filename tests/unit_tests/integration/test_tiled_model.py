# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models in tiles of the sequence give what they give as a whole, and hold no more than a tile."""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import pytest
import torch
from megatron_models import (
    build_chunks,
    forget_expert_metrics,
    initialize,
    make_config,
    micro_batches,
    run_schedule,
    wrap,
)
from model_case import DENSE_MODULES, ModelCase
from ranks import run_ranks
from tiny_gpt import compare_on_ranks, run_step, skip_without_model, train
from torch.utils._python_dispatch import TorchDispatchMode

from megatron.slipstream import TileOptions, tiles_of, with_tiles
from megatron.slipstream.fine_grained_activation_offload.markers import CHECKPOINT_INPUTS
from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.integration import install
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter
from megatron.slipstream.integration.layers import tiled_model
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan import tiles

pytestmark = pytest.mark.releases

LOSS = {"loss_sequence_tiles": 4}
MLP = {"mlp_sequence_tiles": 5}
BOTH = {**LOSS, **MLP}
FUSED = {"cross_entropy_loss_fusion": True, "cross_entropy_fusion_impl": "native"}
BIAS = {"add_bias_linear": True}

CASES: dict[str, tuple[ModelCase, dict[str, Any]]] = {
    "the loss": (ModelCase(num_layers=2), LOSS),
    "the loss, tied": (ModelCase(num_layers=2, is_tied=True), LOSS),
    "the loss, fused": (ModelCase(num_layers=2, overrides=FUSED, bf16=True), LOSS),
    "dense": (ModelCase(num_layers=2), MLP),
    "dense, biased": (ModelCase(num_layers=2, overrides=BIAS), MLP),
    "not gated": (ModelCase(num_layers=2, overrides={"gated_linear_unit": False}), MLP),
    "mla": (ModelCase("mla", num_layers=2), BOTH),
    "mixed": (ModelCase("mixed", num_layers=2), BOTH),
    "sync-free experts": (ModelCase("moe", num_layers=2, sync_free_experts=True), BOTH),
    "hybrid": (ModelCase("hybrid"), BOTH),
    "packed": (ModelCase("mixed", num_layers=2, is_packed=True, micro_batch_size=1), BOTH),
    "recomputed": (
        ModelCase(
            num_layers=2,
            overrides={
                "recompute_granularity": "full",
                "recompute_method": "uniform",
                "recompute_num_layers": 1,
            },
        ),
        BOTH,
    ),
}


def compare_all(rank: int, num_ranks: int, port: int) -> dict[str, list[tuple[float, float]]]:
    """For each case and tensor, the largest difference from the model as a whole, and its value."""
    initialize(ModelCase(), rank, num_ranks, port)
    return {name: compare(case, tiles) for name, (case, tiles) in CASES.items() if exists(case)}


def exists(case: ModelCase) -> bool:
    try:
        skip_without_model(case)
    except pytest.skip.Exception:
        return False
    return True


def compare(case: ModelCase, tiles: dict[str, Any]) -> list[tuple[float, float]]:
    forget_expert_metrics()
    config = make_config(case)
    plain = train(case, config, build_chunks(case, config), (2,))
    tiled_case = replace(case, **tiles)
    tiled = train(tiled_case, config, build_chunks(tiled_case, config), (2,))
    return [
        ((one - two).abs().max().item(), one.abs().max().item())
        for one, two in zip(plain[0], tiled[0], strict=True)
    ]


def test_the_report_has_the_tiles_of_training_not_of_an_evaluation() -> None:
    class Part(tiled_model._Tiled, torch.nn.Module):
        part = "mlp"

    part, report = Part(), RankReport()
    part.tiling = tiles.Tiling(num_tiles=4)
    part._divide(16)
    with torch.no_grad():
        part._divide(2)
    tiled_model.fill_tiles(report, [part])
    assert report.tiles == {"mlp": 4}


@pytest.fixture(scope="module")
def differences() -> dict[str, list[tuple[float, float]]]:
    (result,) = run_ranks(1, compare_all)
    return result


@pytest.mark.parametrize("name", CASES)
def test_losses_and_gradients_are_close_to_those_of_the_whole(
    name: str, differences: dict[str, list[tuple[float, float]]]
) -> None:
    skip_without_model(CASES[name][0])
    found = differences[name]
    tolerance = 2e-2 if CASES[name][0].bf16 else 1e-5
    assert len(found) > 10
    assert all(difference <= tolerance * value for difference, value in found), found
    assert any(difference > 0 for difference, _ in found), "the tiles were not used"


class Shapes(TorchDispatchMode):
    """The shapes of all tensors that operations create."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        output = func(*args, **(kwargs or {}))
        for tensor in output if isinstance(output, (tuple, list)) else [output]:
            if isinstance(tensor, torch.Tensor):
                self.seen.add(tuple(tensor.shape))
        return output


WIDE = ModelCase(num_layers=2, seq_length=32, vocab_size=7040, hidden_size=32)
"""A model whose vocabulary and inner widths are no other size."""
FFN = 3 * WIDE.hidden_size


def most_rows(rank: int, num_ranks: int, port: int, case: ModelCase, width: int) -> int:
    """The most rows of a tensor of this width in a step, forward and backward."""
    initialize(case, rank, num_ranks, port)
    config = make_config(case)
    chunks = build_chunks(case, config)
    with Shapes() as shapes:
        train(case, config, chunks, (1,))
    weights = {tuple(p.shape) for chunk in chunks for p in chunk.parameters()}
    weights |= {shape[::-1] for shape in weights}
    sizes = [shape for shape in shapes.seen - weights if shape and shape[-1] == width]
    return max(torch.Size(shape[:-1]).numel() for shape in sizes)


@pytest.mark.parametrize("kind", ["dense", "moe"])
@pytest.mark.parametrize("what", ["loss", "mlp"])
def test_nothing_inside_is_larger_than_a_tile(kind: str, what: str) -> None:
    width = WIDE.vocab_size if what == "loss" else 2 * FFN
    case = replace(WIDE, kind=kind, overrides={"ffn_hidden_size": FFN})
    num_rows = case.seq_length * case.micro_batch_size
    if kind == "moe" and what == "mlp":
        case.overrides.update(moe_ffn_hidden_size=FFN, moe_grouped_gemm=True)
        num_rows *= 2  # each token has two experts
    (whole,) = run_ranks(1, most_rows, case, width)
    tiled = replace(case, **{f"{what}_sequence_tiles": 4})
    (of_tile,) = run_ranks(1, most_rows, tiled, width)
    # The experts of one rank take their tokens one after another.
    assert whole == num_rows or (kind == "moe" and what == "mlp" and whole > num_rows // 4)
    assert of_tile <= num_rows // 4


@pytest.mark.parametrize("kind, native", [("dense", "off"), ("moe", "auto")])
def test_with_the_engine_on_all_is_bitwise_the_same_and_inputs_of_mlps_move(
    kind: str, native: str
) -> None:
    case = ModelCase(kind, **BOTH)
    options = {"offload_checkpoint_inputs": True, "offload_native": native}
    (result,) = compare_on_ranks(1, case, DENSE_MODULES, "cpu-lazy", (1, 2, 2), options)
    assert result.difference is None
    assert set(result.moved_modules) == {*DENSE_MODULES, CHECKPOINT_INPUTS}
    assert result.num_late == 0


def test_pipelines_are_bitwise_the_same_with_the_engine_on() -> None:
    case = ModelCase("mixed", num_layers=8, pp=2, vpp=2, **BOTH)
    options = {"offload_checkpoint_inputs": True}
    results = compare_on_ranks(2, case, ("core_attn",), "cpu-lazy", (2, 2, 2), options)
    assert [result.difference for result in results] == [None, None]
    assert all(CHECKPOINT_INPUTS in result.moved_modules for result in results)


def test_what_the_output_layer_saves_moves_too() -> None:
    case = ModelCase(num_layers=2, **LOSS)
    (result,) = compare_on_ranks(1, case, ("output_layer",), "cpu-lazy", (1, 2, 2))
    assert result.difference is None
    assert result.moved_modules == ("output_layer",)


def reported(rank: int, num_ranks: int, port: int) -> list[dict[str, int]]:
    """The tiles in the report of a model that has some, and of one that has none."""
    found = []
    install.install(OffloadConfig(offload_backend="cpu"))
    for case in (ModelCase("mixed", num_layers=2, **BOTH), ModelCase("mixed", num_layers=2)):
        initialize(case, rank, num_ranks, port)
        config = make_config(case, ("core_attn",))
        chunks = build_chunks(case, config)
        train(case, config, chunks, (2, 2))
        found.append(install.report(chunks[0]).ranks[0].tiles)
    return found


def test_the_report_says_how_many_tiles_there_were() -> None:
    (found,) = run_ranks(1, reported)
    assert found == [{"mlp": 5, "experts": 5, "output_layer": 4}, {}]


def on_two_ranks(rank: int, num_ranks: int, port: int, case: ModelCase) -> list[torch.Tensor]:
    """The losses and gradients of a step with tensor parallelism."""
    initialize(case, rank, num_ranks, port)
    config = make_config(case)
    chunks = build_chunks(case, config)
    (result,) = train(case, config, chunks, (2,))
    return result


@contextlib.contextmanager
def as_if_on_a_gpu() -> Iterator[None]:
    """Context in which layers with sequence parallelism can be built and run on the CPU."""
    from megatron.core.transformer.torch_norm import WrappedTorchNorm

    # Torch's norms refuse it, since the ranks' gradients would have to be added up.
    norm = staticmethod(lambda _, config, hidden_size, eps: torch.nn.RMSNorm(hidden_size, eps))
    with (
        patch.object(torch.cuda, "current_device", lambda: "cpu"),
        patch.object(WrappedTorchNorm, "__new__", norm),
    ):
        yield


def in_parallel(rank: int, num_ranks: int, port: int, case: ModelCase) -> list[list[Any]]:
    plain = replace(case, loss_sequence_tiles=1, mlp_sequence_tiles=1)
    with as_if_on_a_gpu():
        return [on_two_ranks(rank, num_ranks, port, one) for one in (plain, case)]


@pytest.mark.skipif(torch.cuda.is_available(), reason="pretends a device")
@pytest.mark.parametrize("sequence_parallel", [False, True])
@pytest.mark.parametrize("is_fused", [False, True])
def test_the_vocabulary_and_the_sequence_may_be_divided_among_ranks(
    sequence_parallel: bool, is_fused: bool
) -> None:
    overrides = {"sequence_parallel": sequence_parallel, "cross_entropy_loss_fusion": is_fused}
    case = ModelCase(num_layers=2, tp=2, overrides=overrides, loss_sequence_tiles=4)
    case = replace(case, mlp_sequence_tiles=1 if is_fused else 3)
    for plain, tiled in run_ranks(2, in_parallel, case):
        for one, two in zip(plain, tiled, strict=True):
            tolerance = 1e-2 if is_fused else 1e-5  # it rounds gradients to bfloat16
            assert (one - two).abs().max() <= tolerance * one.abs().max()


def reduced_once(rank: int, num_ranks: int, port: int) -> list[float]:
    """How often each parameter was said to be ready in an iteration; the largest differences."""
    case = ModelCase("mixed", num_layers=2, bf16=True, is_tied=True)
    initialize(case, rank, num_ranks, port)
    gradients = []
    for one in (case, replace(case, **BOTH)):
        forget_expert_metrics()
        config = make_config(one)
        (chunk,) = build_chunks(one, config)
        (model,) = wrap(config, [chunk], overlap_grad_reduce=True)
        with counting_ready(model) as counts:
            for iteration in range(2):
                model.zero_grad_buffer()
                counts.clear()
                # Megatron's schedule reduces in the last of two micro-batches.
                config.no_sync_func = model.no_sync
                run_schedule(one, [model], list(micro_batches(one, iteration, 2)))
        assert set(counts.values()) == {1}
        assert len(counts) == len(list(model.parameters()))
        gradients.append([p.main_grad.clone() for p in model.parameters()])
    return [
        ((one - two).abs().max() / one.abs().max()).item()
        for one, two in zip(*gradients, strict=True)
    ]


@contextlib.contextmanager
def counting_ready(model: Any) -> Iterator[Counter[Any]]:
    """Context in which the calls are counted that say a parameter's gradient is complete."""
    counts: Counter[Any] = Counter()
    group_class = type(model.bucket_groups[0])
    original = group_class.register_grad_ready

    def count(group: Any, parameter: Any, *arguments: Any) -> None:
        counts[parameter] += group.is_last_microbatch
        original(group, parameter, *arguments)

    with patch.object(group_class, "register_grad_ready", count):
        yield counts


def test_data_parallelism_reduces_each_gradient_once() -> None:
    (differences,) = run_ranks(1, reduced_once)
    assert len(differences) > 10
    assert max(differences) < 0.05
    assert max(differences) > 0, "the tiles were not used"


def other_calls(rank: int, num_ranks: int, port: int) -> None:
    case = ModelCase("mixed", num_layers=2, **BOTH)
    initialize(case, rank, num_ranks, port)
    config = make_config(case)
    plain_case = replace(case, loss_sequence_tiles=1, mlp_sequence_tiles=1)
    (plain,) = build_chunks(plain_case, config)
    (tiled,) = build_chunks(case, config)
    (batch,) = micro_batches(case, 0, 1)
    mask = torch.ones(1, 1, case.seq_length, case.seq_length, dtype=torch.bool).triu(1)
    inputs = batch["tokens"], batch["position_ids"], mask

    # Without labels the model gives logits; with them losses, in an evaluation too.
    torch.testing.assert_close(tiled(*inputs), plain(*inputs))
    labels = batch["labels"]
    with torch.no_grad():
        expected = plain(*inputs, labels=labels)
        torch.testing.assert_close(tiled(*inputs, labels=labels), expected)
        torch.testing.assert_close(tiled(*inputs, None, labels), expected)

    assert tiles_of(plain) == TileOptions()
    assert tiles_of(tiled) == TileOptions(**BOTH)
    assert tiled.state_dict().keys() == plain.state_dict().keys()
    with pytest.raises(ValueError, match="model that it has divided"):
        with_tiles([tiled])
    plain.decoder.layers[0].mlp.dropout = torch.nn.Dropout(0.1)
    with pytest.raises(ValueError, match="dropout inside an MLP .dropout, 0.1. is not supported"):
        with_tiles([plain])


def test_models_without_labels_and_refusals() -> None:
    run_ranks(1, other_calls)


def peak_bytes(case: ModelCase) -> int:
    """Memory of a step, above weights and gradients."""
    config = make_config(case)
    chunks = build_chunks(case, config)
    with DeviceMemoryMeter() as meter:
        run_step(case, config, chunks, 0, 1)  # makes the gradients
        before = meter.allocated_bytes
        meter.reset_peak()
        run_step(case, config, chunks, 1, 1)
        return meter.peak_bytes - before


FFN_SIZE, VOCAB_SIZE, NUM_TOKENS = 2048, 8192, 64


def bytes_per_token(rank: int, num_ranks: int, port: int) -> dict[str, tuple[float, int]]:
    """By what the peak falls for each token that a tile has less, and what that should be."""
    initialize(ModelCase(), rank, num_ranks, port)
    found: dict[str, tuple[float, int]] = {}
    for bf16 in (False, True):
        small = ModelCase(
            num_layers=1, hidden_size=16, micro_batch_size=1, seq_length=NUM_TOKENS, bf16=bf16
        )
        element_bytes = 2 if bf16 else 4
        for is_gated in (False, True):
            overrides = {"ffn_hidden_size": FFN_SIZE, "gated_linear_unit": is_gated}
            expected = tiles.mlp_bytes_per_token(
                small.hidden_size, FFN_SIZE, element_bytes, is_gated, is_fused=False
            )
            case = replace(small, overrides=overrides)
            found[f"mlp {bf16} {is_gated}"] = drop(case, "mlp"), expected
        expected = tiles.logits_bytes_per_token(VOCAB_SIZE, element_bytes, "unfused")
        case = replace(small, vocab_size=VOCAB_SIZE)
        found[f"loss {bf16}"] = drop(case, "loss"), expected
    return found


def drop(case: ModelCase, what: str) -> float:
    two, four = (
        peak_bytes(replace(case, **{f"{what}_sequence_tiles": number})) for number in (2, 4)
    )
    return (two - four) / (NUM_TOKENS // 4)


@pytest.mark.skipif(torch.cuda.is_available(), reason="reads a CPU's memory")
def test_a_tile_takes_the_memory_that_is_computed_for_it() -> None:
    (found,) = run_ranks(1, bytes_per_token)
    assert len(found) == 6
    for name, (measured, expected) in found.items():
        assert measured == pytest.approx(expected, rel=0.01), name
