# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Cases and recipes of functional tests, in Megatron-LM's format, so that cases are portable.

``test_cases/<model>/<case>/model_config.yaml`` has:

- ``ENV_VARS``: environment variables of the training processes.
- ``MODEL_ARGS``: flags of the training script. ``--flag: true`` is a flag without a value,
  ``"[a b]"`` a list of values, ``"(a b)"`` and any other text with spaces one value. Megatron-LM
  expands other values twice with a shell, so a shell's special character needs two backslashes.
  ``${NAME}`` is an environment variable; an unknown one is not replaced.
- ``BEFORE_SCRIPT``: shell commands before each training.
- ``TEST_TYPE``: ``regular``, or ``ckpt-resume``: train, resume from the checkpoint at half-way,
  train the second half again, and compare.
- ``METRICS``: metrics that are compared with golden values.

``recipes/<platform>/<model>.yaml`` says which cases run on a platform, and on how many ranks.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import signal
import statistics
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, NamedTuple, Optional

import yaml
from pydantic import BaseModel, ConfigDict, Field
from training_runs import read_records

from megatron.slipstream.launcher import free_port
from megatron.slipstream.options.fields import OffloadConfig
from tools.shared_gpus import ranks_per_gpu

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "functional_tests" / "test_cases"
RECIPES = ROOT / "tests" / "test_utils" / "recipes"
REPRODUCIBLE_KERNELS = ROOT / "tests" / "support" / "reproducible_kernels"
TIMEOUT_S = 600

Values = Mapping[int, float]
"""A metric's values by iteration."""

EXACT_METRICS = ("lm loss", "num-zeros")
"""Megatron-LM's metrics, which METRICS may name."""
BYTES_METRICS = ("activation-peak-bytes", "offloaded-bytes")
"""Compared on a CPU only: on a GPU plans follow measured times."""
TOLERANCE = 0.05
"""Megatron-LM's relative tolerance of inexact metrics, for all steps but one (or 1% of them)."""

_MEGATRON_OFFLOADING = """
    fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
    activation_offload_fraction delta_offload_bytes_across_pp_ranks delay_offload_until_cuda_graph
    fine_grained_offloading_max_inflight_offloads
""".split()
OFFLOADING_FLAGS = frozenset(
    "--" + name.replace("_", "-")
    for name in [*_MEGATRON_OFFLOADING, *(field.name for field in fields(OffloadConfig))]
)

CPU_ARGUMENTS: Mapping[str, Optional[str]] = {
    "--transformer-impl": "local",
    "--bf16": None,
    "--attention-backend": None,
    "--moe-permute-fusion": None,
}
"""Flags that need a GPU, with their value without one; None leaves them out."""
_CPU_VARIABLES = {
    "CUDA_VISIBLE_DEVICES": "",
    # The same sums, in the same order, on every kind of CPU.
    "ATEN_CPU_CAPABILITY": "default",
    "MKL_CBWR": "COMPATIBLE",
    "OMP_NUM_THREADS": "1",
}
_GPU_VARIABLES = {
    # A kernel that another rank or test compiled for other sizes may round differently.
    "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1",
}
_OF_A_LAUNCHER = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR")
_ITERATION = re.compile(r" iteration +(\d+)/ *\d+ \|.*?\| num zeros: ([\d.]+) \|")
_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


class ModelConfig(BaseModel):
    """The content of a ``model_config.yaml``."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    ENV_VARS: dict[str, str] = Field(default_factory=dict)
    MODEL_ARGS: dict[str, str]
    BEFORE_SCRIPT: str = ""
    TEST_TYPE: Literal["regular", "ckpt-resume"]
    METRICS: tuple[Literal["lm loss", "num-zeros"], ...] = EXACT_METRICS


def read_yaml(path: Path) -> Any:
    """The content of a file. Numbers stay text, so that a command line has 1e-6 as written."""
    return yaml.load(path.read_text(), yaml.BaseLoader)


class Job(NamedTuple):
    """One case on one platform."""

    model: str
    case: str
    platform: str
    num_ranks: int
    """Number of processes, one for each GPU if there are any."""
    script: str
    """The command that a CI system runs from the repository's root."""

    @property
    def config(self) -> ModelConfig:
        """The case."""
        return ModelConfig.model_validate(read_yaml(self.folder / "model_config.yaml"))

    @property
    def folder(self) -> Path:
        """The case's folder."""
        return CASES / self.model / self.case

    @property
    def golden_path(self) -> Path:
        """Its golden values, made with the versions of constraints.txt."""
        return self.folder / f"golden_values_dev_{self.platform}.json"

    @property
    def metrics(self) -> tuple[str, ...]:
        """Names of the values that are compared with golden ones."""
        return self.config.METRICS + (BYTES_METRICS if self.platform == "cpu" else ())


