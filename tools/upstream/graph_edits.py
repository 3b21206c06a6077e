# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Edits of Megatron's layers for CUDA graphs, which the plugin makes by classes of its own."""

from __future__ import annotations

from pathlib import Path

from tools.upstream.anchors import Edit, at_start, decorate, in_class
from tools.upstream.modules import place_of

_CALLS = str(place_of("patches.graph_calls"))
_MODULE = "megatron/core/transformer/module.py"
_LAYER = "megatron/core/transformer/transformer_layer.py"
_MAMBA = "megatron/core/ssm/mamba_layer.py"

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
    methods = (
        (_MODULE, "GraphableMegatronModule._te_cuda_graph_capture", "captures_copies"),
        (
            *(_MODULE, "GraphableMegatronModule._get_te_cuda_graph_replay_args"),
            "replays_beside_copies",
        ),
        (_LAYER, "TransformerLayer._te_cuda_graph_capture", "captures_copies"),
        (_LAYER, "TransformerLayer._te_cuda_graph_replay", "notes_replay"),
        (_MAMBA, "MambaLayer._te_cuda_graph_replay", "notes_replay"),
    )
    why = {
        "captures_copies": "copies would not be part of the graphs",
        "replays_beside_copies": "work after a graph would wait for its copies",
        "notes_replay": "the engine would not count what replays move",
    }
    return [
        Edit(
            _MODULE,
            "GraphableMegatronModule",
            in_class(_ATTRIBUTE),
            "the layers that follow would lack what they call",
        ),
        *(
            Edit(path, name, decorate(decorator), why[decorator], ((_CALLS, decorator),))
            for path, name, decorator in methods
        ),
        Edit(
            *(_MODULE, "GraphableMegatronModule._should_call_te_cudagraph"),
            at_start(_WITH_BACKWARD),
            "a pass without gradients would replay graphs that a backward needs",
        ),
    ]
