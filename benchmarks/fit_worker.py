# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The process of ``benchmarks.fit`` that measures points: reads them as JSON lines, writes rows."""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import json
import logging
import os
import sys
import time
import warnings
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, Optional

import torch
from megatron_models import (
    build_chunks,
    initialize,
    make_config,
    micro_batches,
    run_schedule,
    use_gpu,
)
from model_case import ModelCase

from benchmarks.cases import find_case
from benchmarks.engines import SIZE_LIMIT, offload_config, own_module_names
from benchmarks.figures import spread_of
from benchmarks.fit_ways import OURS, Setup
from benchmarks.measure import (
    Step,
    metered_backend,
    release_host_memory,
    timed_step,
)
from benchmarks.variant import describe, report_fields
from benchmarks.worker import machine_facts
from megatron.slipstream.integration import install
from megatron.slipstream.options.budget import movable_modules
from megatron.slipstream.options.facts import Facts


def work(setup: Setup) -> int:
    """Measure points until the input ends or one fails; return the exit status."""
    # megatron-core's engine prints tables, and compilers print too.
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    warnings.simplefilter("ignore")
    logging.getLogger("megatron.core").setLevel(logging.ERROR)
    model: Optional[FitModel] = None
    for line in sys.stdin:
        try:
            machine = {} if model else {"machine": machine_facts()}
            model = model or FitModel(setup)
            point = json.loads(line)
            fields = machine | model.measure(point)
        except BaseException as error:
            fields = {"error": describe(error), "dies": is_out_of_memory(error)}
        answers.write(json.dumps(fields) + "\n")
        answers.flush()
        if "error" in fields:
            break
    # Without a shutdown: after an error, copies may still wait for memory that is gone.
    os._exit(0)


def is_out_of_memory(error: BaseException) -> bool:
    """Whether memory of the device or the host was too small."""
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(
        text in str(error).lower()
        for text in ("out of memory", "alloc_failed", "for activations even if every layer")
    )


