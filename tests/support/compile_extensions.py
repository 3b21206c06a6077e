# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compiles the extensions that tests use.

Otherwise the first test that needs one compiles it, for half a minute, and the other processes soon
wait for its lock. ``.ci/run`` runs it beside lint, and several processes while they collect.
"""

from megatron.core.tensor_parallel import random

from megatron.slipstream.fine_grained_activation_offload.native import native_module

native_module()
random._get_share_storage()
