# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flags of a training command are checked, for any launcher."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from doctor_facts import HEALTHY

from megatron.slipstream.doctor.checks import examine
from megatron.slipstream.doctor.command import check_command
from megatron.slipstream.doctor.facts import Command
from megatron.slipstream.estimate.training_command import Words, split_command
from megatron.slipstream.integration.entry import dry_run
from megatron.slipstream.model_rules import STAYS
from megatron.slipstream.preflight import DATASET_MISSING
from megatron.slipstream.rules import Finding

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


FOUND = (
    Finding("error", "a=1 is not supported with b because c", "set a=2; or b", "a"),
    DATASET_MISSING.found(prefix="p", missing="p.idx"),
    STAYS.found(names="attn_norm, mlp_norm"),
)


@pytest.fixture
def checked(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Input and result of the check of flags."""
    args = SimpleNamespace(
        fine_grained_activation_offloading=True,
        deterministic_mode=True,
        cuda_graph_impl="transformer_engine",
        cuda_graph_granularity="layer",
        offload_host_memory_limit_bytes=5,
        num_experts=8,
        moe_grouped_gemm=True,
        use_megatron_fsdp=False,
        use_torch_fsdp2=False,
    )
    results: list[Any] = [dry_run.Checked(args, 16, FOUND)]

    def check_flags(*given: Any) -> dry_run.Checked:
        results.extend(given)
        return results[0]

    monkeypatch.setattr(dry_run, "check_flags", check_flags)
    return results


def test_all_that_is_wrong_with_flags_is_found(checked: list[Any]) -> None:
    command = check_command(Words(FLAGS, 8, 2))
    assert checked[1:] == [FLAGS, 16]
    assert command == Command(FOUND, 16, True, "transformer_engine", True, True, 5)


@pytest.mark.parametrize(
    "implementation, granularity, graphs",
    [("local", "layer", "local"), ("none", "chunk", "chunk"), ("none", "layer", "none")],
)
def test_graphs_of_chunks_are_graphs_too(
    checked: list[Any], implementation: str, granularity: str, graphs: str
) -> None:
    checked[0].args.cuda_graph_impl = implementation
    checked[0].args.cuda_graph_granularity = granularity
    assert check_command(Words(FLAGS)).graphs == graphs


def test_flags_that_could_not_be_parsed_ask_for_nothing(checked: list[Any]) -> None:
    unknown = Finding("error", "unrecognized arguments: --x")
    checked[0] = dry_run.Checked(None, findings=(unknown,))
    command = check_command(Words(FLAGS))
    assert checked[1:] == [FLAGS, None]
    assert command.findings == (unknown,)
    assert command == Command(command.findings, 1)


def test_without_flags_the_report_says_how_to_give_some() -> None:
    (row,) = (row for row in examine(HEALTHY) if row.label == "Flags")
    assert row.severity == "ok"
    assert "slipstream doctor -- FLAGS" in row.value
