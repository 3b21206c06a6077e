# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""``slipstream doctor``: what is right on this machine, what will go wrong, and what to do.

``collect`` reads the machine, once. A check is a function of these facts alone; checks lie by topic
in ``versions``, ``variables``, ``gpus``, ``nodes``, ``memory`` and ``command``, and ``checks`` has
them all. ``show`` draws what they say. Works without torch, and says what it could not look at.
"""
