# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""A training command is split into flags and processes, for any launcher."""

from __future__ import annotations

import pytest

from megatron.slipstream.estimate.training_command import Words, split_command

FLAGS = ("--num-layers", "2", "--data-path", "folder/of.py")


@pytest.mark.parametrize(
    "launcher, ranks_per_host, num_hosts",
    [
        ("", None, 1),
        ("pretrain_gpt.py", None, 1),
        ("python pretrain_gpt.py", None, 1),
        ("./run train", None, 1),
        ("torchrun --nproc-per-node 8 pretrain_gpt.py", 8, 1),
        ("torchrun --nproc_per_node=4 --nnodes=2 pretrain_gpt.py", 4, 2),
        ("python -m torch.distributed.run --nproc-per-node=2 /some/pretrain_gpt.py", 2, 1),
        ("CUDA_DEVICE_MAX_CONNECTIONS=1 torchrun --nproc-per-node 2 -m my.training", 2, 1),
        ("numactl -m 0 torchrun --nproc-per-node 4 -m my.training", 4, 1),
        ("./run python -m torch.distributed.run --nproc-per-node 3 -m my.training", 3, 1),
        ("srun --nodes 2 torchrun --nnodes 2 --nproc-per-node 8 pretrain_gpt.py", 8, 2),
        # Words and ranges do not give a number.
        ("torchrun --nproc-per-node gpu --nnodes 1:4 pretrain_gpt.py", None, 1),
    ],
)
def test_the_flags_are_those_of_the_script(
    launcher: str, ranks_per_host: int | None, num_hosts: int
) -> None:
    words = split_command([*launcher.split(), *FLAGS])
    assert words == Words(FLAGS, ranks_per_host, num_hosts)


@pytest.mark.parametrize(
    "launcher, message",
    [
        ("bash train.sh", "'bash train.sh' is not supported because a training's flags are not"),
        ("./train.sh", "'./train.sh --num-layers' is not supported because a training's flags"),
        ("nohup bash -x train.sh", "'nohup bash -x' is not supported because"),
        ("mpirun -np 8 python pretrain_gpt.py", "'mpirun' is not supported before the script"),
        ("accelerate launch train.py", "'accelerate' is not supported before the script because"),
        ("torchrun --nproc-per-node 8", "names no script (NAME.py or -m MODULE), so where its"),
        ("num-layers 2", "'num-layers 2 --num-layers' names no script"),
    ],
)
def test_a_command_that_hides_its_flags_or_processes_is_refused(
    launcher: str, message: str
) -> None:
    with pytest.raises(ValueError) as refused:
        split_command([*launcher.split(), *FLAGS[:2]])
    assert message in str(refused.value)


def test_a_command_without_flags_has_none() -> None:
    assert split_command(["./run", "train"]).flags == ()
    assert split_command([]).flags == ()
