# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The commits of the series, in order: each is of use without the next."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from megatron.slipstream.patches import table
from megatron.slipstream.patches.patching import Patch
from tools.upstream.anchors import Edit
from tools.upstream.fields import budget_edits, chunk_edits, expert_edits, field_edits
from tools.upstream.graph_edits import layer_graph_edits, packed_graph_edits
from tools.upstream.modules import ENGINE_FOLDERS, modules_in
from tools.upstream.packed_edits import dynamic_edits, packed_edits


@dataclass(frozen=True)
class Commit:
    """A commit of the series."""

    title: str
    text: str
    """Its message below the title."""
    rows: tuple[Patch, ...] = ()
    """Rows of the table of patches that become edits."""
    modules: tuple[str, ...] = ()
    """Modules of this package that it adds."""
    new: tuple[str, ...] = ()
    """Files that only exist there: their names in ``new``."""
    tests: tuple[str, ...] = ()
    """Patterns of files in ``tests/unit_tests``, of which it adds those that can run there."""
    helpers: tuple[str, ...] = ()
    """Modules of this package that its tests need."""
    edits: Callable[[Path], list[Edit]] = field(default=lambda root: [])
    """More edits."""
    since: tuple[str, str] = ("", "")
    """The first version that can have it, and what earlier ones lack."""
    name: str = ""
    """For lines of files of ``new`` that are not there before it, or with it."""


