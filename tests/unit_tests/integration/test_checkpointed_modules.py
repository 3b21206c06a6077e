# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The rule on ``offload_checkpoint_inputs`` knows which modules keep inputs in checkpoints."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Optional

import pytest
from model_case import ModelCase
from ranks import run_ranks
from tiny_gpt import build_chunks, initialize, make_config, train

from megatron.slipstream.fine_grained_activation_offload.markers import CHECKPOINT_INPUTS
from megatron.slipstream.integration import install
from megatron.slipstream.options import rules
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.options.model import keeps_checkpoint_inputs

pytestmark = pytest.mark.releases

RECOMPUTED = ("core_attn", "layernorm", "mlp", "moe", "moe_act", "shared_experts")
"""Names for ``recompute_modules`` in models without latent attention."""
SHARED = {"moe_shared_expert_intermediate_size": 32}
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "dense": ("dense", {}),
    "experts": ("moe", {}),
    "shared experts": ("moe", SHARED),
    "experts in every second layer": ("moe", {"moe_layer_freq": 2}),
    "no dense layer by a list": ("moe", {"moe_layer_freq": [1, 1]}),
    "no attention in a pattern": ("hybrid", SHARED),
}


class Seen(NamedTuple):
    expected: bool
    """What the rule says."""
    moves: bool
    """Whether the engine had groups of such inputs."""
    warnings: list[str]


class Words(logging.Handler):
    """Collects messages of warnings."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.said: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.said.append(record.getMessage())


def train_all(rank: int, num_ranks: int, port: int) -> dict[tuple[str, Optional[str]], Seen]:
    """A step of each model with each recomputed module, and with none."""
    words = Words()
    logging.getLogger("megatron.slipstream").addHandler(words)
    found = {}
    initialize(ModelCase("dense"), rank, num_ranks, port)
    for model, (kind, fields) in MODELS.items():
        for name in (None, *RECOMPUTED):
            options = dict(fields)
            if name is not None:
                options |= {"recompute_granularity": "selective", "recompute_modules": [name]}
            case = ModelCase(kind, num_layers=2, pattern="-E", overrides=options)
            words.said.clear()
            rules._said.clear()
            install.install(OffloadConfig(offload_backend="cpu", offload_checkpoint_inputs=True))
            try:
                config = make_config(case, ("core_attn",))
            except (AssertionError, ValueError):
                continue  # megatron-core refuses it
            train(case, config, build_chunks(case, config), (1,))
            moves = CHECKPOINT_INPUTS in install.report().ranks[0].modules
            said = [text for text in words.said if "offload_checkpoint_inputs" in text]
            pattern = case.pattern if kind == "hybrid" else None
            expected = keeps_checkpoint_inputs(Facts(config, hybrid_layer_pattern=pattern))
            found[model, name] = Seen(expected, moves, said)
            install.uninstall()
    return found


@pytest.fixture(scope="module")
def seen() -> dict[tuple[str, Optional[str]], Seen]:
    (found,) = run_ranks(1, train_all)
    return found


@pytest.mark.parametrize("name", [None, *RECOMPUTED])
@pytest.mark.parametrize("model", MODELS)
def test_the_rule_says_what_happens(
    model: str, name: Optional[str], seen: dict[tuple[str, Optional[str]], Seen]
) -> None:
    if (model, name) not in seen:
        assert name == "moe_act"
        pytest.skip("megatron-core refuses it")
    case = seen[model, name]
    assert case.expected == case.moves
    # An installed engine says so once; the settings may be meant for another model.
    assert len(case.warnings) == (not case.moves)


def test_both_kinds_occur(seen: dict[tuple[str, Optional[str]], Seen]) -> None:
    assert {case.moves for case in seen.values()} == {True, False}
