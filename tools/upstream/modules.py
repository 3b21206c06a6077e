# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Where modules and tests of this repository land in Megatron-LM, and their text there."""

from __future__ import annotations

import ast
import itertools
import re
from collections.abc import Iterable, Iterator
from functools import cache
from pathlib import Path
from typing import NamedTuple, Optional

ROOT = Path(__file__).resolve().parents[2]
NEW_TEXT = Path(__file__).with_name("new")
"""Files that only exist there."""

PACKAGE = "megatron.slipstream"
PIPELINE = "megatron.core.pipeline_parallel"
ENGINE = f"{PIPELINE}.offload_engine"
EXPERTS = "megatron.core.transformer.moe.sync_free"
CHUNK_GRAPHS = f"{PIPELINE}.chunk_graphs"
PACKED = "megatron.core.datasets.packed"
PACKED_TRAINING = "megatron.training.packed_sequences"
GRAPH_TRAINING = "megatron.training.captured_models"
DYNAMIC_TRAINING = "megatron.training.dynamic_context_parallel"
TESTS = "tests/unit_tests/pipeline_parallel"
SUPPORT = f"{TESTS}/offload_support"
NEW_MODULES = {"captured_models.py": GRAPH_TRAINING}
"""Files of ``new`` that are not part of the engine, and their names there."""
HEAD = (
    "# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0."
)
HEAD_THERE = "# Copyright (c) 2026, NVIDIA CORPORATION. All rights reserved."

ENGINE_FOLDERS = {"plan": f"{PIPELINE}.offload_plan", "fine_grained_activation_offload": ENGINE}
FOLDERS = {
    **ENGINE_FOLDERS,
    "integration.budget": f"{ENGINE}.budget",
    "experts": EXPERTS,
    "packed_sequences": PACKED,
    "context_parallel": "megatron.core.datasets.dynamic_context_parallel",
    "graphs": CHUNK_GRAPHS,
}
"""Packages that move as a whole, and their names there."""
MODULES = {
    "estimate.schedules": f"{PIPELINE}.offload_plan.schedules",
    "integration.graphs.chunks": f"{CHUNK_GRAPHS}.model_chunks",
    "integration.graphs.cp_sizes": f"{CHUNK_GRAPHS}.cp_sizes",
    "integration.graphs.goals": f"{ENGINE}.graph_goals",
    "integration.graphs.layer_copies": f"{ENGINE}.layer_copies",
    "integration.graphs.packed_layers": f"{CHUNK_GRAPHS}.packed_layers",
    "integration.graphs.quantized_weights": f"{CHUNK_GRAPHS}.quantized_weights",
    "integration.graphs.rotary_tables": f"{CHUNK_GRAPHS}.rotary_tables",
    "integration.graphs.schedules": f"{CHUNK_GRAPHS}.num_slots",
    "integration.experts.sync_free_experts": f"{EXPERTS}.layers",
    "integration.layers.layer_boundaries": f"{ENGINE}.budget.layer_boundaries",
    "integration.layers.layer_parts": f"{ENGINE}.budget.layer_parts",
    "integration.layers.layer_settings": f"{ENGINE}.budget.layer_settings",
    "integration.packed.batch_group": "megatron.core.transformer.batch_group",
    "integration.packed.context_parallel_groups": "megatron.core.context_parallel_groups",
    "integration.packed.dynamic_batches": DYNAMIC_TRAINING,
    "integration.packed.packed_sequences": PACKED_TRAINING,
    "integration.seam.layer_classes": f"{ENGINE}.layer_classes",
    "integration.seam.gradients": f"{ENGINE}.gradients",
    "integration.seam.manager": f"{ENGINE}.manager",
    "integration.seam.model_router": f"{ENGINE}.model_router",
    "integration.seam.p2p_sync": f"{ENGINE}.p2p_sync",
    "integration.seam.compat": f"{ENGINE}.pass_arguments",
    "launcher": f"{ENGINE}.launcher",
    "options.budget": f"{ENGINE}.budget.budget_rules",
    "options.chunk_graphs": f"{CHUNK_GRAPHS}.option_rules",
    "options.context_parallel": "megatron.training.context_parallel_rules",
    "options.engine": f"{ENGINE}.option_rules",
    "options.experts": f"{EXPERTS}.option_rules",
    "options.facts": f"{ENGINE}.facts",
    "options.fields": f"{ENGINE}.options",
    "options.host_memory": f"{ENGINE}.host_memory",
    "options.model": f"{ENGINE}.graph_options",
    "options.packing": "megatron.training.packing_rules",
    "options.preflight": f"{ENGINE}.process_facts",
    "options.rules": f"{ENGINE}.rules",
    "patches.attributes": f"{ENGINE}.attributes",
    "patches.d2h_by_kernel": "megatron.core.d2h_by_kernel",
    "patches.exchanged_tensors": f"{CHUNK_GRAPHS}.exchanged_tensors",
    "patches.graph_calls": "megatron.core.transformer.graph_calls",
    "patches.layer_capture": "megatron.core.transformer.packed_graph_calls",
    "patches.marks": f"{ENGINE}.marks",
    "patches.model_calls": f"{ENGINE}.model_calls",
    "patches.multihot_map": "megatron.core.transformer.moe.multihot_map",
    "patches.p2p_shapes": f"{PIPELINE}.p2p_shapes",
    "patches.releases": f"{ENGINE}.releases",
    "patches.rotary_kernels": "megatron.core.fusions.rope_autotune",
}
"""Modules that move alone."""
TEST_MODULES = {
    "integration.cpu.cpu_memory": "cpu_memory",
    "integration.cpu.cpu_modules": "cpu_modules",
    "integration.cpu.cpu_only": "cpu_only",
    "integration.cpu.gathering_attention": "gathering_attention",
    "patches.patching": "patching",
}
"""Modules that only tests need there: they lie beside the tests' helpers."""
STAY = frozenset(
    {"plan.files", "plan.progress_bar", "fine_grained_activation_offload.run_metadata"}
)
"""Modules of the moved packages that tools read files with: they need pydantic or rich."""

