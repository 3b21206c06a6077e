# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Checks of host memory: the share that each rank may pin, and its limits."""

from __future__ import annotations

from megatron.slipstream.doctor.check import Check, Seen, Topic, not_checked
from megatron.slipstream.doctor.facts import Facts
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.preflight import HOST_MEMORY_SHARE, host_memory_share_bytes
from megatron.slipstream.rules import Rule

LITTLE_BYTES = 4 << 30
"""A GPU rank's share below which only a few layers of a large model could be offloaded."""

SMALL_SHM_BYTES = 1 << 30
"""Size that NCCL's documentation recommends for a container."""

RANKS_PER_HOST_OF_LAUNCHERS = ("SLURM_NTASKS_PER_NODE", "OMPI_COMM_WORLD_LOCAL_SIZE")

LITTLE_MEMORY = Rule(
    "little-host-memory",
    "warning",
    "each of {ranks} ranks may pin {share} of host memory; activations beyond it stay on the GPU",
    "give the job more host memory (a container's limit counts), or offload fewer modules",
)
LIMIT_TOO_HIGH = Rule(
    "host-memory-limit-too-high",
    "warning",
    "offload_host_memory_limit_bytes={limit} lets {ranks} ranks pin {together}, but only "
    "{available} are available: the system may kill the job",
    "set offload_host_memory_limit_bytes to {share_bytes} or less, or leave it out",
)
SHARE_NOT_KNOWN = Rule(
    "local-world-size-not-set",
    "warning",
    "{variable}={number}, but LOCAL_WORLD_SIZE is not set: each rank assumes that it is the only "
    "one of the host, and may pin all available memory",
    "start with torchrun, or export LOCAL_WORLD_SIZE={number}",
)
SMALL_MEMLOCK = Rule(
    "memlock-limit",
    "warning",
    "RLIMIT_MEMLOCK is {limit} on a host with RDMA adapters: it limits NCCL's memory "
    "registrations, which may fail",
    "ulimit -l unlimited (containers: --ulimit memlock=-1; Slurm: "
    "PropagateResourceLimitsExcept=MEMLOCK in slurm.conf)",
)
SMALL_SHM = Rule(
    "small-shm",
    "warning",
    "/dev/shm has {size}; NCCL and data loader workers exchange data there, and fail when it is "
    "full",
    "give the container more (--shm-size=1g or more, or --ipc=host)",
)


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
        return not_checked("neither /proc/meminfo nor a control group reports available memory")
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
    lines = [
        f"{format_bytes(share)} for each of {ranks} ({percent} of {format_bytes(available)})",
        *(
            f"limit of the control group (v{group.version}): {format_bytes(group.limit_bytes)}"
            for group in facts.host.groups
            # Version 1 reports "no limit" as a number larger than any memory.
            if facts.host.total_bytes is None or group.limit_bytes < facts.host.total_bytes
        ),
    ]
    return Seen("\n".join(lines), tuple(findings))


def _memlock(facts: Facts) -> Seen:
    limit = facts.host.memlock_bytes
    if limit is None:
        return Seen("unlimited")
    findings = (SMALL_MEMLOCK.found(limit=format_bytes(limit)),)
    return Seen(format_bytes(limit), findings if facts.host.has_rdma else ())


def _shm(facts: Facts) -> Seen:
    size = facts.host.shm_bytes
    if size is None:
        return not_checked("there is no /dev/shm")
    findings = (SMALL_SHM.found(size=format_bytes(size)),) if size < SMALL_SHM_BYTES else ()
    return Seen(format_bytes(size), findings)


TOPIC = Topic(
    "Host memory",
    (
        Check(
            "Ranks per host",
            "ranks pin more memory than the host has, and the job is killed",
            _ranks,
            (SHARE_NOT_KNOWN,),
        ),
        Check(
            "May be pinned",
            "activations stay on the GPU, or the job is killed",
            _share,
            (LITTLE_MEMORY, LIMIT_TOO_HIGH),
        ),
        Check("Locked memory", "NCCL fails to register memory", _memlock, (SMALL_MEMLOCK,)),
        Check("/dev/shm", "NCCL or a data loader fails", _shm, (SMALL_SHM,)),
    ),
)
