# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Which megatron-core is installed, and what it has.

What a release has is asked of the release itself, a signature or a name; its version is used in
messages only. megatron-core is imported by the functions, not by this module: on a machine without
a GPU the stand-ins come first.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import metadata

from megatron.slipstream import preflight

TESTED_RELEASES = ("0.17.1", "0.18.2", "0.19.2")
"""The releases of megatron-core that the tests run with."""


def release() -> str:
    """The installed megatron-core for messages, such as 'megatron-core 0.19.2'."""
    try:
        return f"megatron-core {metadata.version('megatron-core')}"
    except metadata.PackageNotFoundError:
        return "megatron-core of unknown version"


@cache
def has_hybrid_models() -> bool:
    """Whether there is a ``HybridModel`` (from 0.18 on).

    The ``MambaModel`` of 0.17 does not tell the engine when a pass begins, so nothing of it moves.
    """
    return preflight.is_installed("megatron.core.models.hybrid")


def schedule_frees_before_sent() -> bool:
    """Whether the interleaved schedule may free a stage's output while it is being sent.

    0.17 does; waiting for the send came with 0.18.
    """
    return not has_hybrid_models()


@cache
def models_pass_their_rank() -> bool:
    """Whether models pass pipeline rank, delta and fraction when a pass begins (from 0.19 on).

    With the same change a mark began to learn the name of its group when the group ends.
    """
    from megatron.core.pipeline_parallel import fine_grained_activation_offload

    interface = fine_grained_activation_offload.FineGrainedActivationOffloadingInterface
    return "pp_rank" in inspect.signature(interface.init_chunk_handler).parameters


def has_group_end(name: str) -> bool:
    """Whether ``name`` is the function that ends a group (its name changed in 0.19)."""
    from megatron.core.pipeline_parallel import fine_grained_activation_offload

    return hasattr(fine_grained_activation_offload, name)


def has_gpt_builder() -> bool:
    """Whether ``megatron.training`` builds GPT models from a configuration (from 0.19 on)."""
    from megatron.training import argument_utils

    return hasattr(argument_utils, "gpt_config_from_args")


def pretrain_parses() -> bool:
    """Whether ``pretrain`` parses and validates the command line itself (up to 0.17)."""
    from megatron.training import argument_utils

    return not hasattr(argument_utils, "pretrain_cfg_container_from_args")
