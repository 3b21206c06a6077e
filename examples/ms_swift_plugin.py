# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""For ms-swift: ``--external_plugins examples/ms_swift_plugin.py``."""

import megatron.slipstream.integration.frameworks.on_import  # noqa: F401