def load_jobs() -> list[Job]:
    """All jobs of the recipes."""
    return [job for path in sorted(RECIPES.glob("*/*.yaml")) for job in _jobs(read_yaml(path))]


def _jobs(recipe: Any) -> Iterator[Job]:
    spec = recipe["spec"]
    for product in recipe["products"]:
        for case in product["test_case"]:
            for one in product["products"]:
                (gpus,) = one.get("gpus", [spec["gpus"]])
                for platform in one["platforms"]:
                    script = spec["script"].format(test_case=case, platforms=platform)
                    yield Job(spec["model"], case, platform, int(gpus), script)


# Command lines


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with each ``${NAME}`` or ``$NAME`` of a known variable replaced."""
    return _VARIABLE.sub(lambda match: variables.get(match[1] or match[2], match[0]), text)


def command_line(arguments: Mapping[str, str], variables: Mapping[str, str]) -> list[str]:
    """Flags as the arguments of a process."""
    return [word for flag, value in arguments.items() for word in _words(flag, value, variables)]


def _words(flag: str, value: str, variables: Mapping[str, str]) -> Iterator[str]:
    value = " ".join(shlex.split(expand(value, variables)))
    yield flag
    if value == "true":
        return
    if re.fullmatch(r"\[[^]]+\]", value):
        yield from shlex.split(value[1:-1])
    elif re.fullmatch(r"\([^)]+\)", value) or " " in value:
        yield value
    else:
        yield from shlex.split(value)


def arguments_of(job: Job, offloads: bool = True) -> dict[str, str]:
    """Flags of the training script on the job's platform, with or without offloading."""
    arguments = {
        flag: value
        for flag, value in job.config.MODEL_ARGS.items()
        if offloads or flag not in OFFLOADING_FLAGS
    }
    if job.platform != "cpu":
        return arguments
    for flag, instead in CPU_ARGUMENTS.items():
        if arguments.pop(flag, None) is not None and instead is not None:
            arguments[flag] = instead
    # On this backend a missing wait gives a wrong number.
    return arguments | ({"--offload-backend": "cpu-lazy"} if offloads else {})


# Trainings


@dataclass(frozen=True)
class Result:
    """Results of a training."""

    records: list[dict[str, Any]]
    """Contents of ``--run-record-path``, by rank."""
    num_zeros: Values
    """Number of gradients that are exactly zero."""
    num_iterations: int
    shown: str = ""
    """What a user sees; with one rank on a CPU megatron's own output is in a file."""

    def by_iteration(self, field: str) -> dict[int, list[Any]]:
        """A field of the records by iteration, with a value for each rank."""
        first = self.num_iterations - len(self.records[0]["iterations"]) + 1
        columns = zip(*(record["iterations"] for record in self.records), strict=True)
        return {step: [rank[field] for rank in ranks] for step, ranks in enumerate(columns, first)}

    def metrics(self) -> dict[str, Values]:
        """The metrics, with Megatron-LM's five decimals."""
        peaks = self.by_iteration("activation_peak_bytes")
        moved = self.by_iteration("bytes_offloaded")
        metrics: dict[str, Values] = {
            "lm loss": {step: ranks[-1] for step, ranks in self.by_iteration("loss").items()},
            "num-zeros": self.num_zeros,
            "activation-peak-bytes": {step: max(ranks) for step, ranks in peaks.items()},
            "offloaded-bytes": {step: sum(ranks) for step, ranks in moved.items()},
        }
        return {
            name: {step: round(float(value), 5) for step, value in values.items()}
            for name, values in metrics.items()
        }

    def peak_bytes(self) -> int:
        """Peak of the highest rank in a typical iteration, with the memory of CUDA graphs."""
        outside = self.by_iteration("activation_peak_bytes").values()
        inside = self.by_iteration("graph_pool_bytes").values()
        steps = (
            [peak + pool for peak, pool in zip(*ranks, strict=True)]
            for ranks in zip(outside, inside, strict=True)
        )
        of_ranks = zip(*steps, strict=True)
        return int(max(statistics.median(peaks) for peaks in of_ranks))


