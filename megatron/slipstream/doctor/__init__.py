# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream doctor``: finds causes of failing or slow training on this machine, with fixes."""
