# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Host memory: how much each rank may pin, and what limits it."""

from __future__ import annotations

from megatron.slipstream.doctor.check import Check, Seen, Topic, not_looked_at
from megatron.slipstream.doctor.facts import Facts
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.preflight import HOST_MEMORY_SHARE, host_memory_share_bytes
from megatron.slipstream.rules import Rule

LITTLE_BYTES = 4 << 30
"""Per rank with a GPU: less than the activations of a few layers of a large model."""

SMALL_SHM_BYTES = 1 << 30
"""What NCCL's documentation tells to give a container."""

RANKS_PER_HOST_OF_LAUNCHERS = ("SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")

LITTLE_MEMORY = Rule(
    "little-host-memory",
    "warning",
    "each of {ranks} ranks may pin {share} of host memory; what does not fit stays on the GPU",
    "give the job more host memory (a container's limit counts), or offload fewer modules",
)
LIMIT_TOO_HIGH = Rule(
    "host-memory-limit-too-high",
    "warning",
    "offload_host_memory_limit_bytes={limit} lets {ranks} ranks pin {together}, and {available} "
    "are available: the system may end the job",
    "set offload_host_memory_limit_bytes to {share_bytes} or less, or leave it out",
)
NODE_TOO_SMALL = Rule(
    "node-memory-short",
    "note",
    "node {node} has {free} free, and the ranks of its {gpus} GPUs may pin {together}: the rest "
    "goes to another node, where copies are slower",
    "set offload_host_memory_limit_bytes to {share_bytes}, or spread the ranks over the nodes",
)
SHARE_NOT_KNOWN = Rule(
    "local-world-size-not-set",
    "warning",
    "{variable}={number}, but LOCAL_WORLD_SIZE is not set: each rank takes itself for the only one "
    "of the host, and may pin all that is available",
    "start with torchrun, or export LOCAL_WORLD_SIZE={number}",
)
SMALL_MEMLOCK = Rule(
    "memlock-limit",
    "note",
    "RLIMIT_MEMLOCK is {limit}. NVIDIA's driver pins memory without regard to it, but what NCCL "
    "registers with RDMA adapters counts, and may fail",
    "ulimit -l unlimited (containers: --ulimit memlock=-1; Slurm: "
    "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf)",
)
SMALL_SHM = Rule(
    "small-shm",
    "warning",
    "/dev/shm has {size}; NCCL and the workers of data loaders exchange data there, and fail once "
    "it is full",
    "give the container more (--shm-size=1g or more, or --ipc=host)",
)


def _available(facts: Facts) -> Seen:
    available, host = facts.process.available_memory_bytes, facts.host
    if available is None:
        return not_looked_at("neither /proc/meminfo nor a control group tells")
    lines = [format_bytes(available)]
    if host.total_bytes is not None:
        lines[0] += f" of {format_bytes(host.total_bytes)}"
    lines += [
        f"limit of the control group (v{group.version}): {format_bytes(group.limit_bytes)}"
        for group in host.groups
        # Version 1 writes 'none' as a number beyond any memory.
        if host.total_bytes is None or group.limit_bytes < host.total_bytes
    ]
    return Seen("\n".join(lines))


def _ranks(facts: Facts) -> Seen:
    value = f"{facts.ranks.number} ({facts.ranks.source})"
    if "LOCAL_WORLD_SIZE" in facts.environment:
        return Seen(value)
    return Seen(
        value,
        tuple(
            SHARE_NOT_KNOWN.found(variable=name, number=facts.environment[name])
            for name in RANKS_PER_HOST_OF_LAUNCHERS
            if facts.environment.get(name, "1") != "1"
        ),
    )


def _share(facts: Facts) -> Seen:
    available, ranks = facts.process.available_memory_bytes, facts.ranks.number
    if available is None:
        return not_looked_at("nothing tells how much is available")
    share = host_memory_share_bytes(available, ranks)
    findings = []
    if facts.gpus and share < LITTLE_BYTES:
        findings.append(LITTLE_MEMORY.found(ranks=ranks, share=format_bytes(share)))
    limit = facts.command.host_memory_limit_bytes if facts.command else None
    if limit is not None and limit * ranks > available:
        findings.append(
            LIMIT_TOO_HIGH.found(
                limit=limit,
                ranks=ranks,
                together=format_bytes(limit * ranks),
                available=format_bytes(available),
                share_bytes=share,
            )
        )
    percent = f"{HOST_MEMORY_SHARE:.0%}"
    value = f"{format_bytes(share)} for each of {ranks} ({percent} of what is available)"
    return Seen(value, tuple(findings))


def _nodes(facts: Facts) -> Seen:
    """Only where there is a rank for each GPU is it known which node a rank is on."""
    available, ranks = facts.process.available_memory_bytes, facts.ranks.number
    if facts.numa is None or len(facts.numa.nodes) < 2 or available is None:
        return Seen("one node" if facts.numa is not None else "unknown")
    if ranks != len(facts.gpus):
        return Seen("which ranks a node has is not known")
    share = host_memory_share_bytes(available, ranks)
    lines, findings = [], []
    for node in facts.numa.nodes:
        num_gpus = sum(gpu.node == node.number for gpu in facts.gpus)
        lines.append(f"node {node.number}: {format_bytes(num_gpus * share)}")
        if num_gpus and node.free_bytes is not None and num_gpus * share > node.free_bytes:
            short = NODE_TOO_SMALL.found(
                node=node.number,
                free=format_bytes(node.free_bytes),
                gpus=num_gpus,
                together=format_bytes(num_gpus * share),
                share_bytes=node.free_bytes // num_gpus,
            )
            findings.append(short)
    return Seen("\n".join(lines), tuple(findings))


def _memlock(facts: Facts) -> Seen:
    limit = facts.host.memlock_bytes
    if limit is None:
        return Seen("unlimited")
    finding = SMALL_MEMLOCK.found(limit=format_bytes(limit))
    if facts.host.has_rdma:
        finding = finding._replace(severity="warning")
    return Seen(format_bytes(limit), (finding,) if facts.gpus or facts.host.has_rdma else ())


def _shm(facts: Facts) -> Seen:
    size = facts.host.shm_bytes
    if size is None:
        return not_looked_at("there is no /dev/shm")
    findings = (SMALL_SHM.found(size=format_bytes(size)),) if size < SMALL_SHM_BYTES else ()
    return Seen(format_bytes(size), findings)


TOPIC = Topic(
    "Host memory",
    "What leaves a GPU needs as many bytes of pinned host memory. Available is what the kernel "
    "estimates, or what the control group of a container leaves if that is less.",
    (
        Check("Available", _available),
        Check("Ranks per host", _ranks, (SHARE_NOT_KNOWN,)),
        Check("May be pinned", _share, (LITTLE_MEMORY, LIMIT_TOO_HIGH)),
        Check("May be pinned by node", _nodes, (NODE_TOO_SMALL,)),
        Check("Locked memory", _memlock, (SMALL_MEMLOCK,)),
        Check("/dev/shm", _shm, (SMALL_SHM,)),
    ),
)
