# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Moving saved activations: the only code that touches streams, events and host staging memory."""
