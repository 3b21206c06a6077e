# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tracks a model's forward passes with hooks on the model and on the chosen modules.

Hooks are used instead of replacing ``forward`` because they survive other replacements of it
(mixed-precision wrappers set and remove theirs) and can distinguish copies of a module. They do
nothing under other saved-tensor hooks (a checkpoint's, ``save_on_cpu``), so those get the same
tensors in forward and in recomputation.

[Note: Calls that never end]
torch calls a hook after a forward that raised, except for exceptions such as ``KeyboardInterrupt``.
So every call stores the Python frame that runs it, and calls whose frame is no longer on the stack
are undone before the next one begins.

[Note: One thread trains]
The engine tracks one forward or backward at a time, and saved-tensor hooks are thread-local. So
calls are kept per thread, and one thread is the trainer: the last that ran the model with
gradients. Another thread takes over once no forward of the trainer is running or waiting for
backward, or once the trainer has ended. Until then, what other threads save stays on the device,
which does not change results. Passes without gradients never touch the engine.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import logging
import sys
import threading
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import FrameType
from typing import Any, Optional

import torch
from torch.autograd.graph import Node

from megatron.slipstream.attached.engine import AttachedEngine, is_transformed
from megatron.slipstream.attached.inputs import CheckpointInputs
from megatron.slipstream.attached.names import Match
from megatron.slipstream.attached.other_hooks import name_of_others, name_of_takers, top_pack_hook

logger = logging.getLogger(__name__)

_MODULE_FILE = torch.nn.Module.__call__.__code__.co_filename

_TWO_TRAIN = (
    "two threads run the model with gradients at the same time, so what the second one saves stays "
    "on the device; run it under torch.no_grad() if it needs no gradients"
)


class _Role(enum.Enum):
    SKIPPED = "nothing: no gradients, in backward, in another region, or under other hooks"
    PASS = "the model runs: a pass is open"
    REGION = "a chosen module runs: what it saves belongs to its group"
    WITHOUT_GRADIENTS = "a chosen module runs as in a re-entrant checkpoint"


class _Call:
    __slots__ = ("hooked", "role", "frame", "exception", "first_node")

    def __init__(self, hooked: _Hooked, role: _Role) -> None:
        self.hooked = hooked
        self.role = role
        self.frame = _frame_of_call()
        self.exception = sys.exception()
        """Exception being handled when the call began; a different one at its end is the call's."""
        self.first_node = 0
        """Sequence number of the call's first autograd node, if needed."""

    @property
    def is_running(self) -> bool:
        """Whether the call is on the stack of the caller of this property."""
        frame: Optional[FrameType] = sys._getframe(1)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None or self.frame is None


def _frame_of_call() -> Optional[FrameType]:
    frame: Optional[FrameType] = sys._getframe(2)
    while frame is not None and frame.f_code.co_filename != _MODULE_FILE:
        frame = frame.f_back
    return frame


class _Thread:
    def __init__(self) -> None:
        self.thread = threading.current_thread()
        self.calls: list[_Call] = []
        """Innermost last."""
        self.is_in_region = False

    @property
    def trains(self) -> bool:
        """Whether the engine was notified of a running call."""
        return any(call.role is not _Role.SKIPPED for call in self.calls)


class _Hooked:
    """A module with hooks. The module owns its hooks, so the reference to it is weak."""

    __slots__ = ("_module", "label")

    def __init__(self, module: torch.nn.Module, label: str) -> None:
        self._module = weakref.ref(module)
        self.label = label
        """Empty for the model itself."""

    def is_of(self, module: torch.nn.Module) -> bool:
        return self._module() is module


class _Hook:
    """A hook of a module; in a deep-copied or pickled module, one that does nothing."""

    def __init__(
        self, function: Callable[..., None], hooked: _Hooked, lock: threading.RLock
    ) -> None:
        self._function = function
        self._hooked = hooked
        self._lock = lock

    def __call__(self, *arguments: Any) -> None:
        # torch.export also makes a single graph, but without the compiler.
        if torch.compiler.is_compiling() and (
            not torch.compiler.is_dynamo_compiling() or _is_one_graph()
        ):
            return
        self._run(*arguments)

    # torch.compile must neither trace the engine nor run it at compile time: break the graph here.
    @torch.compiler.disable
    def _run(self, *arguments: Any) -> None:
        with self._lock:
            self._function(self._hooked, *arguments)

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, str]]:
        # Accepts any arguments, does nothing, and can be unpickled without this package.
        return getattr, (contextlib.nullcontext(), "__exit__")