COMMITS = (
    Commit(
        "Rotary kernels and padded routing: wrong gradients with some block sizes and masks",
        "Some block sizes that Triton may choose for the fused rotation of multi-latent attention\n"
        "compute wrong gradients (4640, 7103): autotuning is restricted to the others.\n"
        "Padding competed for the capacity of experts, raised with an expert bias, and made all\n"
        "gradients NaN in a buffer of nothing but padding.",
        (*table.ROTATION, *table.PADDING),
        ("patches.rotary_kernels",),
        ("test_rope_autotune.py", "test_padded_routing.py"),
    ),
    Commit(
        "The host does not wait for copies behind large ones",
        "Token counts and shapes go to the host by a kernel, not by the copy engine, where they\n"
        "would queue behind activations. The expert map of the flex dispatcher has a fixed size,\n"
        "so a scatter fills it without asking the device three times in each layer.",
        (*table.COPIES, *table.DISPATCH),
        ("patches.d2h_by_kernel", "patches.p2p_shapes", "patches.multihot_map"),
        ("test_host_syncs.py",),
    ),
    Commit(
        "Planned offloading of activations: plan and engine, off by default",
        "Two packages beside fine_grained_activation_offload.py. offload_plan decides what moves\n"
        "and when from recorded iterations; offload_engine moves it. Nothing selects them yet:\n"
        "without an engine of theirs behind it, the facade does what it did.",
        (*table.GROUPS, *table.DISCARDED),
        (
            *(module for room in ENGINE_FOLDERS for module in modules_in(room)),
            *(
                "estimate.schedules",
                "integration.seam.manager",
                "launcher",
                "options.engine",
                "options.facts",
            ),
            *("options.fields", "options.host_memory", "options.rules", "patches.marks"),
        ),
        ("conftest.py",),
        ("plan/test_*.py", "fine_grained_activation_offload/test_*.py"),
    ),
    Commit(
        "Planned offloading: several models, and gradients that appear in backward",
        "Each model of a process has an engine and a plan of its own; calls of its chunks say\n"
        "which one marks belong to.",
        table.CALLS,
        (
            *("integration.seam.gradients", "integration.seam.model_router"),
            *("integration.seam.p2p_sync", "integration.seam.compat", "options.model"),
            *("patches.attributes", "patches.model_calls", "patches.releases"),
        ),
        ("select.py", "offloaded_models.py", "test_bit_equality.py"),
        helpers=(
            "integration.cpu.cpu_only",
            "integration.cpu.cpu_modules",
            "patches.patching",
        ),
        tests=("integration/test_gradients.py", "integration/test_p2p_sync.py"),
    ),
    Commit(
        "Planned offloading: fields of TransformerConfig",
        "offload_engine selects the engine; its settings are fields beside offload_modules, from\n"
        "which Megatron makes flags, and are checked in __post_init__.",
        edits=field_edits,
        new=("test_config_fields.py",),
    ),
    Commit(
        "Planned offloading: copies inside the CUDA graphs of layers",
        "Layers notify the engine where Transformer Engine captures and replays them, so its\n"
        "copies are part of the graphs, on a stream of their own: work after a graph waits for\n"
        "its computation only. TECudaGraphHelper's hooks reach the engine already.",
        name="graphs",
        edits=layer_graph_edits,
        modules=(
            *("patches.graph_calls", "integration.graphs.goals", "integration.graphs.layer_copies"),
            *("integration.seam.layer_classes", "options.preflight"),
        ),
        new=("select.py", "offloaded_models.py", "test_layer_graphs.py"),
    ),
    Commit(
        "Packed sequences: whole documents side by side, in tensors of one shape",
        "sequence_packing trains on documents instead of on rows that are cut out of their\n"
        "concatenation. Attention sees one document, padding trains nothing, and micro-batches\n"
        "have one shape, so the host reads no length from the device. 'balanced' gives the ranks\n"
        "of a global batch equal work.",
        name="packed",
        edits=packed_edits,
        modules=(
            *modules_in("packed_sequences"),
            *("integration.packed.packed_sequences", "options.packing"),
        ),
        new=("offloaded_models.py", "test_packed_sequences.py"),
    ),
    Commit(
        "Dynamic context parallelism: each micro-batch of packed sequences has a size of its own",
        "dynamic_context_parallel divides a long document among as many ranks as it needs, beside\n"
        "short ones that stay on one. Attention takes the group from the micro-batch, in rotary\n"
        "embeddings too, and in backward when it is recomputed.",
        name="dynamic",
        edits=dynamic_edits,
        modules=(
            *modules_in("context_parallel"),
            *("integration.packed.batch_group", "integration.packed.context_parallel_groups"),
            *("integration.packed.dynamic_batches", "options.context_parallel"),
        ),
        new=("test_dynamic_context_parallel.py",),
    ),
    Commit(
        "Sync-free experts: the host waits for no number of tokens",
        "moe_sync_free_experts keeps the number of tokens of each expert on the device: dropless\n"
        "experts on torch's grouped GEMM, with the losses, gradients and checkpoints of others.",
        modules=(
            *modules_in("experts"),
            *("integration.experts.sync_free_experts", "options.experts"),
        ),
        new=("test_sync_free_experts.py",),
        edits=expert_edits,
    ),
    Commit(
        "Chunk graphs: one CUDA graph for the forward of a pipeline stage, one for its backward",
        "cuda_graph_granularity='chunk' replays the layers of a model chunk as a whole, with the\n"
        "copies of planned offloading inside. Slots follow from the schedule, so any number of\n"
        "micro-batches replays; experts need static shapes, or no number of tokens on the host.\n"
        "With dynamic context parallelism there are graphs of every size, in the same memory.",
        name="chunks",
        edits=chunk_edits,
        modules=(
            *modules_in("graphs"),
            *("integration.graphs.chunks", "integration.graphs.cp_sizes"),
            *("integration.graphs.quantized_weights", "integration.graphs.rotary_tables"),
            "integration.graphs.schedules",
            *("options.chunk_graphs", "patches.exchanged_tensors"),
        ),
        new=(
            *("offloaded_models.py", "captured_models.py", "test_chunk_graphs.py"),
            "test_dynamic_context_parallel.py",
        ),
        tests=(
            "graphs/test_*.py",
            "fine_grained_activation_offload/test_races_gpu.py",
            "fine_grained_activation_offload/test_verify.py",
            *(f"integration/test_{name}.py" for name in ("rotary_tables", "schedules")),
            "integration/test_quantized_weights.py",
        ),
    ),
    Commit(
        "Packed sequences in the CUDA graphs of layers",
        "Layers are captured with the arguments of an eager iteration: offsets, padding mask and\n"
        "rotary table become static inputs. A chunk has as many sets of graphs as micro-batches\n"
        "in flight, and with dynamic context parallelism those of every size.",
        name="packed_layers",
        rows=table.LAYER_CAPTURE,
        modules=(
            *("patches.layer_capture", "integration.graphs.packed_layers"),
            *("options.context_parallel", "options.packing"),
        ),
        new=(
            *("captured_models.py", "test_packed_layer_graphs.py"),
            "test_dynamic_context_parallel.py",
        ),
        tests=("integration/test_packed_layers.py",),
        edits=packed_graph_edits,
    ),
    Commit(
        "Planned offloading: recomputation and a memory budget",
        "activation_memory_budget chooses for each layer what it keeps, moves and recomputes, so\n"
        "that activations fit in the least time. Layers are changed between iterations, and the\n"
        "inputs of checkpoints move, too.",
        name="budget",
        rows=(*table.CHECKPOINTS, *table.BACKWARD),
        modules=(
            *modules_in("integration.budget"),
            *("integration.layers.layer_boundaries", "integration.layers.layer_parts"),
            *("integration.layers.layer_settings", "options.budget"),
        ),
        new=("select.py", "test_memory_budget.py"),
        edits=budget_edits,
        helpers=("integration.cpu.cpu_memory",),
    ),
)
