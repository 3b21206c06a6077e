# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Finds saved-tensor hooks of other code: only the innermost hooks get a saved tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, Optional

import torch
from torch._C import _autograd
from torch.autograd.graph import Node

Owns = Callable[[Any], bool]
"""Whether a hook is one of ours."""

_CHECKPOINT = torch.utils.checkpoint.__name__


def top_pack_hook() -> Any:
    """Return the active saved-tensor pack hook; None if there is none."""
    hooks = _autograd._top_saved_tensors_default_hooks(False)
    return hooks[0] if hooks is not None else None


def name_of_others(owns: Owns) -> Optional[str]:
    """Return the name of active hooks inside of ours, except checkpoints', which keep nothing."""
    popped, name = [], None
    try:
        while (hooks := _autograd._top_saved_tensors_default_hooks(False)) is not None:
            if owns(hooks[0]):
                break
            _autograd._pop_saved_tensors_default_hooks()
            popped.append(hooks)
            if not _is_of_checkpoint(hooks[0]):
                name = _name_of(hooks[0])
                break
    finally:
        for pack, unpack in reversed(popped):
            _autograd._push_saved_tensors_default_hooks(pack, unpack)
    return name


def name_of_takers(nodes: Iterable[Node], first: int, owns: Owns) -> Optional[str]:
    """Return the name of other hooks that took a tensor saved in a region; None if none did.

    ``nodes`` are those of the region's results, ``first`` is the sequence number of its first.
    """
    for saved in _saved_by(nodes, first):
        # torch.autograd.graph has no public way to ask this without unpacking the tensor.
        hook = getattr(saved, "unpack_hook", None)
        if hook is not None and not owns(hook) and not _is_of_checkpoint(hook):
            return _name_of(hook)
    return None


def _saved_by(nodes: Iterable[Node], first: int) -> Iterator[Any]:
    waiting, seen = list(nodes), set()
    while waiting:
        node = waiting.pop()
        if node in seen or node._sequence_nr() < first:
            continue
        seen.add(node)
        for name in dir(node):
            if name.startswith("_raw_saved_"):
                saved = getattr(node, name)
                yield from saved if isinstance(saved, (tuple, list)) else (saved,)
        waiting += [before for before, _ in node.next_functions if before is not None]


def _is_of_checkpoint(hook: Any) -> bool:
    return getattr(hook, "__module__", None) == _CHECKPOINT


def _name_of(hook: Any) -> str:
    """Return the name of what set a hook, such as ``save_on_cpu``."""
    name: str = getattr(hook, "__qualname__", type(hook).__qualname__)
    return name.split(".<locals>")[0].removesuffix(".__init__")
