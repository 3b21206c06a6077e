# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Whole trainings whose parameters or optimizer are not where a plain one has them.

FSDP frees a layer's weights while its activations are on the host, and gathers them again before
its backward. An optimizer on the host copies gradients and weights beside the activations.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
from training_runs import result_of, train_on_ranks

COMMON = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128 --num-layers 4
    --hidden-size 64 --num-attention-heads 4 --seq-length 32 --max-position-embeddings 32
    --position-embedding-type rope --normalization RMSNorm --swiglu --disable-bias-linear
    --untie-embeddings-and-output-weights --bf16
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 3
    --eval-interval 3 --eval-iters 1 --log-interval 1 --num-workers 0
""".split()
OFFLOAD = """
    --fine-grained-activation-offloading --min-offloaded-tensor-size 1
    --offload-modules attn_norm qkv_linear core_attn attn_proj mlp_norm
""".split()


# Stand-ins for a machine without a GPU.


class _Meshes:
    """``DeviceMesh`` of CPUs."""

    @staticmethod
    def from_group(group: Any, device_type: str = "cuda", **options: Any) -> Any:
        return torch.distributed.DeviceMesh.from_group(group, "cpu", **options)


class _Torch:
    """``torch``, whose only device is the CPU."""

    __getattr__ = staticmethod(torch.__getattribute__)

    @staticmethod
    def device(*_: Any) -> torch.device:
        return torch.device("cpu")


def _torch_fsdp_on_cpu() -> None:
    from megatron.core.distributed import torch_fully_sharded_data_parallel

    torch_fully_sharded_data_parallel.DeviceMesh = _Meshes


def _megatron_fsdp_on_cpu() -> None:
    from megatron.core.distributed.fsdp import mcore_fsdp_adapter
    from megatron.core.distributed.fsdp.src.megatron_fsdp import (
        megatron_fsdp,
        param_and_grad_buffer,
    )

    mcore_fsdp_adapter.DeviceMesh = _Meshes
    for module in (mcore_fsdp_adapter, megatron_fsdp, param_and_grad_buffer):
        module.torch = _Torch()


def _host_optimizer_on_cpu() -> None:
    """The model's parameters (bfloat16) count as on the GPU, the optimizer's (float32) do not."""
    from megatron.core.optimizer.cpu_offloading import hybrid_optimizer

    def is_cuda(tensor: torch.Tensor) -> bool:
        caller = sys._getframe(1).f_globals
        return caller is vars(hybrid_optimizer) and tensor.dtype == torch.bfloat16

    torch.Tensor.is_cuda = property(is_cuda)
    torch.Tensor.pin_memory = lambda tensor: tensor


class Way(NamedTuple):
    """How parameters and optimizer are distributed."""

    num_ranks: int
    flags: str
    prepare: Any


WAYS = {
    "torch FSDP2, recomputation": Way(
        2,
        "--use-torch-fsdp2 --ckpt-format torch_dist --recompute-granularity selective "
        "--recompute-modules layernorm mlp",
        _torch_fsdp_on_cpu,
    ),
    # gloo cannot scale while it reduces.
    "Megatron-FSDP": Way(
        2,
        "--use-megatron-fsdp --data-parallel-sharding-strategy optim_grads_params "
        "--ckpt-format fsdp_dtensor --calculate-per-token-loss",
        _megatron_fsdp_on_cpu,
    ),
    "optimizer on the host": Way(
        1,
        "--optimizer-cpu-offload --use-distributed-optimizer --use-precision-aware-optimizer "
        "--no-pin-cpu-grads --no-pin-cpu-params",
        _host_optimizer_on_cpu,
    ),
}


def _check(way: Way, folder: Path, has_gpu: bool) -> None:
    prepare = None if has_gpu else way.prepare
    flags = [*COMMON, *way.flags.split()]
    off, on = (
        train_on_ranks(way.num_ranks, [*flags, *more], folder / f"{name}.json", prepare=prepare)
        for name, more in (("off", []), ("on", OFFLOAD))
    )
    assert [result_of(record) for record in on] == [result_of(record) for record in off]
    losses = [iteration["loss"] for iteration in on[0]["iterations"]]
    assert len(set(losses)) == len(losses)
    last = on[0]["iterations"][-1]
    assert last["bytes_offloaded"] > 0
    assert last["activation_peak_bytes"] < off[0]["iterations"][-1]["activation_peak_bytes"]


@pytest.mark.parametrize("name", WAYS)
def test_training_is_the_same_with_the_engine(name: str, tmp_path: Path) -> None:
    if name == "Megatron-FSDP":
        pytest.importorskip("einops", reason="megatron's FSDP needs einops")
    _check(WAYS[name], tmp_path, has_gpu=False)


@pytest.mark.parametrize(
    "name",
    [
        pytest.param(name, marks=pytest.mark.gpu if way.num_ranks == 1 else pytest.mark.gpus2)
        for name, way in WAYS.items()
    ],
)
def test_training_is_the_same_with_the_engine_on_gpus(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NVTE_ALLOW_NONDETERMINISTIC_ALGO", "0")
    _check(WAYS[name], tmp_path, has_gpu=True)
