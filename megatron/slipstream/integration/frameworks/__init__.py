# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What frameworks around megatron-core need: options as they take them, and ways to be loaded."""
