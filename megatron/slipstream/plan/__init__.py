# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Deciding what moves and when: pure data and pure functions, no GPU and no megatron-core."""
