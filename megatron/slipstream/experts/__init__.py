# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Experts whose token counts stay on the device."""
