# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Everything that touches megatron-core or megatron.training."""
