# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The fields of all options.

The on/off switch and the choice of modules stay megatron-core's own options
(``fine_grained_activation_offloading``, ``offload_modules``, ``min_offloaded_tensor_size``,
``activation_offload_fraction``, ``delta_offload_bytes_across_pp_ranks``). :class:`OffloadConfig`
adds only what megatron-core has no name for. The other modules of this room have the rules.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal, Optional, TypedDict, Union, get_origin, get_type_hints

from megatron.slipstream.options.engine import RULES
from megatron.slipstream.options.rules import check_rules, require
from megatron.slipstream.plan.candidates import PolicyOptions


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

    activation_memory_budget: Union[float, Literal["auto"], None] = field(
        default=None,
        metadata={"argparse_meta": {"type": lambda text: parse_budget(text), "metavar": "GIB"}},
    )
    """Keep, offload or recompute what each layer saves, so that activations use at most this many
    GiB of each rank's device, in the least time. They are the device peak less weights, gradients
    and optimizer state. 'auto' is all device memory less these, what is in use outside of torch's
    allocator, and a margin of 5% of the device. The first iteration recomputes every layer as a
    whole and offloads its input; later ones relax that within the budget. `--recompute-modules` are
    recomputed in any case. Switches offloading on, including the inputs of checkpoints; the default
    of `--offload-modules` is then all modules of the model that can move. Not together with
    `--offload-target-memory-gib` or `--offload-max-overhead-percent`."""

    offload_host_memory_limit_bytes: Optional[int] = None
    """Maximum of pinned host memory of this process, in bytes; several models share it. Groups that
    do not fit stay on the device, with a warning. Not set: 80% of the memory that is available on
    the node (or in the container) at the start, divided by LOCAL_WORLD_SIZE."""

    offload_native: Literal["auto", "off"] = "auto"
    """'auto' does the work of each group (saved-tensor hooks, marks, copies, waits) in C++, which
    takes the host a fraction of the time. It is compiled at the first use, in under a minute, and
    kept in ~/.cache/slipstream ($XDG_CACHE_HOME/slipstream). If it cannot be compiled or loaded, a
    warning says why, and Python does the same. 'off' is Python."""

    offload_checkpoint_inputs: bool = False
    """Move the inputs that checkpoints keep: of layers under `--recompute-granularity full`, and of
    modules that megatron-core checkpoints as a whole (`core_attn`, `mlp`, `moe` and
    `shared_experts` in `--recompute-modules`), and of MLPs in tiles (`--mlp-sequence-tiles`). Their
    groups are called checkpoint_inputs. The default of `--offload-modules` is then core_attn."""

    offload_verify: int = 0
    """Check in the first N iterations that every tensor is reloaded unchanged, and fill freed
    device memory with NaN meanwhile. A difference ends the run and names module, layer, micro-batch
    and stream order. Slow. Replays of CUDA graphs are not checked, with a warning."""

    offload_trace_path: Optional[str] = None
    """Write the trace of an iteration (saved bytes, device memory, times, bandwidth) as JSON to
    this file when training ends, for 'slipstream plan'. When, and how ranks are named:
    '--offload-report-path'."""

    offload_report_path: Optional[str] = None
    """Write the report as JSON to this file when training ends, for 'slipstream report'. '{rank}'
    is replaced by the rank; without it '.rank<N>' is inserted for ranks above 0. A name that ends
    in .html writes one page with the figures of all ranks and the first rank's timeline. Behind
    `install()` training ends at `uninstall()`, or when Python exits; the page then has the first
    rank only."""

    offload_nvtx_ranges: bool = False
    """Name every copy and release with an NVTX range, for Nsight Systems. Costs the host about 10
    us a group. Replays of CUDA graphs have none, with a warning."""

    def __post_init__(self) -> None:
        _check_types(self)
        require(check_rules(RULES, self))

    @classmethod
    def of(cls, args: Any) -> OffloadConfig:
        """Read the settings from parsed arguments or any object with them as attributes."""
        return cls(**{field.name: getattr(args, field.name) for field in fields(cls)})

    @property
    def max_overhead_percent(self) -> Optional[float]:
        """``offload_max_overhead_percent`` as a number."""
        given = self.offload_max_overhead_percent
        return parse_percent(given) if isinstance(given, str) else given

    def policy_options(self) -> PolicyOptions:
        """Return the options of plans; the process's limit sets that of host memory."""
        target_gib = self.offload_target_memory_gib
        has_budget = self.activation_memory_budget is not None
        return PolicyOptions(
            release_lag=self.offload_release_lag,
            prefetch_depth=self.offload_prefetch_depth,
            target_memory_bytes=None if target_gib is None else int(target_gib * 2**30),
            target_option=(
                "activation_memory_budget" if has_budget else PolicyOptions.target_option
            ),
            max_overhead_percent=self.max_overhead_percent,
        )

    @property
    def moves_checkpoint_inputs(self) -> bool:
        return self.offload_checkpoint_inputs or self.activation_memory_budget is not None


