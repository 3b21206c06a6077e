# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What offloading costs and saves: ``python -m benchmarks.run --help``."""
