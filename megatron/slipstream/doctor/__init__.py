# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream doctor``: finds causes of failing or slow training on this machine, with cures.

``collect`` reads the machine once. A check is a function of these facts and names the failure that
it prevents. Checks are grouped by topic in ``versions``, ``variables``, ``gpus``, ``memory`` and
``command``; ``checks`` lists all. The doctor works without torch and says what it could not check.
"""
