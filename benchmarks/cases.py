# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""All cases, and how the command chooses among them and their sets of modules."""

from __future__ import annotations

import difflib
from collections.abc import Sequence

from benchmarks.case import Case, Variant
from benchmarks.engine_cases import ENGINE_CASES
from benchmarks.graph_cases import GRAPH_CASES

CASES: tuple[Case, ...] = (*ENGINE_CASES, *GRAPH_CASES)


def find_case(name: str) -> Case:
    """Return the case called ``name``.

    Raises:
        ValueError: There is none; the message names the nearest.
    """
    cases = {case.name: case for case in CASES}
    if name in cases:
        return cases[name]
    near = difflib.get_close_matches(name, cases, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}? " if near else ""
    raise ValueError(f"--case {name} is not a case; {hint}Cases: {', '.join(cases)}")


def select_variants(case: Case, chosen: Sequence[str]) -> tuple[Variant, ...]:
    """Return the case's variants for these sets of modules, in the order given; all if none are.

    Args:
        case: The case.
        chosen: Sets such as 'core_attn+attn_proj', with commas or pluses. 'all' is the case's last
            variant. Sets that the case does not list are created.

    Raises:
        ValueError: A name is not a module.
    """
    # Imported here, so that importing this file does not need megatron.slipstream.
    from megatron.slipstream.options.model import check_module_names
    from megatron.slipstream.options.rules import require

    if not chosen:
        return case.variants
    by_name = {variant.name: variant for variant in case.variants}
    known = {frozenset(variant.modules): variant for variant in case.variants}
    variants = []
    for text in chosen:
        if text in by_name:
            variants.append(by_name[text])
            continue
        names = tuple(filter(None, text.replace(",", "+").split("+")))
        if names == ("all",):
            variants.append(case.variants[-1])
            continue
        if frozenset(names) not in known:
            require(check_module_names(names))
        variants.append(known.get(frozenset(names), Variant(names)))
    return tuple(variants)
