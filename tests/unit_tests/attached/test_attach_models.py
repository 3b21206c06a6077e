# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Attached models with special tensors, random ones, distributed ones, and those of transformers.

``SLIPSTREAM_RANDOM_MODELS`` is the number of random models, one per seed.
"""

from __future__ import annotations

import importlib.util
import os
import traceback
from collections.abc import Iterable
from functools import cache, partial
from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from attached_models import (
    BACKENDS,
    Decoder,
    attach_to,
    counters,
    equal,
    gradients,
    make,
    make_attached,
    one_backward_each,
    train,
)
from random_programs import compare
from random_seeds import first_seed
from ranks import run_ranks
from tensor_kinds import KINDS, SIZE, STAYING, tensor_of_kind
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from megatron.slipstream.attached.handle import Attached, attach
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.plan.staying import Staying

# --- tensors of any kind: what has no memory of its own stays -------------------------------------

PATHS = ["auto", "off"]
"""``offload_native``: with the hooks in C++, and without."""


class Saves(torch.autograd.Function):
    """Saves a tensor of any kind for backward, and counts how often it comes back as itself."""

    num_returned = 0

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, hidden: list[torch.Tensor]) -> torch.Tensor:
        (special,) = hidden  # As arguments, torch opens or refuses some kinds.
        ctx.save_for_backward(x, special)
        ctx.kind = (type(special), special.layout, special.shape if not special.is_nested else None)
        return 2 * x

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> Any:
        x, special = ctx.saved_tensors
        shape = special.shape if not special.is_nested else None
        assert ctx.kind == (type(special), special.layout, shape)
        Saves.num_returned += 1
        return gradient * x.cos(), None


class KindLayer(torch.nn.Module):
    def __init__(self, kind: str, held_as: str) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(SIZE, SIZE)
        special = tensor_of_kind(kind)
        if held_as == "buffer":
            self.register_buffer("special", special)
        elif held_as == "parameter":
            self.special = torch.nn.Parameter(special, requires_grad=False)
        else:
            self.special = special

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x + Saves.apply(self.linear(x), [self.special])


@cache
def trained_without(kind: str, held_as: str) -> list[Any]:
    return train_kind(kind, held_as, None)[0]


def train_kind(kind: str, held_as: str, path: str | None) -> tuple[list[Any], Attached | None]:
    torch.manual_seed(0)
    model = torch.nn.Sequential(*(KindLayer(kind, held_as) for _ in range(3)))
    attached = None
    if path is not None:
        config = OffloadConfig(offload_backend="cpu-lazy", offload_native=path)
        attached = attach(model, KindLayer, config, min_offloaded_tensor_size=1)
    results = []
    for step in range(3):
        x = torch.randn(4, SIZE, generator=torch.Generator().manual_seed(step))
        loss = model(x).square().mean()
        loss.backward()
        results.append(loss.item())
    return results + [layer.linear.weight.grad.tolist() for layer in model], attached


KIND_CASES = [
    (kind, held_as)
    for kind in KINDS
    for held_as in ("attribute", "buffer", "parameter")
    if (kind, held_as) != ("vmap", "parameter")  # torch cannot make it.
]


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(("kind", "held_as"), KIND_CASES)
def test_a_saved_tensor_of_any_kind_comes_back(kind: str, held_as: str, path: str) -> None:
    expected = trained_without(kind, held_as)
    before = Saves.num_returned
    results, attached = train_kind(kind, held_as, path)
    assert results == expected
    assert Saves.num_returned == before + 9
    assert attached is not None
    rank = attached.report().ranks[0]
    assert rank.is_native is (path == "auto")
    assert attached.engine.plan is not None
    named = {STAYING[kind].text}
    if held_as != "attribute":
        named.add(Staying.PARAMETER.text)
    for group in attached.engine.plan.trace.groups:
        assert named & set(group.stays)
    moved = rank.modules["KindLayer"]
    assert moved.num_groups_moved == 2
    # Of two layers the linear part's input and output, except the model's input, which is held.
    assert moved.d2h_bytes == 3 * 4 * SIZE * 4


# --- random models in random programs -------------------------------------------------------------

NUM_SEEDS = int(os.environ.get("SLIPSTREAM_RANDOM_MODELS", "40"))
SEEDS_PER_TEST = 10
FIRST_SEED = first_seed()


def failures_of(seeds: Iterable[int]) -> list[str]:
    """Faults by seed. Something must be compared, and something must move."""
    found, num_values, moved_bytes = [], 0, 0
    for seed in seeds:
        try:
            outcome = compare(seed)
        except AssertionError as error:
            found.append(str(error))
        else:
            num_values += outcome.num_values
            moved_bytes += outcome.moved_bytes
    if not found:
        assert num_values > 0
        assert moved_bytes > 0
    return found


@pytest.mark.parametrize("first", range(0, NUM_SEEDS, SEEDS_PER_TEST))
def test_results_are_equal(first: int) -> None:
    seeds = range(FIRST_SEED + first, FIRST_SEED + min(first + SEEDS_PER_TEST, NUM_SEEDS))
    print(f"seeds {seeds[0]} to {seeds[-1]}")
    assert failures_of(seeds) == []


# --- DistributedDataParallel and ``fully_shard``, on two processes --------------------------------

WRAPPERS = {
    "data parallel": {"wrapper": "ddp"},
    "sharded": {"wrapper": "fsdp"},
    "sharded, bf16": {"wrapper": "fsdp", "bf16": True},
    "sharded, checkpoint": {"wrapper": "fsdp", "checkpointing": False},
    "sharded, reentrant": {"wrapper": "fsdp", "checkpointing": True},
    "checkpointed, compiled, sharded": {"wrapper": "all"},
}


def _wrap(model: Any, wrapper: str, bf16: bool) -> Any:
    if wrapper == "ddp":
        return DistributedDataParallel(model)
    precision = MixedPrecisionPolicy(param_dtype=torch.bfloat16 if bf16 else None)
    for index, layer in enumerate(model.layers):
        if wrapper == "all":
            layer = model.layers[index] = checkpoint_wrapper(layer.eval())
            layer.compile(backend="aot_eager")
        fully_shard(layer, mp_policy=precision)
    return fully_shard(model, mp_policy=precision)


def _run(
    rank: int,
    backend: Optional[str],
    attach_first: bool,
    wrapper: str,
    bf16: bool = False,
    checkpointing: Optional[bool] = None,
) -> tuple[list[torch.Tensor], Any]:
    model, attached = make(partial(Decoder, 3, checkpointing)), None
    if backend and attach_first:
        attached = attach_to(model, "layers.*", backend)
    model = _wrap(model, wrapper, bf16)
    if backend and not attach_first:
        attached = attach_to(model, "layers.*", backend)
    return train(model, one_backward_each, 2, seed=100 * rank), attached


def _check(rank: int, case: dict[str, Any], whole_bytes: int) -> str:
    """The faults found; empty if none.

    Args:
        rank: This rank.
        case: One of :data:`WRAPPERS`.
        whole_bytes: Bytes that move without a wrapper.
    """
    expected, _ = _run(rank, None, False, **case)
    for backend, attach_first in zip(BACKENDS, (False, True), strict=True):
        results, attached = _run(rank, backend, attach_first, **case)
        report = attached.report().ranks[0]
        (moved,) = counters(attached).values()
        facts = {
            "equal": equal(results, expected),
            "rank": report.rank == rank,
            "one plan": report.num_plans == 1,
            "none late": moved.num_late == 0,
            "two of three move": moved.num_groups_moved == 2,
            "no parameter moves": moved.d2h_bytes <= whole_bytes,
            "all that moves is freed": moved.freed_bytes == moved.d2h_bytes > 0,
        }
        wrong = [name for name, holds in facts.items() if not holds]
        if wrong:
            return f"rank {rank}, {backend}: not {wrong}, {moved}"
    return ""


def _whole_bytes(checkpointing: Optional[bool] = None, **_: Any) -> int:
    model, attached = make_attached(partial(Decoder, 3, checkpointing), "layers.*")
    train(model, one_backward_each, 2)
    return attached.report().ranks[0].d2h_bytes


def _check_all(rank: int, num_ranks: int, port: int) -> dict[str, str]:
    """The faults of each case until one raises."""
    torch.distributed.init_process_group("gloo", rank=rank, world_size=num_ranks)
    said = dict.fromkeys(WRAPPERS, "not run")
    for name, case in WRAPPERS.items():
        try:
            said[name] = _check(rank, case, _whole_bytes(**case))
        except BaseException:
            said[name] = traceback.format_exc()
            break
    return said


@pytest.fixture(scope="module")
def results() -> list[dict[str, str]]:
    """What each rank says of each case. The processes start once, which takes longest."""
    if not torch.distributed.is_gloo_available():
        pytest.skip("torch was built without gloo")
    return run_ranks(2, _check_all)


@pytest.mark.parametrize("name", WRAPPERS)
def test_distributed_models(name: str, results: list[dict[str, str]]) -> None:
    assert [said[name] for said in results] == ["", ""]


# --- Hugging Face transformers, in a plain loop and in its Trainer --------------------------------

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}


needs_transformers = pytest.mark.skipif(
    importlib.util.find_spec("transformers") is None, reason="transformers is not installed"
)


def llama() -> Any:
    import transformers

    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mixtral() -> Any:
    import transformers

    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}
    config = transformers.MixtralConfig(**SIZES, **routing, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def make_hugging(build: Any, checkpointing: Optional[bool]) -> Any:
    torch.manual_seed(5)
    model = build()
    model.train()
    model.config.use_cache = False
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    return model


def train_hugging(model: Any, num_iterations: int = 3) -> list[torch.Tensor]:
    """Losses and gradients of a plain loop: padded sequences, two micro-batches per iteration."""
    optimizer = torch.optim.AdamW(model.parameters(), 1e-2)
    results = []
    for iteration in range(num_iterations):
        torch.manual_seed(iteration)
        for _ in range(2):
            ids = torch.randint(0, 64, (2, 16))
            mask = torch.ones_like(ids)
            mask[0, :5] = 0
            output = model(input_ids=ids, labels=ids, attention_mask=mask)
            output.loss.backward()
            results.append(output.loss.detach().clone())
        results += gradients(model)
        optimizer.step()
        optimizer.zero_grad()
    return results


@cache
def hugging_results(build: Any, checkpointing: Optional[bool]) -> list[torch.Tensor]:
    return train_hugging(make_hugging(build, checkpointing))


@needs_transformers
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpoint", "reentrant"])
@pytest.mark.parametrize("build", [llama, mixtral], ids=lambda build: build.__name__)
def test_plain_loop(build: Any, checkpointing: Optional[bool], backend: str) -> None:
    model = make_hugging(build, checkpointing)
    attached = attach_to(model, "model.layers.*", backend)
    assert equal(train_hugging(model), hugging_results(build, checkpointing))
    report = attached.report().ranks[0]
    assert (report.num_iterations, report.num_plans, report.total.num_late) == (6, 1, 0)
    # The model itself holds the first layer's input as long as its forward runs.
    inputs_bytes = 2 * 2 * 16 * SIZES["hidden_size"] * 4
    if checkpointing is None:
        assert report.total.num_groups_moved == 3
        assert report.total.freed_bytes > 10 * inputs_bytes
    else:
        assert report.total.num_groups_moved == 2
        assert report.total.freed_bytes == inputs_bytes


@needs_transformers
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("build", [llama, mixtral], ids=lambda build: build.__name__)
def test_parts_of_layers(build: Any, backend: str) -> None:
    model = make_hugging(build, None)
    # transformers 4 calls a block of experts otherwise.
    mlp = "mlp" if hasattr(model.model.layers[0], "mlp") else "block_sparse_moe"
    attached = attach_to(model, ["model.layers.*.self_attn", f"**.{mlp}"], backend)
    assert equal(train_hugging(model), hugging_results(build, None))
    moved = {name: each.num_groups_moved for name, each in counters(attached).items()}
    assert moved == {"model.layers.*.self_attn": 3, f"**.{mlp}": 3}


class _Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@needs_transformers
@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("build", [llama, mixtral], ids=lambda build: build.__name__)
def test_trainer(build: Any, checkpointing: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")
    import transformers

    def run(attaches: bool) -> tuple[list[Any], Any]:
        model = make_hugging(build, None)
        attached = attach_to(model, "model.layers.*", "cpu-lazy") if attaches else None
        arguments = transformers.TrainingArguments(
            output_dir=str(tmp_path),
            use_cpu=True,
            bf16=True,
            max_steps=3,
            per_device_train_batch_size=2,
            gradient_accumulation_steps=2,
            gradient_checkpointing=checkpointing,
            logging_steps=1,
            eval_strategy="steps",
            eval_steps=1,
            save_strategy="no",
            report_to=[],
            disable_tqdm=True,
            seed=3,
        )
        trainer = transformers.Trainer(
            model=model, args=arguments, train_dataset=_Rows(), eval_dataset=_Rows()
        )
        trainer.train()
        history = [
            torch.tensor(row[name])
            for row in trainer.state.log_history
            for name in ("loss", "grad_norm", "eval_loss")
            if name in row
        ]
        return history + [weight.detach().clone() for weight in model.parameters()], attached

    expected, _ = run(False)
    results, attached = run(True)
    assert equal(results, expected)
    report = attached.report().ranks[0]
    assert (report.num_iterations, report.num_plans, report.total.num_late) == (6, 1, 0)
    assert report.total.num_groups_moved == (2 if checkpointing else 3)
