# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Every run-time change to megatron-core, Transformer Engine, Triton and torch, by feature."""

from __future__ import annotations

import enum
import re
from collections.abc import Iterator
from functools import partial
from importlib import import_module
from typing import Any

from megatron.slipstream.options import preflight
from megatron.slipstream.options.rules import rows_of
from megatron.slipstream.patches import patching
from megatron.slipstream.patches.patching import Patch
from megatron.slipstream.patches.rotary_kernels import KERNELS, OLD_KERNELS, runs_triton


class Feature(enum.Enum):
    """A feature that needs patches; its value describes when they are applied."""

    ENGINE = "`install()`"
    ENGINE_ON_GPU = "`install()` on a GPU"
    PEAK_MEMORY = "`install()`, `attach()` and chunk graphs on a GPU"
    CHECKPOINT_INPUTS = "`install()` with `offload_checkpoint_inputs`"
    MODEL_CALLS = "`install_at_first_call()`"
    MODULE_NAMES = "`install()`, and flags that name modules which only Slipstream marks"
    FUSED_ROTATION = "`./run train`, chunk graphs and dynamic context parallelism, with any engine"
    SYNC_FREE_DISPATCH = "`install()` and `./run train`, with any engine"
    PADDED_ROUTING = "packed sequences"
    PACKED_LAYER_GRAPHS = "packed sequences with `cuda_graph_impl=transformer_engine`"
    EXCHANGES_STAY = "capture of a chunk graph"
    EXPERT_METRICS = "`./run train`, with any engine"
    TRAINING_ENTRY = "`./run train`"


_CORE = "megatron.core"
_FACADE = f"{_CORE}.pipeline_parallel.fine_grained_activation_offload"
_ROUTER = f"{_CORE}.transformer.moe.router"
_LOOP = "megatron.training.training"


def _call(module: str, name: str, *values: Any) -> Any:
    return getattr(import_module(f"megatron.slipstream.patches.{module}"), name)(*values)


def _lazy(module: str, name: str) -> partial[Any]:
    """Return a function that imports ``name`` when called, after the CPU shims are in place."""
    return partial(_call, module, name)


def _patches(table: str) -> tuple[Patch, ...]:
    """Return the patches of a table in text.

    A row is 'target(first parameters): module.function: reason'.
    Numbers of upstream issues stand before the reason, without parameters all are accepted.
    """
    rows = []
    for row in rows_of(table):
        target, replacement, reason = row.split(": ", 2)
        name, _, given = target.removesuffix(")").partition("(")
        issues = tuple(map(int, re.findall(r"#(\d+)", reason)))
        parameters = tuple(given.split(", ")) if given else None
        reason = re.sub(r"#\d+ ", "", reason)
        lazy = _lazy(*replacement.split("."))
        rows.append(Patch(name, lazy, reason, issues, parameters=parameters))
    return tuple(rows)


CALLS = _patches(f"""
    {_CORE}.models.common.language_module.language_module.LanguageModule.__call__:
        model_calls.call_through_router: marks do not say which model they are of, so two trained
        models would share one plan
    {_CORE}.models.gpt.gpt_model.GPTModel.build_schedule_plan: model_calls.build_through_router:
        the same where the layers of two micro-batches run in turn
""")

BACKWARD = _patches(f"""
    {_CORE}.pipeline_parallel.schedules.backward_step(input_tensor, output_tensor,
        output_tensor_grad, config): model_calls.name_what_fits:
        torch's error for a backward without memory would not say what fits a memory budget
""")

_FUSED_ROTATION = f"{_CORE}.fusions.fused_mla_yarn_rope_apply"
_IS_EARLY_0_20 = f"{_FUSED_ROTATION}.{OLD_KERNELS[0]}"
"""Of the commits of 0.20, those from before August 2026 have it."""
ROTATION = tuple(
    Patch(
        f"{_FUSED_ROTATION}.{name}",
        _lazy("rotary_kernels", "restrict_autotune_configs"),
        "some block sizes that Triton may choose compute wrong gradients",
        (4640, 7103),
        since=since,
        until=until,
        unless=unless,
        attributes=("cache", "configs", "early_config_prune", "fn"),
        condition=runs_triton,
    )
    for names, since, until, unless in (
        (OLD_KERNELS, "", "0.20", f"{_FUSED_ROTATION}.{KERNELS[0]}"),
        (KERNELS, "0.20", "", _IS_EARLY_0_20),
    )
    for name in names
)