_has_warned_of_one_graph = False
"""Reset by :func:`attach`. Needed because the compiler runs :func:`_is_one_graph` at every hook."""


@torch._dynamo.assume_constant_result
def _is_one_graph() -> bool:
    """Whether code must compile to one graph, which no hook may break. Run by the compiler."""
    compiled = torch._dynamo.symbolic_convert.InstructionTranslator.current_tx()
    global _has_warned_of_one_graph
    if compiled.one_graph and not _has_warned_of_one_graph:
        _has_warned_of_one_graph = True
        logger.warning(
            "attach(): modules are compiled with fullgraph=True, so nothing of them moves; leave "
            "fullgraph out, or compile the modules before attach()"
        )
    return compiled.one_graph


class ForwardHooks:
    """The hooks of one :func:`attach`, which notify ``engine`` of passes and regions."""

    def __init__(
        self, engine: AttachedEngine, model: torch.nn.Module, matches: Sequence[Match]
    ) -> None:
        self._engine = engine
        self._inputs = CheckpointInputs(engine)
        self._lock = threading.RLock()
        """Held by each hook while it runs."""
        self._local = threading.local()
        self._trainer: Optional[_Thread] = None
        """See [Note: One thread trains]."""
        self._ran: dict[str, set[_Role]] = {match.label: set() for match in matches}
        """Roles of calls by label, recorded until the first pass ends."""
        self._others: dict[str, str] = {}
        """Names of other saved-tensor hooks that took what modules save, by label."""
        self._is_first_pass = True
        self._warned: set[str] = set()
        self.reasons: dict[str, str] = {}
        """Why modules move nothing or less than they could, by label; of the model, by \"\"."""
        self._handles: list[Any] = []
        # By default, compiled code assumes that modules have the hooks that the first module of
        # their class had at compile time. Recompile it with guards on hooks.
        global _has_warned_of_one_graph
        _has_warned_of_one_graph = False
        torch._dynamo.config.skip_nnmodule_hook_guards = False
        torch._dynamo.reset()
        self._add(model, "", self._enter_model, self._leave_model)
        for match in matches:
            self._add(match.module, match.label, self._enter, self._leave)

    def _add(
        self,
        module: torch.nn.Module,
        label: str,
        enter: Callable[..., None],
        leave: Callable[..., None],
    ) -> None:
        hooked = _Hooked(module, label)
        before, after = _Hook(enter, hooked, self._lock), _Hook(leave, hooked, self._lock)
        # Outermost, so that other hooks of the module are part of its call.
        self._handles += [
            module.register_forward_pre_hook(before, prepend=True, with_kwargs=True),
            module.register_forward_hook(after, with_kwargs=True, always_call=True),
        ]

    @property
    def are_removed(self) -> bool:
        return not self._handles

    def remove(self) -> None:
        """Remove the hooks; raises ``RuntimeError`` if another thread is training."""
        with self._lock:
            if not self._is_trainer_free():
                assert self._trainer is not None
                raise RuntimeError(
                    f"detach() is not supported while the thread {self._trainer.thread.name!r} "
                    "trains the model because saved-tensor hooks are set in that thread; call "
                    "detach() there, or after its backward"
                )
            self._forget_trainer()
            for handle in self._handles:
                handle.remove()
            self._handles.clear()
            while self._here.calls:
                self._undo(self._here.calls.pop(), self._here)

    # Threads: [Note: One thread trains].

    @property
    def _here(self) -> _Thread:
        here: Optional[_Thread] = getattr(self._local, "thread", None)
        if here is None:
            here = self._local.thread = _Thread()
        return here

    def _is_trainer_free(self) -> bool:
        """Whether this thread is the trainer, or can become it."""
        trainer = self._trainer
        if trainer is None or trainer is self._here or not trainer.thread.is_alive():
            return True
        return not trainer.trains and self._engine.is_idle

    def _becomes_trainer(self) -> bool:
        if not self._is_trainer_free():
            self._warn_once(_TWO_TRAIN)
            return False
        self._forget_trainer()
        self._trainer = self._here
        return True

    def _forget_trainer(self) -> None:
        """Undo the calls of a trainer whose thread ended in a forward."""
        trainer = self._trainer
        if trainer is not None and not trainer.thread.is_alive():
            while trainer.calls:
                self._undo(trainer.calls.pop(), trainer)

    # The model.

    def _enter_model(self, hooked: _Hooked, module: Any, args: Any, kwargs: Any) -> None:
        if not self._is_hooked(hooked, module):
            return
        self._undo_interrupted_calls()
        role = _Role.SKIPPED
        calls = self._here.calls
        if self._engine.is_training_forward and all(c.role is not _Role.PASS for c in calls):
            if top_pack_hook() is None:
                role = _Role.PASS if self._becomes_trainer() else _Role.SKIPPED
            else:
                name = name_of_others(self._owns)
                whose = f" ({name})" if name else ""
                self._tell(
                    "",
                    f"the model runs under other saved-tensor hooks{whose}, so nothing of it moves",
                )
        elif is_transformed():
            self._tell("", "the model runs in a transform of torch.func, so nothing of it moves")
        elif self._engine.is_backward_compiled:
            self._tell(
                "",
                "compiled autograd runs the backward, so nothing moves, since it would compile for "
                "minutes at the hooks; switch it off, or leave out attach()",
            )
        call = _Call(hooked, role)
        if role is _Role.PASS:
            _check_current_gpu(module)
            self._engine.begin_forward()
            self._inputs.start()
        calls.append(call)

    def _leave_model(
        self, hooked: _Hooked, module: Any, args: Any, kwargs: Any, output: Any
    ) -> None:
        call = self._pop_call(hooked, module)
        if call is None or call.role is not _Role.PASS:
            return
        self._inputs.stop()
        has_raised = sys.exception() is not call.exception
        self._engine.end_forward(failed=has_raised)
        if self._is_first_pass and not has_raised:
            self._is_first_pass = False
            self._warn_of_labels_without_groups()

    # A chosen module.

    def _enter(self, hooked: _Hooked, module: Any, args: Any, kwargs: Any) -> None:
        if not self._is_hooked(hooked, module):
            return
        self._undo_interrupted_calls()
        call = _Call(hooked, self._role_of_module())
        if self._is_first_pass:
            call.first_node = torch.autograd._get_sequence_nr()
            others = name_of_others(self._owns)
            if others is not None and call.role is not _Role.SKIPPED:
                self._others[hooked.label] = others
        if call.role is _Role.WITHOUT_GRADIENTS:
            self._inputs.enter_without_gradients()
        elif call.role is _Role.REGION:
            pack = top_pack_hook()
            if pack is None or self._inputs.is_own(pack):
                self._inputs.close()
                self._engine.begin_region(hooked.label)
                self._here.is_in_region = True
            else:
                call.role = _Role.SKIPPED
                if all(outer.hooked.label for outer in self._here.calls):
                    self._tell(
                        hooked.label,
                        f"a module of {hooked.label!r} runs outside of the model's forward and "
                        "under other saved-tensor hooks, so nothing of it moves",
                    )
                self._inputs.enter(hooked.label, tensors_in((args, kwargs)))
        if self._is_first_pass:
            self._ran[hooked.label].add(call.role)
        self._here.calls.append(call)

    def _leave(self, hooked: _Hooked, module: Any, args: Any, kwargs: Any, output: Any) -> None:
        call = self._pop_call(hooked, module)
        if call is None or call.role is _Role.SKIPPED:
            return
        if call.role is _Role.WITHOUT_GRADIENTS:
            self._inputs.leave(hooked.label, tensors_in((args, kwargs)))
            return
        self._engine.leave_region()
        self._here.is_in_region = False
        if sys.exception() is not call.exception:
            return
        nodes = nodes_of(output, (args, kwargs))
        if self._is_first_pass:
            takers = name_of_takers(nodes, call.first_node, self._owns)
            if takers is not None:
                self._others[hooked.label] = takers
        if not self._engine.commit_region(hooked.label, nodes, hooked.label in self._others):
            self._warn_once(
                f"no result is found in what {hooked.label} ({type(module).__name__}) returns, a "
                f"{type(output).__name__}, so its saved tensors are reloaded late, which slows "
                "training down; let it return tensors, or tuples, dictionaries or data classes of "
                "them"
            )

    def _role_of_module(self) -> _Role:
        here = self._here
        if self._engine.is_training_forward:
            is_region = not here.is_in_region and self._becomes_trainer()
            return _Role.REGION if is_region else _Role.SKIPPED
        if torch.is_grad_enabled() or here.is_in_region:
            return _Role.SKIPPED
        is_model_training = any(call.role is _Role.PASS for call in here.calls)
        return _Role.WITHOUT_GRADIENTS if is_model_training else _Role.SKIPPED

    def _warn_of_labels_without_groups(self) -> None:
        awaited = self._engine.awaited_names
        for label, roles in self._ran.items():
            if not roles:
                self._tell(
                    label, f"no module of {label!r} ran in the model's forward, so nothing moves"
                )
            elif label in self._others:
                others = self._others[label]
                place = "set" if _Role.REGION in roles else "run under"
                self._tell(
                    label,
                    f"modules of {label!r} {place} other saved-tensor hooks ({others}), "
                    "which take what they save, so that does not move; use one or the other",
                )
            elif _Role.REGION not in roles and label not in self._inputs.labels:
                self._tell(
                    label,
                    f"modules of {label!r} ran only where nothing is kept of them (in "
                    "torch.utils.checkpoint or without gradients), so nothing of them moves; name "
                    "the modules that are checkpointed, and their inputs move",
                )
            elif _Role.REGION in roles and label not in awaited:
                self._tell(
                    label,
                    f"backward does not reach modules of {label!r}, so nothing of them moves: "
                    "neither their inputs nor their parameters need gradients, or they compute "
                    "nothing; name modules that are trained",
                )

    # Calls.

    def _is_hooked(self, hooked: _Hooked, module: Any) -> bool:
        """Whether the call is of the hooked module, rather than of a copy.

        Replicas of ``torch.nn.DataParallel`` run in threads, so they are a ``RuntimeError``.
        """
        if hooked.is_of(module):
            return True
        if getattr(module, "_is_replica", False):
            raise RuntimeError(
                "attach() is not supported with torch.nn.DataParallel because its copies of the "
                "model run in threads; use DistributedDataParallel (torchrun), or show the process "
                "one GPU only (CUDA_VISIBLE_DEVICES)"
            )
        return False

    def _pop_call(self, hooked: _Hooked, module: Any) -> Optional[_Call]:
        """Return the call that ends; None if its start was missed because another hook raised."""
        here = self._here
        if not hooked.is_of(module) or all(call.hooked is not hooked for call in here.calls):
            return None
        while here.calls[-1].hooked is not hooked:
            self._undo(here.calls.pop(), here)
        return here.calls.pop()

    def _undo_interrupted_calls(self) -> None:
        """See [Note: Calls that never end]."""
        here = self._here
        while here.calls and not here.calls[-1].is_running:
            self._undo(here.calls.pop(), here)

    def _undo(self, call: _Call, thread: _Thread) -> None:
        # Saved-tensor hooks end with their thread.
        is_here = thread is self._here
        if call.role is _Role.REGION:
            self._engine.leave_region(is_here)
            thread.is_in_region = False
        elif call.role is _Role.PASS:
            self._inputs.stop(is_here)
            self._engine.end_forward(failed=True)

    def _owns(self, hook: Any) -> bool:
        """Whether a saved-tensor hook, to pack or to unpack, is one of this ``attach()``."""
        owner = getattr(getattr(hook, "func", hook), "__self__", None)
        return owner is self._engine or owner is self._inputs

    def _tell(self, label: str, reason: str) -> None:
        self.reasons.setdefault(label, reason)
        self._warn_once(reason)

    def _warn_once(self, text: str) -> None:
        if text not in self._warned:
            self._warned.add(text)
            logger.warning("attach(): %s", text)


