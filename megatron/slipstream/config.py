# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The settings of a user, and the rules that every setting must meet.

The on/off switch and the choice of modules stay megatron-core's own options
(``fine_grained_activation_offloading``, ``offload_modules``, ``min_offloaded_tensor_size``,
``activation_offload_fraction``, ``delta_offload_bytes_across_pp_ranks``). :class:`OffloadConfig`
adds only what megatron-core has no name for. :data:`RULES` is the one table of requirements:
error messages, documentation and tests are generated from it.
"""

from __future__ import annotations

import argparse
import difflib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, Optional, Union, get_type_hints

from megatron.slipstream.rules import Finding, Rule, always, check_rules, option_rule, require

MODULE_NAMES: Mapping[str, str] = {
    "attn_norm": "input layer norm (saves the layer input, [s, b, h])",
    "qkv_linear": "query/key/value projection (saves the normalised input, [s, b, h])",
    "core_attn": "core attention (saves q, k, v and the attention output)",
    "attn_proj": "attention output projection (saves the attention output, [s, b, h])",
    "mlp_norm": "pre-MLP layer norm (saves the attention block's output, [s, b, h])",
    "expert_fc1": "first grouped GEMM of the experts (saves the permuted tokens)",
    "moe_act": "activation function of the experts (saves the first GEMM's output)",
    "fused_group_mlp": "the experts' fused grouped MLP (Transformer Engine operation fuser; from "
    "megatron-core 0.19 on)",
}
"""Every module name megatron-core 0.19.2 marks, with what its backward pass saves."""

MOE_MODULE_NAMES = frozenset({"expert_fc1", "moe_act", "fused_group_mlp"})


@dataclass(frozen=True)
class OffloadConfig:
    """Settings of Slipstream's own, beside megatron-core's offloading options."""

    offload_engine: Literal["slipstream", "megatron"] = "slipstream"
    """Engine behind megatron-core's offloading options: 'slipstream', or 'megatron' for the one
    built into megatron-core (for comparison)."""

    offload_backend: Literal["auto", "cuda", "cpu", "cpu-lazy"] = "auto"
    """Where device and host memory are. 'auto' is 'cuda' with a GPU and 'cpu' without one. 'cpu'
    imitates both in host memory; 'cpu-lazy' also delays every copy until it is waited for and fills
    unowned memory with NaN, so that a missing wait changes the result."""

    offload_release_lag: int = 1
    """Number of later group commits after which a group's device memory is freed. Larger values
    give the D2H copy more time and cost device memory; 0 waits for each copy at once. Once
    iterations have been timed, this only limits the device peak."""

    offload_prefetch_depth: int = 1
    """Number of group uses in backward before its own at which a group's H2D copy starts. Larger
    values give the copy more time and cost device memory; 0 copies at the moment of use. Once
    iterations have been timed, this only limits the device peak."""

    offload_target_memory_gib: Optional[float] = None
    """Keep each rank's device peak, as the allocator counts it, at or below this many GiB, in the
    least predicted time. If that is impossible, the plan has the lowest peak and the log says what
    is missing. Takes effect once iterations have been timed. Not set, all groups may move."""

    offload_max_overhead_percent: Union[float, Literal["auto"], None] = field(
        default=None,
        metadata={"argparse_meta": {"type": lambda text: parse_percent(text), "metavar": "P"}},
    )
    """Move only what lowers the device peak and lengthens an iteration by at most this percentage;
    0 moves what hides completely, 'auto' is 1. The overhead is predicted once iterations have been
    timed, then measured against iterations without offloading (resolution 0.25%). Not together with
    `--offload-target-memory-gib`. Not set, all groups may move."""

    offload_host_memory_limit_bytes: Optional[int] = None
    """Maximum of pinned host memory of this process, in bytes. Groups that do not fit stay on the
    device, with a warning. Not set: 80% of the memory that is available on the node (or in the
    container) at the start, divided by LOCAL_WORLD_SIZE."""

    offload_native: Literal["auto", "off"] = "auto"
    """'auto' does the work of each group (saved-tensor hooks, marks, copies, waits) in C++, which
    takes the host a fraction of the time. It is compiled at the first use, in under a minute, and
    kept in ~/.cache/slipstream; without a C++ compiler, Python does the same. 'off' is Python."""

    offload_checkpoint_inputs: bool = False
    """Move the inputs that checkpoints keep: of layers under `--recompute-granularity full`, and of
    modules that megatron-core checkpoints as a whole (`core_attn`, `mlp`, `moe` and
    `shared_experts` in `--recompute-modules`). Their groups are called checkpoint_inputs. The
    default of `--offload-modules` is then core_attn."""

    offload_verify: int = 0
    """Check in the first N iterations that every tensor is reloaded unchanged, and fill freed
    device memory with NaN meanwhile. A difference ends the run and names module, layer, micro-batch
    and stream order. Slow."""

    offload_trace_path: Optional[str] = None
    """Write the trace of an iteration (saved bytes, device memory, times, bandwidth) as JSON to
    this file when training ends, for 'slipstream plan'. Ranks are named as in
    '--offload-report-path'."""

    offload_report_path: Optional[str] = None
    """Write the report as JSON to this file when training ends, for 'slipstream report'. '{rank}'
    is replaced by the rank; without it '.rank<N>' is inserted for ranks above 0. A name that ends
    in .html writes one page with the figures of all ranks and the first rank's timeline."""

    offload_nvtx_ranges: bool = False
    """Name every copy and release with an NVTX range, for Nsight Systems. Costs the host about 10
    us a group."""

    def __post_init__(self) -> None:
        _check_types(self)
        require(check_rules(RULES, self))

    @classmethod
    def of(cls, args: Any) -> OffloadConfig:
        """The settings from parsed arguments, or another object with all of them as attributes."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    @property
    def max_overhead_percent(self) -> Optional[float]:
        """``offload_max_overhead_percent`` as a number."""
        given = self.offload_max_overhead_percent
        return parse_percent(given) if isinstance(given, str) else given


@cache
def _type_checks() -> dict[str, Any]:
    """The type check of each setting, but for those with a choice, whose rules list it."""
    # To make them takes tens of milliseconds, so not on import.
    from pydantic import TypeAdapter

    hints = get_type_hints(OffloadConfig)
    return {name: TypeAdapter(hint) for name, hint in hints.items() if "Literal" not in str(hint)}


def _check_types(config: OffloadConfig) -> None:
    """Refuse a value of another type, be it one that could be converted.

    Raises:
        ValueError: There is one. The message names the setting.
    """
    for name, check in _type_checks().items():
        _check_value(name, getattr(config, name), check)


def check_type(name: str, value: object, expected: type) -> None:
    """Refuse an argument of another type, as the settings' are refused.

    Args:
        name: Of the argument.
        value: Its value.
        expected: Its type.

    Raises:
        ValueError: It has another type.
    """
    from pydantic import TypeAdapter

    _check_value(name, value, TypeAdapter(expected))


def _check_value(name: str, value: object, check: Any) -> None:
    from pydantic import ValidationError

    try:
        # Strictly: '2', 1.5 or True for a number is seldom what was meant.
        check.validate_python(value, strict=True)
    except ValidationError as error:
        expected = (item["msg"].removeprefix("Input should be ") for item in error.errors())
        cure = " or ".join(dict.fromkeys(expected))
        raise ValueError(f"{name}={value!r} has the wrong type; set {cure}") from error


AUTO_OVERHEAD_PERCENT = 1.0
"""The limit of the overhead that 'auto' stands for, in percent."""


def parse_percent(text: str) -> float:
    """A limit of the overhead on a command line: a number, or 'auto'.

    Raises:
        argparse.ArgumentTypeError: It is neither.
    """
    if text == "auto":
        return AUTO_OVERHEAD_PERCENT
    try:
        return float(text)
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is neither a number nor 'auto'") from None


def _is_at_least_0(value: Any) -> bool:
    return type(value) in (int, float) and 0 <= value < math.inf


def _offloading(facts: Any) -> bool:
    return bool(facts.fine_grained_activation_offloading)


def _offloading_with_graphs(facts: Any) -> bool:
    return _offloading(facts) and _graph_impl(facts) != "none"


def _offloading_with_our_engine(facts: Any) -> bool:
    return _offloading(facts) and getattr(facts, "offload_engine", "slipstream") == "slipstream"


def _modules(facts: Any) -> set[str]:
    return set(facts.offload_modules or ())


def _graph_impl(facts: Any) -> str:
    """megatron-core's implementation of CUDA graphs; 'none' also where it has no such option."""
    return str(getattr(facts, "cuda_graph_impl", None) or "none")


