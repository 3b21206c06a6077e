# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Moves saved activations: the only code that uses streams, events and host staging memory."""
