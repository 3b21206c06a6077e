# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Small models of megatron-core and its own schedules, with the engine on or off, on CPU or GPU."""

from __future__ import annotations

import gc
import io
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Optional, Union
from unittest.mock import patch

import pytest
import torch
from garbage import without_garbage_collection
from megatron_models import (
    build_chunks,
    initialize,
    make_config,
    micro_batches,
    run_schedule,
    use_gpu,
)
from model_case import DENSE_MODULES, MOE_MODULES, ModelCase
from ranks import run_ranks
from torch._inductor import config as inductor

from megatron.slipstream.fine_grained_activation_offload import peak_statistics
from megatron.slipstream.fine_grained_activation_offload.backend import Backend
from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.fine_grained_activation_offload.cuda_backend import CudaBackend
from megatron.slipstream.fine_grained_activation_offload.engine_setup import make_backend
from megatron.slipstream.integration.cpu.cpu_memory import DeviceMemoryMeter
from megatron.slipstream.patches import releases

__all__ = [
    "DENSE_MODULES",
    "MOE_MODULES",
    "Comparison",
    "ModelCase",
    "build_chunks",
    "compare",
    "compare_on_ranks",
    "compiled_again",
    "first_difference",
    "initialize",
    "make_config",
    "memory_counted",
    "run_step",
    "skip_without_model",
    "switched_off",
    "train",
    "use_gpu",
]


def skip_without_model(case: ModelCase) -> None:
    """Skip the test where the installed megatron-core has no model of this kind."""
    if case.sync_free_experts and not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} is too old for moe_sync_free_experts")
    if case.kind == "hybrid" and "+" in case.pattern and not releases.is_since("0.19"):
        pytest.skip(f"{releases.release()} has no multi-latent attention in hybrid models")


def run_step(
    case: ModelCase,
    config: Any,
    chunks: Sequence[torch.nn.Module],
    step: int,
    count: int,
    forward_only: bool = False,
) -> list[torch.Tensor]:
    """Call megatron-core's schedule once on ``count`` micro-batches. Returns their losses."""
    return run_schedule(case, chunks, list(micro_batches(case, step, count)), forward_only)


def train(
    case: ModelCase, config: Any, chunks: Sequence[torch.nn.Module], counts: Sequence[int]
) -> list[list[torch.Tensor]]:
    """The results of :func:`train_steps`, in host memory: a GPU may be too small for all."""
    return [_kept(results) for results in train_steps(case, config, chunks, counts)]