def graphed_modules(facts: Any) -> frozenset[str]:
    """The parts of each layer that CUDA graphs capture, by name; none is the whole layer.

    Args:
        facts: With megatron-core's option names; up to 0.17 this one is ``cuda_graph_scope``.
    """
    given = getattr(facts, "cuda_graph_modules", None) or getattr(facts, "cuda_graph_scope", None)
    return frozenset(getattr(module, "name", module) for module in given or ())


def moves_in_layer_graphs(facts: Any) -> bool:
    """Whether activations move inside Transformer Engine's graphs of layers.

    Args:
        facts: With megatron-core's option names.
    """
    return _graph_impl(facts) == "transformer_engine" and _offloading(facts)


def modules_at_the_edge_of_graphs(facts: Any) -> list[str]:
    """The ``offload_modules`` whose tensors are inputs or outputs of graphs in some layers.

    They stay there: inputs and outputs of a graph are static memory that it keeps, so moving them
    frees nothing.
    """
    if not moves_in_layer_graphs(facts):
        return []
    captured = graphed_modules(facts)
    at_the_edge = set()
    if not captured or "attn" in captured:
        at_the_edge.add("attn_norm")  # saves the layer's input
    if "moe_router" in captured or len(captured & {"attn", "mlp"}) == 1:
        at_the_edge.add("mlp_norm")  # saves what attention's graph gives to the next part
    return [name for name in facts.offload_modules if name in at_the_edge]


