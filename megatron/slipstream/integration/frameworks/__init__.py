# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""For frameworks around megatron-core: options in their form, and ways to load Slipstream."""
