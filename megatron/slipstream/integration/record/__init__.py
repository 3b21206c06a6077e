# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What a run writes: reports, traces, its metadata and its progress."""