class FitModel:
    """A model trained in one way, for any sequence length.

    Raises:
        RuntimeError: The way needs a GPU, and there is none.
    """

    def __init__(self, setup: Setup) -> None:
        self._setup = setup
        if setup.way == "megatron" and not use_gpu():
            raise RuntimeError("megatron-core's own engine moves CUDA tensors only")
        case = find_case(setup.case)
        self._case = self._with_recomputation(case.model)
        initialize(self._case, 0, 1, int(os.environ["MASTER_PORT"]))
        self._device_bytes = self._limit_device()
        offload = {**SIZE_LIMIT, **case.offload}
        with own_module_names():
            modules: Sequence[str] = setup.offload_modules
            if setup.moves_all:
                pattern = case.model.hybrid_layer_pattern if case.model.kind == "hybrid" else None
                tiles = {"mlp_sequence_tiles": self._case.mlp_sequence_tiles}
                without = make_config(self._case)
                modules = movable_modules(Facts(without, tiles, hybrid_layer_pattern=pattern))
            config = make_config(self._case, modules, **offload)
            self._chunks: Sequence[Any] = build_chunks(self._case, config)
        self._end_s = 0.0
        for chunk in self._chunks:
            for parameter in chunk.parameters():
                parameter.grad = torch.zeros_like(parameter)

    def _with_recomputation(self, case: ModelCase) -> ModelCase:
        overrides = {**case.overrides, **self._setup.overrides}
        if not use_gpu():
            overrides.pop("cross_entropy_loss_fusion", None)
            overrides.pop("cross_entropy_fusion_impl", None)
            # One operation, as Transformer Engine's norms: recomputed ones are bit-equal then.
            overrides["normalization"] = "LayerNorm"
        return dataclasses.replace(case, overrides=overrides, **self._setup.tiles)

    def _limit_device(self) -> int:
        """Limit torch's allocator; return the bytes that it can have."""
        limit = int((self._setup.device_gib or 2**20) * 2**30)
        if not use_gpu():
            return limit
        free, total = torch.cuda.mem_get_info()
        free += torch.cuda.memory_reserved()
        torch.cuda.set_per_process_memory_fraction(min(1.0, limit / total))
        return min(free, limit)

    def measure(self, point: Mapping[str, Any]) -> dict[str, Any]:
        """Return the figures of a sequence length.

        Args:
            point: ``tokens``; ``iterations`` to time, at least one, after ``warmups`` and at most
                ``max_planning`` until our plan is settled; ``seconds`` after which none begins.
        """
        self._case = dataclasses.replace(self._case, seq_length=point["tokens"])
        release_host_memory()
        with self._engine() as manager, metered_backend(manager) as backend:
            data = list(micro_batches(self._case, 0, self._setup.micro_batches, 0))
            if use_gpu():
                torch.cuda.reset_peak_memory_stats()
            resident_bytes = backend.begin_peak()
            before = self._prepare(point, data, manager)
            highest_bytes = backend.peak_bytes()
            backend.begin_peak()
            timed = self._iterate(data, point["iterations"], self._end_s)
            peak_bytes = backend.peak_bytes()
            fields: dict[str, Any] = {"moved_bytes": 0}
            if manager is not None:
                fields |= report_fields(manager)
            highest_bytes = max(highest_bytes, peak_bytes)
            fields |= allocator_fields(highest_bytes, self._device_bytes)
        spread = spread_of([step.ms for step in timed])
        num_tokens = self._setup.micro_batches * self._case.micro_batch_size * point["tokens"]
        return fields | {
            "num_iterations": len(timed),
            "num_before": len(before),
            "first_ms": (before or timed)[0].ms,
            "step_ms": spread.median,
            "step_ms_interquartile": spread.interquartile,
            "step_ms_standard_error": spread.standard_error,
            "tokens_per_s": 1e3 * num_tokens / spread.median,
            "losses": timed[-1].losses,
            "resident_bytes": resident_bytes,
            "peak_bytes": peak_bytes,
            "highest_bytes": highest_bytes,
            "device_bytes": self._device_bytes,
        }

    @contextlib.contextmanager
    def _engine(self) -> Iterator[Any]:
        """Context with our engine if the way has it; yields it or None."""
        if self._setup.way not in OURS:
            yield None
            return
        yield install.install(offload_config(self._setup.engine_options))
        install.uninstall()

    def _prepare(self, point: Mapping[str, Any], data: Any, manager: Any) -> list[Step]:
        """Run iterations until our plan is settled, then those of the warm-up."""
        self._end_s = time.monotonic() + point["seconds"]
        steps: list[Step] = []
        while manager is not None and len(steps) < point["max_planning"]:
            if time.monotonic() > self._end_s or manager.is_settled:
                break
            steps += self._iterate(data, 1, self._end_s)
        if point["warmups"] and time.monotonic() < self._end_s:
            steps += self._iterate(data, point["warmups"], self._end_s)
        return steps

    def _iterate(self, data: Any, number: int, end_s: float) -> list[Step]:
        """Run ``number`` iterations; none but the first begins after ``end_s``."""

        def run(_: int) -> list[torch.Tensor]:
            return run_schedule(self._case, self._chunks, data)

        steps: list[Step] = []
        while not steps or (len(steps) < number and time.monotonic() < end_s):
            gc.collect()
            steps.append(timed_step(run, len(steps)))
        return steps


def allocator_fields(highest_bytes: int, device_bytes: int) -> dict[str, int]:
    """Return the memory reserved at most, and how often the allocator's cache was emptied.

    Raises:
        torch.OutOfMemoryError: The device that a CPU imitates is too small.
    """
    if not use_gpu():
        if highest_bytes > device_bytes:
            raise torch.OutOfMemoryError(f"{highest_bytes} bytes of {device_bytes}")
        return {"reserved_bytes": highest_bytes, "num_alloc_retries": 0}
    statistics = torch.cuda.memory_stats()
    return {
        "reserved_bytes": statistics["reserved_bytes.all.peak"],
        "num_alloc_retries": statistics["num_alloc_retries"],
    }