GROUPS = (
    *_patches(f"""
        {_FACADE}.fine_grained_offloading_group_start(tensor, name): marks.tell_group_input:
            the engine would not know where backward leaves a group
    """),
    *(
        Patch(
            f"{_FACADE}.{name}",
            _lazy("marks", "end_by_engine"),
            "a Python function would run at each group's end, forward and backward",
            since=since,
            until=until,
            parameters=("tensor", "name", "forced_released_tensors", "delay_offload"),
        )
        for name, since, until in (
            ("fine_grained_offloading_group_offload", "0.19", ""),
            ("fine_grained_offloading_group_commit", "", "0.18"),
        )
    ),
)

NAMES = _patches(f"""
    {_CORE}.transformer.transformer_config.TransformerConfig.__post_init__(self):
        module_names.accept_own_modules: a model's configuration would refuse modules that only
        Slipstream marks
""")

_CHECKPOINT = f"{_CORE}.tensor_parallel.random.CheckpointWithoutOutput"
DISCARDED = (
    *_patches(f"""
        {_CHECKPOINT}.discard_output_and_register_recompute(self, hook_tensor):
            marks.end_checkpoint: a copy to the host would read memory that has been discarded to be
            recomputed, and the inputs of an evaluation would lie beside the activations of training
    """),
    Patch(
        f"{_CHECKPOINT}._discard_outputs",
        _lazy("marks", "tell_discarded_outputs"),
        "the same where a manager discards the outputs of several checkpoints",
        parameters=("self",),
        since="0.20",
        unless=_IS_EARLY_0_20,
    ),
)

COPIES = _patches(f"""
    {_CORE}.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu(tensor, as_numpy,
        record_stream): d2h_by_kernel.D2HByKernel:
        the host would wait for token counts behind the copies of activations
    {_CORE}.pipeline_parallel.p2p_communication.P2PCommunicator._communicate_shapes(self,
        tensor_send_next, tensor_send_prev, recv_prev, recv_next): p2p_shapes.exchange_by_kernels:
        the host would wait for shapes of varying lengths behind the copies of activations
""")

PEAKS = tuple(
    Patch(
        f"torch._C.{name}",
        _lazy("peak_memory", replacement),
        "`max_memory_allocated()` would only cover the time since the engine last read the peak "
        "between two marks",
    )
    for prefix, stats, peaks in (
        ("_cuda", "memoryStats", "resetPeakMemoryStats"),
        ("_accelerator", "getDeviceStats", "resetPeakStats"),
    )
    for name, replacement in (
        (f"{prefix}_{stats}", "add_discarded_peaks"),
        (f"{prefix}_{peaks}", "forget_discarded_peaks"),
    )
)

CHECKPOINTS = (
    Patch(
        f"{_CORE}.tensor_parallel.random.CheckpointFunction.apply",
        _lazy("marks", "run_in_a_group"),
        "no marks lie around a checkpoint, so its inputs would stay",
        (5218,),
    ),
    Patch(
        "transformer_engine.pytorch.distributed._CheckpointFunction.apply",
        _lazy("marks", "run_in_a_group"),
        "the same for checkpoints of Transformer Engine",
        condition=lambda: preflight.is_installed("transformer_engine"),
    ),
)

DISPATCH = _patches(f"""
    {_CORE}.transformer.moe.token_dispatcher._DeepepManager._indices_to_multihot(self, indices,
        probs): multihot_map.convert_by_scatter: the host would wait three times in each expert
        layer for sizes that follow from its input
""")

PADDING = _patches(f"""
    {_ROUTER}.TopKRouter.routing(self, logits, padding_mask): padded_routing.pass_mask_on:
        the functions below would not see the padding mask
    {_ROUTER}.TopKRouter._apply_expert_bias(self, routing_map, padding_mask):
        padded_routing.count_without_padding:
        the router raises, since mask and routing map have shapes that do not match
    {_ROUTER}.apply_router_token_dropping(routing_probs, routing_map):
        padded_routing.drop_padding_first: padding would compete for the capacity of experts
    {_ROUTER}.get_tokens_per_expert_and_token_count: padded_routing.count_at_least_one:
        a buffer of nothing but padding would make all gradients NaN
""")

