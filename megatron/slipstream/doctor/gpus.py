# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""GPUs, their links to the host, and what copies reach."""

from __future__ import annotations

from typing import Optional

from megatron.slipstream.doctor.check import Check, Seen, Topic, not_looked_at
from megatron.slipstream.doctor.facts import Facts, Gpu, Link
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.plan.trace import Bandwidth
from megatron.slipstream.rules import Finding, Rule

GB_PER_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""What one lane of PCI Express carries in each direction, by generation."""

FAR_BELOW_LINK = 0.7
"""Of what the link carries. Copies of pinned memory reach 0.88 on an H200 with 16 lanes of
generation 5; published figures of an A100 with generation 4 are 0.8."""

ONE_WAY_AT_A_TIME = 1.25
"""Both directions at once, together, over the faster one alone: an H200 reaches 1.8."""

NO_GPU = Rule(
    "no-gpu",
    "note",
    "there is no GPU here: trainings run on the CPU, for trying things out, and imitate its memory",
    "run the doctor on a machine that trains",
)
GPU_NOT_SEEN = Rule(
    "gpu-not-seen",
    "error",
    "there is an NVIDIA GPU or its driver, and torch sees no GPU{hidden}",
    "unset CUDA_VISIBLE_DEVICES, or give the container its GPUs (--gpus all); nvidia-smi tells "
    "whether the driver answers",
)
NARROW_LINK = Rule(
    "pcie-lanes",
    "warning",
    "GPU {gpu} uses {width} of {max_width} lanes",
    "the card does not sit well, or the slot has fewer lanes: tell who runs the machine",
)
SLOW_LINK = Rule(
    "pcie-generation",
    "warning",
    "GPU {gpu} has PCIe generation {generation} of {max_generation} right after copies",
    "see the firmware's settings of the slot and of power saving: tell who runs the machine",
)
IDLE_LINK = Rule(
    "pcie-idle",
    "note",
    "GPU {gpu} has PCIe generation {generation} of {max_generation}, as an idle GPU may",
    "run the doctor without --no-bandwidth to see it at work",
)
SLOW_COPIES = Rule(
    "slow-copies",
    "warning",
    "GPU {gpu}: copies {direction} reach {rate:.1f} GB/s, {share:.0%} of what PCIe generation "
    "{generation} with {width} lanes carries",
    "see that nobody else uses the link or the memory now, and that pinned memory is on the GPU's "
    "node (NUMA, below); in a virtual machine, ask the provider",
)
ONE_WAY = Rule(
    "one-way-at-a-time",
    "note",
    "GPU {gpu}: both ways at once reach {both:.1f} GB/s together, hardly more than one way alone "
    "({alone:.1f} GB/s), so copies out and back slow each other down",
    "pipelines, which copy both ways at once, then hide fewer bytes: let --offload-max-overhead-"
    "percent choose how many",
)
NOT_MEASURED = Rule(
    "bandwidth-not-measured",
    "warning",
    "GPU {gpu}: copies could not be measured: {error}",
    "see whether another process uses the GPU's memory, and whether pinned memory can be had",
)


def _gpus(facts: Facts) -> Seen:
    if not facts.gpus and facts.driver is None:
        return Seen("none", (NO_GPU.found(),))
    value = "\n".join(map(_describe, facts.gpus)) or "none"
    # Without CUDA or without torch, that is what is said, under Versions.
    if facts.torch is None or facts.torch.cuda is None or facts.torch.sees_gpus:
        return Seen(value)
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    return Seen(value, (GPU_NOT_SEEN.found(hidden=hidden),))


def _describe(gpu: Gpu) -> str:
    memory = "" if gpu.memory_bytes is None else f", {format_bytes(gpu.memory_bytes)}"
    return f"GPU {gpu.number}: {gpu.name}{memory}"


def _links(facts: Facts) -> Seen:
    if not facts.gpus:
        return Seen("no GPU")
    if "link" in facts.unseen:
        return not_looked_at(facts.unseen["link"])
    lines, findings = [], []
    for gpu in facts.gpus:
        if gpu.link is None:
            lines.append(f"GPU {gpu.number}: not PCIe, or not told")
            continue
        lines.append(f"GPU {gpu.number}: {_describe_link(gpu.link)}")
        findings += _check_link(gpu, gpu.link)
    return Seen("\n".join(lines), tuple(findings))


def _describe_link(link: Link) -> str:
    best = (link.max_generation, link.max_width)
    now = f"generation {link.generation} x{link.width}"
    if (link.generation, link.width) == best:
        return now
    return f"{now} (at most generation {link.max_generation} x{link.max_width})"


def _check_link(gpu: Gpu, link: Link) -> list[Finding]:
    findings = []
    if link.width < link.max_width:
        findings.append(
            NARROW_LINK.found(gpu=gpu.number, width=link.width, max_width=link.max_width)
        )
    if link.generation < link.max_generation:
        problem = IDLE_LINK if gpu.bandwidth is None else SLOW_LINK
        findings.append(
            problem.found(
                gpu=gpu.number, generation=link.generation, max_generation=link.max_generation
            )
        )
    return findings


def _copies(facts: Facts) -> Seen:
    if not facts.gpus:
        return Seen("no GPU")
    if "bandwidth" in facts.unseen:
        return not_looked_at(facts.unseen["bandwidth"])
    lines, findings = [], []
    for gpu in facts.gpus:
        lines.append(f"GPU {gpu.number}: {_describe_bandwidth(gpu.bandwidth)}")
        if gpu.bandwidth is None:
            error = gpu.bandwidth_error or "nothing tells why"
            findings.append(NOT_MEASURED.found(gpu=gpu.number, error=error))
        else:
            findings += _check_bandwidth(gpu, gpu.bandwidth)
    return Seen("\n".join(lines), tuple(findings))


def _describe_bandwidth(bandwidth: Optional[Bandwidth]) -> str:
    if bandwidth is None:
        return "not measured"
    return (
        f"out {bandwidth.d2h_gb_per_s:.1f}, back {bandwidth.h2d_gb_per_s:.1f} GB/s; at once "
        f"{bandwidth.d2h_both_gb_per_s:.1f} and {bandwidth.h2d_both_gb_per_s:.1f} GB/s"
    )


def _check_bandwidth(gpu: Gpu, bandwidth: Bandwidth) -> list[Finding]:
    findings = []
    alone = {"out": bandwidth.d2h_gb_per_s, "back": bandwidth.h2d_gb_per_s}
    link = gpu.link
    if link is not None and link.generation in GB_PER_S_PER_LANE:
        carries = GB_PER_S_PER_LANE[link.generation] * link.width
        findings += [
            SLOW_COPIES.found(
                gpu=gpu.number,
                direction=direction,
                rate=rate,
                share=rate / carries,
                generation=link.generation,
                width=link.width,
            )
            for direction, rate in alone.items()
            if rate < FAR_BELOW_LINK * carries
        ]
    both = bandwidth.d2h_both_gb_per_s + bandwidth.h2d_both_gb_per_s
    fastest = max(alone.values())
    if both < ONE_WAY_AT_A_TIME * fastest:
        findings.append(ONE_WAY.found(gpu=gpu.number, both=both, alone=fastest))
    return findings


TOPIC = Topic(
    "GPUs and their links",
    "Copies are of pinned memory, placed as training places it, one GPU after the other. 1 GB is "
    "1e9 bytes. The planner's own measurement during training is the same.",
    (
        Check("GPUs", _gpus, (NO_GPU, GPU_NOT_SEEN)),
        Check("PCIe link", _links, (NARROW_LINK, SLOW_LINK, IDLE_LINK)),
        Check("Copies", _copies, (SLOW_COPIES, ONE_WAY, NOT_MEASURED)),
    ),
)
