# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""All GPU tests and benchmarks, shared out over the GPUs of one machine."""
