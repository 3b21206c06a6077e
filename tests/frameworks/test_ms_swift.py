# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""ms-swift's and mcore-bridge's own code with the lines of their page: ``./run test-frameworks
ms-swift``."""

from __future__ import annotations

import importlib
import json
import os
import tempfile
from collections import defaultdict
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import framework_pages
import pytest
import torch
from framework_runs import (
    WITHOUT_KERNELS,
    Training,
    check_training,
    last_line,
    local_spec,
    save_tiny_qwen,
    skip_without,
    use_torch_optimizers,
)
from ranks import run_ranks
from tiny_gpt import ModelCase, first_difference, initialize, train

from megatron.slipstream import to_transformer_overrides

skip_without("swift", "mcore_bridge", "transformer_engine")
# Once, for all the processes that are forked from this one: with the CPU shims it does not import.
importlib.import_module("swift.megatron.pipelines.train.sft")

pytestmark = pytest.mark.timeout(600)

CASE = ModelCase("dense")
COMMAND = [word for word in framework_pages.words("ms-swift", "megatron sft") if word != "$@"][2:]
OPTIONS = json.loads(COMMAND[COMMAND.index("--megatron_extra_kwargs") + 1])
PLUGIN = Path(__file__).resolve().parents[2] / "examples" / "ms_swift_plugin.py"

PARSE = """
import json, sys
from swift.megatron.arguments import MegatronSftArguments
from swift.utils import json_parse_to_dict
from transformers import HfArgumentParser

args, rest = HfArgumentParser(MegatronSftArguments).parse_known_args(sys.argv[1:])
print(json.dumps([json_parse_to_dict(args.megatron_extra_kwargs), args.external_plugins, rest]))
"""


def _python(code: str, *arguments: str) -> str:
    """In a separate process: the CPU shims and ms-swift's parser are incompatible."""
    quiet = os.environ | {"PYTHONWARNINGS": "ignore"}
    return last_line(code, *arguments, environment=quiet)


def test_the_command_line_is_read_as_it_stands() -> None:
    options, plugins, rest = json.loads(_python(PARSE, *COMMAND))
    assert options == OPTIONS == to_transformer_overrides(options)
    assert plugins == ["slipstream_plugin.py"]
    assert rest == []


def test_the_file_on_the_page_is_the_one_in_the_examples() -> None:
    (line,) = framework_pages.blocks("ms-swift", "python")
    assert PLUGIN.read_text().endswith(line)


def test_the_plugin_file_gets_ready() -> None:
    code = (
        "import sys\n"
        "from swift.utils.utils import import_external_file\n"
        "import_external_file(sys.argv[1])\n"
        "from megatron.slipstream.integration import install\n"
        "from megatron.slipstream.patches import model_calls\n"
        "print(model_calls.before_first_call is not None, install.installed())"
    )
    assert _python(code, str(PLUGIN)) == "True None"


def _hf_config() -> Any:
    from transformers import Qwen2Config

    return Qwen2Config(
        num_hidden_layers=CASE.num_layers,
        hidden_size=CASE.hidden_size,
        num_attention_heads=CASE.num_attention_heads,
        num_key_value_heads=2,
        intermediate_size=192,
        vocab_size=CASE.vocab_size,
        max_position_embeddings=64,
        tie_word_embeddings=False,
        attention_dropout=0.0,
    )


def _config(extra: dict[str, Any], **arguments: Any) -> Any:
    """ms-swift's parsed arguments, only those that matter here."""
    from swift.megatron.model.utils import get_mcore_model_config

    given: dict[str, Any] = defaultdict(
        lambda: None,
        megatron_model_meta=SimpleNamespace(model_type="gpt"),
        megatron_extra_kwargs=extra,
        torch_dtype=torch.float32,
        task_type="causal_lm",
        router_replay_mode="disabled",
        padded_vocab_size=CASE.vocab_size,
        perform_initialization=True,
        variable_seq_lengths=False,
        **WITHOUT_KERNELS,
        **arguments,
    )

    class Arguments:
        def __getattr__(self, name: str) -> Any:
            return given[name]

    return get_mcore_model_config(Arguments(), _hf_config())


def _configs(rank: int, world_size: int, port: int) -> list[Any]:
    initialize(CASE)
    given = {name: getattr(_config(OPTIONS), name) for name in OPTIONS}
    with pytest.raises(TypeError, match="offload_module'"):
        _config({"offload_module": ["core_attn"]})
    # An empty list among its arguments is dropped, one among the extra arguments is not.
    dropped = _config({}, recompute_modules=[]).recompute_modules
    arrived = _config({"recompute_modules": []}).recompute_modules
    return [given, dropped, arrived]


def test_the_options_arrive_and_empty_lists_of_arguments_do_not() -> None:
    ((given, dropped, arrived),) = run_ranks(1, _configs)
    assert given == OPTIONS
    assert dropped == ["core_attn"]
    assert arrived == []


