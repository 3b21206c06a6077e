# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Context parallelism whose size changes per micro-batch: assigns documents to ranks."""
