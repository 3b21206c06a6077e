# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed documents train like the same documents one by one, and padding trains nothing.

Against documents one by one the numbers are close and not equal, since matrices of other shapes
are multiplied. The contents of padding must not change a bit.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple, Optional

import numpy as np
import pytest
import torch
from ranks import run_ranks
from shared_documents import documents
from tiny_gpt import ModelCase, build_chunks, initialize, make_config, skip_without_model

from megatron.slipstream.integration.packed.packed_sequences import packed_seq_params
from megatron.slipstream.packed_sequences.batch import packed_sample
from megatron.slipstream.packed_sequences.packing import PackLimits
from megatron.slipstream.patches import patching, releases, table
from megatron.slipstream.patches.table import Feature

pytestmark = pytest.mark.releases

TOLERANCE = 5e-6
"""Tolerances of losses (about 5), and of gradients relative to the largest; in float32."""

LENGTHS = (17, 1, 9, 20)

PACKS = {
    "a sequence of padding": PackLimits(64, 8),
    "padding after the last document": PackLimits(64, 4),
    "padding after every document": PackLimits(64, 6, alignment=4),
    "no padding": PackLimits(47, 4),
}

DENSE = ModelCase(num_layers=2, seq_length=64, micro_batch_size=1)
MLA = ModelCase(kind="mla", num_layers=2, seq_length=64, micro_batch_size=1)
MOE = ModelCase(
    kind="moe",
    num_layers=2,
    seq_length=64,
    micro_batch_size=1,
    overrides={
        "moe_router_load_balancing_type": ["aux_loss", "seq_aux_loss"],
        "moe_aux_loss_coeff": [0.1, 0.1],
        "moe_z_loss_coeff": 0.1,
        "moe_router_score_function": "sigmoid",
        "moe_router_enable_expert_bias": True,
    },
)
"""All features of the router that could see padding."""
MOE_STATIC = ModelCase(
    **vars(MOE)
    | {
        "overrides": {
            **MOE.overrides,
            "moe_expert_capacity_factor": 0.75,
            "moe_pad_expert_input_to_capacity": True,
        }
    }
)
"""Experts of a fixed capacity, for which tokens compete."""
HYBRID = ModelCase(**vars(MOE) | {"kind": "hybrid", "num_layers": 4})
MLA_HYBRID = ModelCase(**vars(MLA) | {"kind": "hybrid", "num_layers": 4, "pattern": "+-"})
MOE_STATIC_BY_POSITION = ModelCase(
    **vars(MOE) | {"overrides": {**MOE_STATIC.overrides, "moe_token_drop_policy": "position"}}
)


class Result(NamedTuple):
    """One pass through a model."""

    losses: torch.Tensor
    gradients: list[torch.Tensor]
    num_routed: list[torch.Tensor]


def run(model: torch.nn.Module, batches: Sequence[dict[str, Any]]) -> Result:
    """Losses of the labels that count, and the gradients of their sum."""
    model.zero_grad(set_to_none=True)
    losses = []
    for batch in batches:
        counts = batch.pop("loss_mask")
        per_token = model(**batch)
        (per_token * counts).sum().backward()
        losses.append(per_token[counts.bool()].detach().clone())
    routed = []
    for module in model.modules():
        if getattr(module, "local_tokens_per_expert", None) is not None:
            routed.append(module.local_tokens_per_expert.clone())
            module.local_tokens_per_expert.zero_()
    gradients = [p.grad.clone() for p in model.parameters() if p.grad is not None]
    return Result(torch.cat(losses), gradients, routed)


def packed(
    texts: Sequence[np.ndarray], limits: PackLimits, padding_token: int = 0, routes: bool = False
) -> dict[str, Any]:
    sample = {key: tensor.unsqueeze(0) for key, tensor in packed_sample(texts, limits).items()}
    padding = sample["padding_mask"]
    for key in ("tokens", "labels"):
        sample[key][padding] = padding_token
    sample["position_ids"][padding] = padding_token
    return {
        "input_ids": sample["tokens"],
        "position_ids": sample["position_ids"],
        "attention_mask": None,
        "labels": sample["labels"],
        "loss_mask": sample["loss_mask"],
        "packed_seq_params": packed_seq_params(
            sample["cu_seqlens"][0], sample["cu_seqlens_padded"][0], limits.max_tokens
        ),
        **({"padding_mask": padding} if routes else {}),
    }


