# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Functional test cases in the format of Megatron-LM's own, so that cases can be handed over.

A case is a folder ``test_cases/<model>/<case>`` with a ``model_config.yaml``:

- ``ENV_VARS``: environment variables of the training processes.
- ``MODEL_ARGS``: flags of the training script. ``--flag: true`` is a flag without a value,
  ``"[a b]"`` is a list of values, ``"(a b)"`` and any other text with spaces is one value. What
  reads these files there are shell scripts, which read other values twice: a character that means
  something to a shell needs two backslashes.
- ``MODEL_ARGS_2``: the same for the second training of a case that resumes; ``MODEL_ARGS`` if not
  there.
- ``BEFORE_SCRIPT``, ``AFTER_SCRIPT``: shell commands around each training, in its shell.
- ``TEST_TYPE``: ``regular``, or ``ckpt-resume``: train, go back to the checkpoint from half-way,
  train the second half again, and compare.
- ``METRICS``: what is compared with golden values.

``${NAME}`` stands for a variable of the environment; a name that is not there stays as it is.
"""

from __future__ import annotations

import difflib
import re
import shlex
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Optional

import yaml
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from megatron.slipstream.config import OffloadConfig

ROOT = Path(__file__).resolve().parents[2]
CASES = ROOT / "tests" / "functional_tests" / "test_cases"

Arguments = Mapping[str, str]
"""Flags with their values as the file has them."""

_MEGATRON_OFFLOADING = """
    fine_grained_activation_offloading offload_modules min_offloaded_tensor_size
    activation_offload_fraction delta_offload_bytes_across_pp_ranks delay_offload_until_cuda_graph
    fine_grained_offloading_max_inflight_offloads
""".split()
OFFLOADING_FLAGS = frozenset(
    "--" + name.replace("_", "-")
    for name in [*_MEGATRON_OFFLOADING, *(field.name for field in fields(OffloadConfig))]
)
"""What a case is without when it is compared with itself without offloading."""

_VARIABLE = re.compile(r"\$\{(\w+)\}|\$(\w+)")


class Strict(BaseModel):
    """What a file may hold and nothing else."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class ModelConfig(Strict):
    """The content of a ``model_config.yaml``; see the top of this module."""

    ENV_VARS: dict[str, str] = Field(default_factory=dict)
    MODEL_ARGS: dict[str, str]
    MODEL_ARGS_2: Optional[dict[str, str]] = None
    BEFORE_SCRIPT: Optional[str] = None
    AFTER_SCRIPT: Optional[str] = None
    TEST_TYPE: Literal["regular", "ckpt-resume"]
    METRICS: tuple[str, ...] = ("lm loss", "num-zeros")


@dataclass(frozen=True)
class Case:
    """A case and where it lies."""

    model: str
    name: str
    config: ModelConfig
    folder: Path

    @property
    def offloads(self) -> bool:
        """Whether there is something to compare it with that does not."""
        return "--fine-grained-activation-offloading" in self.config.MODEL_ARGS

    @property
    def resumes(self) -> bool:
        """Whether its second half is trained twice."""
        return self.config.TEST_TYPE == "ckpt-resume"

    @property
    def num_iterations(self) -> int:
        """How long a training is."""
        return int(self.config.MODEL_ARGS["--train-iters"])

    def golden_path(self, environment: str, platform: str) -> Path:
        """Where the golden values for a platform are."""
        return self.folder / f"golden_values_{environment}_{platform}.json"

    def arguments(self, run_number: int = 1) -> Arguments:
        """Flags of the first or the second training."""
        second = self.config.MODEL_ARGS_2
        return second if run_number == 2 and second is not None else self.config.MODEL_ARGS


def read_yaml(path: Path, kind: type[Any]) -> Any:
    """The content of a file as ``kind``, a model of pydantic.

    Raises:
        ValueError: It is not there or something else; names file and field.
    """
    try:
        # Texts as they are written: 1e-6 is to get to a command line as that.
        content = yaml.load(path.read_text(), yaml.BaseLoader)
        return kind.model_validate(content)
    except OSError as error:
        raise ValueError(f"{path} cannot be read ({error.strerror})") from error
    except yaml.YAMLError as error:
        raise ValueError(f"{path} is no YAML: {' '.join(str(error).split())}") from error
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"]))
        raise ValueError(f"{path}: {place or 'the file'}: {first['msg']}") from error


def load_case(folder: Path) -> Case:
    """Read a case.

    Raises:
        ValueError: Its file is missing or not in the format; names file, field and cure.
    """
    path = folder / "model_config.yaml"
    config = read_yaml(path, ModelConfig)
    for name in ("MODEL_ARGS", "MODEL_ARGS_2"):
        arguments = getattr(config, name)
        if arguments is not None:
            _check_arguments(path, name, arguments, config.TEST_TYPE == "ckpt-resume")
    return Case(folder.parent.name, folder.name, config, folder)


def _check_arguments(path: Path, name: str, arguments: Arguments, resumes: bool) -> None:
    for flag, value in arguments.items():
        if not flag.startswith("--"):
            raise ValueError(f"{path}: {name}: {flag!r} is no flag; begin it with --")
        if value in ("", "false", "null"):
            raise ValueError(
                f"{path}: {name}: {flag}: {value or 'nothing'} is not supported because the format "
                "would give the flag that as its value; leave the flag out"
            )
    needed = ["--train-iters"]
    if resumes:
        needed += ["--save", "--load", "--save-interval"]
    for flag in needed:
        if flag not in arguments:
            raise ValueError(f"{path}: {name} has no {flag}, which a test needs; set it")


def find_cases(names: Sequence[str] = (), folder: Path = CASES) -> list[Case]:
    """The cases of these names, or all, in order.

    Raises:
        ValueError: There is none of a name.
    """
    folders = {path.parent.name: path.parent for path in folder.glob("*/*/model_config.yaml")}
    for name in names:
        if name not in folders:
            near = difflib.get_close_matches(name, folders, n=1)
            hint = f"did you mean {near[0]}?" if near else "--list shows them"
            raise ValueError(f"{name} is not a functional test case; {hint}")
    return [load_case(folders[name]) for name in names or sorted(folders)]


def expand(text: str, variables: Mapping[str, str]) -> str:
    """``text`` with each ``${NAME}`` or ``$NAME`` that is a variable in its place."""

    def value(match: re.Match[str]) -> str:
        return variables.get(match[1] or match[2], match[0])

    return _VARIABLE.sub(value, text)


def without_offloading(arguments: Arguments) -> Arguments:
    """The same training with everything staying on the device."""
    return {flag: value for flag, value in arguments.items() if flag not in OFFLOADING_FLAGS}


def command_line(arguments: Arguments, variables: Mapping[str, str]) -> list[str]:
    """Flags as a process takes them."""
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
