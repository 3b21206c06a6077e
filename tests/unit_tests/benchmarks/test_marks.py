# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compute times are taken at the marks that plans are made of, or there is no bound to show."""

from __future__ import annotations

from ranks import run_ranks


def _mark_names(rank: int, world_size: int, port: int) -> None:
    from megatron_models import initialize

    from benchmarks.cases import find_case
    from benchmarks.engines import BaseModel, build_offloading_chunks, make_engine
    from benchmarks.marks import measure_step_ms

    case = find_case("smoke")
    initialize(case.model, rank, world_size, port)
    base = BaseModel(case)
    chunks = build_offloading_chunks(base, case.variants[0])
    # Two engines that take turns with one model, as tunings do.
    engines = [make_engine(base, label, chunks, {}) for label in ("slipstream", "slipstream:lag")]
    for iteration in range(2):
        for engine in engines:
            engine.run(iteration)
    for engine in engines:
        marks, step_ms = measure_step_ms(engine)
        steps = engine.manager.plan.trace.steps
        assert [(step.kind, step.name) for step in steps] == marks
        assert len(step_ms) == len(marks)
        of_no_group = [step.kind.value for step in steps if not step.is_of_group]
        assert of_no_group == ["OS", "OE", "BS", "OB", "OD"] * case.num_micro_batches
        engine.close()


def test_times_are_taken_at_the_marks_of_the_plan() -> None:
    run_ranks(1, _mark_names)