RULES: tuple[Rule, ...] = (
    option_rule(
        "offload_engine",
        always,
        lambda c: c.offload_engine in ("slipstream", "megatron"),
        "offload_engine={offload_engine!r} is not an engine",
        "set 'slipstream' or 'megatron'",
    ),
    option_rule(
        "offload_native",
        always,
        lambda c: c.offload_native in ("auto", "off"),
        "offload_native={offload_native!r} is not a choice",
        "set 'auto' or 'off'",
    ),
    option_rule(
        "offload_backend",
        always,
        lambda c: c.offload_backend in ("auto", "cuda", "cpu", "cpu-lazy"),
        "offload_backend={offload_backend!r} is not a backend",
        "set 'auto', 'cuda', 'cpu' or 'cpu-lazy'",
    ),
    option_rule(
        "offload_release_lag",
        always,
        lambda c: c.offload_release_lag >= 0,
        "offload_release_lag={offload_release_lag} is negative",
        "set the number of group commits (0 or more) that device memory outlives its own",
    ),
    option_rule(
        "offload_prefetch_depth",
        always,
        lambda c: c.offload_prefetch_depth >= 0,
        "offload_prefetch_depth={offload_prefetch_depth} is negative",
        "set how many groups ahead (0 or more) a copy back starts",
    ),
    option_rule(
        "offload_target_memory_gib",
        always,
        lambda c: c.offload_target_memory_gib is None or 0 < c.offload_target_memory_gib < math.inf,
        "offload_target_memory_gib={offload_target_memory_gib} is no device peak",
        "set the GiB (above 0, and finite) that each rank may use at most, or leave it out to "
        "move everything that may",
    ),
    option_rule(
        "offload_max_overhead_percent",
        always,
        lambda c: (
            c.offload_max_overhead_percent in (None, "auto")
            or _is_at_least_0(c.offload_max_overhead_percent)
        ),
        "offload_max_overhead_percent={offload_max_overhead_percent!r} is no limit",
        "set by how many percent (0 or more, or 'auto') copies may slow an iteration down, or "
        "leave it out to move everything that may",
    ),
    option_rule(
        "offload_max_overhead_percent",
        lambda c: c.offload_target_memory_gib is not None,
        lambda c: c.offload_max_overhead_percent is None,
        "offload_max_overhead_percent={offload_max_overhead_percent} is not supported with "
        "offload_target_memory_gib={offload_target_memory_gib} because each alone decides how "
        "much moves",
        "set one of them",
    ),
    option_rule(
        "offload_host_memory_limit_bytes",
        always,
        lambda c: (
            c.offload_host_memory_limit_bytes is None or c.offload_host_memory_limit_bytes > 0
        ),
        "offload_host_memory_limit_bytes={offload_host_memory_limit_bytes} leaves no host memory "
        "to move activations to",
        "set a number of bytes above 0, or leave it out for 80% of the node's available memory, "
        "shared by its processes",
    ),
    option_rule(
        "offload_verify",
        always,
        lambda c: c.offload_verify >= 0,
        "offload_verify={offload_verify} is negative",
        "set how many iterations (0 or more) to check",
    ),
)
"""Requirements on :class:`OffloadConfig`."""


