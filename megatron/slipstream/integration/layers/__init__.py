# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Settings of the layers of a built model: what each recomputes, and its tiles."""
