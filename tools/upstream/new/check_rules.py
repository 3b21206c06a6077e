# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How rules are checked where the options are those of one object."""

from collections.abc import Iterable
from typing import Any

from megatron.slipstream.options.rules import Finding, Rule


def check_rules(rules: Iterable[Rule], options: Any) -> list[Finding]:
    """Return a finding for each violated rule.

    Args:
        rules: The requirements.
        options: Has the options as attributes.
    """
    return [
        rule.found(**vars(options))
        for rule in rules
        if rule.when(options) and not rule.requires(options)
    ]