def alone(text: np.ndarray) -> dict[str, Any]:
    tokens = torch.from_numpy(text).long().unsqueeze(0)
    length = len(text) - 1
    return {
        "input_ids": tokens[:, :-1],
        "position_ids": torch.arange(length).unsqueeze(0),
        "attention_mask": torch.ones(1, 1, length, length, dtype=torch.bool).triu(1),
        "labels": tokens[:, 1:],
        "loss_mask": torch.ones(1, length),
    }


def model_of(case: ModelCase, rank: int, num_ranks: int, port: int) -> torch.nn.Module:
    # Uninitialized memory holds NaN, so that reads of it change results.
    torch.use_deterministic_algorithms(True)
    initialize(case, rank, num_ranks, port)
    table.apply(Feature.PADDED_ROUTING)
    (model,) = build_chunks(case, make_config(case))
    return model.train()


# --- like documents one by one --------------------------------------------------------------------


def difference(expected: Result, actual: Result) -> tuple[float, float]:
    """Largest difference of losses, and of gradients relative to the largest gradient."""
    scale = max(gradient.abs().max() for gradient in expected.gradients)
    pairs = zip(expected.gradients, actual.gradients, strict=True)
    gradients = max(((a - b).abs().max() / scale).item() for a, b in pairs)
    return (expected.losses - actual.losses).abs().max().item(), gradients


def _differences_from_documents_alone(
    rank: int, num_ranks: int, port: int, case: ModelCase
) -> dict[str, tuple[float, float]]:
    model = model_of(case, rank, num_ranks, port)
    texts = documents(LENGTHS, case.vocab_size)
    one_by_one = run(model, [alone(text) for text in texts])
    one_sequence = np.concatenate([*(text[:-1] for text in texts), [0]])
    results = {"": run(model, [alone(one_sequence)])}
    for name, limits in PACKS.items():
        results[name] = run(model, [packed(texts, limits, routes=case.kind == "moe")])
    return {name: difference(one_by_one, result) for name, result in results.items()}


@pytest.mark.parametrize("case", [DENSE, MOE, MLA, MLA_HYBRID], ids=lambda case: case.kind)
def test_packed_documents_train_and_route_like_documents_one_by_one(case: ModelCase) -> None:
    skip_without_model(case)
    (found,) = run_ranks(1, _differences_from_documents_alone, case)
    losses, _ = found.pop("")
    assert losses > 0.01  # attention across documents changes losses
    for name, (losses, gradients) in found.items():
        assert losses <= TOLERANCE, (name, losses)
        if case.kind != "moe":  # its auxiliary losses are those of a micro-batch
            assert gradients <= TOLERANCE, (name, gradients)


def _gradients_beside_no_padding(
    rank: int, num_ranks: int, port: int, case: ModelCase
) -> dict[str, float]:
    """Largest relative difference of gradients, auxiliary losses included."""
    model = model_of(case, rank, num_ranks, port)
    texts = documents(LENGTHS, case.vocab_size)
    results = {
        name: run(model, [packed(texts, limits, 57, True)]) for name, limits in PACKS.items()
    }
    expected = results.pop("no padding")
    return {name: difference(expected, result)[1] for name, result in results.items()}


def test_auxiliary_losses_are_those_of_the_documents_without_padding() -> None:
    (found,) = run_ranks(1, _gradients_beside_no_padding, MOE)
    assert len(found) == 3
    for name, gradients in found.items():
        assert gradients <= TOLERANCE, (name, gradients)


# --- padding --------------------------------------------------------------------------------------


def _count_padding() -> None:
    """Undo the patches of the router, except where it would raise."""
    table.undo(Feature.PADDED_ROUTING)
    patching.apply([p for p in table.PADDING if "expert_bias" in p.target], "this test")


