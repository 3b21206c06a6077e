# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flags of a training command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.slipstream import preflight
from megatron.slipstream.config import NO_EFFECT, NOTHING_TO_MOVE, REFUSED_BY_MEGATRON, STAYS
from megatron.slipstream.doctor.check import Check, Seen, Topic, not_looked_at
from megatron.slipstream.doctor.facts import Command, Facts


class Words(NamedTuple):
    """A training command in parts."""

    flags: tuple[str, ...]
    """Of the training script."""
    ranks_per_host: Optional[int] = None
    """As the launcher is told; None if it is not."""
    num_hosts: int = 1


_SHELLS = frozenset({"bash", "dash", "ksh", "sbatch", "sh", "zsh"})
_SHELL_SCRIPTS = (".sbatch", ".sh", ".slurm")
_OTHER_LAUNCHERS = frozenset({"accelerate", "deepspeed", "horovodrun", "mpiexec", "mpirun", "srun"})
_TORCHRUN = frozenset({"torch.distributed.launch", "torch.distributed.run"})


def is_command(word: str) -> bool:
    """Whether one word without flags starts a program, and is no file to read."""
    path = Path(word)
    is_program = path.name in _SHELLS | _OTHER_LAUNCHERS | {"python", "python3", "torchrun"}
    return is_program or path.suffix in (".py", *_SHELL_SCRIPTS)


def split_command(words: list[str]) -> Words:
    """Take the launcher and the script away from a command.

    Args:
        words: Such as ``torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2``,
            ``./run train --num-layers 2``, or the flags alone.

    Raises:
        ValueError: The flags, or the number of processes, are somewhere else.
    """
    if not words or words[0].startswith("-"):
        return Words(tuple(words))
    if Path(words[0]).name == "run" and words[1:2] == ["train"]:
        return Words(tuple(words[2:]))
    first_flag = _after_script(words)
    launcher = " ".join(words[:first_flag])
    ranks_per_host = _number(launcher, "nproc")
    others = [word for word in words[:first_flag] if Path(word).name in _OTHER_LAUNCHERS]
    if others and ranks_per_host is None:
        raise ValueError(
            f"{others[0]!r} is not supported before the script because the number of processes "
            "is not read from its options; give torchrun --nproc-per-node N --nnodes M in its place"
        )
    return Words(tuple(words[first_flag:]), ranks_per_host, _number(launcher, "nnodes") or 1)


def _after_script(words: list[str]) -> int:
    """The place behind the script, or behind ``-m`` and its module."""
    is_python = False  # 'numactl -m 0' has an '-m' of its own.
    for place, word in enumerate(words):
        is_python = is_python or Path(word).name.startswith(("python", "torchrun"))
        if Path(word).name in _SHELLS or word.endswith(_SHELL_SCRIPTS):
            raise ValueError(
                f"{' '.join(words[: place + 2])!r} is not supported because a training's flags are "
                "not read from a shell script; give the command in it: torchrun "
                "--nproc-per-node N pretrain_gpt.py --num-layers ..."
            )
        if word.endswith(".py"):
            return place + 1
        following = "".join(words[place + 1 : place + 2])
        if is_python and word in ("-m", "--module") and following not in ("", *_TORCHRUN):
            return place + 2
    raise ValueError(
        f"{' '.join(words[:3])!r} names no script (NAME.py or -m MODULE), so where its flags begin "
        "is not known; give the flags alone, or the whole command"
    )


def _number(launcher: str, name: str) -> Optional[int]:
    """The number that torchrun is given as an option; None for words such as 'gpu' and ranges."""
    found = re.search(rf"--{name}(?:[-_]per[-_]node)?[ =](\d+)(?: |$)", launcher)
    return int(found[1]) if found else None


def check_command(words: Words) -> Command:
    """Parse and check the flags. Imports megatron-core, which takes seconds."""
    from megatron.slipstream.integration.dry_run import check_flags

    num_processes = words.ranks_per_host and words.ranks_per_host * words.num_hosts
    checked = check_flags(words.flags, num_processes)
    args = checked.args
    if args is None:
        return Command(checked.findings, checked.num_processes)
    offloads = args.fine_grained_activation_offloading
    has_fsdp = args.use_megatron_fsdp or args.use_torch_fsdp2
    captures_chunks = args.cuda_graph_granularity == "chunk"
    return Command(
        checked.findings,
        checked.num_processes,
        offloads=offloads,
        graphs="chunk" if captures_chunks else args.cuda_graph_impl or "none",
        is_deterministic=args.deterministic_mode,
        host_memory_limit_bytes=args.offload_host_memory_limit_bytes,
        copies_beside_experts=offloads and args.moe_grouped_gemm and not has_fsdp,
    )


def _flags(facts: Facts) -> Seen:
    if facts.command is None and "command" in facts.unseen:
        return not_looked_at(facts.unseen["command"])
    if facts.command is None:
        return Seen("none given (slipstream doctor -- FLAGS checks those of a training)")
    offloads = "with offloading" if facts.command.offloads else "without offloading"
    processes = f"{facts.command.num_processes} process"
    plural = "es" if facts.command.num_processes > 1 else ""
    return Seen(f"a training {offloads}, on {processes}{plural}", facts.command.findings)


TOPIC = Topic(
    "Training command",
    "Flags after `--` are parsed by Megatron's own parser and checked as a training checks them at "
    "its start, but all at once; no model is built. Every broken rule of "
    "[Options](options.md#what-is-refused) is shown, under the name of its option. The whole "
    "command may be given, with `torchrun` before the script: then the number of processes is "
    "known. Otherwise it is that of the launcher which has started the doctor, or the smallest "
    "that the flags allow.",
    (
        Check(
            "Flags",
            _flags,
            (
                *(REFUSED_BY_MEGATRON, STAYS, NO_EFFECT, NOTHING_TO_MOVE),
                preflight.DATASET_MISSING,
                preflight.DATASET_CORRUPT,
                preflight.TOKEN_OUTSIDE_VOCABULARY,
            ),
        ),
    ),
)
