# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""CUDA graphs of model chunks, and what those of layers share with them: memory and calls."""
