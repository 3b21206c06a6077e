# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Environment variables that Transformer Engine, torch, CUDA and NCCL read."""

from __future__ import annotations

from typing import Optional

from packaging.version import Version

from megatron.slipstream import preflight
from megatron.slipstream.doctor.check import Check, Seen, Topic, not_looked_at
from megatron.slipstream.doctor.facts import Facts
from megatron.slipstream.rules import Finding, Rule, Severity

OLD_ALLOCATOR = "PYTORCH_CUDA_ALLOC_CONF"
NEW_ALLOCATOR = "PYTORCH_ALLOC_CONF"
NO_CACHE = "PYTORCH_NO_CUDA_MEMORY_CACHING"
BLOCKING = "CUDA_LAUNCH_BLOCKING"
QUEUES = "CUDA_DEVICE_MAX_CONNECTIONS"
REGISTER = "NCCL_GRAPH_REGISTER"
MIXING = "NCCL_GRAPH_MIXING_SUPPORT"
NONDETERMINISTIC = "NVTE_ALLOW_NONDETERMINISTIC_ALGO"

READ = (
    *(OLD_ALLOCATOR, NEW_ALLOCATOR, NO_CACHE, BLOCKING, QUEUES),
    *(REGISTER, MIXING, NONDETERMINISTIC),
)

_READS_NEW_NAME = "2.11"
"""torch that takes 'expandable_segments' from the new name. 2.9.1 does not
(https://github.com/pytorch/pytorch/issues/183387)."""

TWO_CONFIGURATIONS = Rule(
    "allocator-configured-twice",
    "warning",
    f"{OLD_ALLOCATOR}={{old}} and {NEW_ALLOCATOR}={{new}} differ, and torch takes some settings "
    "from the one and some from the other",
    f"set one of them; megatron-core looks at {OLD_ALLOCATOR} only",
)
NEW_NAME_NOT_READ = Rule(
    "allocator-setting-not-read",
    "warning",
    f"torch {{torch}} may leave {NEW_ALLOCATOR}={{value}} unread, as 2.9.1 does with "
    f"expandable_segments ({_READS_NEW_NAME} reads it)",
    f"set {OLD_ALLOCATOR} in its place",
)
EXPANDABLE_IN_GRAPHS = Rule(
    "expandable-segments-in-graphs",
    "error",
    f"{{variable}}={{value}} is not supported with CUDA graphs unless {REGISTER}=0, because NCCL "
    "registers the buffers of captured operations, and with such memory that ends in illegal "
    "accesses{unnoticed}",
    f"set {REGISTER}=0, or leave expandable_segments out",
)
_UNNOTICED = f" (megatron-core looks for it in {OLD_ALLOCATOR} only, so nothing stops the run)"
NO_CACHING = Rule(
    "no-memory-caching",
    "warning",
    f"{NO_CACHE}={{value}} gives every block back to the driver, which waits for the GPU each time",
    f"unset {NO_CACHE}",
)
BLOCKING_LAUNCHES = Rule(
    "blocking-launches",
    "warning",
    f"{BLOCKING}={{value}} makes every launch wait for its end, so that no copy runs beside "
    "computation",
    f"unset {BLOCKING}; it is for looking for errors",
)
MANY_QUEUES = Rule(
    "many-queues",
    "note",
    f"{QUEUES} is not set, and where products of experts run in several streams, copies beside "
    "them are slower for it (on an H200 50 instead of 55 GB/s)",
    f"set {QUEUES}=1, as megatron-core wants it for tensor and context parallelism up to Hopper",
)
NOT_DETERMINISTIC = Rule(
    "not-deterministic",
    "note",
    f"{NONDETERMINISTIC} is {{value}}, so two runs of one training may differ in the last bits, "
    "offloading or not{refused}",
    f"set {NONDETERMINISTIC}=0 to compare runs bit by bit",
)
_REFUSED = "; deterministic_mode=True is refused with that once the model is built"
NO_GRAPH_MIXING = Rule(
    "no-graph-mixing",
    "warning",
    f"{MIXING}=0 lets NCCL assume that no operation of a graph is under way beside another one, "
    "and graphs of single layers have others beside them: they may deadlock",
    f"unset {MIXING}",
)
_SCRIPT_SETS_IT = ", as ./run train (pretrain_gpt.py) does by itself"


def _switch(facts: Facts) -> Seen:
    if facts.process.transformer_engine is None:
        return Seen("no Transformer Engine")
    if facts.process.te_import_error is not None:
        return not_looked_at("Transformer Engine does not import")
    value = {None: "no such switch", True: "1", False: "0"}[facts.process.te_offload_v1]
    findings = preflight.check_switch(facts.process)
    is_set = facts.process.te_offload_v1_environment is not None
    if not is_set:
        findings = [f._replace(cure=f.cure + _SCRIPT_SETS_IT) for f in findings]
    if not (is_set and facts.command is not None and facts.command.offloads):
        findings = [finding._replace(severity="warning") for finding in findings]
    return Seen(value, tuple(findings))


