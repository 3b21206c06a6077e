# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Packed sequences (THD): documents of any length side by side in buffers of one size."""
