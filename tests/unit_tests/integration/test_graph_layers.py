# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""megatron-core's layers under capture, without a GPU: each call of a capture runs immediately.

The steps of Transformer Engine (warm-up, capture of forward layer by layer, then of backward) are
done here by hand; a replay would compute the same.
"""

from __future__ import annotations

import contextlib
import dataclasses
import gc
import inspect
import itertools
import re
import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from types import SimpleNamespace
from typing import Any, Optional
from unittest.mock import MagicMock, patch

import pytest
import torch
from captured_layers import with_graphs
from model_case import MLP_MODULES
from ranks import run_ranks
from tiny_gpt import ModelCase, build_chunks, initialize, make_config, run_step, train

from megatron.slipstream.fine_grained_activation_offload.cpu_backends import CpuBackend
from megatron.slipstream.integration.seam import compat
from megatron.slipstream.patches import releases

pytestmark = pytest.mark.releases

NUM_WARMUPS = 3
TRANSFORMER_ENGINE = ("transformer_engine", "transformer_engine.pytorch")


def _case(kind: str, scope: Sequence[str]) -> ModelCase:
    return with_graphs(ModelCase(kind, num_layers=3), scope, NUM_WARMUPS)


@contextlib.contextmanager
def _as_on_a_gpu(events: list[str]) -> Iterator[None]:
    """CUDA and Transformer Engine as the layers call them; ``events`` notes recorded events."""
    from megatron.core.transformer import transformer_layer

    def event(**options: Any) -> Any:
        assert options == {"external": True}
        return MagicMock(record=lambda: events.append("go on"))

    with (
        patch.object(transformer_layer, "is_te_min_version", lambda *_: True),
        patch.object(torch.cuda, "Event", event),
    ):
        yield


def _captured(
    layers: Sequence[Any], x: torch.Tensor, grad: torch.Tensor, events: list[str]
) -> list[torch.Tensor]:
    """Outputs and then input gradients of layers that are captured in order."""
    from megatron.core.transformer import cuda_graphs

    options = {"attention_mask": _mask(x)}
    with patch.object(cuda_graphs, "_IS_GRAPH_CAPTURING", True):
        for layer in layers:  # Transformer Engine's warm-up
            layer(x.detach().requires_grad_(), **options)
        taped = []
        with patch.object(CpuBackend, "is_capturing", lambda _: True):
            for layer in layers:
                x = x.detach().requires_grad_()
                (output,) = layer(x, **options)
                events.append("forward ends")
                taped.append((x, output))
                x = output
            results = [output.detach() for _, output in taped]
            for x, output in reversed(taped):
                output.backward(grad)
                events.append("backward ends")
                assert x.grad is not None
                grad = x.grad
                results.append(grad)
    return results


def _eager(layers: Sequence[Any], x: torch.Tensor, grad: torch.Tensor) -> list[torch.Tensor]:
    taped, mask = [], _mask(x)
    for layer in layers:
        x = x.detach().requires_grad_()
        output, _ = layer(x, attention_mask=mask)
        taped.append((x, output))
        x = output
    results = [output.detach() for _, output in taped]
    for x, output in reversed(taped):
        output.backward(grad)
        assert x.grad is not None
        grad = x.grad
        results.append(grad)
    return results


def _mask(x: torch.Tensor) -> torch.Tensor:
    return torch.ones(1, 1, len(x), len(x), dtype=torch.bool).triu(1)


def _compare(
    rank: int, world_size: int, port: int, scope: Sequence[str], backend: str, is_stock: bool
) -> Any:
    from megatron.slipstream.integration import install
    from megatron.slipstream.options.fields import OffloadConfig

    case, events = dataclasses.replace(_case("dense", scope), keeps_layers=is_stock), []
    initialize(case, rank, world_size, port)
    with _as_on_a_gpu(events):
        torch.manual_seed(11)
        shape = (case.seq_length, case.micro_batch_size, case.hidden_size)
        x, grad = torch.randn(shape), torch.randn(shape)
        plain = build_chunks(case, make_config(case))[0]
        expected = _eager(plain.decoder.layers, x, grad)
        expected += [p.grad for p in plain.decoder.layers.parameters() if p.grad is not None]
        manager = install.install(OffloadConfig(offload_backend=backend))
        config = make_config(case, ["qkv_linear", "core_attn", "attn_proj", *MLP_MODULES])
        chunks = build_chunks(case, config)
        train(case, config, chunks, (1, 1))
        chunks[0].zero_grad(set_to_none=True)
        layers = chunks[0].decoder.layers
        result = _captured(layers, x, grad, events)
        # The warm-up has no backward, so gradients are those of the capture alone.
        result += [p.grad.clone() for p in layers.parameters() if p.grad is not None]
        manager.reset()
        run_step(case, config, chunks, 0, 2)  # with what is not captured
        moved = {name: item.num_groups_moved for name, item in manager.graphs.modules.items()}
        kinds = {type(layer).__name__ for layer in layers}
        install.uninstall()
        kinds_after = {type(layer).__name__ for layer in layers}
        assert (kinds_after == {"TransformerLayer"}) == is_stock
    equal = [torch.equal(a, b) for a, b in zip(expected, result, strict=True)]
    return equal, moved, kinds, events


def _replay(rank: int, world_size: int, port: int) -> Any:
    """Arguments of layers' graphs, without and with copies in them."""
    from megatron.slipstream.integration import install
    from megatron.slipstream.options.fields import OffloadConfig

    case = _case("dense", ())
    initialize(case, rank, world_size, port)
    handed_on: list[dict[str, Any]] = []
    flushed: list[int] = []

    def graph(x: torch.Tensor, **options: Any) -> tuple[torch.Tensor]:
        handed_on.append({k: v for k, v in options.items() if k.startswith("cuda_graph_")})
        manager.push_offload_groups(lambda *_: flushed.append(len(handed_on)), "moe_act", [])
        return (x,)

    with _as_on_a_gpu([]):
        manager = install.install(OffloadConfig(offload_backend="cpu"))
        config = make_config(case, ["qkv_linear", "core_attn"])
        chunks = build_chunks(case, config)
        layers, shape = chunks[0].decoder.layers, (case.seq_length, 1, case.hidden_size)
        for moves in (False, True):
            if moves:
                train(case, config, chunks, (1, 1))
                _captured(layers, torch.randn(shape), torch.randn(shape), [])
                manager.graphs.close()
            x, engine = torch.randn(shape), dict.fromkeys(TRANSFORMER_ENGINE, MagicMock())
            for layer in layers:
                layer.cuda_graphs = [graph]
                with patch.dict(sys.modules, engine):  # Only its version is read.
                    layer(x, attention_mask=_mask(x))
                layer.cuda_graphs = []
        without, with_copies = handed_on[: len(layers)], handed_on[len(layers) :]
        events = [layer.graph_copies.event for layer in layers]
        streams = {id(options["cuda_graph_stream"]) for options in with_copies}
        are_theirs = [
            options["cuda_graph_event"] is event
            for options, event in zip(with_copies, events, strict=True)
        ]
        num_events = len(set(map(id, events)) - {id(None)})
        install.uninstall()
    return without, streams == {id(manager.cuda_graph_stream)}, are_theirs, num_events, flushed


