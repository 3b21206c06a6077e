# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Turns this repository into a series of commits on a branch of Megatron-LM."""
