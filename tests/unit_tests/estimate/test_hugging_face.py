# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The config.json of a model gives the model's shape; missing numbers are errors."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from megatron.slipstream.estimate.hugging_face import MODEL_TYPES, load_hub_config
from megatron.slipstream.estimate.model_shapes import Experts, LatentAttention, ModelShape
from megatron.slipstream.estimate.model_state import num_parameters
from megatron.slipstream.estimate.training_command import read_flags

EXAMPLES = Path(__file__).resolve().parents[3] / "examples" / "models"
BASE = {
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_attention_heads": 8,
    "num_hidden_layers": 4,
    "num_key_value_heads": 2,
    "vocab_size": 1000,
}


def load(tmp_path: Path, model_type: str, **fields: Any) -> dict[str, Any]:
    path = tmp_path / "config.json"
    path.write_text(json.dumps({"model_type": model_type, **BASE, **fields}))
    return load_hub_config(path).fields


@pytest.mark.parametrize(
    "name, parameters",
    [("llama3_8b", 8.03e9), ("mixtral_8x7b", 46.7e9), ("deepseek_v3", 671e9)],
)
def test_the_examples_have_as_many_parameters_as_their_names_say(
    name: str, parameters: float
) -> None:
    fields = load_hub_config(EXAMPLES / f"{name}.json").fields
    shape = ModelShape(seq_length=4096, **fields)
    assert num_parameters(shape, 0).total == pytest.approx(parameters, rel=0.002)


def test_there_is_a_test_of_every_model_type() -> None:
    tested = {"llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe", "deepseek_v3"}
    assert set(MODEL_TYPES) == tested


def test_llama(tmp_path: Path) -> None:
    shape = ModelShape(seq_length=8, **load(tmp_path, "llama", head_dim=16, tie_word_embeddings=1))
    assert (shape.num_layers, shape.hidden_size, shape.ffn_hidden_size) == (4, 64, 128)
    assert (shape.query_groups, shape.head_dim, shape.vocab_size) == (2, 16, 1000)
    assert shape.share_embeddings_and_output_weights
    fields = load(tmp_path, "llama", num_key_value_heads=None)
    assert ModelShape(seq_length=8, **fields).query_groups == 8


@pytest.mark.parametrize(
    "model_type, fields, note",
    [
        ("mistral", {"sliding_window": 32}, "sliding_window=32 is ignored: attention is planned"),
        ("mistral", {"sliding_window": None}, None),
        ("qwen2", {"sliding_window": 32}, None),
        ("qwen2", {"sliding_window": 32, "use_sliding_window": True}, "sliding_window=32 is"),
        (
            "llama",
            {"quantization_config": {"quant_method": "fp8"}},
            "quantization_config is ignored: sizes and times are those of training in --precision",
        ),
    ],
)
def test_what_a_plan_ignores_is_said(
    tmp_path: Path, model_type: str, fields: dict[str, Any], note: str | None
) -> None:
    load(tmp_path, model_type, **fields)
    notes = load_hub_config(tmp_path / "config.json").notes
    assert [given[: len(note or "")] for given in notes] == ([] if note is None else [note])


def test_mixtral(tmp_path: Path) -> None:
    fields = load(tmp_path, "mixtral", num_local_experts=8, num_experts_per_tok=2)
    assert fields["experts"] == Experts(8, 2, 128)


def test_qwen3(tmp_path: Path) -> None:
    assert load(tmp_path, "qwen3")["qk_layernorm"]
    assert "qk_layernorm" not in load(tmp_path, "qwen2")


def test_qwen3_moe(tmp_path: Path) -> None:
    fields = load(tmp_path, "qwen3_moe", num_experts=16, num_experts_per_tok=4,
                  moe_intermediate_size=32, decoder_sparse_step=2, mlp_only_layers=[3])  # fmt: skip
    assert fields["experts"] == Experts(16, 4, 32)
    assert fields["layer_kinds"] == ("*-", "*E", "*-", "*-")


def test_deepseek_v3(tmp_path: Path) -> None:
    latent = {"q_lora_rank": 24, "kv_lora_rank": 16, "qk_nope_head_dim": 8, "qk_rope_head_dim": 4}
    experts = {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_shared_experts": 2}
    fields = load(tmp_path, "deepseek_v3", **latent, **experts, v_head_dim=8,
                  moe_intermediate_size=32, first_k_dense_replace=1)  # fmt: skip
    assert fields["latent_attention"] == LatentAttention(24, 16, 8, 4, 8)
    assert fields["experts"] == Experts(16, 4, 32, 64)
    assert fields["layer_kinds"] == ("*-", "*E", "*E", "*E")
    assert fields["qk_layernorm"]


def test_what_is_left_out_is_said() -> None:
    (note,) = load_hub_config(EXAMPLES / "deepseek_v3.json").notes
    assert "num_nextn_predict_layers=1" in note
    assert load_hub_config(EXAMPLES / "llama3_8b.json").notes == ()


@pytest.mark.parametrize(
    "content, message",
    [
        ("{", "is not JSON"),
        ("[]", "has no 'model_type'"),
        ('{"model_type": "gpt2"}', "known are llama, mistral, mixtral, qwen2, qwen3, qwen3_moe, d"),
        ('{"model_type": "llama"}', "'num_hidden_layers' is missing"),
        ('{"model_type": "llama", "num_hidden_layers": "4"}', "='4' is not a number"),
        ('{"model_type": "qwen3_moe", "num_hidden_layers": 1000000000}', "10000 or fewer"),
        (
            '{"model_type": "qwen3_moe", "num_hidden_layers": 4, "mlp_only_layers": "3"}',
            "mlp_only_layers='3' is not a list of int",
        ),
    ],
)
def test_what_is_no_config_is_refused(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "config.json"
    path.write_text(content)
    with pytest.raises(ValueError) as error:
        load_hub_config(path)
    assert message in str(error.value)
    assert str(path) in str(error.value)


def test_a_missing_config_is_named(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="does not exist"):
        load_hub_config(tmp_path / "config.json")


# --- flags from files -----------------------------------------------------------------------------

FLAGS = ["--num-layers", "32", "--swiglu", "--offload-modules", "core_attn", "attn_proj"]


def test_flags_are_read_from_text(tmp_path: Path) -> None:
    path = tmp_path / "flags"
    path.write_text("--num-layers 32 \\\n  --swiglu # gated\n--offload-modules core_attn attn_proj")
    assert read_flags(path) == FLAGS
    path.write_text("--x 'y")
    with pytest.raises(ValueError, match=r"flags is not a list of flags: .*; close the quotes"):
        read_flags(path)
