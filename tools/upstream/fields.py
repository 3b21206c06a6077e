# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The engine's settings as fields of Megatron's ``TransformerConfig``."""

from __future__ import annotations

import ast
from pathlib import Path

from tools.upstream.anchors import Edit, Source, at_end
from tools.upstream.modules import ENGINE, source_of

CONFIG = "megatron/core/transformer/transformer_config.py"
FIELDS = (
    *("offload_backend", "offload_release_lag", "offload_prefetch_depth"),
    *("offload_target_memory_gib", "offload_max_overhead_percent"),
    *("offload_host_memory_limit_bytes", "offload_native", "offload_verify"),
    "offload_nvtx_ranges",
)
"""Settings that the series supports, beside ``offload_engine``."""
_AFTER = "fine_grained_activation_offloading"
_TYPES = {"offload_max_overhead_percent": "Optional[float]"}
"""Types without a choice of words, of which Megatron's factory makes no flag."""

_ENGINE_FIELD = '''\
offload_engine: Literal["megatron", "slipstream"] = "megatron"
"""Engine behind fine_grained_activation_offloading: 'megatron', or 'slipstream', which plans what
moves and when from measured iterations."""
'''
_CHECK = f"""\
if self.fine_grained_activation_offloading and self.offload_engine == "slipstream":
    # Imported here: the module imports models, which import this one.
    from {ENGINE}.select import select_at_first_call

    select_at_first_call(self)
"""


def field_edits(root: Path) -> list[Edit]:
    """Return the edits that add the fields and their checks."""
    name = "TransformerConfig"
    return [
        Edit(CONFIG, name, _add_fields, "fields of the engine"),
        Edit(CONFIG, f"{name}.__post_init__", at_end(_CHECK), "their checks, and the choice"),
    ]


def _add_fields(source: Source, name: str) -> None:
    """Add the fields behind the switch of offloading, which the class must have."""
    config = source.find(name)
    places = [
        place
        for place, node in enumerate(config.body)
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == _AFTER
    ]
    if len(places) != 1:
        raise source.moved(f"{name}.{_AFTER}", "is not a field")
    last = config.body[places[0] + 1]  # its description
    if not isinstance(last, ast.Expr):
        raise source.moved(f"{name}.{_AFTER}", "has no description")
    code = "\n" + "\n".join([_ENGINE_FIELD, *map(_field, FIELDS)])
    source.insert((last.end_lineno or 0) + 1, code, last.col_offset)


def _field(name: str) -> str:
    """Return a setting's field and description, from the class that has it here."""
    text = source_of("options.fields").read_text()
    config = next(
        node
        for node in ast.parse(text).body
        if isinstance(node, ast.ClassDef) and node.name == "OffloadConfig"
    )
    for node, description in zip(config.body, config.body[1:], strict=False):
        if isinstance(node, ast.AnnAssign) and ast.unparse(node.target) == name:
            hint = _TYPES.get(name, ast.unparse(node.annotation)).replace("'", '"')
            default = node.value
            if isinstance(default, ast.Call):
                default = next(word.value for word in default.keywords if word.arg == "default")
            assert default is not None
            shown = ast.unparse(default).replace("'", '"')
            words = ast.get_source_segment(text, description) or ""
            lines = words.replace("`--", "`").replace("\n    ", "\n")
            return f"{name}: {hint} = {shown}\n{lines}\n"
    raise ValueError(f"OffloadConfig has no {name}; adapt tools/upstream/fields.py")
