# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The ``plan`` sub-command: its options, the model that they name, and its output."""
