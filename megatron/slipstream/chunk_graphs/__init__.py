# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""One CUDA graph for the forward and one for the backward pass of a whole pipeline model chunk."""
