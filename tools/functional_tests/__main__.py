# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

import sys

from tools.functional_tests.command import main

sys.exit(main())