KEEP = {
    "integration.cpu.cpu_only": {"install_training_shims", "skip_helper_compilation"},
    "integration.graphs.goals": {"warn_of_untimed_plan"},
    "integration.seam.compat": {"missing_pass_arguments", "unmark_norms_at_graph_edges"},
    "launcher": {"rank", "num_local_ranks"},
    "options.budget": {"BUDGET_RULES", "GATHERED", "OTHER_PASSES"},
    "options.engine": {"RULES"},
    "options.fields": {"OffloadConfig"},
    "options.model": {
        *("moves_in_layer_graphs", "CHECKPOINTED_MODULES", "graphed_modules"),
        *("LAYER_GRAPH_RULES", "check_options_in_graphs"),
    },
    "options.packing": {"check_corpora", "check_packing"},
    "options.preflight": {"check_graphs", "collect"},
    "options.rules": {
        *("Condition", "Rule", "check_by", "check_rules", "option_rule", "require", "value_rule"),
        "warn_once",
    },
    "patches.multihot_map": {"indices_to_multihot"},
    "patches.releases": {
        "is_since",
        "is_within",
        "TESTED_RELEASES",
        "release",
    },
    "patches.rotary_kernels": {"restrict_autotune_configs"},
}
"""Of some modules only these definitions, with what they use."""
DROP = {
    "integration.graphs.chunks": {"change_model_config", "prepare_arguments"},
    "integration.experts.sync_free_experts": {"SyncFreeExpertsLayer", "with_sync_free_experts"},
    "fine_grained_activation_offload.report": {
        *("SCHEMA", "VERSION", "_File", "Report.to_json", "Report.from_json", "Report.save"),
    },
}
"""Definitions that do not move: they read and write files of our tools."""
INSTEAD = {
    "integration.graphs.chunks": {"_exchanged_tensors_stay": "exchanged_tensors_stay.py"},
    "options.fields": {"_check_types": "check_types.py"},
    "packed_sequences.dataset": {"watched": "watched.py", "_QUIET_S": ""},
    "patches.rotary_kernels": {"runs_triton": ""},
}
"""Definitions that have another text there, and the file of ``new`` that holds it."""
REWORD = {
    "fine_grained_activation_offload.peak_statistics": (
        (f":mod:`{PACKAGE}.patches` do that; this", "Patches do that; this"),
    ),
    "integration.budget.stage_ranks": (
        (
            "    for module in chunk.modules():\n"
            "        if isinstance(module, DynamicGroupMixin):\n"
            '            yield "dynamic_context_parallel"\n',
            "    if config.dynamic_context_parallel:\n"
            '        yield "dynamic_context_parallel"\n    for module in chunk.modules():\n',
        ),
    ),
    "integration.graphs.chunks": (
        ("import exchanged_tensors, table\n", "import exchanged_tensors\n"),
        (
            "    table.apply(Feature.FUSED_ROTATION)\n    if torch.cuda.is_available():\n"
            "        table.apply(Feature.PEAK_MEMORY)\n",
            "",
        ),
        (
            'call install() before the "\n            "model is built',
            "set offload_engine=slipstream",
        ),
    ),
    "integration.layers.layer_parts": (
        (
            '    if part in ("mlp", "moe_act") and has_tiles(layer.mlp):\n'
            '        return "its tiles are computed again in backward anyway '
            '(mlp_sequence_tiles)"\n',
            "",
        ),
    ),
    "integration.packed.batch_group": ((" in a patched tree", ""),),
    "integration.packed.dynamic_batches": (
        ("    table.apply(Feature.PADDED_ROUTING)\n", ""),
        ("See ``providers.datasets``; all", "As ``packed_sequences.datasets``; all"),
    ),
    "integration.packed.packed_sequences": (
        ("    table.apply(Feature.PADDED_ROUTING)\n", ""),
        ("; see ``providers.datasets``", ""),
    ),
    "integration.seam.manager": (
        ("1, build the model ", "1, or leave the modules that "),
        (f'"from {PACKAGE}.with_graph_offloading(spec), or leave the modules that "', ""),
    ),
    "options.chunk_graphs": (
        (
            "Slipstream captures chunks itself, instead of megatron-core's graphs",
            "chunks are captured in place of what it names",
        ),
        (
            "Slipstream does not yet know when the dispatcher's memory is ready to be captured",
            "it is not known when the dispatcher's memory is ready to be captured",
        ),
    ),
}
"""Text that names what does not exist there."""
UNTIL = {
    "packed_layers": {
        "options.context_parallel": (
            (
                '"set transformer_engine, or leave it out and set cuda_graph_granularity=chunk; '
                'both "\n        "capture graphs of every size",\n'
                '        ("none", "transformer_engine"),\n',
                '"leave it out",\n        ("none",),\n',
            ),
        ),
        "options.packing": (
            ("    *PACKED_LAYER_RULES,\n", ""),
            (
                '"set transformer_engine, or leave it out and set cuda_graph_granularity=chunk",\n'
                '        ("none", "transformer_engine"),\n',
                '"leave it out",\n        ("none",),\n',
            ),
        ),
    },
}
"""Text that names what does not exist there until the commit of a name."""


