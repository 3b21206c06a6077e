# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Decides what to offload and when: pure data and functions, without a GPU or megatron-core."""
