# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Options and the rules that they must meet; knows neither torch nor megatron-core."""
