# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Whole trainings through the entry of ``pretrain_gpt.py``: optimizer, DDP, every layout over gloo.

Each layout trains twice, engine off and on. Losses, the last gradients and the final weights are
compared on every rank, as hashes of their bytes.
"""

from __future__ import annotations

from pathlib import Path

import pytest
from forked import run_module
from training_runs import result_of, train_on_ranks

COMMON = """
    --mock-data --tokenizer-type NullTokenizer --vocab-size 128
    --hidden-size 64 --num-attention-heads 4 --group-query-attention --num-query-groups 2
    --seq-length 32 --max-position-embeddings 32 --position-embedding-type rope
    --normalization RMSNorm --swiglu --disable-bias-linear
    --micro-batch-size 2 --global-batch-size 8 --lr 1e-3 --train-iters 4
    --eval-interval 3 --eval-iters 1 --log-interval 1
""".split()
MOE = """
    --num-experts 4 --moe-router-topk 2 --moe-grouped-gemm --moe-token-dispatcher-type alltoall
    --moe-router-load-balancing-type aux_loss --moe-aux-loss-coeff 0.01
""".split()
DENSE_MODULES = ["attn_norm", "qkv_linear", "core_attn", "attn_proj", "mlp_norm"]
MOE_MODULES = [*DENSE_MODULES, "expert_fc1", "moe_act"]
TWO_MICRO_BATCHES = ["--global-batch-size", "4"]
"""Layouts in which only the accumulation of gradients depends on the number of micro-batches."""

LAYOUTS = {
    "GPT, bf16, dropout": (
        1,
        "--num-layers 4 --bf16 --hidden-dropout 0.1 --attention-dropout 0.1".split()
        + TWO_MICRO_BATCHES,
    ),
    "hybrid, PP2, one stage without experts, multi-token prediction": (
        2,
        ["--hybrid-layer-pattern", "*-|*E/*E", "--pipeline-model-parallel-size", "2", *MOE],
    ),
    "DP2, distributed optimizer, overlapped": (
        2,
        "--num-layers 2 --use-distributed-optimizer --overlap-grad-reduce "
        "--overlap-param-gather".split(),
    ),
    "TP2": (
        2,
        "--num-layers 2 --tensor-model-parallel-size 2".split() + TWO_MICRO_BATCHES,
    ),
    "EP2, sync-free": (
        2,
        ["--num-layers", "2", "--expert-model-parallel-size", "2", *MOE, "--moe-sync-free-experts"],
    ),
    "PP2 VPP2, MoE": (
        2,
        "--num-layers 4 --pipeline-model-parallel-size 2 "
        "--num-layers-per-virtual-pipeline-stage 1".split()
        + MOE,
    ),
}


def _offload(modules: list[str], *more: str) -> list[str]:
    """Flags that switch the engine on."""
    switch = ["--fine-grained-activation-offloading", "--offload-modules", *modules]
    return [*switch, "--min-offloaded-tensor-size", "1", *more]


LAST = "PP2 VPP2, MoE"
"""Its engine has the backend on which a missing wait changes results, for every release."""
MEASURED = "GPT, bf16, dropout", LAST
"""Layouts whose memory is read, one for each schedule: their peak is compared with that without the
engine, and plans are made from it."""


@pytest.mark.parametrize(
    "layout",
    [pytest.param(name, marks=[pytest.mark.releases] * (name == LAST)) for name in LAYOUTS],
)
def test_training_is_the_same_with_the_engine(layout: str, tmp_path: Path) -> None:
    num_ranks, flags = LAYOUTS[layout]
    modules = MOE_MODULES if "--num-experts" in flags else DENSE_MODULES
    offload = _offload(modules, *(["--offload-backend", "cpu-lazy"] if layout == LAST else []))
    reads = layout in MEASURED
    off = train_on_ranks(num_ranks, [*COMMON, *flags], tmp_path / "off.json", reads)
    on = train_on_ranks(num_ranks, [*COMMON, *flags, *offload], tmp_path / "on.json", reads)
    assert [result_of(record) for record in on] == [result_of(record) for record in off]
    assert on[0]["iterations"][-1]["bytes_offloaded"] > 0
    without, peaks = (
        [iteration["activation_peak_bytes"] for iteration in record[0]["iterations"]]
        for record in (off, on)
    )
    if reads:
        assert peaks[-1] < without[-1]
        # The engine resets the peak statistics in the first and the third iteration.
        assert max(peaks) < 2 * min(peaks)


def test_the_report_and_the_trace_of_a_run_read_back(tmp_path: Path) -> None:
    report, trace = tmp_path / "report.json", tmp_path / "trace.json"
    flags = "--num-layers 4 --pipeline-model-parallel-size 2".split()
    paths = ["--offload-report-path", str(report), "--offload-trace-path", str(trace)]
    offload = _offload(DENSE_MODULES, *paths)
    # With a record, device memory is read on a CPU too.
    train_on_ranks(2, [*COMMON, *flags, *offload], tmp_path / "record.json")
    files = [str(report), str(report.with_suffix(".rank1.json"))]
    shown = _command("report", *files)
    assert "Plan of rank 0" in shown
    totals = [line.split() for line in shown.splitlines() if " total " in line]
    assert [line[0] for line in totals] == ["0", "1"]
    assert "device peak" in shown
    traces = [str(trace), str(trace.with_suffix(".rank1.json"))]
    for rank_trace in traces:
        assert "Proved safe" in _command("plan", rank_trace)
    page = tmp_path / "report.html"
    _command("report", *files, "--trace", *traces, "--html", str(page))
    assert "another plan" not in page.read_text(), "the traces give the plans that were followed"


def _command(*arguments: str) -> str:
    done = run_module("megatron.slipstream.cli", *arguments)
    assert done.returncode == 0, done.stderr
    return done.stdout
