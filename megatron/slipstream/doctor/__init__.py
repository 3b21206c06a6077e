# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream doctor``: finds causes of failing or slow training on this machine, with fixes.

``facts`` reads the machine once; each function in ``checks`` judges these facts, and names the
failure that it prevents. The doctor works without torch and reports what it could not check.
"""