MODEL_RULES: tuple[Rule, ...] = (
    option_rule(
        "offload_modules",
        _offloading,
        lambda f: bool(f.offload_modules),
        "fine_grained_activation_offloading=True needs at least one module to move",
        "set offload_modules to some of: " + ", ".join(MODULE_NAMES),
    ),
    option_rule(
        "offload_modules",
        _offloading,
        lambda f: "attn_proj" not in _modules(f) or "core_attn" in _modules(f),
        "offload_modules contains 'attn_proj' without 'core_attn', which is not supported "
        "because attn_proj saves core_attn's output and core_attn's backward reads it too",
        "add 'core_attn'",
    ),
    option_rule(
        "offload_modules",
        _offloading,
        lambda f: f.num_moe_experts or not MOE_MODULE_NAMES & _modules(f),
        "offload_modules={offload_modules} names expert modules, but the model has no experts "
        "(num_moe_experts is not set)",
        "remove " + ", ".join(sorted(MOE_MODULE_NAMES)),
    ),
    option_rule(
        "activation_offload_fraction",
        _offloading,
        lambda f: 0.0 <= f.activation_offload_fraction <= 1.0,
        "activation_offload_fraction={activation_offload_fraction} is outside [0, 1]",
        "set the fraction of each chunk's groups to move",
    ),
    option_rule(
        "min_offloaded_tensor_size",
        _offloading,
        lambda f: f.min_offloaded_tensor_size >= 0,
        "min_offloaded_tensor_size={min_offloaded_tensor_size} is negative",
        "set a number of elements (not bytes), 0 to move every tensor",
    ),
    option_rule(
        "delta_offload_bytes_across_pp_ranks",
        _offloading,
        lambda f: f.delta_offload_bytes_across_pp_ranks >= 0,
        "delta_offload_bytes_across_pp_ranks={delta_offload_bytes_across_pp_ranks} is negative",
        "set how many bytes more each later pipeline rank keeps on the device",
    ),
    option_rule(
        "fine_grained_offloading_max_inflight_offloads",
        _offloading,
        lambda f: (getattr(f, "fine_grained_offloading_max_inflight_offloads", None) or 0) >= 0,
        "fine_grained_offloading_max_inflight_offloads="
        "{fine_grained_offloading_max_inflight_offloads} is negative",
        "set how many copies out of each module (0 or more) compute need not have waited for, or "
        "leave it out for no limit",
    ),
    option_rule(
        "offload_checkpoint_inputs",
        lambda f: _offloading(f) and getattr(f, "offload_checkpoint_inputs", False),
        lambda f: f.recompute_granularity is not None,
        "offload_checkpoint_inputs=True is not supported without recomputation because no "
        "checkpoint keeps inputs then",
        "set recompute_granularity='full', or leave it out",
    ),
    option_rule(
        "delay_offload_until_cuda_graph",
        _offloading_with_our_engine,
        lambda f: (
            not getattr(f, "delay_offload_until_cuda_graph", False) or _graph_impl(f) != "none"
        ),
        "delay_offload_until_cuda_graph=True is not supported without CUDA graphs because there "
        "is no graph to wait for",
        "set cuda_graph_impl='transformer_engine', or leave it out",
    ),
    option_rule(
        "cpu_offloading",
        _offloading,
        lambda f: not f.cpu_offloading,
        "fine_grained_activation_offloading=True is not supported with cpu_offloading=True "
        "because both would move the same tensors",
        "set cpu_offloading=False",
    ),
    option_rule(
        "cuda_graph_impl",
        _offloading_with_graphs,
        lambda f: _graph_impl(f) != "full_iteration",
        "cuda_graph_impl='full_iteration' is not supported with offloading because one graph of "
        "the whole iteration leaves no step to plan from and no layer to tell the engine where "
        "it is",
        "set cuda_graph_impl='transformer_engine'",
    ),
    option_rule(
        "cuda_graph_impl",
        _offloading_with_graphs,
        lambda f: (
            _graph_impl(f) != "local"
            or (_modules(f) <= MOE_MODULE_NAMES and bool(graphed_modules(f)))
        ),
        "cuda_graph_impl='local' is not supported with offload_modules={offload_modules} because "
        "only expert modules outside of its graphs can move",
        "set cuda_graph_impl='transformer_engine', or name parts of the layer in "
        "cuda_graph_modules and no other modules than " + ", ".join(sorted(MOE_MODULE_NAMES)),
    ),
    option_rule(
        "cuda_graph_modules",
        _offloading_with_graphs,
        lambda f: "moe" not in graphed_modules(f),
        "cuda_graph_modules contains 'moe', which is not supported with offloading because "
        "megatron-core marks no groups inside it",
        "remove 'moe' or set 'moe_router'",
    ),
    option_rule(
        "cuda_graph_warmup_steps",
        _offloading_with_graphs,
        lambda f: getattr(f, "cuda_graph_warmup_steps", 1) > 0,
        "cuda_graph_warmup_steps={cuda_graph_warmup_steps} is not supported with offloading "
        "because what moves inside graphs is planned from the steps before them",
        "set at least 1",
    ),
)
"""Requirements on megatron-core's own offloading options (duck-typed: an args namespace or a
``TransformerConfig``)."""