@cache
def _type_checks() -> dict[str, Any]:
    """Return the settings' type checks; rules check those of a number or a word."""
    # Created on first use: it takes tens of milliseconds.
    from pydantic import TypeAdapter

    return {
        name: TypeAdapter(hint)
        for name, hint in get_type_hints(OffloadConfig).items()
        if get_origin(hint) is Literal or "Literal" not in str(hint)
    }


def _check_types(config: OffloadConfig) -> None:
    """Check the types of values, without conversion."""
    for name, check in _type_checks().items():
        _check_value(name, getattr(config, name), check)


def check_type(name: str, value: object, expected: Any) -> None:
    """Check the type of an argument as those of settings are; raise ``ValueError`` for another."""
    from pydantic import TypeAdapter

    _check_value(name, value, TypeAdapter(expected))


def _check_value(name: str, value: object, check: Any) -> None:
    from pydantic import ValidationError

    try:
        # Strict: '2', 1.5 or True in place of an integer is usually a mistake.
        check.validate_python(value, strict=True)
    except ValidationError as error:
        expected = (item["msg"].removeprefix("Input should be ") for item in error.errors())
        cure = " or ".join(dict.fromkeys(expected))
        is_choice = {item["type"] for item in error.errors()} == {"literal_error"}
        fault = "is not a choice" if is_choice else "has the wrong type"
        raise ValueError(f"{name}={value!r} {fault}; set {cure}") from error


AUTO_OVERHEAD_PERCENT = 1.0
"""Overhead limit of 'auto', in percent."""


def number_or_auto[N: (int, float)](
    number: type[N], name: str
) -> Callable[[str], Union[N, Literal["auto"]]]:
    """Return a parser for the command line of a number, with its name in the error, or 'auto'.

    The parser raises ``argparse.ArgumentTypeError`` for a text that is neither.
    """

    def parse(text: str) -> Union[N, Literal["auto"]]:
        try:
            return "auto" if text == "auto" else number(text)
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is neither {name} nor 'auto'") from None

    return parse


parse_budget: Callable[[str], Union[float, Literal["auto"]]] = number_or_auto(float, "a number")
"""Parses a budget of GiB."""
parse_tiles = number_or_auto(int, "an integer")


def parse_percent(text: str) -> float:
    """Parse an overhead limit from the command line: :func:`number_or_auto`."""
    percent = number_or_auto(float, "a number")(text)
    return AUTO_OVERHEAD_PERCENT if percent == "auto" else percent


def check_is_config(config: object) -> None:
    """Raise ``ValueError`` unless the value is an :class:`OffloadConfig`."""
    if not isinstance(config, OffloadConfig):
        raise ValueError(f"config={config!r} is no OffloadConfig; give OffloadConfig(...), or none")


@dataclass(frozen=True)
class PackingOptions:
    """Settings of packed training, which ``sequence_packing`` switches on."""

    sequence_packing: Optional[Literal["greedy", "balanced"]] = None
    """Train on whole documents side by side instead of on rows of --seq-length tokens cut out of
    their concatenation; attention does not cross documents. A micro-batch is one buffer of
    --seq-length tokens (set --micro-batch-size 1). 'greedy' fills one buffer after the other;
    'balanced' also equalises the cost of attention among data-parallel ranks."""

    thd_max_packed_sequences: Optional[int] = None
    """Maximum number of documents in a micro-batch; it fixes the shape of attention's offsets. Not
    set: one per 64 tokens."""

    thd_max_tokens: Optional[int] = None
    """Tokens of a micro-batch on one rank, padding included. Only --seq-length divided by the
    context-parallel size, the default, is supported."""


@dataclass(frozen=True)
class DynamicContextParallelOptions:
    """Settings of dynamic context parallelism, in addition to those of packed sequences."""

    dynamic_context_parallel: bool = False
    """Choose a context-parallel size for every micro-batch of packed sequences: documents longer
    than a rank's buffer (--seq-length / --context-parallel-size tokens) are divided among as many
    data- and context-parallel ranks as they need. Needs --sequence-packing balanced and
    --calculate-per-token-loss."""

    min_dynamic_context_parallel_size: int = 1
    """Smallest context-parallel size of a micro-batch, a power of two."""

    max_dynamic_context_parallel_size: Optional[int] = None
    """Largest context-parallel size of a micro-batch, a power of two; longer documents are cut. Not
    set: the largest that divides the number of data- and context-parallel ranks."""

    dynamic_context_parallel_verify: bool = False
    """Debugging: compare before every micro-batch what the ranks of a group are about to compute,
    and raise an error instead of hanging. The host waits each time."""


@dataclass(frozen=True)
class ExpertOptions:
    """Settings of expert layers."""

    moe_sync_free_experts: bool = False
    """Keep the number of tokens of each expert on the GPU, so that the host never waits for it:
    dropless experts on torch's grouped GEMM. bf16, one tensor-parallel rank."""
    moe_sync_free_capacity_factor: Optional[float] = None
    """Rows that sync-free experts can send from one expert-parallel rank to another, by those of an
    even share, such as 2.0. A step that needs more ends with an error that says how much. Default:
    as many as there can be, which takes memory for expert_model_parallel_size times the rows."""


