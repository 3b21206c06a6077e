# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Write docs/user-guide/options.md from megatron/slipstream/config.py.

    python tools/generate_docs.py            write the file
    python tools/generate_docs.py --check    fail if the file is not what would be written

Field docstrings, defaults and the rule tables are the source; whoever changes them runs this.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import sys
from collections.abc import Iterable
from pathlib import Path
from string import Formatter
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from megatron.slipstream import config  # noqa: E402  (found beside this script, installed or not)

TARGET = ROOT / "docs" / "user-guide" / "options.md"


class MegatronOption(NamedTuple):
    """An option of megatron-core in our words, with the default that version 0.19.2 has."""

    name: str
    default: object
    meaning: str


MEGATRON_OPTIONS = (
    MegatronOption(
        "fine_grained_activation_offloading",
        False,
        "Move activations to host memory during forward and back before their backward.",
    ),
    MegatronOption(
        "offload_modules",
        [],
        "The modules whose saved activations move; names below, separated by spaces on the "
        "command line.",
    ),
    MegatronOption(
        "min_offloaded_tensor_size",
        1048576,
        "Tensors with fewer elements stay on the device. Counted in elements, not bytes.",
    ),
    MegatronOption(
        "activation_offload_fraction",
        1.0,
        "The fraction of the groups in each model chunk that move, 0 to 1. From megatron-core 0.19 "
        "on.",
    ),
    MegatronOption(
        "delta_offload_bytes_across_pp_ranks",
        0,
        "How many bytes more each later pipeline rank keeps on the device. Later ranks hold fewer "
        "micro-batches at a time and have memory to spare. From megatron-core 0.19 on.",
    ),
)


class Field(NamedTuple):
    """One field of ``OffloadConfig`` as its source declares it."""

    name: str
    values: str
    default: object
    docstring: str


def config_fields() -> list[Field]:
    """Read the fields of ``OffloadConfig`` with the docstring that follows each of them.

    Raises:
        ValueError: A field has no docstring.
    """
    (cls,) = ast.parse(inspect.getsource(config.OffloadConfig)).body
    assert isinstance(cls, ast.ClassDef)
    fields = []
    for statement, following in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign):
            continue
        match following:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                pass
            case _:
                raise ValueError(f"OffloadConfig.{ast.unparse(statement.target)} has no docstring")
        name = ast.unparse(statement.target)
        fields.append(
            Field(
                name,
                accepted_values(statement.annotation),
                getattr(config.OffloadConfig, name),
                " ".join(docstring.split()),
            )
        )
    return fields


def accepted_values(annotation: ast.expr) -> str:
    match annotation:
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Tuple(elts=choices)):
            return ", ".join(f"`{ast.literal_eval(choice)}`" for choice in choices)
        case ast.Subscript(value=ast.Name(id="Optional"), slice=inner):
            return f"{accepted_values(inner)}, or not set"
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=[*members, none])):
            assert ast.unparse(none) == "None"
            return ", ".join(accepted_values(member) for member in members) + ", or not set"
        case ast.Subscript(value=ast.Name(id="Literal"), slice=ast.Constant(value=choice)):
            return f"`{choice}`"
        case _:
            return f"`{ast.unparse(annotation)}`"


def flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def shown(default: object) -> str:
    if default is None or default == []:
        return "not set"
    return "off" if default is False else f"`{default}`"


def message_with_gaps(message: str) -> str:
    """Show a rule's format string with an ellipsis where the user's value goes."""
    return "".join(
        text + ("" if name is None else "…") for text, name, _, _ in Formatter().parse(message)
    )


def table(head: tuple[str, ...], rows: Iterable[tuple[str, ...]]) -> list[str]:
    lines = [head, ("---",) * len(head), *rows]
    return ["| " + " | ".join(cell.replace("|", r"\|") for cell in line) + " |" for line in lines]


def rules_table(rules: Iterable[config.Rule]) -> list[str]:
    rows = ((f"`{rule.option}`", message_with_gaps(rule.message)) for rule in rules)
    return table(("option", "message"), rows)


def own_option(field: Field) -> list[str]:
    return [
        f"### `{flag(field.name)}`",
        "",
        field.docstring,
        "",
        f"In Python: `OffloadConfig({field.name}=...)`. Values: {field.values}. "
        f"Default: {shown(field.default)}.",
        "",
    ]


def options_page() -> str:
    """Give the whole text of docs/user-guide/options.md."""
    experts = config.MOE_MODULE_NAMES
    lines = [
        "# Options",
        "",
        "<!-- Generated by tools/generate_docs.py from megatron/slipstream/config.py: edit there. "
        "-->",
        "",
        "A flag of the command line and the configuration field of the same name (with `_` for "
        "`-`) mean the same.",
        "",
        "## Megatron-Core's own options",
        "",
        "These switch offloading on and choose what moves. Slipstream adds no second name for "
        "them, so every script and framework that can set them works unchanged.",
        "",
        *table(
            ("flag", "default", "meaning"),
            (
                (f"`{flag(option.name)}`", shown(option.default), option.meaning)
                for option in MEGATRON_OPTIONS
            ),
        ),
        "",
        "### Names for `--offload-modules`",
        "",
        *table(
            ("name", "what moves", "models"),
            (
                (f"`{name}`", text, "with experts" if name in experts else "all")
                for name, text in config.MODULE_NAMES.items()
            ),
        ),
        "",
        "## Slipstream's own options",
        "",
        *(line for field in config_fields() for line in own_option(field)),
        "## What is refused",
        "",
        "A setting that cannot work is refused at start with one of these messages (`…` stands "
        "for your value). No option is ever turned off in silence.",
        "",
        *rules_table(config.RULES),
        "",
        "While `fine_grained_activation_offloading` is on:",
        "",
        *rules_table(config.MODEL_RULES),
        "",
        "A name in `offload_modules` that Megatron-Core does not mark is refused with the nearest "
        "name that it does.",
    ]
    return "\n".join(lines) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only, and write nothing")
    page = options_page()
    if not parser.parse_args().check:
        TARGET.write_text(page)
        return 0
    if TARGET.exists() and TARGET.read_text() == page:
        return 0
    print(
        f"{TARGET.relative_to(ROOT)} is not what config.py says; "
        "run ./run python tools/generate_docs.py",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
