# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Checks of environment variables that Transformer Engine, torch, CUDA and NCCL read."""

from __future__ import annotations

from typing import Optional

from megatron.slipstream import preflight
from megatron.slipstream.doctor.check import Check, Seen, Topic, not_checked
from megatron.slipstream.doctor.facts import Facts
from megatron.slipstream.rules import Rule, Severity

OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
NEW_ALLOCATOR = "PYTORCH_ALLOC_CONF"
REGISTER = "NCCL_GRAPH_REGISTER"
MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"
DEBUGGING = {
    "CUDA_LAUNCH_BLOCKING": "makes every launch synchronous, so no copy overlaps with compute",
    "PYTORCH_NO_CUDA_MEMORY_CACHING": "returns every block to the driver, which waits for the GPU",
}
"""Debugging variables, and why they slow down training."""

READ = (OLD_ALLOCATOR, NEW_ALLOCATOR, REGISTER, MIXING, QUEUES, NONDETERMINISTIC, *DEBUGGING)

EXPANDABLE_IN_GRAPHS = Rule(
    "expandable-segments-in-graphs",
    "error",
    f"{{variable}}={{value}} is not supported with CUDA graphs unless {REGISTER}=0, because NCCL "
    "registers the buffers of captured operations, which with such memory leads to illegal "
    "accesses{unnoticed}",
    f"set {REGISTER}=0, or leave expandable_segments out",
)
_UNNOTICED = f" (megatron-core reads only {OLD_ALLOCATOR}, so it does not refuse the run)"
NO_GRAPH_MIXING = Rule(
    "no-graph-mixing",
    "warning",
    f"{MIXING}=0 lets NCCL assume that no other operation runs concurrently with a graph; graphs "
    "of single layers run concurrently with others, and may deadlock",
    f"unset {MIXING}",
)
DEBUGGING_IS_ON = Rule(
    "debugging-variable", "warning", "{variable}={value} {why}", "unset {variable}"
)
NOT_DETERMINISTIC = Rule(
    "not-deterministic",
    "error",
    f"deterministic_mode=True is not supported with {NONDETERMINISTIC}={{value}} because "
    "Transformer Engine then chooses kernels that round differently from run to run",
    f"set {NONDETERMINISTIC}=0",
)
MANY_QUEUES = Rule(
    "many-hardware-queues",
    "warning",
    f"{QUEUES} is not set: with the driver's eight hardware queues, copies beside experts or in "
    "CUDA graphs of chunks are about a tenth slower",
    f"set {QUEUES}=1; with megatron-core's FSDP, which needs more, 8",
)
_SCRIPT_SETS_IT = ", as ./run train (pretrain_gpt.py) does automatically"


def _switch(facts: Facts) -> Seen:
    if facts.process.transformer_engine is None:
        return Seen("no Transformer Engine")
    if facts.process.te_import_error is not None:
        return not_checked("Transformer Engine does not import")
    value = {None: "no such switch", True: "1", False: "0"}[facts.process.te_offload_v1]
    findings = preflight.check_switch(facts.process)
    is_set = facts.process.te_offload_v1_environment is not None
    if not is_set:
        findings = [f._replace(cure=f.cure + _SCRIPT_SETS_IT) for f in findings]
    if not (is_set and facts.command is not None and facts.command.offloads):
        findings = [finding._replace(severity="warning") for finding in findings]
    return Seen(value, tuple(findings))


def _graphs(facts: Facts) -> Seen:
    variable = _expandable_variable(facts)
    found = {name: facts.environment.get(name) for name in (REGISTER, MIXING)}
    if variable is not None:
        found = {variable: facts.environment[variable], **found}
    severity = _severity_in_graphs(facts)
    findings = []
    if severity is not None and variable is not None and found[REGISTER] != "0":
        finding = EXPANDABLE_IN_GRAPHS.found(
            variable=variable,
            value=facts.environment[variable],
            unnoticed="" if variable == OLD_ALLOCATOR else _UNNOTICED,
        )
        findings.append(finding._replace(severity=severity))
    if severity is not None and found[MIXING] == "0":
        findings.append(NO_GRAPH_MIXING.found())
    return Seen(_shown(found), tuple(findings))


def _expandable_variable(facts: Facts) -> Optional[str]:
    """Return the variable that enables expandable segments; None if none does."""
    for name in (OLD_ALLOCATOR, NEW_ALLOCATOR):
        settings = facts.environment.get(name, "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" in settings:
            return name
    return None


def _severity_in_graphs(facts: Facts) -> Optional[Severity]:
    """Return the severity of findings about graphs: None without graphs, a warning if unknown."""
    if facts.command is None:
        return "warning"
    return None if facts.command.graphs == "none" else "error"


def _debugging(facts: Facts) -> Seen:
    found = {name: facts.environment.get(name) for name in DEBUGGING}
    findings = (
        DEBUGGING_IS_ON.found(variable=name, value=value, why=DEBUGGING[name])
        for name, value in found.items()
        if value not in (None, "", "0")
    )
    return Seen(_shown(found), tuple(findings))


def _queues(facts: Facts) -> Seen:
    value, command = facts.environment.get(QUEUES), facts.command
    if value is not None or command is None or not command.offloads or not facts.gpus:
        return Seen(value or "not set")
    is_slow = command.has_experts or command.graphs == "chunk"
    return Seen("not set", (MANY_QUEUES.found(),) if is_slow else ())


def _determinism(facts: Facts) -> Seen:
    value = facts.environment.get(NONDETERMINISTIC)
    is_wanted = facts.command is not None and facts.command.is_deterministic
    is_met = value == "0" or facts.process.transformer_engine is None
    findings = (NOT_DETERMINISTIC.found(value=value or "(not set)"),)
    return Seen(_shown({NONDETERMINISTIC: value}), findings if is_wanted and not is_met else ())


def _shown(found: dict[str, Optional[str]]) -> str:
    return "\n".join(f"{n}={v}" for n, v in found.items() if v is not None) or "not set"


TOPIC = Topic(
    "Environment variables",
    (
        Check(
            preflight.TE_SWITCH,
            "Transformer Engine offloads weights as well; training refuses to start",
            _switch,
            (preflight.TE_SWITCH_OFF,),
        ),
        Check(
            "NCCL in CUDA graphs",
            "illegal memory accesses, or a deadlock, in captured collectives",
            _graphs,
            (EXPANDABLE_IN_GRAPHS, NO_GRAPH_MIXING),
        ),
        Check(
            "Debugging switches",
            "copies do not overlap with compute",
            _debugging,
            (DEBUGGING_IS_ON,),
        ),
        Check(
            "Hardware queues",
            "copies are slower beside experts, and in CUDA graphs of chunks",
            _queues,
            (MANY_QUEUES,),
        ),
        Check(
            "Determinism",
            "`--deterministic-mode` is refused after the model is built",
            _determinism,
            (NOT_DETERMINISTIC,),
        ),
    ),
)