class Landed(NamedTuple):
    """A file of the series."""

    path: str
    text: str


@cache
def place_of(module: str) -> Optional[str]:
    """Return the name there of a module of the package, given without its prefix; None: none."""
    if module in STAY:
        return None
    if module in MODULES or module in TEST_MODULES:
        return MODULES.get(module) or TEST_MODULES[module]
    room = next((room for room in FOLDERS if f"{module}.".startswith(f"{room}.")), None)
    return None if room is None else FOLDERS[room] + module.removeprefix(room)


def source_of(module: str) -> Path:
    """Return the file of a module of the package."""
    path = ROOT.joinpath(*PACKAGE.split("."), *module.split("."))
    return path / "__init__.py" if path.is_dir() else path.with_suffix(".py")


def modules_in(room: str) -> list[str]:
    """Return all modules of a moved package that move."""
    top = ROOT.joinpath(*PACKAGE.split("."))
    found = []
    for path in sorted(source_of(room).parent.rglob("*.py")):
        parts = path.relative_to(top).with_suffix("").parts
        found.append(".".join(parts[:-1] if parts[-1] == "__init__" else parts))
    return [module for module in found if module not in STAY]


def landed(module: str, made: frozenset[str]) -> Landed:
    """Return the file that a module becomes after the commits of these names."""
    place = place_of(module)
    assert place is not None, module
    path = source_of(module)
    if module in TEST_MODULES:
        target = f"{SUPPORT}/{place}.py"
    else:
        name = "/__init__.py" if path.name == "__init__.py" else ".py"
        target = place.replace(".", "/") + name
    later = [words[module] for name, words in UNTIL.items() if name not in made and module in words]
    text = _reworded(path.read_text(), module, itertools.chain.from_iterable(later))
    return Landed(target, rewritten(text, module))


