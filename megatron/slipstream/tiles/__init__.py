# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Functions of a sequence, computed tile by tile and again in backward."""
