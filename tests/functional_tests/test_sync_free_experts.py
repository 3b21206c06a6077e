# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Trainings with sync-free experts are, bit by bit, those with megatron-core's experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from megatron.core import optimizer
from megatron.core.optimizer import distrib_optimizer
from ranks import run_ranks
from training_runs import train_main, train_on_ranks

FLAGS = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 2
    --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --num-experts 4 --moe-router-topk 2 --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
    --micro-batch-size 2 --global-batch-size 4 --lr 1e-3 --log-interval 1 --eval-iters 0 --bf16
    --eval-interval 20 --lr-decay-iters 20
    --clip-grad 0 --attention-dropout 0 --hidden-dropout 0
""".split()
"""Without a limit of the gradients' norm, which is summed parameter by parameter."""
SYNC_FREE = ["--moe-sync-free-experts"]


STEPS = ["--moe-grouped-gemm", "--use-distributed-optimizer"]


def _losses(folder: Path, num_steps: int, *flags: str) -> list[Any]:
    folder.mkdir(exist_ok=True)
    flags = (*FLAGS, "--train-iters", str(num_steps), *flags)
    records = train_on_ranks(1, list(flags), folder / "run.json", reads_memory=False)
    return [iteration["loss"] for iteration in records[-1]["iterations"]]


def test_ten_steps_are_those_of_megatrons_grouped_experts(tmp_path: Path) -> None:
    theirs = _losses(tmp_path / "theirs", 10, *STEPS)
    ours = _losses(tmp_path / "ours", 10, *STEPS, *SYNC_FREE)
    assert ours == theirs
    assert len(set(ours)) == 10


BOTH_WAYS = pytest.mark.parametrize(
    "first, then", [([], SYNC_FREE), (SYNC_FREE, [])], ids=["to ours", "from ours"]
)


def _save(folder: Path, *flags: str) -> list[Any]:
    """Train four steps and save at the second; returns the losses after it."""
    save = ["--save", str(folder), "--save-interval", "2", "--ckpt-format", "torch_dist"]
    losses = _losses(folder, 4, *flags, *save)
    (folder / "latest_checkpointed_iteration.txt").write_text("2")
    return losses[2:]


def _resume(folder: Path, *flags: str) -> list[Any]:
    """Continue from the second step."""
    load = ["--load", str(folder), "--ckpt-format", "torch_dist"]
    return _losses(folder / "resumed", 4, *flags, *load)


@BOTH_WAYS
def test_a_training_continues_with_the_other_experts(
    first: list[str], then: list[str], tmp_path: Path
) -> None:
    """Weights and optimizer state go through a checkpoint, between one parameter and many."""
    assert _save(tmp_path, *first) == _resume(tmp_path, *then)


class _AdamOfGroups(torch.optim.Optimizer):
    """Counts steps by group, as Transformer Engine's and Apex's do.

    With torch's own, which counts them by parameter, megatron-core loads no state of its
    distributed optimizer.
    """

    def __init__(
        self, params: Any, lr: float, weight_decay: float, betas: Any, eps: float, **_: Any
    ) -> None:
        super().__init__(
            params, {"lr": lr, "weight_decay": weight_decay, "betas": betas, "eps": eps}
        )

    def initialize_state(self, parameter: torch.Tensor, *_: Any) -> None:
        """Called by megatron-core before it loads."""
        for name in ("exp_avg", "exp_avg_sq"):
            self.state[parameter][name] = torch.zeros_like(parameter)

    @torch.no_grad()
    def step(self, *_: Any) -> None:
        for group in self.param_groups:
            group["step"] = step = group.get("step", 0) + 1
            first, second = group["betas"]
            for parameter in group["params"]:
                if not self.state[parameter]:
                    self.initialize_state(parameter)
                mean, square = self.state[parameter].values()
                mean.lerp_(parameter.grad, 1 - first)
                square.lerp_(parameter.grad.square(), 1 - second)
                scale = (square / (1 - second**step)).sqrt() + group["eps"]
                parameter.mul_(1 - group["lr"] * group["weight_decay"])
                parameter.addcdiv_(mean, scale, value=-group["lr"] / (1 - first**step))


@pytest.fixture
def _fused_adam(monkeypatch: pytest.MonkeyPatch) -> None:
    """What there is with Transformer Engine; the ranks are forks of this process."""
    monkeypatch.setattr(optimizer, "Adam", _AdamOfGroups)
    monkeypatch.setattr(optimizer, "USING_PYTORCH_OPTIMIZER", False)
    monkeypatch.setattr(distrib_optimizer, "Adam", _AdamOfGroups)
    monkeypatch.setattr(distrib_optimizer, "HAVE_APEX_OR_TE", True)
    monkeypatch.setattr(distrib_optimizer, "USING_TE_OPTIMIZER", True)


@BOTH_WAYS
@pytest.mark.usefixtures("_fused_adam")
def test_the_state_of_the_distributed_optimizer_does_too(
    first: list[str], then: list[str], tmp_path: Path
) -> None:
    flags = ["--use-distributed-optimizer", "--dist-ckpt-optim-fully-reshardable"]
    assert _save(tmp_path, *first, *flags) == _resume(tmp_path, *then, *flags)


@BOTH_WAYS
@pytest.mark.usefixtures("_fused_adam")
def test_its_buckets_are_refused_with_the_other_experts(
    first: list[str], then: list[str], tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """They have the same sizes, and other parameters in them."""
    flags = ["--use-distributed-optimizer"]
    rest = _save(tmp_path, *first, *flags)
    capfd.readouterr()
    load = ["--load", str(tmp_path), "--ckpt-format", "torch_dist", "--train-iters", "4"]
    load += ["--run-record-path", "refused.json"]
    assert run_ranks(1, train_main, tmp_path, [*FLAGS, *then, *flags, *load], False) == [2]
    (line,) = (line for line in capfd.readouterr().err.splitlines() if "error: " in line)
    assert f"was saved with moe_sync_free_experts={bool(first)}, and parameters" in line
    assert not (tmp_path / "refused.json").exists()
    weights_alone = _resume(tmp_path, *then, *flags, "--no-load-optim")
    assert weights_alone[0] == rest[0]
