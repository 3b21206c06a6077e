# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Flags and limits of packed training."""

from __future__ import annotations

import argparse
import dataclasses
from types import SimpleNamespace
from typing import Any, get_type_hints

import pytest

from megatron.slipstream.options.fields import PackingOptions
from megatron.slipstream.options.packing import check_corpora
from megatron.slipstream.options.rules import require
from megatron.slipstream.packed_sequences.packing import PackLimits, pack_limits


def arguments(**options: Any) -> SimpleNamespace:
    """Parsed arguments of a packed run; only those that the rules need on every release."""
    given: dict[str, Any] = {
        **dataclasses.asdict(PackingOptions(sequence_packing="greedy")),
        "seq_length": 128,
        "micro_batch_size": 1,
        "context_parallel_size": 1,
    }
    return SimpleNamespace(**given | options)


@pytest.mark.parametrize(
    "packing, blends, refused",
    [
        ("balanced", [["a"], ["b", "c"]], True),
        ("balanced", [["a"], ["b"]], False),
        ("balanced", [], False),
        ("greedy", [["a", "b"]], False),
        (None, [["a", "b"]], False),
    ],
)
def test_packs_of_several_corpora_cannot_be_balanced(
    packing: Any, blends: list[list[str]], refused: bool
) -> None:
    args = arguments(sequence_packing=packing)
    if refused:
        with pytest.raises(ValueError, match="data_path with 2 corpora.*; set data_path"):
            require(check_corpora(args, blends))
    else:
        require(check_corpora(args, blends))


@pytest.mark.parametrize(
    "options, limits",
    [
        ({}, PackLimits(128, 2)),
        ({"seq_length": 100}, PackLimits(100, 2)),
        ({"thd_max_packed_sequences": 9}, PackLimits(128, 9)),
        ({"context_parallel_size": 2}, PackLimits(128, 2, alignment=4)),
    ],
)
def test_limits_are_those_of_all_context_parallel_ranks(
    options: dict[str, Any], limits: PackLimits
) -> None:
    assert pack_limits(arguments(**options)) == limits


@pytest.mark.releases
def test_flags_are_read_as_megatron_makes_them_of_the_options() -> None:
    from megatron.training.argument_utils import ArgumentGroupFactory

    types = get_type_hints(PackingOptions)
    for field in dataclasses.fields(PackingOptions):
        field.type = types[field.name]
    parser = argparse.ArgumentParser()
    ArgumentGroupFactory(PackingOptions).build_group(parser, "packed sequences")
    flags = "--sequence-packing balanced --thd-max-packed-sequences 8 --thd-max-tokens 256".split()
    assert PackingOptions(**vars(parser.parse_args(flags))) == PackingOptions("balanced", 8, 256)
    assert PackingOptions(**vars(parser.parse_args([]))) == PackingOptions()
