# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Checks of GPUs, the rates of copies to and from them, and CPU affinity."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from megatron.slipstream.doctor.check import Check, Seen, Topic, not_checked
from megatron.slipstream.doctor.facts import Facts, Gpu
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.rules import Finding, Rule

GB_PER_S_PER_LANE = {1: 0.25, 2: 0.5, 3: 0.985, 4: 1.969, 5: 3.938, 6: 7.563}
"""Rate of one lane of PCI Express in each direction, by generation."""

FAR_BELOW_LINK = 0.7
"""Fraction of the link's rate below which copies are slow. Pinned copies reach 0.88 on an H200
(PCIe 5, 16 lanes); published figures for an A100 (PCIe 4) are 0.8."""

NO_GPU = Rule(
    "no-gpu",
    "note",
    "this machine has no GPU: training runs on the CPU, for tests only, with simulated device "
    "memory",
    "run the doctor on a machine that trains",
)
GPU_NOT_SEEN = Rule(
    "gpu-not-seen",
    "error",
    "an NVIDIA GPU or its driver is present, but torch sees no GPU{hidden}",
    "unset CUDA_VISIBLE_DEVICES, or give the container its GPUs (--gpus all); check the driver "
    "with nvidia-smi",
)
SLOW_COPIES = Rule(
    "slow-copies",
    "warning",
    "GPU {gpu}: copies {direction} reach {rate:.1f} GB/s, {share:.0%} of the rate of PCIe "
    "generation {max_generation} with {max_width} lanes (it runs with generation {generation}, "
    "{width} lanes)",
    "with fewer lanes or a lower generation, reseat the card or change the slot's firmware "
    "settings; otherwise check for other users of the link, and that the process runs on the GPU's "
    "NUMA node",
)
NOT_MEASURED = Rule(
    "bandwidth-not-measured",
    "warning",
    "GPU {gpu}: copies could not be measured: {error}",
    "check whether another process uses the GPU's memory, and whether pinned memory is available",
)
BOUND_ELSEWHERE = Rule(
    "bound-to-another-node",
    "warning",
    "GPU {gpu} is on NUMA node {node}, but this process may run only on CPUs {cpus} of other "
    "nodes: copies cross the link between the sockets",
    "start the training with torchrun --numa-binding=node, or the rank with "
    "numactl --cpunodebind={node} --membind={node}",
)
TOOLS_MISSING = Rule(
    "affinity-tools-missing",
    "warning",
    "cuda-python or pynvml is missing: megatron-core's training loop, which needs them to bind "
    "each process to the NUMA node of its GPU, raises an error (./run train continues unbound)",
    "pip install cuda-python nvidia-ml-py",
)


def _gpus(facts: Facts) -> Seen:
    if not facts.gpus and facts.driver is None:
        return Seen("none", (NO_GPU.found(),))
    value = "\n".join(map(_describe, facts.gpus)) or "none"
    # The version checks report missing CUDA or torch.
    if facts.torch is None or facts.torch.cuda is None or facts.torch.sees_gpus:
        return Seen(value)
    visible = facts.environment.get("CUDA_VISIBLE_DEVICES")
    hidden = "" if visible is None else f" (CUDA_VISIBLE_DEVICES={visible!r})"
    return Seen(value, (GPU_NOT_SEEN.found(hidden=hidden),))


def _describe(gpu: Gpu) -> str:
    memory = "" if gpu.memory_bytes is None else f", {format_bytes(gpu.memory_bytes)}"
    return f"GPU {gpu.number}: {gpu.name}{memory}"


def _copies(facts: Facts) -> Seen:
    if not facts.gpus:
        return Seen("no GPU")
    if "bandwidth" in facts.unseen:
        return not_checked(facts.unseen["bandwidth"])
    lines, findings = [], []
    for gpu in facts.gpus:
        rates = gpu.bandwidth
        if rates is None:
            error = gpu.bandwidth_error or "unknown error"
            lines.append(f"GPU {gpu.number}: not measured")
            findings.append(NOT_MEASURED.found(gpu=gpu.number, error=error))
            continue
        lines.append(
            f"GPU {gpu.number}: D2H {rates.d2h_gb_per_s:.1f}, H2D {rates.h2d_gb_per_s:.1f} GB/s; "
            f"both {rates.d2h_both_gb_per_s:.1f} and {rates.h2d_both_gb_per_s:.1f} GB/s"
        )
        findings += _slow(gpu, {"out": rates.d2h_gb_per_s, "back": rates.h2d_gb_per_s})
    return Seen("\n".join(lines), tuple(findings))


def _slow(gpu: Gpu, rates: dict[str, float]) -> Iterator[Finding]:
    link = gpu.link
    if link is None or link.max_generation not in GB_PER_S_PER_LANE:
        return
    carries = GB_PER_S_PER_LANE[link.max_generation] * link.max_width
    for direction, rate in rates.items():
        if rate < FAR_BELOW_LINK * carries:
            shown = {"direction": direction, "rate": rate, "share": rate / carries}
            yield SLOW_COPIES.found(gpu=gpu.number, **shown, **link._asdict())


def _affinity(facts: Facts) -> Seen:
    findings = tuple(
        BOUND_ELSEWHERE.found(gpu=gpu.number, node=gpu.node, cpus=format_numbers(facts.cpus))
        for gpu in _gpus_of_this_process(facts)
        if gpu.node is not None and not facts.cpus_of_node.get(gpu.node, facts.cpus) & facts.cpus
    )
    machine = frozenset().union(*facts.cpus_of_node.values())
    how = "all" if machine <= facts.cpus else "bound to"
    return Seen(f"{how} CPUs {format_numbers(facts.cpus)}", findings)


def _gpus_of_this_process(facts: Facts) -> tuple[Gpu, ...]:
    """Return the GPU of this process if it was started as a rank, else all GPUs."""
    rank = facts.environment.get("LOCAL_RANK", "")
    if rank.isdigit() and int(rank) < len(facts.gpus):
        return (facts.gpus[int(rank)],)
    return facts.gpus


def _tools(facts: Facts) -> Seen:
    if facts.process.affinity_tools:
        return Seen("cuda-python and pynvml")
    return Seen("not both installed", (TOOLS_MISSING.found(),) if facts.gpus else ())


def format_numbers(numbers: Iterable[int]) -> str:
    """Format numbers as the kernel lists them, such as '0-3,8'."""
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and runs[-1][1] == number - 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(a) if a == b else f"{a}-{b}" for a, b in runs)


TOPIC = Topic(
    "GPUs",
    (
        Check("GPUs", "training runs on the CPU", _gpus, (NO_GPU, GPU_NOT_SEEN)),
        Check("Copies", "compute waits for copies", _copies, (SLOW_COPIES, NOT_MEASURED)),
        Check(
            "CPU affinity",
            "copies cross the link between sockets",
            _affinity,
            (BOUND_ELSEWHERE,),
        ),
        Check(
            "Affinity tools",
            "megatron-core's training loop raises an error if activations are offloaded",
            _tools,
            (TOOLS_MISSING,),
        ),
    ),
)
