# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Detect the installed megatron-core and its features.

Features are detected by a signature or a name; the version is used in messages only. Only the
functions import megatron-core, since without a GPU the shims must be installed first.
"""

from __future__ import annotations

import inspect
from functools import cache
from importlib import metadata

from megatron.slipstream import preflight

TESTED_RELEASES = ("0.17.1", "0.18.2", "0.19.2")
"""The releases of megatron-core that the tests run with."""


def release() -> str:
    """Return the installed megatron-core's name for messages, such as 'megatron-core 0.19.2'."""
    try:
        return f"megatron-core {metadata.version('megatron-core')}"
    except metadata.PackageNotFoundError:
        return "megatron-core of unknown version"


@cache
def has_hybrid_models() -> bool:
    """Whether there is a ``HybridModel`` (from 0.18 on).

    The ``MambaModel`` of 0.17 does not announce a pass to the engine, so it offloads nothing.
    """
    return preflight.is_installed("megatron.core.models.hybrid")


def schedule_frees_before_sent() -> bool:
    """Whether the interleaved schedule may free a stage's output while it is being sent.

    0.17 does; from 0.18 on it waits for the send.
    """
    return not has_hybrid_models()


@cache
def models_pass_their_rank() -> bool:
    """Whether models pass pipeline rank, delta and fraction when a pass begins (from 0.19 on).

    The same change passes a mark the name of its group when the group ends.
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
