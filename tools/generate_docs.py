# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Write the pages of the documentation that come from the source.

    python tools/generate_docs.py            write them
    python tools/generate_docs.py --check    fail if one is not what would be written

docs/user-guide/options.md has the flags, with field docstrings and defaults; patches.md beside it
has the table of run-time patches. Run this after a change of an option or a patch.
"""

from __future__ import annotations

import argparse
import ast
import itertools
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import NamedTuple

# Found beside this script, installed or not.
sys.path[:0] = [str(Path(__file__).resolve().parent), str(Path(__file__).resolve().parents[1])]

from docs_parts import (  # noqa: E402
    PACKAGE,
    ROOT,
    OptionGroup,
    generated_from,
    option_groups,
    table,
)
from doctor_page import doctor_page  # noqa: E402

from megatron.slipstream import config  # noqa: E402
from megatron.slipstream.patches import table as patch_table  # noqa: E402
from megatron.slipstream.patches.patching import Patch  # noqa: E402

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
        "Offload activations in forward and reload them in backward.",
    ),
    MegatronOption("offload_modules", [], "Modules whose saved activations move; names below."),
    MegatronOption(
        "min_offloaded_tensor_size",
        1048576,
        "Tensors with fewer elements (not bytes) stay on the device.",
    ),
    MegatronOption(
        "activation_offload_fraction",
        1.0,
        "Fraction of the groups of each model chunk that move, 0 to 1. From 0.19 on.",
    ),
    MegatronOption(
        "delta_offload_bytes_across_pp_ranks",
        0,
        "Bytes more that each later pipeline rank keeps on the device. From 0.19 on.",
    ),
    MegatronOption(
        "delay_offload_until_cuda_graph",
        False,
        "With [CUDA graphs of layers](cuda-graphs.md): copy what moves outside of graphs after the "
        "next graph launch. From 0.19 on.",
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
            return accepted_values(inner)
        case ast.Subscript(value=ast.Name(id="Union"), slice=ast.Tuple(elts=[*members, none])):
            assert ast.unparse(none) == "None"
            return ", ".join(accepted_values(member) for member in members)
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


TITLES = {"OffloadConfig": "Slipstream's own options", "EntryOptions": "The training script"}
"""Of groups that are called otherwise here than in ``--help``."""

NOTES = {
    "OffloadConfig": [
        "Flags of `./run train`, fields of `OffloadConfig` for `install()` and `attach()`, and "
        "keys of the file that `SLIPSTREAM_CONFIG` names.",
        "",
    ]
}
"""What a group starts with."""


def own_options(group: OptionGroup) -> list[str]:
    title = TITLES.get(group.cls_name, heading_of(group))
    lines = [f"## {title}", "", *NOTES.get(group.cls_name, [])]
    for field in fields_of(group.cls_name, group.source):
        facts = f"{field.values}; default: {shown(field.default)}."
        lines += [f"### `{flag(field.name)}`", "", field.docstring, "", facts, ""]
    return lines


def heading_of(group: OptionGroup) -> str:
    name = group.title.removeprefix("slipstream ")
    return name[:1].upper() + name[1:]


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
        "A flag `--a-b` and a configuration field `a_b` are the same option. `./run train --help` "
        "lists Slipstream's flags, `./run train --help-all` also Megatron's.",
        "",
        "## Megatron-Core's own options",
        "",
        "These switch offloading on and select what moves.",
        "",
        *table(
            ("flag", "default", "meaning"),
            (
                (f"`{flag(option.name)}`", shown(option.default), option.meaning)
                for option in MEGATRON_OPTIONS
            ),
        ),
        "",
        "The plan also keeps to `fine_grained_offloading_max_inflight_offloads` (0.19): per "
        "module, the number of D2H copies that compute has not waited for.",
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
        "A combination that cannot work is an error at start. It names the option, the reason and "
        "what to set instead; `slipstream doctor -- FLAGS` shows all errors of a command line at "
        "once ([doctor](doctor.md)). No option is turned off silently. What each feature refuses: "
        "[CUDA graphs](cuda-graphs.md#limits), [graphs of chunks](chunk-cuda-graphs.md#limits), "
        "[packed sequences](packed-sequences.md#not-supported), "
        "[dynamic context parallelism](dynamic-context-parallel.md#not-supported); "
        "`cpu_offloading` is refused with offloading. [Compatibility](compatibility.md) shows what "
        "was tested together.",
    ]
    return "\n".join(lines) + "\n"


def issues(numbers: Iterable[int]) -> str:
    url = "https://github.com/NVIDIA/Megatron-LM/issues"
    return ", ".join(f"[#{number}]({url}/{number})" for number in numbers) or "-"


def patch_rows(patches: Iterable[Patch]) -> Iterator[tuple[str, ...]]:
    """Rows of the table; neighbours that are there for one reason share a row."""
    for (reason, releases, upstream), group in itertools.groupby(
        patches, key=lambda patch: (patch.reason, patch.releases, patch.upstream)
    ):
        targets = "<br>".join(f"`{patch.target}`" for patch in group)
        yield targets, reason, releases, issues(upstream)


def patches_page() -> str:
    lines = [
        "# Run-time patches",
        "",
        generated_from("megatron/slipstream/patches/table.py"),
        "",
        "Slipstream replaces these functions of other packages in the running process; their files "
        "do not change. All targets are looked up before the first is replaced: one that a release "
        "has moved, or whose parameters differ, is an error that names it. `uninstall()` undoes "
        "the patches of `install()`. `slipstream doctor` checks the targets; `--json` lists them.",
    ]
    for feature, patches in patch_table.TABLE.items():
        lines += ["", f"## {feature.value}", ""]
        if feature is not ENGINE and set(patches) <= set(patch_table.TABLE[ENGINE]):
            names = ", ".join(f"`{patch.target.rpartition('.')[2]}`" for patch in patches)
            lines += [f"From the first table: {names}."]
            continue
        lines += table(("target", "without it", "releases", "upstream"), patch_rows(patches))
    lines += [
        "",
        "## One object only",
        "",
        *table(
            ("object", "method", "for"),
            (
                ("`TransformerBlock` of a chunk", "`forward`", "chunk graphs: replay"),
                (
                    "`DistributedDataParallel` around it",
                    "`zero_grad_buffer`",
                    "chunk graphs: start of an iteration",
                ),
                (
                    "`RotaryEmbedding` of a chunk",
                    "`forward`, `get_cached_cos_sin`",
                    "capture of a chunk: tables that live as long as its graphs",
                ),
                (
                    "`_comm_manager` of a flex dispatcher",
                    "`_indices_to_multihot`",
                    "`with_sync_free_dispatch(spec)`: a map of fixed size",
                ),
            ),
        ),
        "",
        "Patches for runs without a GPU: "
        "[cpu_only.py](../../megatron/slipstream/integration/cpu_only.py).",
    ]
    return "\n".join(lines) + "\n"


PAGES: Mapping[str, Callable[[], str]] = {
    "options.md": options_page,
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
