# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How the training loop replays chunks."""

import functools
from collections.abc import Callable
from typing import Any

from megatron.core.utils import get_attr_wrapped_model

from megatron.slipstream.integration.graphs.chunks import close_graphs, replay_chunks
from megatron.slipstream.patches import model_calls


def replays_chunks(train: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``train``: with ``cuda_graph_granularity='chunk'`` it replays the model's chunks."""

    @functools.wraps(train)
    def run(forward_step: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        config = get_attr_wrapped_model(model[0], "config")
        if config.cuda_graph_granularity != "chunk":
            return train(forward_step, model, *arguments, **options)
        if getattr(config, "dynamic_context_parallel", False):
            raise ValueError(
                "cuda_graph_granularity=chunk is not supported with dynamic_context_parallel "
                "because graphs are captured for one context-parallel size; leave one of them out"
            )
        if model_calls.before_first_call is not None:
            model_calls.before_first_call()  # The graphs contain the copies of this engine.
        replay_chunks(model, config.cuda_graph_warmup_steps)
        try:
            return train(forward_step, model, *arguments, **options)
        finally:
            close_graphs()

    return run