def _layer_spec() -> Any:
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    return get_gpt_layer_local_spec()


def _for_a_stage(config: Any, vp_stage: Optional[int] = None) -> Any:
    config.stages.append(vp_stage)
    return _layer_spec()


@pytest.mark.parametrize(
    "given, stages",
    [(_layer_spec, []), (lambda: _for_a_stage, [1]), (lambda: lambda config: _layer_spec(), [])],
    ids=["a spec", "a function of the stage", "a function of the configuration"],
)
def test_a_model_is_built_from_layers_that_offload_in_graphs(
    given: Callable[[], Any], stages: list[int]
) -> None:
    from megatron.slipstream.integration.graphs.layers import with_graph_offloading
    from megatron.slipstream.integration.seam.specs import change_model_spec

    config = SimpleNamespace(transformer_layer_spec=given(), stages=[])
    change_model_spec(config, with_graph_offloading)
    spec = config.transformer_layer_spec(config, vp_stage=1)
    assert spec.module.__name__ == "GraphOffloadTransformerLayer"
    assert repr(spec.submodules) == repr(_layer_spec().submodules)
    assert config.stages == stages


def test_a_hybrid_model_is_built_from_such_layers() -> None:
    from megatron.slipstream.integration.graphs.layers import with_graph_offloading
    from megatron.slipstream.integration.seam.specs import change_model_spec

    config = SimpleNamespace(hybrid_stack_spec=None)
    change_model_spec(config, with_graph_offloading)
    layers = config.hybrid_stack_spec.submodules
    assert layers.attention_layer.module.__name__ == "GraphOffloadTransformerLayer"
    assert layers.moe_layer.module.__name__ == "GraphOffloadMoETransformerLayer"
    assert layers.mamba_layer.module.__name__ == "GraphOffloadMambaLayer"


