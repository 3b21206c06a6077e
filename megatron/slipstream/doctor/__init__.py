# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream doctor``: finds causes of failing or slow training on this machine, with fixes.

``collect`` reads facts about the machine once. A check is a function of these facts and names the
failure that it prevents. Checks are grouped by topic in ``versions``, ``variables``, ``gpus``,
``memory`` and ``command``; ``checks`` lists them all. The doctor works without torch and reports
what it could not check.
"""
