# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream doctor``: what on this machine would make a training fail, or slow, and what to do.

``collect`` reads the machine, once. A check is a function of these facts and names the failure that
it prevents; checks lie by topic in ``versions``, ``variables``, ``gpus``, ``memory`` and
``command``, and ``checks`` has them all. Works without torch, and says what it could not check.
"""
