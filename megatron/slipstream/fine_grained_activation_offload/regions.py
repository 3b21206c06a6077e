# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The regions of groups: tensors that are saved inside one belong to its group."""

from __future__ import annotations

import logging
from typing import Any, NamedTuple, Optional

import torch
from torch.autograd.graph import saved_tensors_hooks

from megatron.slipstream.fine_grained_activation_offload.activation_store import ActivationStore
from megatron.slipstream.fine_grained_activation_offload.group import OffloadTensorGroup
from megatron.slipstream.plan.staying import Staying

logger = logging.getLogger(__name__)


class RegionFlag(NamedTuple):
    """A flag that models set while code runs in a group's region."""

    owner: Any
    name: str
    """Name of a bool attribute of ``owner``."""
    without: frozenset[str]
    """Names of groups in whose regions it is not set."""


class Regions:
    """The regions that an engine has entered. C++ works on the same stack and flag."""

    def __init__(self, store: ActivationStore) -> None:
        self._store = store
        self.flag: Optional[RegionFlag] = None
        """A flag that is true while a group's operations run."""
        self.entered = store.entered
        """See ``ActivationStore.entered``."""
        self._has_warned_of_others = False

    def enter(
        self, group: Optional[OffloadTensorGroup], reader: Any, sets_flag: bool = True
    ) -> None:
        """Enter a region of a group; None if saved tensors need not be tracked.

        For ``reader`` see ``ActivationStore.hooks``; :attr:`flag` is set if ``sets_flag``. Within
        another region, one that is not tracked has hooks as well: otherwise the group around it
        would hold what is saved in it.
        """
        active = torch._C._autograd._top_saved_tensors_default_hooks(False)
        is_others = active is not None and not self._store.is_own_hook(active[0])
        if is_others and group is not None:
            group.kinds_staying |= Staying.TAKEN.bit
            self._warn_of_others()
        if is_others or (group is None and active is None):
            self.entered.append(None)
            return
        hooks, flag = saved_tensors_hooks(*self._store.hooks(group, reader)), self.flag
        self.entered.append(flag is not None and bool(getattr(flag.owner, flag.name)))
        hooks.__enter__()
        if not sets_flag or flag is None or group is None:
            return
        if group.name not in flag.without:
            setattr(flag.owner, flag.name, True)

    def leave(self) -> None:
        before = self.entered[-1]
        if before is not None:
            torch._C._autograd._pop_saved_tensors_default_hooks()
            self._restore_flag(before)
        self.entered.pop()

    def leave_open(self) -> None:
        """Leave the regions that an exception has left open. No pass begins inside a region."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        if hooks is None and not self.entered:
            return
        while hooks is not None and self._store.is_own_hook(hooks[0]):
            torch._C._autograd._pop_saved_tensors_default_hooks()
            hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        before = [entered for entered in self.entered if entered is not None]
        if before:
            self._restore_flag(before[0])
        self.entered.clear()

    def _restore_flag(self, is_set: bool) -> None:
        if self.flag is not None:
            setattr(self.flag.owner, self.flag.name, is_set)

    def _warn_of_others(self) -> None:
        """Say once that other saved-tensor hooks are active, which must see all saved tensors.

        A non-reentrant checkpoint counts saved tensors in forward and in recomputation: if it
        missed some in one of them, backward would get the wrong tensors.
        """
        if not self._has_warned_of_others:
            self._has_warned_of_others = True
            logger.warning(
                "a group runs under other saved-tensor hooks (of a checkpoint, of save_on_cpu), so "
                "nothing of it moves"
            )