def _kept(results: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [tensor.to("cpu", copy=True) for tensor in results]


def train_steps(
    case: ModelCase, config: Any, chunks: Sequence[torch.nn.Module], counts: Sequence[int]
) -> Iterator[list[torch.Tensor]]:
    """Run a step per entry of ``counts``. Yields for each its losses followed by all gradients.

    Weights do not change, so that each step can be compared on its own. The yielded list is
    emptied before the next step: gradients of a previous step would count in its peak.
    """
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    for step, count in enumerate(counts):
        for chunk in chunks:
            chunk.zero_grad(set_to_none=True)
        torch.manual_seed(step)
        model_parallel_cuda_manual_seed(step, force_reset_rng=True)
        results = run_step(case, config, chunks, step, count)
        results += [
            parameter.grad
            for chunk in chunks
            for parameter in chunk.parameters()
            if parameter.grad is not None
        ]
        yield results
        results.clear()


def first_difference(
    expected: Iterable[Sequence[torch.Tensor]], actual: Iterable[Sequence[torch.Tensor]]
) -> Optional[str]:
    """The first bitwise difference of two :func:`train` results; None if they are equal.

    ``actual`` may be :func:`train_steps`: then each step is compared on its device.
    """
    for step, (left, right) in enumerate(zip(expected, actual, strict=True)):
        if len(left) != len(right):
            return f"step {step}: {len(left)} and {len(right)} tensors"
        for index, (a, b) in enumerate(zip(left, right, strict=True)):
            a = a.to(b.device)
            if not torch.equal(a, b):
                difference = (a.float() - b.float()).abs().max()
                return f"step {step}, tensor {index} of shape {list(a.shape)}: up to {difference}"
        a = b = None  # The next step's peak would count them.
    return None


@dataclass(frozen=True)
class Comparison:
    """Result of :func:`compare` on one rank."""

    difference: Optional[str]
    """The first difference between engine on and off; None if equal."""
    moved_bytes: int
    freed_bytes: int
    """Bytes moved in the last step whose device memory was freed meanwhile."""
    moved_modules: tuple[str, ...]
    num_late: int
    peak_drop_bytes: int = 0
    """Drop of the device peak in the last step; 0 where memory was not measured."""
    planned_drop_bytes: int = 0
    claimed_drop_bytes: int = 0
    """Drop according to the engine's summary before the measured step."""
    reported_drop_bytes: int = 0
    """Sum of the drops of modules in its report."""
    baseline_peak_bytes: int = 0
    reported_baseline_bytes: int = 0
    """Peak without the engine according to its report, including weights."""
    is_timed: bool = False
    """Whether the last followed plan was made from times."""
    is_native: bool = False
    """Whether the saved-tensor hooks in C++ ran."""
    follows_layout: bool = False
    """Whether host buffers had the computed layout of the last followed plan."""
    why_not: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """For each module of which nothing moved, the reasons in the report."""


def compare(
    rank: int,
    world_size: int,
    port: int,
    case: ModelCase,
    offload_modules: Sequence[str],
    backend: str,
    counts: Sequence[int],
    offload: Optional[dict[str, Any]] = None,
    reads_memory: bool = False,
    keeps_gradients: bool = False,
    without: Union[Sequence[bytes], Mapping[int, bytes], None] = None,
) -> Comparison:
    """Train ``case`` with the engine off and on; to be run on every rank.

    Args:
        rank: This rank.
        world_size: Number of ranks.
        port: Port of their rendezvous.
        case: The model.
        offload_modules: Modules that move.
        backend: The engine's backend.
        counts: Number of micro-batches of each step.
        offload: Other options of megatron-core, or of ``OffloadConfig`` (``offload_...``).
        reads_memory: Measure memory also on a CPU, as if it were the device. A GPU's is always
            measured.
        keeps_gradients: Whether the measured step starts with gradients of 0 rather than none.
        without: By rank, serialized results of :func:`switched_off`; None: train without.
    """
    from megatron.slipstream.integration import install
    from megatron.slipstream.options.fields import OffloadConfig

    initialize(case, rank, world_size, port)
    offload = dict(offload or {})
    own = {name: offload.pop(name) for name in list(offload) if name.startswith("offload_")}
    if without is None:
        settings = (case, counts, backend, reads_memory, keeps_gradients)
        expected, baseline_peak = switched_off(*settings)
    else:
        expected, baseline_peak = torch.load(io.BytesIO(without[rank]))

    install.uninstall()
    manager = install.install(OffloadConfig(offload_backend=backend, **own))
    config = make_config(case, offload_modules, **offload)
    with memory_counted(manager.store.backend, reads_memory) as memory, compiled_again(case):
        gc.collect()  # The other model's memory would count.
        chunks = build_chunks(case, config)
        difference = first_difference(expected, train_steps(case, config, chunks, counts))
        claimed = manager.offload_summary_total_bytes
        arguments = (case, config, chunks, counts[-1])
        peak = _peak_of_one_more_step(*arguments, memory, keeps_gradients)
        planned = _planned_drop_bytes(manager)
    manager.finish_report()
    modules = manager.report.modules
    return Comparison(
        difference=difference,
        moved_bytes=manager.report.d2h_bytes,
        freed_bytes=manager.report.freed_bytes,
        moved_modules=tuple(name for name in modules if modules[name].d2h_bytes),
        num_late=manager.report.total.num_late,
        peak_drop_bytes=baseline_peak - peak,
        planned_drop_bytes=planned,
        claimed_drop_bytes=claimed,
        reported_drop_bytes=manager.report.peak_drop_bytes,
        baseline_peak_bytes=baseline_peak,
        reported_baseline_bytes=manager.report.baseline_peak_bytes,
        is_timed=manager.plan is not None and len(manager.plan.trace.step_ms) > 0,
        is_native=manager.store.is_native,
        follows_layout=manager.store.host_pool.follows_layout,
        why_not=_reasons(manager, offload_modules),
    )


def compare_on_ranks(
    num_ranks: int,
    case: ModelCase,
    offload_modules: Sequence[str],
    backend: str,
    counts: Sequence[int],
    offload: Optional[dict[str, Any]] = None,
    reads_memory: bool = False,
    keeps_gradients: bool = False,
) -> list[Comparison]:
    """:func:`compare` on each of several ranks; tests share the run without the engine."""
    arguments = (case, offload_modules, backend, counts, offload, reads_memory, keeps_gradients)
    if torch.cuda.is_available():  # Starting more processes would take longer.
        return run_ranks(num_ranks, compare, *arguments)
    # Without the engine a backend only reads memory.
    reader = backend if reads_memory else "cpu"
    settings = (case, tuple(counts), reader, reads_memory, keeps_gradients)
    key = repr((num_ranks, settings))
    if key not in _trained_without:
        while len(_trained_without) >= MAX_KEPT:
            del _trained_without[next(iter(_trained_without))]
        both = run_ranks(num_ranks, compare_and_keep, arguments, settings)
        _trained_without[key] = [without for _, without in both]
        return [comparison for comparison, _ in both]
    return run_ranks(num_ranks, compare, *arguments, _trained_without[key])


_trained_without: dict[str, list[bytes]] = {}
"""Last results with the engine off on each rank, serialized, by what they depend on."""
MAX_KEPT = 4


def compare_and_keep(
    rank: int, world_size: int, port: int, arguments: Sequence[Any], settings: Sequence[Any]
) -> tuple[Comparison, bytes]:
    """:func:`compare`, and the serialized result of :func:`switched_off` that it compares with."""
    initialize(arguments[0], rank, world_size, port)
    file = io.BytesIO()
    torch.save(switched_off(*settings), file)
    without = {rank: file.getvalue()}
    return compare(rank, world_size, port, *arguments, without), without[rank]


_last_switched_off: dict[str, tuple[list[list[torch.Tensor]], int]] = {}
"""Last results of :func:`switched_off` by its arguments: tests compare several sets of modules
with the same training."""


def switched_off(
    case: ModelCase,
    counts: Sequence[int],
    backend: str,
    reads_memory: bool,
    keeps_gradients: bool = False,
) -> tuple[list[list[torch.Tensor]], int]:
    """Train without the engine.

    Returns:
        The result of :func:`train`, and the peak of one more step in bytes.
    """
    key = repr((case, tuple(counts), backend, reads_memory, keeps_gradients))
    if key not in _last_switched_off:
        _last_switched_off.clear()
        config = make_config(case)
        with compiled_again(case):
            chunks = build_chunks(case, config)
            steps = train_steps(case, config, chunks, counts)
            expected = [_kept(results) for _, results in zip(counts[1:], steps, strict=False)]
            # Reading memory is slow. What the last step leaves to another one is counted, too.
            with memory_counted(make_backend(backend), reads_memory) as memory:
                expected += map(_kept, steps)
                arguments = (case, config, chunks, counts[-1], memory, keeps_gradients)
                _last_switched_off[key] = expected, _peak_of_one_more_step(*arguments)
    return _last_switched_off[key]


def _planned_drop_bytes(manager: Any) -> int:
    """Peak drop of the plan that the last step followed; 0 without readings of memory.

    Times of that step are read afterwards and may lead to another plan, which the report shows.
    """
    plan = manager.plan
    return (
        manager.engine.lifecycle.planner.peak_drop(plan).nbytes
        if plan is not None and plan.trace.memory
        else 0
    )


def _reasons(manager: Any, names: Sequence[str]) -> dict[str, tuple[str, ...]]:
    groups = manager.plan.groups if manager.plan is not None else ()
    reasons: dict[str, tuple[str, ...]] = {}
    for name in names:
        found = [group for group in groups if group.name == name]
        if name in manager.report.absent_modules:
            reasons[name] = ("no group",)
        elif not any(group.moves for group in found):
            reasons[name] = tuple(sorted({group.reason for group in found}))
    return reasons


@contextmanager
def compiled_again(case: ModelCase) -> Iterator[None]:
    """Context in which torch compiles functions for varying numbers of tokens as in a new process.

    The rounding of a compiled sum depends on the kernel that was chosen for the first sizes it was
    compiled for. A tensor that a hook returns to backward is not a view, so torch compiles again:
    after another engine, for other sizes, or with a kernel of another rank from its disk cache.
    """
    if case.ep == 1:
        yield
        return
    torch._dynamo.reset()
    with inductor.patch(force_disable_caches=True):
        yield


@contextmanager
def memory_counted(backend: Backend, on_cpu: bool) -> Iterator[Backend]:
    """Context in which the backend reports device memory; with ``on_cpu`` also that of a CPU."""
    if use_gpu() and torch.distributed.get_world_size() == 1:
        with patch.object(CudaBackend, "memory", _requested_memory):
            yield backend
        return
    if not (on_cpu and isinstance(backend, CpuBackend)):
        yield backend
        return
    with DeviceMemoryMeter() as backend.meter, _reductions_over_one_rank_skipped():
        yield backend
    backend.meter = None


def _requested_memory(_: Backend) -> tuple[int, int]:
    """Bytes requested by tensors: now, and at the peak.

    torch's allocator does not split a block for a rest of less than 1 MiB, and counts the whole
    block as allocated. The number of such blocks depends on earlier frees, so the peaks of two
    trainings differ by some MiB more or less than by the moved bytes. Communicated tensors count as
    requested until all streams have used them, so several ranks need the other figure.
    """
    stats = peak_statistics.read(torch.cuda.current_device())["requested_bytes"]["all"]
    return stats["current"], stats["peak"]


@contextmanager
def _reductions_over_one_rank_skipped() -> Iterator[None]:
    """Context in which reductions over one rank, which change nothing, skip gloo.

    A thread of gloo holds the reduced tensor for a tenth of a millisecond longer than the
    collective takes. Megatron-core reduces where the loss is computed, which is at the peak of
    memory, so the peak would sometimes be higher by such a tensor.
    """
    all_reduce = torch.distributed.all_reduce

    def skip(tensor: torch.Tensor, *arguments: Any, **options: Any) -> Any:
        group, is_async = options.get("group"), options.get("async_op", False)
        if arguments or is_async or torch.distributed.get_world_size(group) > 1:
            return all_reduce(tensor, *arguments, **options)
        return None

    with patch.object(torch.distributed, "all_reduce", skip):
        yield


def _peak_of_one_more_step(
    case: ModelCase, config: Any, chunks: Any, count: int, backend: Backend, keeps_gradients: bool
) -> int:
    """Device peak of a step like those of :func:`train`, from which plans are made: its gradients
    are allocated in backward, unless they are kept. In bytes above the memory at the start; 0 if
    memory is not measured."""
    if backend.memory() is None:
        return 0
    for chunk in chunks:
        chunk.zero_grad(set_to_none=not keeps_gradients)
    if use_gpu():
        torch.cuda.synchronize()
    # Memory that the garbage collector frees during the step would be missing from its peak.
    with without_garbage_collection():
        before = backend.begin_peak()
        run_step(case, config, chunks, 0, count)
        return backend.peak_bytes() - before
