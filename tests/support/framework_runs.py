# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Runs the frameworks' own code in tests, if it is installed, and without a GPU."""

from __future__ import annotations

import importlib.util
import logging
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Optional

import framework_pages
import pytest
import torch
from ranks import run_ranks

TIMEOUT_S = 250

WITHOUT_KERNELS = {
    "use_cpu_initialization": True,
    "bias_activation_fusion": False,
    "bias_dropout_fusion": False,
    "masked_softmax_fusion": False,
    "persist_layer_norm": False,
    "gradient_accumulation_fusion": False,
    "apply_rope_fusion": False,
}
"""Options of models without features for which a CPU has no kernels."""


def skip_without(*modules: str) -> None:
    """Skip the test, or the file that calls this on import, if a module is missing."""
    for name in modules:
        if importlib.util.find_spec(name) is None:
            reason = f"{name} is not installed; see ./run test-frameworks"
            pytest.skip(reason, allow_module_level=True)


def last_line(code: str, *arguments: str, environment: Mapping[str, str] = os.environ) -> str:
    """The last line that the code prints in a separate process.

    Raises:
        AssertionError: It failed; the message has the end of its stderr.
    """
    result = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code, *arguments],
        env=dict(environment),
        capture_output=True,
        text=True,
        timeout=TIMEOUT_S,
        check=False,
    )
    assert result.returncode == 0, result.stderr[-3000:]
    return result.stdout.splitlines()[-1]


class Training(logging.Handler):
    """What a framework's own training did; collects what Slipstream logs meanwhile."""

    def __init__(self) -> None:
        super().__init__()
        self.steps: list[Any] = []
        """The loss and the norm of gradients of each step."""
        self.plan: Optional[str] = None
        """The log line that says what moves."""
        package = logging.getLogger("megatron.slipstream")
        package.setLevel(logging.INFO)
        package.addHandler(self)

    def emit(self, record: logging.LogRecord) -> None:
        first_line = record.getMessage().partition("\n")[0]
        if first_line.startswith("plan: "):
            self.plan = first_line

    def finish(self, model: Any) -> tuple[list[Any], Optional[str], int]:
        """Return steps, plan, and the bytes that left a model; None if none offloads."""
        from megatron.slipstream import report

        moved_bytes = 0 if model is None else sum(rank.d2h_bytes for rank in report(model).ranks)
        return self.steps, self.plan, moved_bytes


def check_training(page: str, train: Callable[..., Any]) -> None:
    """Run a framework's training of three steps without offloading and with it.

    Args:
        page: The framework's page, which shows the plan's log line.
        train: ``train(rank, num_ranks, port, offloads)``, to be run by a rank; it returns
            :meth:`Training.finish`.

    Raises:
        AssertionError: They differ, nothing moves, or the page shows another line.
    """
    ((expected, no_plan, no_bytes),) = run_ranks(1, train, False)
    ((steps, plan, moved_bytes),) = run_ranks(1, train, True)
    assert (no_plan, no_bytes) == (None, 0)
    assert steps == expected
    assert len(steps) == 3
    assert len({str(step) for step in steps}) == 3
    assert moved_bytes > 0
    text = (framework_pages.FOLDER / f"{page}.md").read_text()
    assert f"\nINFO slipstream: {plan}\n" in text


def local_spec(config: Any, *_: Any, vp_stage: Optional[int] = None, **__: Any) -> Any:
    """megatron-core's layers without Transformer Engine, for the configuration's decoder."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    return get_gpt_decoder_block_spec(config, use_transformer_engine=False, vp_stage=vp_stage)


def save_tiny_qwen(folder: Path) -> None:
    """Write the configuration of a Qwen2 of two layers and 128 tokens, as Hugging Face does."""
    from transformers import Qwen2Config

    Qwen2Config(
        num_hidden_layers=2,
        hidden_size=64,
        intermediate_size=128,
        num_attention_heads=4,
        num_key_value_heads=2,
        vocab_size=128,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        architectures=["Qwen2ForCausalLM"],
        dtype="bfloat16",
    ).save_pretrained(folder)


def use_torch_optimizers() -> None:
    """Replace Transformer Engine's optimizer and its kernels for lists of tensors by torch's."""
    from megatron.core import utils

    replacements = {
        "Adam": torch.optim.AdamW,
        "USING_PYTORCH_OPTIMIZER": True,
        "multi_tensor_applier": utils.local_multi_tensor_applier,
        "multi_tensor_l2norm": utils.local_multi_tensor_l2_norm,
        "l2_norm_impl": utils.local_multi_tensor_l2_norm,
        "multi_tensor_scale_impl": utils.local_multi_tensor_scale,
        "multi_tensor_scale_tensor_impl": None,
    }
    for module in (
        "megatron.core.optimizer",
        "megatron.core.optimizer.optimizer",
        "megatron.core.optimizer.clip_grads",
        "megatron.bridge.training.utils.train_utils",
    ):
        names = vars(sys.modules[module]) if module in sys.modules else {}
        names.update({name: new for name, new in replacements.items() if name in names})