def train(job: Job, offloads: bool, folder: Path, run_number: int = 1) -> Result:
    """Train to the end, started like Megatron-LM's scripts; ``folder`` has the log.

    Raises:
        AssertionError: It failed or took too long; the message has the end of its log.
    """
    record = folder / f"record{run_number}.json"
    num_iterations = int(job.config.MODEL_ARGS["--train-iters"])
    folder.mkdir(exist_ok=True)
    if run_number == 2:
        return_to_half_way(job, folder)
    environment = environment_of(job, folder)
    paths = [str(ROOT), *filter(None, [environment.get("PYTHONPATH")])]
    if job.platform != "cpu":
        paths.insert(0, str(REPRODUCIBLE_KERNELS))
    environment["PYTHONPATH"] = os.pathsep.join(paths)
    flags = command_line(arguments_of(job, offloads), environment)
    is_alone = job.platform == "cpu" and job.num_ranks == 1
    output = folder / f"output{run_number}.txt"
    flags += ["--run-record-path", str(record)]
    flags += ["--megatron-output-path", str(output) if is_alone else "-"]
    log = folder / f"log{run_number}.txt"
    script = ["bash", "-ec", f'{job.config.BEFORE_SCRIPT}\nexec "$@"', "bash"]
    with log.open("w") as stream:
        process = subprocess.Popen(
            [*script, *_launcher(job), *flags],
            **{"cwd": ROOT, "env": environment, "stdout": stream, "stderr": subprocess.STDOUT},
            start_new_session=True,
        )
        try:
            status = process.wait(TIMEOUT_S)
        finally:
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGTERM)
    shown = log.read_text(errors="replace")
    text = (output.read_text(errors="replace") if output.exists() else "") + shown
    assert status == 0, f"{job.case} ended with status {status}:\n{text[-6000:]}"
    num_zeros = {int(step): float(zeros) for step, zeros in _ITERATION.findall(text)}
    return Result(read_records(job.num_ranks, record), num_zeros, num_iterations, shown)


def environment_of(job: Job, folder: Path) -> dict[str, str]:
    """Environment variables of a training whose files are in ``folder``."""
    checkpoints = str(folder / "checkpoints")
    variables = {
        "OUTPUT_PATH": str(folder),
        "TENSORBOARD_PATH": str(folder / "tensorboard"),
        "CHECKPOINT_SAVE_PATH": checkpoints,
        "CHECKPOINT_LOAD_PATH": checkpoints,
        # The commands of a case use the same Python.
        "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]]),
    }
    inherited = {name: text for name, text in os.environ.items() if name not in _OF_A_LAUNCHER}
    environment = {**inherited, **variables, **job.config.ENV_VARS}
    return environment | (_CPU_VARIABLES if job.platform == "cpu" else _GPU_VARIABLES)


def return_to_half_way(job: Job, folder: Path) -> None:
    """Remove a training's last checkpoint, so that the next one resumes at half-way."""
    checkpoints = folder / "checkpoints"
    num_iterations = int(job.config.MODEL_ARGS["--train-iters"])
    shutil.rmtree(checkpoints / f"iter_{num_iterations:07d}")
    (checkpoints / "latest_checkpointed_iteration.txt").write_text(f"{num_iterations // 2}\n")


def _launcher(job: Job) -> list[str]:
    shares_gpus = job.platform != "cpu" and ranks_per_gpu() > 1
    script = ["-m", "tools.shared_gpus"] if shares_gpus else []
    if job.platform == "cpu" and job.num_ranks == 1:
        return [
            sys.executable,
            "pretrain_gpt.py",
        ]  # without the time that a launcher takes to start
    ranks = ["--nproc-per-node", str(job.num_ranks), "--master-port", str(free_port())]
    return [sys.executable, "-m", "torch.distributed.run", *ranks, *script, "pretrain_gpt.py"]


# Comparisons


def first_difference(expected: Result, actual: Result) -> Optional[str]:
    """The first bitwise difference of two trainings in common iterations; None if equal."""
    losses = {step: ranks[-1] for step, ranks in expected.by_iteration("loss").items()}
    for step, ranks in actual.by_iteration("loss").items():
        if losses.get(step) != ranks[-1]:
            return f"loss differs in iteration {step}: {losses.get(step)} and {ranks[-1]}"
    for rank, (left, right) in enumerate(zip(expected.records, actual.records, strict=True)):
        for name in ("gradients_sha256", "weights_sha256"):
            # Both values are of the last iteration, which both trainings have.
            if left.get(name) is None or left.get(name) != right.get(name):
                return f"{name.partition('_')[0]} of rank {rank} differ at the end"
    return None


def compare(golden: Values, now: Values, exact: bool) -> list[int]:
    """The steps in which a metric differs from its golden value, if they are too many."""
    allowed_error = 0.0 if exact else TOLERANCE
    found = [
        step
        for step, value in golden.items()
        if step not in now or not abs(now[step] - value) <= allowed_error * abs(value)
    ]
    # With one step, no step may differ.
    num_allowed = 0 if exact or len(golden) == 1 else max(len(golden) // 100, 1)
    return found if len(found) > num_allowed else []


def read_golden(path: Path) -> dict[str, Values]:
    """Read golden values from a file in Megatron-LM's format."""
    return {
        name: {int(step): float(value) for step, value in metric["values"].items()}
        for name, metric in json.loads(path.read_text()).items()
    }


def write_golden(path: Path, metrics: Mapping[str, Values]) -> None:
    """Write golden values."""
    content = {
        name: {
            "start_step": min(values),
            "end_step": max(values),
            "step_interval": 1,
            "values": {str(step): value for step, value in values.items()},
        }
        for name, values in metrics.items()
    }
    path.write_text(json.dumps(content, indent=4) + "\n")
