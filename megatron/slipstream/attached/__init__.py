# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Offloading for any PyTorch model. Nothing here imports megatron-core.

``names`` finds sub-modules by pattern, ``forward`` tracks the model's forward passes with hooks,
``inputs`` finds what checkpoints save, ``engine`` detects passes and iterations, and ``handle``
contains the public :func:`attach`.
"""
