# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The modules that a pattern matches, and the messages of refusals."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attached_models import Attention, Decoder, Layer, attach_to, make_attached, micro_batch
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from megatron.slipstream.attached.handle import ATTACH_RULES, attach
from megatron.slipstream.attached.names import find_modules
from megatron.slipstream.options.fields import OffloadConfig


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(2)


@pytest.mark.parametrize(
    "patterns, names",
    [
        (["layers.*"], ["layers.0", "layers.1"]),
        (["layers.1"], ["layers.1"]),
        (["layers.*.mlp"], ["layers.0.mlp", "layers.1.mlp"]),
        (["**.mlp"], ["layers.0.mlp", "layers.1.mlp"]),
        (["layers.*.mlp.[03]"], [f"layers.{i}.mlp.{j}" for i in (0, 1) for j in (0, 3)]),
        (["**.layers.**.attn"], ["layers.0.attn", "layers.1.attn"]),
        ([Attention], ["layers.0.attn", "layers.1.attn"]),
        (["layers.0", Attention], ["layers.0", "layers.1.attn"]),
        (["head", "embedding"], ["embedding", "head"]),
        (["*"], ["embedding", "head"]),
        ([Layer, "layers.*"], ["layers.0", "layers.1"]),
    ],
    ids=str,
)
def test_a_pattern_means_these_modules(model: Decoder, patterns: Any, names: list[str]) -> None:
    assert [match.name for match in find_modules(model, patterns)] == names


def test_a_group_is_called_after_its_pattern_or_type(model: Decoder) -> None:
    labels = [match.label for match in find_modules(model, ["layers.0", Attention])]
    assert labels == ["layers.0", "Attention"]


