# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""How exchanged tensors stay while a pass is measured: torch is changed meanwhile."""

import contextlib
from collections.abc import Iterator

import torch

from megatron.slipstream.patches import exchanged_tensors
from megatron.slipstream.patches.attributes import replace_on


@contextlib.contextmanager
def _exchanged_tensors_stay() -> Iterator[None]:
    with contextlib.ExitStack() as undo:
        # batch_isend_irecv compares the functions of both modules.
        for module in (torch.distributed, torch.distributed.distributed_c10d):
            for name in ("isend", "irecv"):
                keep = exchanged_tensors.keep_tensors(getattr(module, name))
                undo.callback(replace_on(module, name, keep))
        undo.enter_context(exchanged_tensors.kept())
        yield
