# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What the training loop captures as CUDA graphs beside single layers."""

import contextlib
import functools
from collections.abc import Callable
from typing import Any, Optional

from megatron.core.utils import get_attr_wrapped_model

from megatron.slipstream.context_parallel.limits import RankLimits, rank_limits
from megatron.slipstream.integration.graphs.chunks import close_graphs, replay_chunks
from megatron.slipstream.integration.graphs.packed_layers import pack_layers  # since packed_layers
from megatron.slipstream.patches import model_calls


def captures_model(train: Callable[..., Any]) -> Callable[..., Any]:
    """Decorate ``train``: graphs are captured as the model's configuration says.

    With ``cuda_graph_granularity='chunk'`` they are those of whole chunks.
    With ``sequence_packing``, graphs of layers take packed sequences.  # since packed_layers
    """

    @functools.wraps(train)
    def run(forward_step: Any, model: Any, *arguments: Any, **options: Any) -> Any:
        config = get_attr_wrapped_model(model[0], "config")
        with contextlib.ExitStack() as undo:
            if config.cuda_graph_granularity == "chunk":
                if model_calls.before_first_call is not None:
                    model_calls.before_first_call()  # The graphs contain the copies of this engine.
                undo.callback(close_graphs)
                replay_chunks(model, config.cuda_graph_warmup_steps, limits=_limits_of(config))
            elif _packs(config):  # since packed_layers
                for chunk in model:
                    undo.callback(pack_layers(chunk, _limits_of(config)).close)
            return train(forward_step, model, *arguments, **options)

    return run


def _packs(config: Any) -> bool:  # since packed_layers
    """Whether graphs of layers take packed sequences."""
    impl, packing = config.cuda_graph_impl, config.sequence_packing
    return impl == "transformer_engine" and packing is not None


def _limits_of(config: Any) -> Optional[RankLimits]:
    """Return the ranks that share micro-batches of changing sizes, or None."""
    if not config.dynamic_context_parallel:
        return None
    from megatron.training import get_args  # It imports the training loop, which imports this.

    return rank_limits(get_args())
