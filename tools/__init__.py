# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tools of the project. A package, so that one of the same name later in the path is not taken."""
