# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Write the pages of the documentation that come from the source.

    python tools/generate_docs.py            write them
    python tools/generate_docs.py --check    fail if one is not what would be written

docs/user-guide/options.md has the flags: field docstrings, defaults and the rule tables.
docs/user-guide/patches.md has the table of run-time patches. compatibility.md is made by
compatibility_page.py, messages.md by messages_page.py, and of doctor.md the part with the findings
by doctor_page.py.
Whoever changes an option, a rule, an error or a warning runs this.
"""

from __future__ import annotations

import argparse
import ast
import sys
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import NamedTuple

# Found beside this script, installed or not.
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from compatibility_page import compatibility_page  # noqa: E402
from docs_parts import (  # noqa: E402
    PACKAGE,
    ROOT,
    OptionGroup,
    generated_from,
    message_with_gaps,
    option_groups,
    table,
)
from doctor_page import doctor_page  # noqa: E402
from messages_page import messages_page  # noqa: E402

from megatron.slipstream import config  # noqa: E402
from megatron.slipstream.patches import table as patch_table  # noqa: E402

ENGINE = patch_table.Feature.ENGINE
USER_GUIDE = ROOT / "docs" / "user-guide"


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
    MegatronOption(
        "delay_offload_until_cuda_graph",
        False,
        "With [CUDA graphs of layers](cuda-graphs.md): what moves outside of graphs is copied once "
        "the next graph has been launched. From megatron-core 0.19 on.",
    ),
)


class Field(NamedTuple):
    """One field of a class of options as its source declares it."""

    name: str
    values: str
    default: object
    docstring: str


def fields_of(cls_name: str, source: str) -> list[Field]:
    """Read the fields of a data class with the docstring that follows each of them.

    Args:
        cls_name: The class.
        source: Its file, relative to the package. It is not imported.

    Raises:
        ValueError: A field has no docstring.
    """
    tree = ast.parse((PACKAGE / source).read_text(encoding="utf-8"))
    (cls,) = (n for n in tree.body if isinstance(n, ast.ClassDef) and n.name == cls_name)
    fields = []
    for statement, following in zip(cls.body, [*cls.body[1:], None], strict=True):
        if not isinstance(statement, ast.AnnAssign):
            continue
        name = ast.unparse(statement.target)
        match following:
            case ast.Expr(value=ast.Constant(value=str(docstring))):
                values, default = accepted_values(statement.annotation), default_of(statement)
                fields.append(Field(name, values, default, " ".join(docstring.split())))
            case _:
                raise ValueError(f"{cls_name}.{name} has no docstring")
    return fields


def default_of(statement: ast.AnnAssign) -> object:
    match statement.value:
        case ast.Call(func=ast.Name(id="field"), keywords=keywords):
            (default,) = (keyword.value for keyword in keywords if keyword.arg == "default")
            return ast.literal_eval(default)
        case ast.expr():
            return ast.literal_eval(statement.value)
    raise ValueError(f"{ast.unparse(statement)} has no default")


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


def rules_table(rules: Iterable[config.Rule]) -> list[str]:
    rows = ((f"`{rule.option}`", message_with_gaps(rule.message)) for rule in rules)
    return table(("option", "message"), rows)


TITLES = {
    "OffloadConfig": ("Slipstream's own options", "and settings for `install()` and `attach()`"),
    "EntryOptions": ("The training script", "beside Megatron's"),
}
"""Of groups that are called otherwise here than in ``--help``, and what else to say of them."""


def own_options(group: OptionGroup) -> list[str]:
    title, more = TITLES.get(group.cls_name, (heading_of(group), ""))
    lines = [f"## {title}", "", f"Flags of `./run train`{', ' if more else ''}{more}.", ""]
    for field in fields_of(group.cls_name, group.source):
        facts = f"Values: {field.values}. Default: {shown(field.default)}."
        if group.cls_name == "OffloadConfig":
            facts = f"In Python: `OffloadConfig({field.name}=...)`. {facts}"
        lines += [f"### `{flag(field.name)}`", "", field.docstring, "", facts, ""]
    return lines


def heading_of(group: OptionGroup) -> str:
    name = group.title.removeprefix("slipstream ")
    return name[:1].upper() + name[1:]


def rules_of_rooms() -> list[str]:
    lines = []
    for group in option_groups():
        if group.cls_name != "OffloadConfig" and group.rules:
            lines += ["", f"{heading_of(group)}:", "", *rules_table(group.rules)]
    return lines


WITH_A_NORM = {
    "attn_norm": "with MLA; in others Transformer Engine has the norm in `qkv_linear`",
    "mlp_norm": "with experts; in dense layers Transformer Engine has the norm in the MLP",
}
"""Norms that a linear layer follows are no modules of their own there."""


def models_with(module: str) -> str:
    if module in config.MOE_MODULE_NAMES:
        return "with experts"
    return WITH_A_NORM.get(module, "all")


def options_page() -> str:
    """Give the whole text of docs/user-guide/options.md."""
    lines = [
        "# Options",
        "",
        generated_from("config.py, the options.py of each room and integration/arguments.py"),
        "",
        "A flag of the command line and the configuration field of the same name (with `_` for "
        "`-`) mean the same. `./run train --help` shows Slipstream's, `./run train --help-all` all "
        "of Megatron's flags beside them. A file that `SLIPSTREAM_CONFIG` names sets Slipstream's "
        "too, in [training frameworks](frameworks/README.md) and elsewhere.",
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
            ((f"`{name}`", text, models_with(name)) for name, text in config.MODULE_NAMES.items()),
        ),
        "",
        *(line for group in option_groups() for line in own_options(group)),
        "## What is refused",
        "",
        "A setting that cannot work is refused at start with one of these messages (`…` stands "
        "for your value). No option is ever turned off in silence. "
        "[Compatibility](compatibility.md) shows what goes together.",
        "",
        *rules_table(config.RULES),
        "",
        "While `fine_grained_activation_offloading` is on:",
        "",
        *rules_table(config.MODEL_RULES),
        "",
        "A name in `offload_modules` that Megatron-Core does not mark is refused with the nearest "
        "name that it does.",
        *rules_of_rooms(),
    ]
    return "\n".join(lines) + "\n"


def issues(numbers: Iterable[int]) -> str:
    url = "https://github.com/NVIDIA/Megatron-LM/issues"
    return ", ".join(f"[#{number}]({url}/{number})" for number in numbers) or "-"


def patches_page() -> str:
    lines = [
        "# Run-time patches",
        "",
        generated_from("megatron/slipstream/patches/table.py"),
        "",
        "Slipstream replaces these functions of other packages in the running process. Their files "
        "on disk stay as they are. All targets are looked up before the first is replaced: one "
        "that a release has moved, or given other parameters, ends `install()` with an error that "
        "names it. `uninstall()` undoes what `install()` has patched. `slipstream doctor` checks "
        "the targets on your machine, and lists them with `--json`.",
    ]
    for feature, patches in patch_table.TABLE.items():
        first = feature is patch_table.Feature.ENGINE
        seen = {patch for patch in patches if not first and patch in patch_table.TABLE[ENGINE]}
        if seen == set(patches):
            lines += ["", f"## {feature.value}", "", "Some of those of `install()`:", ""]
            lines += [f"- `{patch.target}`" for patch in patches]
            continue
        lines += ["", f"## {feature.value}", ""]
        lines += table(
            ("target", "what would go wrong without", "releases", "upstream"),
            (
                (f"`{patch.target}`", patch.reason, patch.releases, issues(patch.upstream))
                for patch in patches
            ),
        )
    lines += [
        "",
        "## One object only",
        "",
        *table(
            ("object", "method", "for"),
            (
                ("`TransformerBlock` of a chunk", "`forward`", "chunk graphs: it replays"),
                (
                    "`DistributedDataParallel` around it",
                    "`zero_grad_buffer`",
                    "chunk graphs: where an iteration begins",
                ),
                (
                    "`RotaryEmbedding` of a chunk",
                    "`forward`, `get_cached_cos_sin`",
                    "while a chunk is captured: tables that last as long as its graphs",
                ),
                (
                    "`_comm_manager` of a flex dispatcher",
                    "`_indices_to_multihot`",
                    "`with_sync_free_dispatch(spec)`: a map of fixed size",
                ),
            ),
        ),
        "",
        "Without a GPU, tests and `./run train` replace more, which "
        "[cpu_only.py](../../megatron/slipstream/integration/cpu_only.py) lists.",
    ]
    return "\n".join(lines) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "options.md": options_page,
    "compatibility.md": compatibility_page,
    "messages.md": messages_page,
    "doctor.md": doctor_page,
    "patches.md": patches_page,
}
"""What writes each page of docs/user-guide."""


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--check", action="store_true", help="compare only, and write nothing")
    is_check = parser.parse_args().check
    stale = []
    for name, page in PAGES.items():
        path, text = USER_GUIDE / name, page()
        if not is_check:
            path.write_text(text, encoding="utf-8")
        elif not path.exists() or path.read_text(encoding="utf-8") != text:
            stale.append(str(path.relative_to(ROOT)))
    if not stale:
        return 0
    print(
        f"{', '.join(stale)}: not what the source says; run ./run python tools/generate_docs.py",
        file=sys.stderr,
    )
    return 1


if __name__ == "__main__":
    sys.exit(main())
