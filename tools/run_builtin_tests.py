# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Run Megatron-LM's tests of its own offloading engine on Slipstream's engine instead.

They are read from a Megatron-LM checkout and stay unchanged: wherever they create a new engine with
``reset_instance()``, Slipstream's is installed instead. The installed megatron-core is used.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import torch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from tools.shared_gpus import take_place  # noqa: E402

TESTS = "tests/unit_tests/pipeline_parallel/test_fine_grained_activation_offloading.py"

EPILOG = """\
examples:
  %(prog)s ../Megatron-LM                             all that one GPU can run
  %(prog)s ../Megatron-LM --engine builtin            the same tests with the built-in engine
  %(prog)s ../Megatron-LM -- -k cuda_graph -x         some of them; pytest gets what follows --
  SLIPSTREAM_RANKS_PER_GPU=4 torchrun --nproc-per-node 4 \\
      tools/run_builtin_tests.py ../Megatron-LM -- -k a2a    four ranks that share a GPU

FOLDER is a checkout of the branch of the installed release (core_r0.19.0), or holds from there
tests/__init__.py, tests/unit_tests/{__init__,test_utilities}.py, a2a_overlap/utils.py beside them
and pipeline_parallel/{__init__,test_fine_grained_activation_offloading}.py.
"""


class EngineInPlace:
    """A pytest plugin that puts an engine behind the seam for each test.

    Args:
        engine: ``slipstream``, or ``builtin`` to keep megatron-core's own.
        backend: Slipstream's backend.
    """

    def __init__(self, engine: str, backend: str) -> None:
        self._engine = engine
        self._backend = backend

    @pytest.fixture(autouse=True)
    def engine_in_place(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """Install the engine around each test; restore the environment variables afterwards."""
        from megatron.core.pipeline_parallel import fine_grained_activation_offload as builtin

        from megatron.slipstream.integration import install

        environment = dict(os.environ)
        if self._engine == "slipstream":
            monkeypatch.setattr(builtin.PipelineOffloadManager, "reset_instance", self._install)
        yield
        install.uninstall()
        builtin.PipelineOffloadManager.OFFLOAD_MGR = None
        os.environ.clear()
        os.environ.update(environment)
        gc.collect()

    def _install(self) -> None:
        """Replace the built-in ``reset_instance``: install a new engine without any state."""
        from megatron.slipstream.integration import install
        from megatron.slipstream.options.fields import OffloadConfig

        install.uninstall()
        install.install(OffloadConfig(offload_backend=self._backend))

    @pytest.hookimpl
    def pytest_sessionfinish(self) -> None:
        if torch.distributed.is_initialized():
            torch.distributed.destroy_process_group()


def main(arguments: Sequence[str] | None = None) -> int:
    given = list(sys.argv[1:] if arguments is None else arguments)
    cut = given.index("--") if "--" in given else len(given)
    options = _parser().parse_args(given[:cut])
    folder: Path = options.folder.resolve()
    tests = folder / TESTS
    if not tests.is_file():
        raise SystemExit(f"{tests} is not there; give a folder that holds {TESTS}")
    if "LOCAL_RANK" in os.environ and torch.cuda.is_available():
        take_place(int(os.environ["LOCAL_RANK"]), int(os.environ["LOCAL_WORLD_SIZE"]))
    if options.engine == "slipstream":
        # As pretrain_gpt.py does: without it Transformer Engine's saved tensors do not move.
        os.environ.setdefault("NVTE_CPU_OFFLOAD_V1", "1")
    # As their conftest.py does, which is not used: it downloads data that these tests do not need.
    os.environ.setdefault("NCCL_MAX_NCHANNELS", "1")
    os.environ.setdefault("NCCL_NVLS_ENABLE", "0")
    plugin = EngineInPlace(options.engine, options.backend)
    # Appended to the path, the folder provides the tests; a megatron-core in it is not used.
    common = ["--noconftest", "--import-mode=append", "-p", "no:cacheprovider", "-W", "ignore"]
    where = ["-c", os.devnull, "--rootdir", str(folder), str(tests)]
    return int(pytest.main([*common, *where, *given[cut + 1 :]], plugins=[plugin]))


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__.partition("\n")[0],
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("folder", type=Path, metavar="FOLDER", help="a Megatron-LM checkout")
    engines = ("slipstream", "builtin")
    add("--engine", choices=engines, default=engines[0], help="what the tests get (%(default)s)")
    add("--backend", default="cuda", help="Slipstream's (%(default)s); cpu without a GPU")
    return parser


if __name__ == "__main__":
    sys.exit(main())
