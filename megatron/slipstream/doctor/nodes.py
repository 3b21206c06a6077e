# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""NUMA: whether processes and their pinned memory can be on the node of their GPU."""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps

from megatron.slipstream.doctor.check import Check, Seen, Topic, not_looked_at
from megatron.slipstream.doctor.facts import Facts, Gpu, Numa
from megatron.slipstream.plan.render import format_bytes
from megatron.slipstream.rules import Rule

NODE_UNKNOWN = Rule(
    "gpu-node-unknown",
    "warning",
    "GPU {gpu}: the kernel does not tell its node, as in many virtual machines; nothing is bound",
    "ask the machine's provider for the node, and start the rank with "
    "numactl --cpunodebind=N --membind=N",
)
BOUND_ELSEWHERE = Rule(
    "bound-to-another-node",
    "warning",
    "GPU {gpu} is on node {node}, and this process may run on CPUs {cpus} only, none of which is "
    "there: copies would cross the link between the sockets",
    "start the rank with numactl --cpunodebind={node} --membind={node}, or unbound (then "
    "offload_numa=auto binds it)",
)
NODE_FORBIDDEN = Rule(
    "node-not-allowed",
    "warning",
    "GPU {gpu} is on node {node}, and this process may have memory of nodes {nodes} only",
    "give the job the memory of node {node} as well (Slurm: --mem-bind; containers: --cpuset-mems)",
)
POLICY_SET = Rule(
    "memory-policy-set",
    "note",
    "somebody has set the memory policy '{policy}' for this process, and Slipstream leaves it as "
    "it is",
    "drop it (numactl, launcher) to have pinned memory placed on the GPU's node",
)
TOOLS_MISSING = Rule(
    "affinity-tools-missing",
    "warning",
    "cuda-python or pynvml is missing, and megatron's own training script ends with an error then; "
    "with Slipstream's (./run train) it goes on",
    "pip install cuda-python nvidia-ml-py",
)

_POLICIES = ("default", "preferred", "bind", "interleave", "local", "preferred-many", "weighted")
"""The kernel's names, by number."""


def _with_numa(look: Callable[[Facts, Numa], Seen]) -> Callable[[Facts], Seen]:
    @wraps(look)
    def check(facts: Facts) -> Seen:
        if facts.numa is None:
            return not_looked_at(facts.unseen.get("numa", "nothing tells"))
        return look(facts, facts.numa)

    return check


@_with_numa
def _nodes(facts: Facts, numa: Numa) -> Seen:
    return Seen(
        "\n".join(f"node {node.number}: CPUs {format_numbers(node.cpus)}" for node in numa.nodes)
        or "one (the kernel names none)"
    )


@_with_numa
def _gpu_nodes(facts: Facts, numa: Numa) -> Seen:
    if not facts.gpus:
        return Seen("no GPU")
    findings = []
    for gpu in facts.gpus if len(numa.nodes) > 1 else ():
        if gpu.node is None:
            findings.append(NODE_UNKNOWN.found(gpu=gpu.number))
        elif numa.allowed_nodes is not None and gpu.node not in numa.allowed_nodes:
            nodes = format_numbers(numa.allowed_nodes)
            findings.append(NODE_FORBIDDEN.found(gpu=gpu.number, node=gpu.node, nodes=nodes))
    return Seen("\n".join(map(_place, facts.gpus)), tuple(findings))


def _place(gpu: Gpu) -> str:
    where = "node unknown" if gpu.node is None else f"node {gpu.node}"
    if gpu.bound_to is not None:
        return f"GPU {gpu.number}: {where}; training binds its process there"
    return f"GPU {gpu.number}: {where}; training binds nothing, because {gpu.unbound_because}"


@_with_numa
def _affinity(facts: Facts, numa: Numa) -> Seen:
    cpus_of = {node.number: node.cpus for node in numa.nodes}
    findings = tuple(
        BOUND_ELSEWHERE.found(gpu=gpu.number, node=gpu.node, cpus=format_numbers(numa.cpus))
        for gpu in _gpus_of_this_process(facts)
        if gpu.node in cpus_of and not cpus_of[gpu.node] & numa.cpus
    )
    machine = frozenset().union(*cpus_of.values())
    how = "all" if machine <= numa.cpus else "bound to"
    return Seen(f"{how} CPUs {format_numbers(numa.cpus)}", findings)


def _gpus_of_this_process(facts: Facts) -> tuple[Gpu, ...]:
    """Started as a rank the process is bound for one GPU; else it may be meant for any."""
    rank = facts.environment.get("LOCAL_RANK", "")
    if rank.isdigit() and int(rank) < len(facts.gpus):
        return (facts.gpus[int(rank)],)
    return facts.gpus


@_with_numa
def _policy(facts: Facts, numa: Numa) -> Seen:
    if numa.policy is None:
        return not_looked_at("the kernel does not let this process ask", "nothing need be done")
    known = numa.policy < len(_POLICIES)
    name = _POLICIES[numa.policy] if known else str(numa.policy)
    return Seen(name, (POLICY_SET.found(policy=name),) if numa.policy else ())


@_with_numa
def _free(facts: Facts, numa: Numa) -> Seen:
    return Seen(
        "\n".join(
            f"node {node.number}: {format_bytes(node.free_bytes)}"
            for node in numa.nodes
            if node.free_bytes is not None
        )
        or "unknown"
    )


def _tools(facts: Facts) -> Seen:
    if facts.process.affinity_tools:
        return Seen("cuda-python and pynvml are there")
    return Seen("not both there", (TOOLS_MISSING.found(),) if facts.gpus else ())


def format_numbers(numbers: frozenset[int]) -> str:
    """Numbers as a kernel list, such as '0-3,8'."""
    # Imports torch; whoever has CPUs to format has read them with it.
    from megatron.slipstream.integration.numa import format_cpus

    return format_cpus(numbers)


TOPIC = Topic(
    "NUMA",
    "A copy between a GPU and the memory of another socket crosses the link between the sockets. "
    "Training binds each process to its GPU's node unless somebody has bound it already "
    "(`--offload-numa`). Started by a launcher, the doctor looks at the GPU of its LOCAL_RANK.",
    (
        Check("NUMA nodes", _nodes),
        Check("GPUs' nodes", _gpu_nodes, (NODE_UNKNOWN, NODE_FORBIDDEN)),
        Check("CPU affinity", _affinity, (BOUND_ELSEWHERE,)),
        Check("Memory policy", _policy, (POLICY_SET,)),
        Check("Free memory", _free),
        Check("Affinity tools", _tools, (TOOLS_MISSING,)),
    ),
)