def _allocator(facts: Facts) -> Seen:
    found = {name: facts.environment.get(name) for name in (OLD_ALLOCATOR, NEW_ALLOCATOR, NO_CACHE)}
    old, new, no_cache = found.values()
    findings = []
    if old is not None and new is not None and old != new:
        findings.append(TWO_CONFIGURATIONS.found(old=old, new=new))
    torch = facts.process.torch
    if new is not None and old is None and torch and Version(torch) < Version(_READS_NEW_NAME):
        findings.append(NEW_NAME_NOT_READ.found(torch=torch, value=new))
    if no_cache is not None:
        findings.append(NO_CACHING.found(value=no_cache))
    return Seen(_shown(found), tuple(findings))


def _expandable(facts: Facts) -> Seen:
    variable = _expandable_variable(facts)
    register = facts.environment.get(REGISTER)
    value = f"expandable segments {'on' if variable else 'off'}, {REGISTER}={register or 'not set'}"
    severity = _severity_in_graphs(facts)
    if variable is None or register == "0" or severity is None:
        return Seen(value)
    finding = EXPANDABLE_IN_GRAPHS.found(
        variable=variable,
        value=facts.environment[variable],
        unnoticed="" if variable == OLD_ALLOCATOR else _UNNOTICED,
    )
    return Seen(value, (finding._replace(severity=severity),))


def _expandable_variable(facts: Facts) -> Optional[str]:
    """The variable that switches expandable segments on."""
    for name in (OLD_ALLOCATOR, NEW_ALLOCATOR):
        settings = facts.environment.get(name, "").lower().replace(" ", "").split(",")
        if "expandable_segments:true" in settings:
            return name
    return None


def _severity_in_graphs(facts: Facts) -> Optional[Severity]:
    """Of what graphs do not allow: None if there are none, less if nobody said so."""
    if facts.command is None:
        return "warning"
    return None if facts.command.graphs == "none" else "error"


def _mixing(facts: Facts) -> Seen:
    value = facts.environment.get(MIXING)
    findings: tuple[Finding, ...] = ()
    if value == "0" and _severity_in_graphs(facts) is not None:
        findings = (NO_GRAPH_MIXING.found(),)
    return Seen(_shown({MIXING: value}), findings)


def _launches(facts: Facts) -> Seen:
    value = facts.environment.get(BLOCKING)
    blocks = value not in (None, "", "0")
    findings = (BLOCKING_LAUNCHES.found(value=value),) if blocks else ()
    return Seen(_shown({BLOCKING: value}), findings)


def _queues(facts: Facts) -> Seen:
    value = facts.environment.get(QUEUES)
    slows = value is None and facts.command is not None and facts.command.copies_beside_experts
    return Seen(_shown({QUEUES: value}), (MANY_QUEUES.found(),) if slows and facts.gpus else ())


def _determinism(facts: Facts) -> Seen:
    value = facts.environment.get(NONDETERMINISTIC)
    if value == "0" or facts.process.transformer_engine is None:
        return Seen(_shown({NONDETERMINISTIC: value}))
    is_wanted = facts.command is not None and facts.command.is_deterministic
    finding = NOT_DETERMINISTIC.found(
        value=value or "not set", refused=_REFUSED if is_wanted else ""
    )
    if is_wanted:
        finding = finding._replace(severity="error")
    return Seen(_shown({NONDETERMINISTIC: value}), (finding,))


def _shown(found: dict[str, Optional[str]]) -> str:
    return "\n".join(f"{n}={v}" for n, v in found.items() if v is not None) or "not set"


TOPIC = Topic(
    "Environment variables",
    "The doctor sees the variables that it was started with: start it as your training is started. "
    "Transformer Engine's switch is the value that it has read when it was imported. What is wrong "
    "only with CUDA graphs is a warning until the flags of a training say whether there are any.",
    (
        Check(preflight.TE_SWITCH, _switch, (preflight.TE_SWITCH_OFF,)),
        Check("Device allocator", _allocator, (TWO_CONFIGURATIONS, NEW_NAME_NOT_READ, NO_CACHING)),
        Check("Allocator and graphs", _expandable, (EXPANDABLE_IN_GRAPHS,)),
        Check("NCCL and graphs", _mixing, (NO_GRAPH_MIXING,)),
        Check("Launches", _launches, (BLOCKING_LAUNCHES,)),
        Check("Work queues", _queues, (MANY_QUEUES,)),
        Check("Determinism", _determinism, (NOT_DETERMINISTIC,)),
    ),
)