@cache
def rewritten(text: str, module: str = "") -> str:
    """Return the text of a module or a test there, before unused imports are removed."""
    text = _reworded(_without(text, module), module, REWORD.get(module, ()))
    return _renamed(text).replace(HEAD, HEAD_THERE)


def _reworded(text: str, module: str, words: Iterable[tuple[str, str]]) -> str:
    for old, new in words:
        if old not in text:
            raise ValueError(f"{module} has no longer the text {old!r}; adapt tools/upstream")
        text = text.replace(old, new)
    return text


def check(path: str, text: str) -> None:
    """Check a formatted file.

    Raises:
        ValueError: It names something of this package that does not exist there.
    """
    for number, line in enumerate(text.splitlines(), 1):
        if PACKAGE in line or "pydantic" in line:
            raise ValueError(f"{path}:{number} names what does not exist there: {line.strip()}")


def _renamed(text: str) -> str:
    def place(found: re.Match[str]) -> str:
        parts = found[1].split(".")
        for length in range(len(parts), 0, -1):
            there = place_of(".".join(parts[:length]))
            if there is not None:
                return ".".join([there, *parts[length:]])
        return found[0]

    text = text.replace(f'"{PACKAGE}"', f'"{PIPELINE}"')  # the name of a logger
    text = re.sub(rf"{re.escape(PACKAGE)}\.([\w.]+\w)", place, text)
    # from a.b import c: where c is a module, it may have moved away from its siblings.
    return re.sub(
        rf"from {re.escape(PACKAGE)}[\w.]* import ([\w, ]+)$", _siblings, text, flags=re.M
    )


def _siblings(found: re.Match[str]) -> str:
    room = found[0].split()[1].removeprefix(PACKAGE).lstrip(".")
    return "\n".join(_sibling(room, name) for name in found[1].split(", "))


def _sibling(room: str, name: str) -> str:
    there = place_of(f"{room}.{name}".lstrip("."))
    if there is None:
        return f"from {'.'.join(filter(None, (PACKAGE, room)))} import {name}"
    package, _, last = there.rpartition(".")
    alias = f"{last} as {name}" if last != name else last
    return f"from {package} import {alias}" if package else f"import {alias}"


@cache
def imports_of(text: str, module: str = "") -> tuple[str, ...]:
    """Return what the text of a module or a test there imports and uses, as dotted names."""
    nodes = list(ast.walk(ast.parse(_without(text, module))))
    used = {node.id for node in nodes if isinstance(node, ast.Name)}
    found = []
    for node in nodes:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            prefix = f"{node.module}." if isinstance(node, ast.ImportFrom) else ""
            for alias in node.names:
                if (alias.asname or alias.name.split(".")[0]) in used:
                    found.append(prefix + alias.name)
    return tuple(found)


_STATE = re.compile(r"  # (since|before) (\w+)$")


