# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Where megatron-core calls the engine: the manager of each model, and what differs by release."""
