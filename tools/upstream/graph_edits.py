# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Edits of Megatron's layers for CUDA graphs, which the plugin makes by classes of its own."""

from __future__ import annotations

from pathlib import Path

from tools.upstream.anchors import Edit, at_start, decorated, in_class
from tools.upstream.modules import place_of

_CALLS = str(place_of("patches.graph_calls"))
_MODULE = "megatron/core/transformer/module.py"
_LAYER = "megatron/core/transformer/transformer_layer.py"
_MAMBA = "megatron/core/ssm/mamba_layer.py"
_CLASS = "GraphableMegatronModule"

_ATTRIBUTE = '''\
graph_copies = None
"""Notifies the offloading engine of captures and replays; None: no copies are in the graphs."""
'''
_WITH_BACKWARD = """\
if self.graph_copies is not None and self.cuda_graphs and not torch.is_grad_enabled():
    return False  # A pass without backward would use the graphs of one in flight.

"""


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
        (_LAYER, "TransformerLayer._te_cuda_graph_capture", "captures_copies", lost),
        (_LAYER, "TransformerLayer._te_cuda_graph_replay", "notes_replay", uncounted),
        (_MAMBA, "MambaLayer._te_cuda_graph_replay", "notes_replay", uncounted),
    )
    return [
        Edit(
            *(_MODULE, _CLASS, in_class(_ATTRIBUTE)),
            "the layers that follow would lack what they call",
        ),
        *(decorated(*place, decorator, _CALLS, why) for *place, decorator, why in methods),
        Edit(
            *(_MODULE, f"{_CLASS}._should_call_te_cudagraph", at_start(_WITH_BACKWARD)),
            "a pass without gradients would replay graphs that a backward needs",
        ),
    ]
