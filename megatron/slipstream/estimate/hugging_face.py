# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Reads megatron's options of a model from a Hugging Face ``config.json``, without downloads."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

from megatron.slipstream.estimate.file_errors import wrong_with
from megatron.slipstream.estimate.model_shapes import MAX_LAYERS
from megatron.slipstream.estimate.training_setup import shape_fields


class HubModel(NamedTuple):
    """A model as its ``config.json`` describes it."""

    model_type: str
    options: dict[str, Any]
    notes: tuple[str, ...]
    names: Mapping[str, str]
    """Names of the file's fields, by megatron's."""

    @property
    def fields(self) -> dict[str, Any]:
        """Fields of :class:`~megatron.slipstream.estimate.model_shapes.ModelShape`."""
        return shape_fields(SimpleNamespace(**self.options))

    def in_its_words(self, message: str) -> str:
        """Replace megatron's names in a message by those of the file's fields."""
        return re.sub(r"(?<![\w-])[a-z]\w*", lambda word: self.names.get(word[0], word[0]), message)


def load_hub_config(path: Path) -> HubModel:
    """Read a ``config.json``.

    Raises ``ValueError`` if the file is malformed or cannot be read, its ``model_type`` is unknown,
    or a number is missing or invalid.
    """
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ValueError(
            f"--hf-config={path} {wrong_with(error)}; give the config.json of a model (it is not "
            "downloaded)"
        ) from error
    except ValueError as error:
        raise ValueError(f"{path} is not JSON: {error}; give the config.json of a model") from error
    if not isinstance(config, dict) or "model_type" not in config:
        raise ValueError(f"{path} has no 'model_type'; give the config.json of a model")
    model_type, reader = config["model_type"], _Config(path, config)
    fields = _FIELDS.get(model_type)
    if fields is None:
        raise ValueError(
            f"model_type={model_type!r} of {path} is not supported because the meaning of its "
            f"fields is not known; known are {', '.join(_FIELDS)}. Give megatron's own flags after "
            "-- instead"
        )
    if (count := reader.number("num_hidden_layers")) > MAX_LAYERS:
        raise ValueError(
            f"{path}: num_hidden_layers={count} is too many to plan; give a "
            f"model of {MAX_LAYERS} or fewer"
        )
    options = _more_options(model_type, reader, range(count))
    options |= {
        option: reader.number(name) if name[-1] != "?" else reader.optional(name[:-1])
        for option, name in fields.items()
    }
    names = {option: name.rstrip("?") for option, name in fields.items()}
    names |= {
        "num_experts": names.get("num_moe_experts", "num_experts"),
        "share_embeddings_and_output_weights": "tie_word_embeddings",
        "moe_shared_expert_intermediate_size": "n_shared_experts * moe_intermediate_size",
    }
    return HubModel(model_type, options, tuple(_notes(config)), names)


_DENSE = {
    "num_layers": "num_hidden_layers",
    "hidden_size": "hidden_size",
    "num_attention_heads": "num_attention_heads",
    "ffn_hidden_size": "intermediate_size",
    "vocab_size": "vocab_size",
}
_LLAMA = {**_DENSE, "num_query_groups": "num_key_value_heads?", "kv_channels": "head_dim?"}
_ROUTED = {"moe_router_topk": "num_experts_per_tok", "moe_ffn_hidden_size": "moe_intermediate_size"}
_LATENT = {
    "q_lora_rank": "q_lora_rank?",
    "kv_lora_rank": "kv_lora_rank",
    "qk_head_dim": "qk_nope_head_dim",
    "qk_pos_emb_head_dim": "qk_rope_head_dim",
    "v_head_dim": "v_head_dim",
}
_FIELDS: Mapping[str, Mapping[str, str]] = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "mixtral": {**_LLAMA, "num_moe_experts": "num_local_experts",
                **_ROUTED, "moe_ffn_hidden_size": "intermediate_size"},
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "qwen3_moe": {**_LLAMA, "num_moe_experts": "num_experts", **_ROUTED},
    "deepseek_v3": {**_DENSE, "num_moe_experts": "n_routed_experts", **_ROUTED, **_LATENT,
                    "moe_router_num_groups": "n_group?", "moe_router_group_topk": "topk_group?"},
}  # fmt: skip
"""The number of config.json for each of megatron's options, by ``model_type``; ``?`` marks those
that may be missing."""

MODEL_TYPES = tuple(_FIELDS)


def _more_options(model_type: str, config: _Config, layers: range) -> dict[str, Any]:
    """Return the options that are no number of the file."""
    found: dict[str, Any] = {
        "untie_embeddings_and_output_weights": not config.fields.get("tie_word_embeddings")
    }
    if model_type in ("qwen3", "qwen3_moe", "deepseek_v3"):
        found["qk_layernorm"] = True
    if model_type == "qwen3_moe":
        found["moe_layer_freq"] = _sparse_layers(config, layers)
    if model_type == "deepseek_v3":
        first = config.number("first_k_dense_replace", 0)
        step = config.optional("moe_layer_freq") or 1
        found["moe_layer_freq"] = [layer >= first and layer % step == 0 for layer in layers]
        shared = config.optional("n_shared_experts", 0)
        width = config.number("moe_intermediate_size")
        found["moe_shared_expert_intermediate_size"] = (shared or 0) * width
        found["multi_latent_attention"] = True
    return found


def _sparse_layers(config: _Config, layers: range) -> list[bool]:
    step = config.optional("decoder_sparse_step") or 1
    dense = config.fields.get("mlp_only_layers") or []
    if type(dense) is not list or any(type(layer) is not int for layer in dense):
        raise ValueError(f"{config.path}: mlp_only_layers={dense!r} is not a list of int")
    if absent := sorted({*dense} - {*layers}):
        raise ValueError(
            f"mlp_only_layers={dense} names layer {absent[0]}, but "
            f"num_hidden_layers={len(layers)}; correct the config.json"
        )
    return [layer not in dense and (layer + 1) % step == 0 for layer in layers]


class _Config(NamedTuple):
    path: Path
    fields: Mapping[str, Any]

    def number(self, name: str, least: int = 1) -> int:
        value = self.optional(name, least)
        if value is None:
            raise ValueError(
                f"{self.path}: {name!r} is missing, which model_type="
                f"{self.fields['model_type']!r} has; give the whole config.json"
            )
        return value

    def optional(self, name: str, least: int = 1) -> Optional[int]:
        """Return a number, or None if it is null or missing."""
        value = self.fields.get(name)
        fault = "is not a number" if type(value) is not int else f"is less than {least}"
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f"{self.path}: {name}={value!r} {fault}; correct the config.json")
        return value


def _notes(config: Mapping[str, Any]) -> list[str]:
    is_qwen = config["model_type"].startswith("qwen")  # A window is off there by default.
    window, nextn = config.get("sliding_window"), config.get("num_nextn_predict_layers")
    notes = (
        (window and config.get("use_sliding_window", not is_qwen),
         f"sliding_window={window} is ignored: attention is planned over the whole sequence, so "
         "the predicted compute time, and the copies that hide behind it, are too high"),
        (nextn, f"num_nextn_predict_layers={nextn}: the layers for multi-token prediction are "
         "left out"),
        (config.get("quantization_config"),
         "quantization_config is ignored: sizes and times are those of training in --precision"),
    )  # fmt: skip
    return [text for applies, text in notes if applies]
