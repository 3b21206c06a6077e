# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What a model's configuration says about the passes through its chunks."""

from __future__ import annotations

from dataclasses import replace
from typing import Any, NamedTuple, Optional

from megatron.slipstream.plan.candidates import PolicyOptions


class PassPolicy(NamedTuple):
    """The model's options for a pass. A tuple, since one is made and compared in each pass.

    No field has a default, so a caller that leaves one out fails instead of resetting it.
    """

    min_numel: int
    """Tensors whose memory has fewer elements stay on the device."""
    activation_offload_fraction: float
    delta_offload_bytes_across_pp_ranks: int
    max_inflight_offloads: Optional[int]

    @classmethod
    def of(cls, config: Any) -> PassPolicy:
        """Return the policy of a ``TransformerConfig``, or of an object with its option names."""
        return cls(
            min_numel=config.min_offloaded_tensor_size,
            # megatron-core 0.18 has neither of the next two.
            activation_offload_fraction=getattr(config, "activation_offload_fraction", 1.0),
            delta_offload_bytes_across_pp_ranks=getattr(
                config, "delta_offload_bytes_across_pp_ranks", 0
            ),
            max_inflight_offloads=config.fine_grained_offloading_max_inflight_offloads,
        )

    def applied_to(self, options: PolicyOptions) -> PolicyOptions:
        """Return planning options with those of the model."""
        return replace(
            options,
            activation_offload_fraction=self.activation_offload_fraction,
            delta_offload_bytes_across_pp_ranks=self.delta_offload_bytes_across_pp_ranks,
            max_inflight_offloads=self.max_inflight_offloads,
        )
