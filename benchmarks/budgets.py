# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares budgets for activations with recomputation and offloading set by hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from benchmarks.case import Case, Variant
from benchmarks.engines import BaseModel, Engine, build_twin, make_engine
from benchmarks.fit_ways import FULL, recompute_options
from benchmarks.measure import measure_memory
from benchmarks.ways import Way


class Comparison:
    """A model without offloading, and twins of it that share its parameters, each set differently.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self._base = BaseModel(case)
        self._off_bytes = 0

    def build(self, variant: Variant, label: str, options: Mapping[str, Any]) -> Way:
        """See :class:`benchmarks.ways.Comparison`."""
        base = self._base
        if label == "off":
            return Engine(label, base, base.chunks)
        overrides = base.case.model.overrides | recompute_options(variant.recompute)
        model = replace(base.case.model, overrides=overrides)
        chunks, _ = build_twin(base, model, variant.modules if variant.moves else ())
        if not variant.moves:
            return Engine("recomputed", base, chunks)
        options = dict(options)
        if variant.recompute == FULL:
            options["offload_checkpoint_inputs"] = True
        if variant.budget_share:
            budget_bytes = variant.budget_share * self._activation_bytes()
            options["activation_memory_budget"] = budget_bytes / 2**30
        return make_engine(base, label, chunks, options)

    def _activation_bytes(self) -> int:
        """Return the memory of an iteration without offloading beyond weights and gradients."""
        if not self._off_bytes:
            off = Engine("off", self._base, self._base.chunks)
            self._off_bytes = measure_memory(off.run).act_bytes
        return self._off_bytes
