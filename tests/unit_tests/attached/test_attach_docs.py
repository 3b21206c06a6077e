# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The lines of docs/user-guide/any-pytorch-model.md run in order, unchanged."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from attached_models import Decoder, micro_batch

PAGE = Path(__file__).resolve().parents[3] / "docs" / "user-guide" / "any-pytorch-model.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


class _Model(Decoder):
    """Returns a loss, as the page's model does."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).square().mean()


def test_the_lines_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = _Model()
    scope: dict[str, Any] = {
        "model": model,
        "batches": [micro_batch(index) for index in range(3)],
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    blocks = [block for block in BLOCKS if "transformers" not in block]
    assert len(blocks) == len(BLOCKS) - 1 == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    assert "layers.*" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "trace.json"}
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate"))),
    reason="transformers or accelerate is not installed",
)
def test_the_lines_for_hugging_face_run(tmp_path: Path) -> None:
    import transformers

    (block,) = (block for block in BLOCKS if "transformers" in block)
    ids = torch.zeros(8, dtype=torch.long)
    scope: dict[str, Any] = {
        "llama_config": transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        "arguments": transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True
        ),
        "dataset": [{"input_ids": ids, "labels": ids}] * 2,
    }
    exec("from megatron.slipstream import attach", scope)
    exec(compile(block, str(PAGE), "exec"), scope)
    assert scope["trainer"].state.global_step == 1