def test_a_method_of_layers_in_graphs_that_has_moved_is_named_at_install(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    from megatron.core.transformer.module import GraphableMegatronModule

    from megatron.slipstream.integration import install
    from megatron.slipstream.integration.graphs.layers import take_packed_sequences
    from megatron.slipstream.options.fields import OffloadConfig

    monkeypatch.delattr(GraphableMegatronModule, "_should_call_te_cudagraph")
    for begin in (
        lambda: install.install(OffloadConfig(offload_backend="cpu")),
        lambda: take_packed_sequences([]),
    ):
        with pytest.raises(RuntimeError) as found:
            begin()
        assert "TransformerLayer._should_call_te_cudagraph does not exist in" in str(found.value)
        assert releases.release() in str(found.value)
    assert install.installed() is None


def test_all_methods_that_layers_in_graphs_override_are_checked() -> None:
    from megatron.slipstream.integration.graphs import layers

    called = set(re.findall(r"super\(\)\.(_\w+)", inspect.getsource(layers.GraphedMixin)))
    assert called == {*compat.METHODS_OF_GRAPHED_LAYERS}


def _classes(rank: int, world_size: int, port: int) -> list[tuple[str, bool, bool]]:
    """Of a framework's layer: its class before, while it takes part, again, and afterwards."""
    from megatron.core.transformer.transformer_layer import TransformerLayer

    from megatron.slipstream.integration.graphs.layers import (
        GraphedMixin,
        offload_in_graphs,
    )

    class OwnLayer(TransformerLayer):
        pass

    case = dataclasses.replace(_case("dense", ()), keeps_layers=True)
    initialize(case, rank, world_size, port)
    with _as_on_a_gpu([]):
        (chunk,) = build_chunks(case, make_config(case, ["core_attn"]))
        layer = chunk.decoder.layers[0]
        layer.__class__ = OwnLayer
        found = []

        def note(layer: Any) -> None:
            kind = type(layer)
            is_own, takes_part = issubclass(kind, OwnLayer), issubclass(kind, GraphedMixin)
            found.append((kind.__name__, is_own, takes_part))

        note(layer)
        undo = offload_in_graphs(chunk, lambda: None)
        note(layer)
        kind = type(layer)
        undo += offload_in_graphs(chunk, lambda: None)
        assert type(layer) is kind
        for one in undo:
            one()
        note(layer)
        undo = offload_in_graphs(chunk, lambda: None)
        reference = weakref.ref(chunk)
        del chunk, layer
        gc.collect()
        assert reference() is None
        for one in undo:
            one()
    return found


def _uses(rank: int, world_size: int, port: int) -> list[tuple[Any, ...]]:
    """Of a layer that offloads in graphs and takes packed sequences, in every order of beginning
    and ending: what is left, and whether its class, its attributes and its graphs tell so."""
    from megatron.slipstream.integration.graphs.layers import (
        offload_in_graphs,
        take_packed_sequences,
    )

    initialize(_case("dense", ()), rank, world_size, port)
    found: list[tuple[Any, ...]] = []
    with _as_on_a_gpu([]):
        case = dataclasses.replace(_case("dense", ()), keeps_layers=True)
        (chunk,) = build_chunks(case, make_config(case, ["core_attn"]))
        layer: Any = chunk.decoder.layers[0]
        own_class = type(layer)
        begin_use = {
            "offloads": lambda: offload_in_graphs(chunk, lambda: None),  # type: ignore[arg-type, return-value]
            "packed": lambda: take_packed_sequences([chunk]),
        }
        orders = list(itertools.permutations(begin_use))
        for begin, end in itertools.product(orders, orders):
            undo = {use: begin_use[use]() for use in begin}
            left = set(undo)
            for use in end:
                layer.cuda_graphs = [MagicMock()]
                (graph,) = layer.cuda_graphs
                for one in undo[use]:
                    one()
                left.remove(use)
                uses = {"offloads": "graph_copies", "packed": "packed"}
                seen = {name for name in begin_use if getattr(layer, uses[name], None)}
                is_own = type(layer) is own_class
                deleted = graph.reset.call_count == 1 and layer.cuda_graphs == []
                found.append((use, left == seen, is_own == (not left), deleted))
    return found


def test_uses_of_a_layer_end_in_any_order() -> None:
    (found,) = run_ranks(1, _uses)
    assert len(found) == 8
    # The graphs of packed sequences are those that it has captured itself.
    assert set(found) == {("offloads", True, True, True), ("packed", True, True, False)}


def test_a_layer_of_a_framework_keeps_what_it_has() -> None:
    (found,) = run_ranks(1, _classes)
    assert found == [
        ("OwnLayer", True, False),
        ("GraphedOwnLayer", True, True),
        ("OwnLayer", True, False),
    ]


@pytest.mark.parametrize("backend", ["cpu", "cpu-lazy"])
@pytest.mark.parametrize("scope", [("attn", "mlp"), ()], ids=["attn mlp", "whole layer"])
@pytest.mark.parametrize("is_stock", [False, True], ids=["", "of a framework"])
def test_captured_layers_compute_what_eager_ones_do(
    scope: tuple[str, ...], backend: str, is_stock: bool
) -> None:
    ((equal, moved, kinds, events),) = run_ranks(1, _compare, scope, backend, is_stock)
    assert all(equal), equal
    assert len(equal) > 6
    assert kinds == {"GraphedTransformerLayer" if is_stock else "GraphOffloadTransformerLayer"}
    # All layers but the last one's, whose backward follows.
    assert [moved[name] for name in ("core_attn", "qkv_linear", *MLP_MODULES)] == [2] * 5
    # Other streams may continue before the graph's own copies are joined to its end.
    assert events == ["go on", "forward ends"] * 3 + ["go on", "backward ends"] * 3


def test_graphs_with_copies_are_replayed_on_one_stream_and_each_tells_when_to_go_on() -> None:
    ((without, on_one_stream, are_theirs, num_events, flushed),) = run_ranks(1, _replay)
    assert without == [{}, {}, {}], "as Transformer Engine does it by itself"
    assert on_one_stream
    assert are_theirs == [True] * 3
    assert num_events == 3
    # Copies delayed by the last layer have no next graph. If no layer is known to be the last,
    # they run at the end of the iteration.
    assert flushed == [3] * 3 + [6] * 3


def _warm_up_with_an_old_transformer_engine(rank: int, world_size: int, port: int) -> str:
    from megatron.core.transformer import cuda_graphs

    from megatron.slipstream.integration import install
    from megatron.slipstream.options import preflight
    from megatron.slipstream.options.fields import OffloadConfig

    case = _case("dense", ())
    initialize(case, rank, world_size, port)
    with _as_on_a_gpu([]), patch.object(cuda_graphs, "_IS_GRAPH_CAPTURING", True):
        install.install(OffloadConfig(offload_backend="cpu"))
        (chunk,) = build_chunks(case, make_config(case, ["core_attn"]))
        facts = dataclasses.replace(preflight.collect(), transformer_engine="2.13.0")
        x = torch.zeros(case.seq_length, case.micro_batch_size, case.hidden_size)
        try:
            with patch.object(preflight, "collect", lambda: facts):
                chunk.decoder.layers[0](x, attention_mask=_mask(x))
        except ValueError as error:
            return str(error)
    return ""


def test_a_capture_names_what_is_too_old_for_it() -> None:
    (message,) = run_ranks(1, _warm_up_with_an_old_transformer_engine)
    assert "transformer_engine 2.13.0" in message
    assert "install transformer_engine 2.14 or newer" in message


def _marked_norms(
    rank: int, world_size: int, port: int, kind: str, scopes: Sequence[tuple[str, ...]]
) -> list[str]:
    """The norms that a layer marks, for each scope."""
    norms, marked = ("attn_norm", "mlp_norm"), []
    initialize(ModelCase(kind), rank, world_size, port)
    with _as_on_a_gpu([]):
        for scope in scopes:
            case = _case(kind, scope)
            (chunk,) = build_chunks(case, make_config(case, norms))
            layer = chunk.decoder.layers[0]
            marked.append(" ".join(n for n in norms if getattr(layer, f"offload_{n}")))
    return marked


@pytest.mark.parametrize(
    "kind, expected",
    [
        (
            "dense",
            {
                (): "attn_norm mlp_norm",
                ("attn",): "",
                ("mlp",): "attn_norm",
                ("attn", "mlp"): "mlp_norm",
            },
        ),
        (
            "moe",
            {("attn",): "", ("moe_router",): "attn_norm", ("attn", "moe_router"): ""},
        ),
    ],
)
def test_norms_whose_input_a_graph_hands_on_stay_in_every_release(
    kind: str, expected: dict[tuple[str, ...], str]
) -> None:
    assert run_ranks(1, _marked_norms, kind, list(expected)) == [list(expected.values())]
