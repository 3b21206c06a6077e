# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Lets the marks at the ends of groups learn the names of their groups in forward.

megatron-core 0.17 and 0.18 tell a mark the name in backward only, so an engine has to guess which
of the open groups ends.
"""

from __future__ import annotations

from typing import Any

import torch
from megatron.core.pipeline_parallel import fine_grained_activation_offload as mcore_offload

from megatron.slipstream.fine_grained_activation_offload.markers import CommitMark, offload_group


class CommitByName:
    """Replaces ``FineGrainedOffloadingGroupCommitFunction``, which ends a group.

    Args:
        original: megatron-core's autograd function.
    """

    def __init__(self, original: Any) -> None:
        self._original = original

    def apply(self, tensor: torch.Tensor, mark: Any, name: str, *rest: Any) -> torch.Tensor:
        """As megatron-core calls it; ``rest`` says what to release and whether to delay."""
        if not isinstance(mark, CommitMark):  # of megatron-core's own engine
            result: torch.Tensor = self._original.apply(tensor, mark, name, *rest)
            return result
        return offload_group(mcore_offload.PipelineOffloadManager.OFFLOAD_MGR, name).commit(tensor)
