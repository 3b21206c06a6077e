# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Experts without synchronization with the host."""