@pytest.mark.parametrize(
    "patterns, error",
    [
        ("layer.*", r"'layer\.\*', which matches no sub-module of Decoder.* such as: layers\.\*,"),
        ("layers.*.atn", r"such as: layers\.\*\.attn,"),
        ("layers.*.moe", r"such as: (layers\.\*\.(attn|mlp|attn_norm|mlp_norm), ){4}"),
        ("mlp", r"such as: layers\.\*\.mlp,.*'\*\*' for any number of parts"),
        (torch.nn.Conv2d, r"'Conv2d', which matches no sub-module.* such as: .*Embedding"),
        ("layers", r"only containers that never run \('layers' is a ModuleList\).*'layers\.\*'"),
        ([], r"patterns=\[\] chooses nothing"),
        ([3], r"patterns contains 3, which is neither a name pattern nor a module type"),
        (b"layers.*", r"patterns contains b'layers\.\*', which is neither a name pattern"),
        (3, r"patterns contains 3, which is neither a name pattern nor a module type"),
        (["layers.*", "layers.*.mlp"], r"'layers\.\*\.mlp', which adds nothing .*leave one"),
        (["**.mlp", torch.nn.GELU], r"'GELU', which adds nothing"),
        (Decoder, r"'Decoder', which matches no sub-module"),
    ],
    ids=str,
)
def test_a_pattern_that_chooses_nothing_is_an_error(
    model: Decoder, patterns: Any, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        attach(model, patterns)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_argument_of_another_type_is_an_error_that_names_it(model: Decoder) -> None:
    with pytest.raises(ValueError, match=r"model='layers' is no module"):
        attach("layers", "layers.*")
    with pytest.raises(ValueError, match=r"^model=a list is no module; give the torch.nn.Module"):
        attach([model], "layers.*")
    with pytest.raises(ValueError, match=r"config=\{'offload_verify': 1\} is no OffloadConfig"):
        attach(model, "layers.*", {"offload_verify": 1})
    assert not any(module._forward_hooks for module in model.modules())


def test_a_module_in_place_of_its_name_is_an_error_with_the_name(model: Decoder) -> None:
    for patterns in (model.layers[1], [model.layers[1]]):
        with pytest.raises(ValueError, match=r"a Layer itself, .* give its name, 'layers\.1', or"):
            attach(model, patterns)
    with pytest.raises(ValueError, match=r"a Layer itself, .* give text such as"):
        attach(model, Layer())


def test_a_detached_handle_is_no_context(model: Decoder) -> None:
    attached = attach_to(Decoder(1), "layers.*")
    attached.detach()
    with (
        pytest.raises(RuntimeError, match="is detached, .*; call attach"),
        attached,
    ):
        pass


def test_of_matches_inside_each_other_the_outer_counts() -> None:
    nested = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    assert [match.name for match in find_modules(nested, [torch.nn.Sequential])] == ["0"]


def test_names_are_those_without_wrappers() -> None:
    model = Decoder(2)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(model.layers[1])
    whole = torch.compile(model)
    assert isinstance(whole, torch.nn.Module)
    for patterns in (["layers.*"], [Layer]):
        matches = find_modules(whole, patterns)
        assert [match.name for match in matches] == ["layers.0", "layers.1"]
        # The wrapper: its operations belong to the group.
        assert [match.module for match in matches] == list(model.layers)


def test_a_shared_module_is_found_once() -> None:
    model = Decoder(2)
    model.tied = model.layers[0]
    names = [match.name for match in find_modules(model, ["layers.*", "tied"])]
    assert names == ["layers.0", "layers.1"]


def test_a_module_is_attached_once_only() -> None:
    model, attached = make_attached(Decoder, "layers.*.mlp")
    with pytest.raises(ValueError, match=r"the model \(Decoder\) because it is attached already"):
        attach_to(model, "layers.*.attn")
    with pytest.raises(ValueError, match=r"for mlp because it is attached already"):
        attach_to(model.layers[0], "mlp")
    attached.detach()
    attach_to(model, "layers.*.attn").detach()


@pytest.mark.parametrize(
    "options",
    [
        {"offload_engine": "megatron"},
        {"offload_report_path": "report.json"},
        {"offload_trace_path": "trace.json"},
    ],
    ids=lambda options: next(iter(options)),
)
def test_a_setting_that_cannot_be_followed_is_refused(options: dict[str, Any]) -> None:
    (name,) = options
    assert name in {rule.name for rule in ATTACH_RULES}
    with pytest.raises(ValueError, match=f"{name}=.* is not supported with attach.*because.*; "):
        attach(Decoder(1), "layers.*", OffloadConfig(**options))


@pytest.mark.parametrize(
    "options",
    [
        {"min_offloaded_tensor_size": -1},
        {"min_offloaded_tensor_size": "1"},
        {"min_offloaded_tensor_size": 1e6},
        {"min_offloaded_tensor_size": True},
        {"min_offloaded_tensor_size": None},
        {"activation_offload_fraction": 1.5},
        {"activation_offload_fraction": "0.5"},
        {"activation_offload_fraction": None},
        {"activation_offload_fraction": True},
        {"activation_offload_fraction": float("nan")},
    ],
    ids=str,
)
def test_a_value_out_of_range_is_refused(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"{next(iter(options))}="):
        attach(Decoder(1), "layers.*", **options)


def _on_gpus(model: Decoder, *indices: int) -> Decoder:
    """Makes the model's parameters appear to be on these GPUs."""
    tensors = [SimpleNamespace(is_cuda=True, device=torch.device("cuda", i)) for i in indices]
    model.parameters = lambda recurse=True: iter(tensors)
    return model


def test_a_model_on_several_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match=r"several GPUs \(\[0, 2\]\) of one process.*; use one"):
        attach(_on_gpus(Decoder(1), 0, 2, 0), "layers.*")


def test_a_model_on_another_gpu_than_the_current_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its operations run on another stream than the one that copies would wait for."""
    model = Decoder(1)
    attach_to(model, "layers.*")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _on_gpus(model, 0)
    model(micro_batch(0))
    _on_gpus(model, 1)
    with pytest.raises(RuntimeError, match=r"call torch\.cuda\.set_device\(1\)"):
        model(micro_batch(0))
