# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Reads a training's flags from a command line, or from a file of its words with ``#`` comments."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.slipstream.estimate.file_errors import wrong_with


class Words(NamedTuple):
    """A training command, split into its parts."""

    flags: tuple[str, ...]
    ranks_per_host: Optional[int] = None
    """Processes per host passed to the launcher; None if not given."""
    num_hosts: int = 1


_SHELLS = frozenset({"bash", "dash", "ksh", "sbatch", "sh", "zsh"})
_SHELL_SCRIPTS = (".sbatch", ".sh", ".slurm")
_OTHER_LAUNCHERS = frozenset({"accelerate", "deepspeed", "horovodrun", "mpiexec", "mpirun", "srun"})
_TORCHRUN = frozenset({"torch.distributed.launch", "torch.distributed.run"})


def is_command(word: str) -> bool:
    """Return whether a single word starts a program rather than naming a file to read."""
    path = Path(word)
    is_program = path.name in _SHELLS | _OTHER_LAUNCHERS | {"python", "python3", "torchrun"}
    return is_program or path.suffix in (".py", *_SHELL_SCRIPTS)


def split_command(words: list[str]) -> Words:
    """Split the launcher and the script off the flags of a command.

    Such as ``torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2``, ``./run train
    --num-layers 2``, or the flags alone. Raises ``ValueError`` if the command does not contain the
    flags or the number of processes.
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
            "is not read from its options; give torchrun --nproc-per-node N --nnodes M instead"
        )
    return Words(tuple(words[first_flag:]), ranks_per_host, _number(launcher, "nnodes") or 1)


def _after_script(words: list[str]) -> int:
    """Return the index after the script, or after ``-m`` and its module."""
    is_python = False  # 'numactl -m 0' also has an '-m'.
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
    """Return the number in a torchrun option; None for words such as 'gpu' and for ranges."""
    found = re.search(rf"--{name}(?:[-_]per[-_]node)?[ =](\d+)(?: |$)", launcher)
    return int(found[1]) if found else None


def read_flags(path: Path) -> list[str]:
    """Read the words of a file of flags; raises ``ValueError`` with its name if that fails."""
    try:
        text = path.read_text(encoding="utf-8")
    except OSError as error:
        raise ValueError(
            f"--args-file={path} {wrong_with(error)}; give a file of megatron's flags"
        ) from error
    except UnicodeDecodeError as error:
        raise ValueError(
            f"--args-file={path} is not a text file: {error}; give a file of megatron's flags"
        ) from error
    try:
        return shlex.split(text.replace("\\\n", " "), comments=True)
    except ValueError as error:
        raise ValueError(f"{path} is not a list of flags: {error}; close the quotes") from error