def as_of(text: str, made: frozenset[str]) -> str:
    """Return a file of ``new`` as it is after some commits.

    A line that ends in ``# since NAME`` is there from the commit of that name on, with the lines
    indented below it; one that ends in ``# before NAME`` until then.
    """
    kept = []
    outer: Optional[int] = None
    for line in text.splitlines():
        indent = len(line) - len(line.lstrip())
        if outer is not None and (not line or indent > outer):
            continue
        state = _STATE.search(line)
        is_there = state is None or (state[2] in made) == (state[1] == "since")
        outer = None if is_there else indent
        if is_there:
            kept.append(_STATE.sub("", line) + "\n")
    return "".join(kept)


# Parts of a module.


@cache
def _without(text: str, module: str) -> str:
    tree = ast.parse(text)
    dropped = _unused(tree, module) | DROP.get(module, set())
    instead = INSTEAD.get(module, {})
    spans = []
    known = set()
    for name, first, last in _statements(tree):
        known.add(name)
        if name in instead:
            spans.append((first, last, _instead(instead[name])))
        elif name in dropped:
            spans.append((first, last, ""))
    missing = (DROP.get(module, set()) | instead.keys() | KEEP.get(module, set())) - known
    if missing:
        raise ValueError(f"{module} has no {', '.join(sorted(missing))}; adapt tools/upstream")
    lines = text.splitlines(keepends=True)
    for first, last, new in reversed(spans):
        lines[first - 1 : last] = [new]
    return "".join(lines)


def _instead(file: str) -> str:
    """Return the functions of a file of ``new``; nothing without one."""
    if not file:
        return ""
    text = (NEW_TEXT / file).read_text()
    first = next(node for node in ast.parse(text).body if isinstance(node, ast.FunctionDef))
    line = min([first.lineno, *(decorator.lineno for decorator in first.decorator_list)])
    return "".join(text.splitlines(keepends=True)[line - 1 :])


def _statements(tree: ast.Module) -> Iterator[tuple[str, int, int]]:
    """Yield the names and lines of top-level definitions and methods, in order.

    A string behind an assignment, which describes it, is part of it.
    """
    bodies: list[tuple[str, list[ast.stmt]]] = [("", tree.body)]
    bodies += [(f"{c.name}.", c.body) for c in tree.body if isinstance(c, ast.ClassDef)]
    found = []
    for prefix, body in bodies:
        for place, node in enumerate(body):
            follower = body[place + 1] if place + 1 < len(body) else None
            last = node.end_lineno or node.lineno
            if isinstance(node, (ast.Assign, ast.AnnAssign)) and _is_text(follower):
                last = follower.end_lineno or last  # type: ignore[union-attr]
            decorators = getattr(node, "decorator_list", [])
            first = min([node.lineno, *(decorator.lineno for decorator in decorators)])
            found += [(prefix + name, first, last) for name in _names(node)]
    yield from sorted(found, key=lambda span: span[1])


def _is_text(node: Optional[ast.stmt]) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Constant)
        and isinstance(node.value.value, str)
    )


def _names(node: ast.stmt) -> list[str]:
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        return [node.name]
    if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name):
        return [node.target.id]
    if isinstance(node, ast.Assign):
        return [target.id for target in node.targets if isinstance(target, ast.Name)]
    return []


def _unused(tree: ast.Module, module: str) -> set[str]:
    """Return the top-level definitions that those which are kept do not use."""
    if module not in KEEP:
        return set()
    uses: dict[str, set[str]] = {}
    instead = INSTEAD.get(module, {})
    for node in tree.body:
        for name in _names(node):
            body: ast.AST = node
            if name in instead:
                body = ast.parse(_instead(instead[name]))
            uses[name] = {n.id for n in ast.walk(body) if isinstance(n, ast.Name)}
    kept, waiting = set(), set(KEEP[module])
    while waiting:
        name = waiting.pop()
        kept.add(name)
        waiting |= (uses.get(name, set()) & uses.keys()) - kept
    return uses.keys() - kept
