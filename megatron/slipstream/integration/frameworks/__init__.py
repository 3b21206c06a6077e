# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""For frameworks built on megatron-core: options in their format, and ways to load Slipstream."""