def _train(rank: int, world_size: int, port: int) -> list[int]:
    """Trains mcore-bridge's model. Returns the bytes that move with and without install()."""
    initialize(CASE)
    from mcore_bridge.model.gpt_model import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    from megatron.slipstream import OffloadConfig, install, uninstall

    def model(extra: dict[str, Any]) -> Any:
        torch.manual_seed(0)
        config = _config(extra)
        made = GPTModel(config, get_gpt_decoder_block_spec(config, use_transformer_engine=False))
        made.model_type = 1
        for parameter in made.parameters():
            torch.nn.init.normal_(parameter, std=0.02)
        return made

    plain = model({})
    expected = train(CASE, plain.config, [plain], [2, 2, 2])
    moved = []
    for is_seen in (True, False):
        uninstall()
        manager = install(OffloadConfig(offload_backend="cpu-lazy"))
        if not is_seen:
            uninstall()
        offloading = model({**OPTIONS, "min_offloaded_tensor_size": 1})
        actual = train(CASE, offloading.config, [offloading], [2, 2, 2])
        assert first_difference(expected, actual) is None
        moved.append(manager.report.d2h_bytes)
    return moved


def test_models_with_a_forward_of_their_own_move_all_the_same() -> None:
    ((seen, unseen),) = run_ranks(1, _train)
    assert seen > 0
    assert unseen == 0


def _save_model_and_data(folder: Path) -> None:
    from tokenizers import Tokenizer, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    save_tiny_qwen(folder)
    special = ["<unk>", "<|endoftext|>", "<|im_end|>"]
    words = [*special, *(f"w{index}" for index in range(100))]
    tokenizer = Tokenizer(models.WordLevel({w: i for i, w in enumerate(words)}, special[0]))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    names = dict(zip(("unk_token", "pad_token", "eos_token"), special, strict=True))
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, **names).save_pretrained(folder)
    with (folder / "data.jsonl").open("w") as file:
        for row in range(24):
            both = [
                {"role": role, "content": " ".join(f"w{(row * k + i) % 100}" for i in range(8))}
                for role, k in (("user", 7), ("assistant", 3))
            ]
            print(json.dumps({"messages": both}), file=file)


def _arguments(folder: Path, extra: dict[str, Any]) -> list[str]:
    """The command line of a training of three steps."""
    off = ("padding_free", "use_distributed_optimizer", "cross_entropy_loss_fusion", "check_model")
    given = {
        "model": folder,
        "model_type": "qwen2",
        "template": "qwen2_5",
        "dataset": folder / "data.jsonl",
        "output_dir": folder / "out",
        "tuner_type": "full",
        "train_iters": 3,
        "micro_batch_size": 2,
        "global_batch_size": 4,
        "max_length": 32,
        "lr": 1e-3,
        "logging_steps": 1,
        "dataloader_num_workers": 0,
        "torch_dtype": "bfloat16",
        "attention_backend": "unfused",
        "recompute_granularity": "none",
        "ddp_backend": "gloo",
        **dict.fromkeys(off, "false"),
        "megatron_extra_kwargs": json.dumps({**extra, **WITHOUT_KERNELS, "attention_dropout": 0}),
    }
    return [word for name, value in given.items() for word in (f"--{name}", str(value))]


def _fill(_: Any, models: list[Any], *__: Any, **___: Any) -> None:
    """In place of reading weights: those on disk are of Transformer Engine's layers."""
    torch.manual_seed(0)
    for model in models:
        for parameter in model.parameters():
            torch.nn.init.normal_(parameter, std=0.02)


def _sft(rank: int, world_size: int, port: int, offloads: bool) -> Any:
    """``megatron sft``, with the page's options and plugin if it offloads."""
    from mcore_bridge.bridge.gpt_bridge import GPTBridge
    from mcore_bridge.model import register
    from swift.megatron.pipelines.train import sft
    from swift.megatron.trainers import base

    from megatron.slipstream.integration.cpu.cpu_only import install_cpu_shims

    install_cpu_shims()
    use_torch_optimizers()
    os.environ.update(RANK="0", WORLD_SIZE="1", LOCAL_RANK="0")
    os.environ.update(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(port))
    training = Training()

    class Sft(sft.MegatronSft):
        def prepare_trainer(self) -> Any:
            self.trainer = super().prepare_trainer()
            self.trainer.save_checkpoint = lambda: None  # It is written from a GPU.
            on_log = self.trainer.on_log

            def noted(logs: dict[str, Any], prefix: str = "") -> None:
                on_log(logs, prefix)
                training.steps.append((logs["loss"], logs["grad_norm"]))

            self.trainer.on_log = noted
            return self.trainer

    with (
        tempfile.TemporaryDirectory() as name,
        patch("torch.cuda.device_count", lambda: 1),
        patch.object(register, "get_gpt_decoder_block_spec", local_spec),
        patch.object(base, "warmup_jit_function", lambda *_: None),
        patch.object(GPTBridge, "load_weights", _fill),
    ):
        _save_model_and_data(Path(name))
        arguments = _arguments(Path(name), {})
        if offloads:
            arguments = _arguments(Path(name), {**OPTIONS, "min_offloaded_tensor_size": 1})
            arguments += ["--external_plugins", str(PLUGIN)]
        run = Sft(arguments)
        run.main()
    return training.finish(run.trainer.unwrapped_models[0] if offloads else None)


def test_sft_trains_the_same_and_logs_what_the_page_shows() -> None:
    check_training("ms-swift", _sft)
