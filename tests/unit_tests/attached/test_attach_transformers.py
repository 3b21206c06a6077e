# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Models of Hugging Face transformers, attached, in a plain loop and in its Trainer."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Optional

import pytest
import torch
from attached_models import BACKENDS, attach_to, counters, equal, gradients

transformers = pytest.importorskip("transformers", reason="transformers is not installed")

SIZES = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_dropout": 0.1,
}


def llama() -> Any:
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def mixtral() -> Any:
    routing = {"num_local_experts": 4, "num_experts_per_tok": 2, "router_jitter_noise": 0.1}
    config = transformers.MixtralConfig(**SIZES, **routing, output_router_logits=True)
    return transformers.MixtralForCausalLM(config)


def make(build: Any, checkpointing: Optional[bool]) -> Any:
    torch.manual_seed(5)
    model = build()
    model.train()
    model.config.use_cache = False
    if checkpointing is not None:
        model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
    return model


def train(model: Any, num_iterations: int = 3) -> list[torch.Tensor]:
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("checkpointing", [None, False, True], ids=["", "checkpoint", "reentrant"])
@pytest.mark.parametrize("build", [llama, mixtral], ids=lambda build: build.__name__)
def test_plain_loop(build: Any, checkpointing: Optional[bool], backend: str) -> None:
    expected = train(make(build, checkpointing))
    model = make(build, checkpointing)
    attached = attach_to(model, "model.layers.*", backend)
    assert equal(train(model), expected)
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


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("build", [llama, mixtral], ids=lambda build: build.__name__)
def test_parts_of_layers(build: Any, backend: str) -> None:
    expected = train(make(build, None))
    model = make(build, None)
    # transformers 4 calls a block of experts otherwise.
    mlp = "mlp" if hasattr(model.model.layers[0], "mlp") else "block_sparse_moe"
    attached = attach_to(model, ["model.layers.*.self_attn", f"**.{mlp}"], backend)
    assert equal(train(model), expected)
    moved = {name: each.num_groups_moved for name, each in counters(attached).items()}
    assert moved == {"model.layers.*.self_attn": 3, f"**.{mlp}": 3}


class _Rows(torch.utils.data.Dataset[Any]):
    def __len__(self) -> int:
        return 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        ids = torch.randint(0, 64, (16,), generator=torch.Generator().manual_seed(index))
        return {"input_ids": ids, "labels": ids}


@pytest.mark.parametrize("checkpointing", [False, True], ids=["", "checkpoint"])
@pytest.mark.parametrize("build", [llama, mixtral], ids=lambda build: build.__name__)
def test_trainer(build: Any, checkpointing: bool, tmp_path: Path) -> None:
    pytest.importorskip("accelerate", reason="accelerate, which Trainer needs, is not installed")

    def run(attaches: bool) -> tuple[list[Any], Any]:
        model = make(build, None)
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
