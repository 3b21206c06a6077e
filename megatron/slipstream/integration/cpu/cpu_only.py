# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Run megatron-core and ``megatron.training`` on a machine without a GPU.

For tests, demonstrations and debugging: real models, real pipeline schedules and the real training
loop over gloo. Each replaced symbol is a patch in :data:`CORE_SHIMS` or :data:`TRAINING_SHIMS`,
with its reason.

``torch.cuda.is_available()`` stays False.
"""

from __future__ import annotations

import contextlib
import functools
import logging
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from megatron.slipstream.patches.patching import Patch, apply, replacing, resolve

logger = logging.getLogger(__name__)

_HOST = torch.device("cpu")
_DEVICE_TYPES = frozenset({str, torch.device})


# Replacements. Without streams, every operation has finished when its call returns.


class _InertStream:
    """Replaces ``torch.cuda.Stream``: work is always complete, and waits return immediately."""

    cuda_stream = 0
    device = _HOST

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def wait_stream(self, _: Any = None) -> None:
        pass

    wait_event = synchronize = wait_stream

    def record_event(self, event: Any = None) -> Any:
        return event if event is not None else _InertEvent()

    def query(self) -> bool:
        return True


class _InertEvent(torch.cpu.Event):
    """Replaces ``torch.cuda.Event``: always complete, and measures no time."""

    def __init__(self, *_: Any, **__: Any) -> None:
        pass

    def elapsed_time(self, _: Any) -> float:
        return 0.0


def _returns(value: Any) -> Callable[[Any], Any]:
    return lambda original: lambda *_, **__: value


def _becomes(value: Any) -> Callable[[Any], Any]:
    return lambda original: value


def _is_gpu(device: Any) -> bool:
    if isinstance(device, torch.device):
        return device.type == "cuda"
    return isinstance(device, str) and device.split(":")[0] == "cuda"


def _any_device_to_cpu(original: Any) -> Any:
    """Wrap a tensor factory or ``Tensor.to`` so that ``'cuda'`` means the CPU."""

    @functools.wraps(original)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        if "device" in kwargs and _is_gpu(kwargs["device"]):
            kwargs["device"] = _HOST
        # A model calls this thousands of times in a step, nearly always without a device.
        for arg in args:
            if type(arg) in _DEVICE_TYPES:
                args = tuple(_HOST if _is_gpu(arg) else arg for arg in args)
                break
        return original(*args, **kwargs)

    return wrapper


_return_self = _becomes(lambda self, *_, **__: self)


def _called_from(module: str) -> bool:
    """Whether the function that called our replacement is in ``module`` or below it."""
    name = sys._getframe(3).f_globals.get("__name__", "")
    return name == module or name.startswith(module + ".")


@replacing
def _gpu_type_names_for_optimizer(
    original: Any, self: torch.Tensor, *args: Any, **kwargs: Any
) -> Any:
    """Make ``Tensor.type()`` return 'torch.cuda.*', but only to megatron-core's optimizers."""
    answer = original(self, *args, **kwargs)
    if not args and not kwargs and _called_from("megatron.core.optimizer"):
        return answer.replace("torch.", "torch.cuda.", 1)
    return answer


@replacing
def _one_device_for_initialize(original: Any) -> int:
    """Make ``torch.cuda.device_count()`` return 1, but only to ``megatron.training.initialize``."""
    return 1 if _called_from("megatron.training.initialize") else original()


@replacing
def _to_numpy_if_asked(
    _: Any, tensor: Any, as_numpy: bool = False, record_stream: bool = False
) -> Any:
    """Make ``maybe_move_tensor_to_cpu`` also convert a tensor that is already on the CPU."""
    return tensor.numpy() if as_numpy and torch.is_tensor(tensor) else tensor


