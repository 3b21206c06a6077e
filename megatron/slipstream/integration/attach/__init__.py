# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Offloading for any PyTorch model. Nothing here imports megatron-core.

``names`` finds sub-modules by pattern, ``forward`` follows the model's forward passes by hooks,
``inputs`` finds what checkpointing keeps, ``engine`` detects passes and iterations, and
``handle`` has the public :func:`attach`.
"""