_UNKNOWN_MODULE = Rule(
    "offload_modules",
    "error",
    "offload_modules contains {name!r}, which is not a module megatron-core marks",
    "{hint}Known modules: " + ", ".join(MODULE_NAMES),
)


def check_module_names(names: Iterable[str]) -> list[Finding]:
    """A finding for each name that is not one, with the nearest known module."""
    findings = []
    for name in names:
        if name not in MODULE_NAMES:
            near = difflib.get_close_matches(name, MODULE_NAMES, n=1, cutoff=0.4)
            hint = f"did you mean {near[0]!r}? " if near else ""
            parts = name.replace(",", " ").split()
            if len(parts) > 1 and set(parts) <= MODULE_NAMES.keys():
                hint = f"separate names by spaces: {' '.join(parts)}. "
            findings.append(_UNKNOWN_MODULE.found(name=name, hint=hint))
    return findings


def check_model_options(facts: Any) -> list[Finding]:
    """Check megatron-core's offloading options as given to the model.

    Args:
        facts: An object with megatron-core's option names as attributes, such as parsed arguments
            or a ``TransformerConfig``.
    """
    unknown = check_module_names(facts.offload_modules or ()) if _offloading(facts) else []
    return unknown + check_rules(MODEL_RULES, facts)


# What a look at the flags of a training finds beside broken rules; see integration/checks.py.

STAYS = Rule(
    "stays-on-the-device",
    "warning",
    "offload_modules: {names} of the layers that CUDA graphs capture (cuda_graph_impl, "
    "cuda_graph_modules) stay on the device, since graphs keep what they take in and give out",
    "leave them out, or capture other parts",
)
NO_EFFECT = Rule(
    "no-effect",
    "warning",
    "{names}: no effect without fine_grained_activation_offloading",
    "add --fine-grained-activation-offloading, or leave them out",
)
NOTHING_TO_MOVE = Rule(
    "nothing-to-move",
    "warning",
    "recompute_granularity=full: a layer that is recomputed as a whole saves its input only, which "
    "stays",
    "set offload_checkpoint_inputs=True to move it",
)


REFUSED_BY_MEGATRON = Rule(
    "refused-by-megatron",
    "error",
    "megatron-core's own validation: {message}",
    "change the flag that this is about; megatron-core stops at the first, so look again",
)


def check_is_config(config: object) -> None:
    """Refuse what is given for a configuration and is none.

    Raises:
        ValueError: It is not an :class:`OffloadConfig`.
    """
    if not isinstance(config, OffloadConfig):
        raise ValueError(f"config={config!r} is no OffloadConfig; give OffloadConfig(...), or none")