def _check_current_gpu(model: torch.nn.Module) -> None:
    parameter = next(model.parameters(), None)
    if parameter is None or not parameter.is_cuda:
        return
    current = torch.cuda.current_device()
    if parameter.device.index != current:
        raise RuntimeError(
            f"attach() is not supported with a model on GPU {parameter.device.index} while GPU "
            f"{current} is the current one because copies follow the current one's stream; call "
            f"torch.cuda.set_device({parameter.device.index})"
        )


def tensors_in(value: Any, opens_objects: bool = False) -> Iterator[torch.Tensor]:
    """Yield the tensors in nested containers and data classes, on request in any object."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item, opens_objects)
    elif isinstance(value, (tuple, list)):
        for item in value:
            yield from tensors_in(item, opens_objects)
    elif dataclasses.is_dataclass(value):
        for field in dataclasses.fields(value):
            yield from tensors_in(getattr(value, field.name, None), opens_objects)
    elif opens_objects and not isinstance(value, torch.nn.Module):
        yield from tensors_in(getattr(value, "__dict__", None))


def nodes_of(output: Any, inputs: Any) -> list[Node]:
    """Return the autograd nodes of the tensors in ``output``, except those of ``inputs``.

    A tensor that a module passes through was computed before the module, so backward reaches its
    node after the module.
    """
    earlier = {tensor.grad_fn for tensor in tensors_in(inputs)}
    tensors = list(tensors_in(output)) or tensors_in(output, opens_objects=True)
    nodes = dict.fromkeys(tensor.grad_fn for tensor in tensors)
    return [node for node in nodes if node is not None and node not in earlier]