def _difference_by_an_empty_pack(
    rank: int, num_ranks: int, port: int, case: ModelCase, exclude: bool
) -> list[bool]:
    """For each gradient, whether it is the same with one more pack, which has no document."""
    model = model_of(case, rank, num_ranks, port)
    if not exclude:
        _count_padding()
    texts = documents(LENGTHS, case.vocab_size)
    limits = PACKS["a sequence of padding"]
    routes = case.kind == "moe"
    expected, actual = (
        run(model, [packed(each, limits, routes=routes) for each in packs]).gradients
        for packs in ([texts], [texts, []])
    )
    return [torch.equal(a, b) for a, b in zip(expected, actual, strict=True)]


@pytest.mark.parametrize(
    "case", [DENSE, MLA, MOE, MOE_STATIC], ids=["dense", "MLA", "MoE", "static"]
)
def test_a_pack_without_a_document_changes_no_gradient(case: ModelCase) -> None:
    (same,) = run_ranks(1, _difference_by_an_empty_pack, case, True)
    assert all(same)


def test_routers_that_count_padding_spoil_gradients_with_a_pack_without_a_document() -> None:
    (same,) = run_ranks(1, _difference_by_an_empty_pack, MOE, False)
    assert not all(same)


def _change_by_padding(
    rank: int, num_ranks: int, port: int, case: ModelCase, exclude: bool
) -> tuple[Optional[str], list[int]]:
    """Results that differ in any bit if padding has other tokens, and routers' token counts."""
    model = model_of(case, rank, num_ranks, port)
    if not exclude:
        _count_padding()
    texts = documents(LENGTHS, case.vocab_size)
    num_routed = []
    for name, limits in PACKS.items():
        one, other = (
            run(model, [packed(texts, limits, token, bool(case.overrides))]) for token in (0, 57)
        )
        num_routed += [int(counts.sum()) for counts in (*one.num_routed, *other.num_routed)]
        for field in Result._fields:
            left, right = getattr(one, field), getattr(other, field)
            if not all(torch.equal(a, b) for a, b in zip(left, right, strict=True)):
                return f"{field} with {name}", num_routed
    return None, num_routed


@pytest.mark.parametrize(
    "case", [DENSE, MOE_STATIC, MOE_STATIC_BY_POSITION], ids=["dense", "by probability", "by place"]
)
def test_what_is_in_the_padding_changes_no_bit(case: ModelCase) -> None:
    ((change, _),) = run_ranks(1, _change_by_padding, case, True)
    assert change is None


def test_padding_takes_capacity_from_documents_unless_it_is_excluded() -> None:
    ((change, _),) = run_ranks(1, _change_by_padding, MOE_STATIC, False)
    assert change == "losses with a sequence of padding"


@pytest.mark.parametrize("case", [MOE, HYBRID], ids=["GPT", "hybrid"])
def test_routers_count_no_padding(case: ModelCase) -> None:
    skip_without_model(case)
    ((change, num_routed),) = run_ranks(1, _change_by_padding, case, True)
    assert change is None
    assert set(num_routed) == {2 * sum(LENGTHS)}


# --- the description of a micro-batch -------------------------------------------------------------


def test_nothing_of_the_description_is_left_for_a_gpu_to_find_out() -> None:
    actual, padded = torch.tensor([0, 3, 5, 5]), torch.tensor([0, 3, 5, 9])
    params = packed_seq_params(actual, padded, 9)
    assert params.qkv_format == "thd"
    assert params.cu_seqlens_q is params.cu_seqlens_kv is actual
    assert params.cu_seqlens_q_padded is params.cu_seqlens_kv_padded is padded
    assert params.max_seqlen_q == params.max_seqlen_kv == 9
    assert params.total_tokens is params.seq_idx is params.cp_group is params.local_cp_size is None
    if releases.is_since("0.19"):
        assert params.pad_between_seqs is True
        assert params.tokens_per_sample is None


def test_one_tensor_for_both_offsets_is_refused() -> None:
    offsets = torch.tensor([0, 9])
    with pytest.raises(ValueError, match="are one tensor.*; pass two"):
        packed_seq_params(offsets, offsets, 9)
