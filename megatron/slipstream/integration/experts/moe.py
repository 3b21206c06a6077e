# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Expert layers whose flex dispatcher does not block the host, for models built from a spec.

``install()`` and ``./run train`` do not need them: they patch the dispatcher's class.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from megatron.core.transformer.moe import token_dispatcher
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.slipstream.integration.seam.specs import replace_classes
from megatron.slipstream.patches import table
from megatron.slipstream.patches.multihot_map import indices_to_multihot


class SyncFreeMoELayer(MoELayer):
    """A ``MoELayer`` whose dispatcher converts indices without blocking the host."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        dispatcher: Any = self.token_dispatcher
        if not isinstance(dispatcher, token_dispatcher.MoEFlexTokenDispatcher):
            return
        manager = dispatcher._comm_manager
        if isinstance(manager, token_dispatcher._DeepepManager):
            table.DISPATCH[0].check()
            multihot = partial(indices_to_multihot, num_local_experts=manager.num_local_experts)
            manager._indices_to_multihot = multihot


def with_sync_free_dispatch(spec: Any) -> Any:
    """Return a copy of a layer or block spec that uses :class:`SyncFreeMoELayer`.

    Example:
        spec = with_sync_free_dispatch(get_gpt_decoder_block_spec(config, use_te))
    """
    return replace_classes(spec, {MoELayer: SyncFreeMoELayer})