@replacing
def _never_fp8(original: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    original(self, *args, **kwargs)
    self.fp8 = False


_get_default_state = _becomes(lambda *_, **__: torch.default_generator.get_state())
_set_default_state = _becomes(lambda state, *_, **__: torch.default_generator.set_state(state))


def _of_cpu_modules(name: str) -> Callable[[Any], Any]:
    """Return a patch from ``cpu_modules``, whose import of megatron-core needs the shims first."""
    module = "megatron.slipstream.integration.cpu.cpu_modules"
    return lambda original: getattr(import_module(module), name)(original)


_NO_CURRENT_DEVICE = "utils, rotary embedding, router and schedules ask which device to allocate on"
_NO_STREAMS = "token dispatcher, gradient buckets, P2P and timers order streams; here is only one"
_ONE_GENERATOR = "the tensor-parallel RNG tracker seeds, saves and restores 'the CUDA generator'"
_LITERAL = "schedules, optimizer, clipping and the training loop spell the device as a literal"
_FACTORIES = (
    *("tensor", "as_tensor", "empty", "zeros", "ones", "full", "arange", "rand", "randn"),
    *("randint", "empty_like", "zeros_like", "ones_like", "full_like"),
)

CORE_SHIMS: tuple[Patch, ...] = (
    Patch(
        "megatron.core.transformer.multi_token_prediction.is_inference_column_parallel_linear",
        _returns(False),
        "it compares with classes that are no types without Transformer Engine",
        since="0.20",
    ),
    Patch("torch.cuda.current_device", _returns(_HOST), _NO_CURRENT_DEVICE),
    Patch("torch.cuda.set_device", _returns(None), "initialize selects the local rank's GPU"),
    Patch("torch.cuda.Stream", _becomes(_InertStream), _NO_STREAMS),
    Patch("torch.cuda.Event", _becomes(_InertEvent), _NO_STREAMS),
    # torch.cuda.StreamContext stays: torch.compile makes isinstance() checks against it.
    Patch("torch.cuda.stream", _becomes(contextlib.nullcontext), _NO_STREAMS),
    Patch("torch.cuda.current_stream", _returns(_InertStream()), _NO_STREAMS),
    Patch("torch.cuda.synchronize", _returns(None), _NO_STREAMS),
    Patch("torch.cuda.empty_cache", _returns(None), "there is no caching allocator to empty"),
    Patch("torch.cuda.get_rng_state", _get_default_state, _ONE_GENERATOR),
    Patch("torch.cuda.random.get_rng_state", _get_default_state, _ONE_GENERATOR),
    Patch("torch.cuda.set_rng_state", _set_default_state, _ONE_GENERATOR),
    Patch("torch.cuda.manual_seed", _becomes(torch.default_generator.manual_seed), _ONE_GENERATOR),
    Patch(
        "megatron.core.tensor_parallel.random._set_cuda_rng_state",
        _set_default_state,
        "it queues the state until CUDA initialises, which never happens",
    ),
    *(Patch(f"torch.{name}", _any_device_to_cpu, _LITERAL) for name in _FACTORIES),
    Patch("torch.Tensor.to", _any_device_to_cpu, _LITERAL),
    Patch("torch.Tensor.cuda", _return_self, "tied embeddings are moved to the GPU"),
    Patch("torch.nn.Module.cuda", _return_self, "model chunks are moved to the GPU"),
    Patch(
        "torch.Tensor.type",
        _gpu_type_names_for_optimizer,
        "optimizers compare type names with 'torch.cuda.*' literals",
    ),
    Patch(
        "megatron.core.tensor_parallel.random.CheckpointWithoutOutput.__init__",
        _never_fp8,
        "output-discarding recomputation asks Transformer Engine for its fp8 state",
    ),
    Patch(
        "megatron.core.models.backends.LocalSpecProvider.grouped_mlp_modules",
        _of_cpu_modules("grouped_experts_without_transformer_engine"),
        "grouped experts, the only ones with offload marks, are built on Transformer Engine",
    ),
    Patch(
        "megatron.core.models.hybrid.hybrid_block.TENorm",
        lambda _: import_module("megatron.core.transformer.torch_norm").WrappedTorchNorm,
        "the final norm of a HybridModel is Transformer Engine's whatever its layer spec says",
    ),
    Patch(
        "megatron.core.models.backends.LocalSpecProvider.core_attention",
        _of_cpu_modules("core_attention_with_head_sizes"),
        "multi-latent attention passes head sizes that the local core attention does not take",
    ),
    Patch(
        "megatron.core.transformer.moe.token_dispatcher.maybe_move_tensor_to_cpu",
        _to_numpy_if_asked,
        "it converts to numpy only what it moved, and the dispatcher needs the numpy array",
    ),
)
"""Shims for megatron-core. Ordered by kind: device, streams, generators, literals, the rest."""

TRAINING_SHIMS: tuple[Patch, ...] = (
    Patch(
        "megatron.training.training.initialize_megatron",
        lambda original: functools.partial(original, allow_no_cuda=True),
        "initialisation asserts a GPU unless told otherwise, and pretrain does not pass it on",
    ),
    Patch(
        "torch.cuda.device_count",
        _one_device_for_initialize,
        "with 0 devices, initialisation skips the parallel groups and the RNG tracker",
    ),
    Patch(
        "torch.cuda.get_device_properties",
        _returns(SimpleNamespace(major=9, minor=0, name="cpu", total_memory=0)),
        "argument validation reads the compute capability when TP or CP is used",
    ),
    Patch(
        "megatron.training.training.set_jit_fusion_options",
        _returns(None),
        "its torch.compile warm-up takes half a minute for kernels that are off here",
    ),
    Patch(
        "megatron.core.pipeline_parallel.utils.set_ideal_affinity_for_current_gpu",
        _returns(None),
        "pretrain pins the process to the GPU's NUMA node when activations are offloaded",
    ),
)
"""Shims for ``megatron.training`` beyond :data:`CORE_SHIMS`."""

_HELPERS = Patch(
    "megatron.core.datasets.utils.compile_helpers",
    _returns(None),
    "initialisation runs make, and ends the process where there is no Makefile",
)


def install_cpu_shims() -> bool:
    """Make megatron-core usable without a GPU; return whether this process runs on the shims.

    Call it before a model is built. Idempotent. Raises ``RuntimeError`` if megatron-core lacks
    a symbol that must be replaced.
    """
    if torch.cuda.is_available():
        return False
    apply(CORE_SHIMS, "a machine without a GPU")
    return True


def install_training_shims() -> bool:
    """As :func:`install_cpu_shims`, also for ``megatron.training.pretrain``, which it imports."""
    if not install_cpu_shims():
        return False
    apply(TRAINING_SHIMS, "a machine without a GPU")
    return True


def skip_helper_compilation() -> bool:
    """Stop ``initialize_megatron`` from running ``make``; returns whether it is stopped.

    Needed with a GPU as well: the wheel ships the compiled ``helpers_cpp`` without a Makefile, and
    Megatron exits the process when ``make`` fails. A source checkout has the Makefile.
    """
    owner, _ = resolve(_HELPERS.target)
    has_makefile = (Path(owner.__file__).parent / "Makefile").exists()
    if has_makefile or not _importable("megatron.core.datasets.helpers_cpp"):
        return False
    apply([_HELPERS], "training from a wheel")
    return True


def tolerate_missing_affinity_tools() -> bool:
    """Make ``pretrain`` warn if it cannot pin the process to its GPU's NUMA node.

    Megatron pins it if activations are offloaded, and raises a bare error if ``cuda-python`` or
    ``pynvml`` is missing. Returns whether the warning replaces pinning.
    """
    if not _missing_affinity_tools():
        return False
    apply([_PINNING], "training without affinity tools")
    return True


def _missing_affinity_tools() -> list[str]:
    packages = (("cuda.bindings", "cuda-python"), ("pynvml", "nvidia-ml-py"))
    return [package for module, package in packages if not _importable(module)]


def _warn_instead(_: Any) -> Callable[[], None]:
    def warn() -> None:
        logger.warning(
            "the process is not pinned to its GPU's NUMA node because %s is not installed; "
            "copies to the host may be slower. Install it, or pin with numactl",
            " and ".join(_missing_affinity_tools()),
        )

    return warn


_PINNING = Patch(
    "megatron.core.pipeline_parallel.utils.set_ideal_affinity_for_current_gpu",
    _warn_instead,
    "pretrain raises without cuda-python and pynvml where activations are offloaded",
)


def _importable(module: str) -> bool:
    try:
        import_module(module)
    except ImportError:
        return False
    return True