_TILES = {"argparse_meta": {"type": parse_tiles, "metavar": "N"}}


@dataclass(frozen=True)
class TileOptions:
    """Settings of tiles of the sequence, with or without offloading."""

    loss_sequence_tiles: Union[int, Literal["auto"]] = field(default=1, metadata=_TILES)
    """Compute output layer and loss in this many tiles of the sequence, so that logits never exist
    as a whole. Backward computes each tile again. 'auto': tiles whose logits take at most 512 MiB,
    or of 1024 tokens if that is more. 1 is off."""
    mlp_sequence_tiles: Union[int, Literal["auto"]] = field(default=1, metadata=_TILES)
    """Compute each MLP, and the experts of a rank on their tokens, in this many tiles. An MLP then
    saves its input only, and backward computes each tile again. 'auto': tiles whose tensors inside
    the MLP take at most 512 MiB, or of 1024 tokens if that is more. 1 is off."""


@dataclass(frozen=True)
class ChunkGraphOptions:
    """Settings of CUDA graphs of whole model chunks."""

    cuda_graph_granularity: Literal["layer", "chunk"] = "layer"
    """Content of a CUDA graph. 'layer': what --cuda-graph-impl says. 'chunk', in its place: the
    forward or the backward of all layers of a pipeline stage (or virtual stage), replayed by
    Slipstream. Micro-batches need one shape: sequences of one length, or --sequence-packing. With
    --dynamic-context-parallel a graph is captured for every size."""


@dataclass(frozen=True)
class EntryOptions:
    """Settings of the training script, beside those of the engine."""

    tokenizer_json: Optional[str] = None
    """Tokenizer file written by tools/preprocess_text.py. Sets the vocabulary size and the
    end-of-document token; replaces --tokenizer-type and --vocab-size."""

    megatron_output_path: str = "megatron-output.log"
    """File that megatron's own output is appended to: its arguments, warnings and a line per
    iteration with times. '-' prints it instead. Ranks are named as in '--offload-report-path'."""

    eval_before_training: bool = False
    """Evaluate on the validation set before the first iteration, too."""

    run_record_path: Optional[str] = None
    """Write this run's figures as JSON to this file: loss and peak activation bytes per iteration,
    evaluation losses, digests of the last gradients and the final weights. Ranks are named as in
    '--offload-report-path'."""

    output_interval: int = 100
    """Iterations between two writings of report, trace and run record, which are also written when
    training ends; 0: only then. An .html report is written at the end."""


GROUPS: tuple[tuple[type, str], ...] = (
    (OffloadConfig, "slipstream"),
    (PackingOptions, "slipstream packed sequences"),
    (DynamicContextParallelOptions, "slipstream dynamic context parallelism"),
    (ExpertOptions, "slipstream experts"),
    (TileOptions, "slipstream tiles of the sequence"),
    (ChunkGraphOptions, "slipstream CUDA graphs"),
    (EntryOptions, "slipstream script"),
)
"""Dataclasses whose fields are flags, and the titles of their groups."""


SWITCH = "fine_grained_activation_offloading"
MODULES = "offload_modules"


class OffloadOptions(TypedDict, total=False):
    """Megatron-core's offloading options by name: see its ``TransformerConfig``.

    None leaves an option as it is: [Note: Three values of on and off].
    """

    fine_grained_activation_offloading: Optional[bool]
    """Offload activations in forward and reload them in backward."""
    offload_modules: Optional[list[str]]
    """Modules whose saved activations move, by name."""
    min_offloaded_tensor_size: Optional[int]
    """Tensors whose memory has fewer elements (not bytes) stay on the device."""
    activation_offload_fraction: Optional[float]
    """Fraction of the groups of each model chunk that move, 0 to 1. From 0.19 on."""
    delta_offload_bytes_across_pp_ranks: Optional[int]
    """Bytes more that each later pipeline rank keeps on the device. From 0.19 on."""
    fine_grained_offloading_max_inflight_offloads: Optional[int]
    """Number of D2H copies of each module that compute may not have waited for. Plans keep to it.
    From 0.18 on."""
    delay_offload_until_cuda_graph: Optional[bool]
    """With CUDA graphs of layers: copy what moves outside of graphs after the next graph launch.
    From 0.19 on."""


DEFAULTS: Mapping[str, Any] = {
    SWITCH: False,
    MODULES: [],
    "min_offloaded_tensor_size": 1024 * 1024,
    "activation_offload_fraction": 1.0,
    "delta_offload_bytes_across_pp_ranks": 0,
    "fine_grained_offloading_max_inflight_offloads": None,
    "delay_offload_until_cuda_graph": False,
}
"""megatron-core's default of each option."""