_HELPER = f"{_CORE}.transformer.cuda_graphs.TECudaGraphHelper"
LAYER_CAPTURE = _patches(f"""
    {_HELPER}.create_cudagraphs(self): layer_capture.capture_packed: #4359 #5618
        graphs of layers would have no sequence offsets, and one set for each micro-batch
    {_HELPER}.delete_cuda_graphs(self): layer_capture.delete_packed:
        the graphs of other context-parallel sizes would stay
""")

EXCHANGES = tuple(
    Patch(
        f"torch.distributed.{module}{name}",
        _lazy("exchanged_tensors", "keep_tensors"),
        "a measured pass would free tensors that the recorded one keeps",
        parameters=("tensor",),
    )
    for module in ("", "distributed_c10d.")
    for name in ("isend", "irecv")
)

EVALUATE_FIRST, CHECK_EXPERTS, NAME_REFUSALS = _patches(f"""
    {_LOOP}.train(forward_step_func, model, optimizer, opt_param_scheduler, train_data_iterator,
        valid_data_iterator, process_non_loss_data_func, config): training_loop.evaluate_first:
        `--eval-before-training`: the loop has no call-out before its first iteration
    megatron.training.checkpointing.check_checkpoint_args: training_loop.check_expert_layout:
        the distributed optimizer's state of Megatron's experts would load into that of sync-free
        experts, and the other way round, in another order
    {_LOOP}.load_checkpoint: training_loop.name_refusals: a resume with another schedule or model
        ends in an assertion or, with exit status 0, in a line of output; neither names what to set
""")
REPORT_EXPERTS = Patch(
    f"{_CORE}.transformer.moe.moe_logging.MoEMetricsTracker.report",
    _lazy("training_loop", "report_all_layers"),
    "a hybrid model with a pipeline stage without experts ends in an error, or waits, when "
    "auxiliary losses are logged",
    (6748,),
    until="0.19",
)
METRICS = (
    Patch(
        f"{_CORE}.transformer.moe.moe_logging.MoEMetricsTracker.record",
        _lazy("training_loop", "record_in_range"),
        "a hybrid model whose further tokens have experts behind another letter ends in an error "
        "in the first forward when auxiliary losses are logged",
        since="0.20",
        parameters=("self", "name", "value", "layer_number", "num_layers"),
    ),
)
FINALIZE = Patch(
    f"{_LOOP}.finalize_model_grads",
    _lazy("training_loop", "finalize_through"),
    "progress and run record: the loop does not take the function from the configuration",
    until="0.18",
)
"""Patches of the training entry, which binds them to its arguments."""

TABLE: dict[Feature, tuple[Patch, ...]] = {
    Feature.ENGINE: (*CALLS, *BACKWARD, *ROTATION, *GROUPS, *DISCARDED),
    Feature.ENGINE_ON_GPU: COPIES,
    Feature.PEAK_MEMORY: PEAKS,
    Feature.CHECKPOINT_INPUTS: CHECKPOINTS,
    Feature.MODEL_CALLS: CALLS,
    Feature.MODULE_NAMES: NAMES,
    Feature.FUSED_ROTATION: ROTATION,
    Feature.SYNC_FREE_DISPATCH: DISPATCH,
    Feature.PADDED_ROUTING: PADDING,
    Feature.PACKED_LAYER_GRAPHS: LAYER_CAPTURE,
    Feature.EXCHANGES_STAY: EXCHANGES,
    Feature.EXPERT_METRICS: METRICS,
    Feature.TRAINING_ENTRY: (
        *(EVALUATE_FIRST, CHECK_EXPERTS, NAME_REFUSALS, REPORT_EXPERTS, FINALIZE),
    ),
}


def apply(*features: Feature) -> None:
    """Apply the patches of features; ``RuntimeError`` if a target has moved. Idempotent."""
    patching.apply_all({feature: TABLE[feature] for feature in features})


def undo(*features: Feature) -> None:
    """Undo the patches of features that no other feature needs."""
    for feature in features:
        patching.undo(feature)


def rows() -> Iterator[tuple[Patch, list[Feature]]]:
    """Yield each patch with the features that it is applied for."""
    patches = dict.fromkeys(patch for row in TABLE.values() for patch in row)
    for patch in patches:
        yield patch, [feature for feature, row in TABLE.items() if patch in row]
