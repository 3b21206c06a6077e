# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Write the example trace that docs/user-guide/planning.md plans.

It is made up, not recorded: rank 0 of 4 pipeline ranks training a dense model of 8e9 parameters
(32 layers, hidden size 4096, 32 heads, 8 key-value groups) in bfloat16 on sequences of 8192 tokens,
one each for 8 micro-batches. Sizes follow from the shapes; times from the operations at 600 TFLOP/s
and a tenth of that much again for what is not a matrix product; bandwidth is that of PCIe 5.
"""

from __future__ import annotations

import argparse
import dataclasses
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests" / "support")]

from make_trace import Model, one_f_one_b, trace_of  # noqa: E402

from megatron.slipstream.plan.files import save_trace  # noqa: E402
from megatron.slipstream.plan.operations import device_bytes  # noqa: E402
from megatron.slipstream.plan.trace import (  # noqa: E402
    Bandwidth,
    MemoryReading,
    StepKind,
    Trace,
)

PP_SIZE = 4
NUM_MICRO_BATCHES = 8
NUM_LAYERS = 8
SEQUENCE = 8192
HIDDEN = 4096
KV_HIDDEN = 1024
FFN_HIDDEN = 14336
ROW_BYTES = 2 * SEQUENCE
MODULES = ("qkv_linear", "core_attn", "attn_proj", "mlp_norm")

MS_PER_FLOP = 1.1 * 1e3 / 600e12
# By the module after whose mark it runs, in forward: the feed-forward part follows 'mlp_norm'.
FORWARD_FLOPS = {
    "qkv_linear": 2 * SEQUENCE * HIDDEN * (HIDDEN + 2 * KV_HIDDEN),
    "core_attn": 2 * SEQUENCE * SEQUENCE * HIDDEN,  # Causal: half of all pairs, twice.
    "attn_proj": 2 * SEQUENCE * HIDDEN * HIDDEN,
    "mlp_norm": 0,
}
FEED_FORWARD_FLOPS = 3 * 2 * SEQUENCE * HIDDEN * FFN_HIDDEN

STATE_BYTES = 34 << 30
"""Weights, gradients and optimizer."""
WORK_BYTES = 2 << 30
OTHER_ACTIVATIONS_PER_MANAGED = 2.5
"""The feed-forward part's saved tensors, which no chosen module holds."""


def model() -> Model:
    """Groups of a layer in turn; the output of attention is saved by it and by 'attn_proj'."""
    saves, nbytes = {}, {}
    for layer in range(NUM_LAYERS):
        first = layer * len(MODULES)
        labels = {name: f"{name} {layer}" for name in ("input", "qkv", "attended", "residual")}
        saves[first] = [labels["input"]]
        saves[first + 1] = [labels["qkv"], labels["attended"]]
        saves[first + 2] = [labels["attended"]]
        saves[first + 3] = [labels["residual"]]
        nbytes[labels["qkv"]] = ROW_BYTES * (HIDDEN + 2 * KV_HIDDEN)
        for name in ("input", "attended", "residual"):
            nbytes[labels[name]] = ROW_BYTES * HIDDEN
    return Model(NUM_LAYERS, MODULES, saves=saves, nbytes=nbytes)


def step_ms(trace: Trace) -> tuple[float, ...]:
    """Forward between a group's start and its commit, backward after its use; twice as long."""
    times = []
    for step in trace.steps:
        flops = FORWARD_FLOPS[step.name]
        if step.kind is StepKind.BACKWARD_USE:
            # Going backwards, the feed-forward part comes before the layer's norm.
            flops = 2 * (flops + (FEED_FORWARD_FLOPS if step.name == "mlp_norm" else 0))
        elif step.kind is StepKind.FORWARD_COMMIT:
            flops = FEED_FORWARD_FLOPS if step.name == "mlp_norm" else 0
        times.append(round(0.02 + flops * MS_PER_FLOP, 4))
    return tuple(times)


def example_trace() -> Trace:
    trace = trace_of(one_f_one_b(PP_SIZE, 0, NUM_MICRO_BATCHES), model())
    memory = []
    for managed in device_bytes(trace, ()):
        allocated = STATE_BYTES + int(managed * (1 + OTHER_ACTIVATIONS_PER_MANAGED))
        memory.append(MemoryReading(allocated, allocated + WORK_BYTES, 0))
    return dataclasses.replace(
        trace,
        memory=tuple(memory),
        step_ms=step_ms(trace),
        bandwidth=Bandwidth(
            d2h_gb_per_s=53.0, h2d_gb_per_s=55.0, d2h_both_gb_per_s=41.0, h2d_both_gb_per_s=43.0
        ),
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("path", type=Path, help="where to write it")
    save_trace(example_trace(), parser.parse_args().path)


if __name__ == "__main__":
    main()
