# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""CUDA graphs of layers and of whole model chunks."""
