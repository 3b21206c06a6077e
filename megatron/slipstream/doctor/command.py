# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The flags of a training command."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple, Optional

from megatron.slipstream import preflight
from megatron.slipstream.doctor.check import Check, Seen, Topic, not_looked_at
from megatron.slipstream.doctor.facts import Command, Facts
from megatron.slipstream.preflight import Problem

REFUSED = Problem("option-refused", "error", "{message}", "{cure}")
REFUSED_BY_MEGATRON = Problem(
    "refused-by-megatron",
    "error",
    "megatron-core's own validation: {message}",
    "change the flag that this is about; megatron-core stops at the first, so look again",
)
STAYS = Problem(
    "stays-on-the-device",
    "note",
    "offload_modules: {names} of the layers that CUDA graphs capture stay on the device, since "
    "graphs keep what they take in and give out",
    "leave them out, or capture other parts (cuda_graph_modules)",
)
NO_EFFECT = Problem(
    "no-effect",
    "note",
    "{names}: of no effect without fine_grained_activation_offloading",
    "add --fine-grained-activation-offloading, or leave them out",
)
NOTHING_TO_MOVE = Problem(
    "nothing-to-move",
    "note",
    "recompute_granularity=full: a layer that is recomputed as a whole saves its input only, which "
    "stays",
    "set offload_checkpoint_inputs=True to move it",
)


class Words(NamedTuple):
    """A training command in parts."""

    flags: tuple[str, ...]
    """Of the training script."""
    ranks_per_host: Optional[int] = None
    """As the launcher is told; None if it is not."""
    num_hosts: int = 1


def split_command(words: list[str]) -> Words:
    """Take the launcher and the script away from a command.

    Args:
        words: Such as ``torchrun --nproc-per-node 8 pretrain_gpt.py --num-layers 2``,
            ``./run train --num-layers 2``, or the flags alone.
    """
    if not words or words[0].startswith("-"):
        return Words(tuple(words))
    if Path(words[0]).name == "run" and words[1:2] == ["train"]:
        return Words(tuple(words[2:]))
    first_flag = next((i for i, word in enumerate(words) if word.startswith("-")), len(words))
    script = next((i for i, word in enumerate(words) if word.endswith(".py")), first_flag - 1)
    launcher = " ".join(words[:script])
    return Words(
        tuple(words[script + 1 :]),
        _number(launcher, "nproc"),
        _number(launcher, "nnodes") or 1,
    )


def _number(launcher: str, name: str) -> Optional[int]:
    """The number that torchrun is given as an option; None for words such as 'gpu' and ranges."""
    found = re.search(rf"--{name}(?:[-_]per[-_]node)?[ =](\d+)(?: |$)", launcher)
    return int(found[1]) if found else None


def check_command(words: Words) -> Command:
    """Parse and check the flags. Imports megatron-core, which takes seconds."""
    from megatron.slipstream.integration.doctor import check_flags

    num_processes = words.ranks_per_host and words.ranks_per_host * words.num_hosts
    checked = check_flags(words.flags, num_processes)
    findings = [REFUSED.found(**_in_two(text)) for text in checked.refusals]
    if checked.refusal_of_megatron is not None:
        findings.append(REFUSED_BY_MEGATRON.found(message=checked.refusal_of_megatron))
    findings += checked.findings
    if checked.stays:
        findings.append(STAYS.found(names=", ".join(checked.stays)))
    if checked.unused:
        findings.append(NO_EFFECT.found(names=", ".join(checked.unused)))
    args = checked.args
    if args is None:
        return Command(tuple(findings), checked.num_processes)
    if args.fine_grained_activation_offloading and args.recompute_granularity == "full":
        findings.append(NOTHING_TO_MOVE.found())
    offloads = args.fine_grained_activation_offloading
    has_fsdp = args.use_megatron_fsdp or args.use_torch_fsdp2
    return Command(
        tuple(findings),
        checked.num_processes,
        offloads=offloads,
        graphs=checked.graphs,
        is_deterministic=args.deterministic_mode,
        host_memory_limit_bytes=args.offload_host_memory_limit_bytes,
        copies_beside_experts=offloads and args.moe_grouped_gemm and not has_fsdp,
    )


def _in_two(text: str) -> dict[str, str]:
    """An error's text, which says what is wrong, then '; ' and what to do."""
    message, _, cure = text.partition("; ")
    return {"message": message, "cure": cure}


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
    "[Options](options.md#what-is-refused) is shown, with its message. The whole command may be "
    "given, with `torchrun` before the script: then the number of processes is known. Otherwise it "
    "is that of the launcher which has started the doctor, or the smallest that the flags allow.",
    (
        Check(
            "Flags",
            _flags,
            (
                *(REFUSED, REFUSED_BY_MEGATRON, STAYS, NO_EFFECT, NOTHING_TO_MOVE),
                preflight.DATASET_MISSING,
                preflight.DATASET_CORRUPT,
                preflight.TOKEN_OUTSIDE_VOCABULARY,
            ),
        ),
    ),
)
