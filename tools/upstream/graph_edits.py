# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Edits of Megatron's layers for CUDA graphs, which the plugin makes by classes of its own."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from pathlib import Path

from tools.upstream.anchors import Edit, decorated, in_class
from tools.upstream.modules import place_of

_CALLS = str(place_of("patches.graph_calls"))
_PACKED_CALLS = str(place_of("patches.layer_capture"))
_MODULE = "megatron/core/transformer/module.py"
_LAYER = "megatron/core/transformer/transformer_layer.py"
_MAMBA = "megatron/core/ssm/mamba_layer.py"
_CLASS = "GraphableMegatronModule"

_ATTRIBUTE = '''\
graph_copies = None
"""Notifies the offloading engine of captures and replays; None: no copies are in the graphs."""
'''
_PACKED = '''\
packed = None
"""The layers of its chunk whose graphs take packed sequences; None if they do not."""
'''


def layer_graph_edits(root: Path) -> list[Edit]:
    """Return the edits that make layers notify the engine of their graphs."""
    del root
    lost, uncounted = (
        "copies would not be part of the graphs",
        "the engine would not count what replays move",
    )
    methods = (
        (_MODULE, f"{_CLASS}._te_cuda_graph_capture", "captures_copies", lost),
        (
            *(_MODULE, f"{_CLASS}._get_te_cuda_graph_replay_args", "replays_beside_copies"),
            "work after a graph would wait for its copies",
        ),
        (
            *(_MODULE, f"{_CLASS}._should_call_te_cudagraph", "replays_with_backward"),
            "a pass without gradients would replay graphs that a backward needs",
        ),
        (_LAYER, "TransformerLayer._te_cuda_graph_capture", "captures_copies", lost),
        (_LAYER, "TransformerLayer._te_cuda_graph_replay", "notes_replay", uncounted),
        (_MAMBA, "MambaLayer._te_cuda_graph_replay", "notes_replay", uncounted),
    )
    return [_attribute(_ATTRIBUTE), *_decorated(methods, _CALLS)]


def packed_graph_edits(root: Path) -> list[Edit]:
    """Return the edits that make graphs of layers take packed sequences."""
    del root
    no_offsets, no_mask = (
        "graphs would have no sequence offsets",
        "experts in a graph would get no padding mask",
    )
    methods = (
        (
            *(_MODULE, f"{_CLASS}._should_call_te_cudagraph", "needs_free_graphs"),
            "a micro-batch would use the graphs of one in flight",
        ),
        (
            *(_LAYER, "TransformerLayer.forward", "learns_arguments"),
            "what layers are called with would be unknown",
        ),
        (_LAYER, "TransformerLayer._forward_mlp", "keeps_padding_mask", no_mask),
        (_LAYER, "MoETransformerLayer._forward_mlp", "keeps_padding_mask", no_mask),
        (_LAYER, "TransformerLayer._te_cuda_graph_capture", "captures_packed", no_offsets),
        (_LAYER, "TransformerLayer._te_cuda_graph_replay", "replays_packed", no_offsets),
        (
            *(_LAYER, "TransformerLayer._get_te_cuda_graph_replay_args", "passes_static_inputs"),
            no_offsets,
        ),
    )
    return [_attribute(_PACKED), *_decorated(methods, _PACKED_CALLS, is_inner=True)]


def _attribute(code: str) -> Edit:
    why = "the layers that follow would lack what they call"
    return Edit(_MODULE, _CLASS, in_class(code), why)


def _decorated(
    methods: Iterable[tuple[str, str, str, str]], module: str, is_inner: bool = False
) -> Iterator[Edit]:
    for path, name, decorator, why in methods:
        yield decorated(path, name, decorator, module, why, is_inner)
