# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Gives a forked process the state of a new one.

It would otherwise keep what earlier tests and pytest have left in the process that it is forked
from, so its results would depend on their order and on the time that they took.
"""

from __future__ import annotations

import functools
import gc
import logging
import os
import random
import signal
import sys
import threading
import time
import warnings
from collections.abc import Callable, Mapping
from typing import Any, TextIO

import numpy
import torch

OF_A_LAUNCHER = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT"} | {
    *("LOCAL_WORLD_SIZE", "GROUP_RANK", "GROUP_WORLD_SIZE", "ROLE_RANK", "ROLE_WORLD_SIZE"),
    *("ROLE_NAME", "TORCHELASTIC_RUN_ID", "TORCHELASTIC_USE_AGENT_STORE"),
}
"""Environment variables of a launcher: no command inherits them from the tests' process."""

A_MONTH_S = 30 * 24 * 3600
TORCH_SEED = 67280421310721
"""With which torch begins."""


def environment(added: Mapping[str, str]) -> dict[str, str]:
    """Return the variables of a command: those of this process and the added ones."""
    kept = {name: value for name, value in os.environ.items() if name not in OF_A_LAUNCHER}
    return {**kept, **added}


def check_can_fork() -> None:
    """Prepare to fork: check that this process has none of what a child could not get rid of.

    Raises:
        AssertionError: It has; the message names it.
    """
    _start_times(len(sys.modules))
    found = what_cannot_be_undone()
    assert not found, f"a forked process would inherit {', '.join(found)} from this one"


def what_cannot_be_undone() -> list[str]:
    """Return by name what this process has and a forked one would inherit."""
    return [name for name, is_there in CANNOT_BE_UNDONE.items() if is_there()]


def begin() -> None:
    """Bring this forked process to the state of a new one."""
    for reset in RESETS.values():
        reset()


def _reset_start_times() -> None:
    """megatron-core notes when it is imported, and ends a training after a time since then."""
    now = time.time()
    for names, attribute in _start_times(len(sys.modules)):
        names[attribute] = now


@functools.lru_cache(1)
def _start_times(num_modules: int) -> list[tuple[dict[str, Any], str]]:
    """Where modules of megatron-core note a time, by their names and the attribute.

    The process that forks looks for them: a child would copy the memory of all that it reads.
    """
    now = time.time()
    return [
        (vars(module), attribute)
        for name, module in list(sys.modules.items())
        if name.partition(".")[0] == "megatron"
        for attribute, value in list(vars(module).items())
        if isinstance(value, float) and 0 <= now - value < A_MONTH_S
    ]


def _reset_random_numbers() -> None:
    random.seed(0)
    numpy.random.seed(0)
    torch.manual_seed(TORCH_SEED)


def _reset_logging() -> None:
    logging.disable(logging.NOTSET)
    for logger in (logging.getLogger(), logging.getLogger("megatron.slipstream")):
        logger.handlers.clear()
        logger.filters.clear()
        logger.propagate = True
    logging.getLogger().setLevel(logging.WARNING)
    package = logging.getLogger("megatron.slipstream")
    package.setLevel(logging.NOTSET)


def _reset_messages_shown_once() -> None:
    from megatron.slipstream.fine_grained_activation_offload import warning_log

    warning_log._LOG.counts.clear()
    forward = sys.modules.get("megatron.slipstream.attached.forward")
    if forward is not None:
        forward._has_warned_of_one_graph = False  # type: ignore[attr-defined]


def _reset_warnings() -> None:
    """pytest collects warnings, and shows each of them."""

    def show(
        message: Warning | str,
        category: type[Warning],
        filename: str,
        lineno: int,
        file: TextIO | None = None,
        line: str | None = None,
    ) -> None:
        text = warnings.formatwarning(message, category, filename, lineno, line)
        (file or sys.stderr).write(text)

    warnings.showwarning = show
    warnings.resetwarnings()
    hidden = DeprecationWarning, PendingDeprecationWarning, ImportWarning, ResourceWarning
    for kind in hidden:  # Python's own filters
        warnings.simplefilter("ignore", kind)
    warnings.filterwarnings("default", category=DeprecationWarning, module="__main__")


def _reset_signals() -> None:
    """pytest-timeout has a handler. Timers are not inherited."""
    signal.signal(signal.SIGINT, signal.default_int_handler)
    for number in (signal.SIGALRM, signal.SIGTERM, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _reset_hooks_of_errors() -> None:
    sys.excepthook = sys.__excepthook__
    sys.unraisablehook = sys.__unraisablehook__
    threading.excepthook = threading.__excepthook__
    sys.settrace(None)
    sys.setprofile(None)


def _reset_garbage_collector() -> None:
    gc.enable()
    gc.set_threshold(700, 10, 10)
    gc.callbacks.clear()


def _reset_torch() -> None:
    torch.set_default_dtype(torch.float32)
    torch.set_default_device(None)
    torch.set_grad_enabled(True)
    torch.use_deterministic_algorithms(False)
    torch.set_float32_matmul_precision("highest")
    torch.autograd.set_detect_anomaly(False)
    torch.set_autocast_enabled("cpu", False)


RESETS: dict[str, Callable[[], None]] = {
    "start times": _reset_start_times,
    "random numbers": _reset_random_numbers,
    "logging": _reset_logging,
    "messages shown once": _reset_messages_shown_once,
    "warnings": _reset_warnings,
    "signals": _reset_signals,
    "hooks of errors": _reset_hooks_of_errors,
    "garbage collector": _reset_garbage_collector,
    "torch's settings": _reset_torch,
}


def _of(module: str, attribute: str) -> Any:
    """An attribute of a module, None if the module is not imported."""
    return getattr(sys.modules.get(module), attribute, None)


def _has_parallel_state() -> bool:
    return _of("megatron.core.parallel_state", "_DATA_PARALLEL_GROUP") is not None


def _has_arguments() -> bool:
    return _of("megatron.training.global_vars", "_GLOBAL_ARGS") is not None


def _has_batch_calculator() -> bool:
    name = "megatron.core.num_microbatches_calculator"
    return _of(name, "_GLOBAL_NUM_MICROBATCHES_CALCULATOR") is not None


CANNOT_BE_UNDONE: dict[str, Callable[[], bool]] = {
    "a process group": lambda: torch.distributed.is_initialized(),
    "megatron-core's groups": _has_parallel_state,
    "megatron's arguments": _has_arguments,
    "megatron's number of micro-batches": _has_batch_calculator,
    "patches": lambda: bool(_of("megatron.slipstream.patches.patching", "_applied")),
    "hooks of saved tensors": lambda: (
        torch._C._autograd._top_saved_tensors_default_hooks(True) is not None
    ),
}
"""Whether this process has what a fork would pass on: threads and connections are not."""
