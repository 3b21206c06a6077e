# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Stand-ins that let Megatron train on CPUs."""
