# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""What users of ``attach()`` are told: refusals, why nothing moves, and what a handle prints."""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from attached_models import (
    WIDTH,
    Attention,
    Chain,
    Decoder,
    Layer,
    attach_to,
    equal,
    gradients,
    loss_of,
    make,
    make_attached,
    micro_batch,
    numbers,
    warnings_of,
)
from torch.autograd.graph import save_on_cpu, saved_tensors_hooks
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from megatron.slipstream.attached.engine import MAX_LOST_PASSES
from megatron.slipstream.attached.handle import ATTACH_RULES, attach
from megatron.slipstream.attached.names import find_modules
from megatron.slipstream.options.fields import OffloadConfig

SMALL = "min_offloaded_tensor_size"
PAGE = Path(__file__).resolve().parents[3] / "docs" / "user-guide" / "any-pytorch-model.md"
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE.read_text(), re.M | re.S)


# --- patterns and refusals ------------------------------------------------------------------------


@pytest.fixture(scope="module")
def model() -> Decoder:
    return Decoder(2)


@pytest.mark.parametrize(
    "patterns, names",
    [
        (["layers.*"], ["layers.0", "layers.1"]),
        (["layers.1"], ["layers.1"]),
        (["layers.*.mlp"], ["layers.0.mlp", "layers.1.mlp"]),
        (["**.mlp"], ["layers.0.mlp", "layers.1.mlp"]),
        (["layers.*.mlp.[03]"], [f"layers.{i}.mlp.{j}" for i in (0, 1) for j in (0, 3)]),
        (["**.layers.**.attn"], ["layers.0.attn", "layers.1.attn"]),
        ([Attention], ["layers.0.attn", "layers.1.attn"]),
        (["layers.0", Attention], ["layers.0", "layers.1.attn"]),
        (["head", "embedding"], ["embedding", "head"]),
        (["*"], ["embedding", "head"]),
        ([Layer, "layers.*"], ["layers.0", "layers.1"]),
    ],
    ids=str,
)
def test_a_pattern_means_these_modules(model: Decoder, patterns: Any, names: list[str]) -> None:
    assert [match.name for match in find_modules(model, patterns)] == names


def test_a_group_is_called_after_its_pattern_or_type(model: Decoder) -> None:
    labels = [match.label for match in find_modules(model, ["layers.0", Attention])]
    assert labels == ["layers.0", "Attention"]


@pytest.mark.parametrize(
    "patterns, error",
    [
        ("layer.*", r"'layer\.\*', which matches no sub-module of Decoder.* such as: layers\.\*,"),
        ("layers.*.atn", r"such as: layers\.\*\.attn,"),
        ("layers.*.moe", r"such as: (layers\.\*\.(attn|mlp|attn_norm|mlp_norm), ){4}"),
        ("mlp", r"such as: layers\.\*\.mlp,.*'\*\*' for any number of parts"),
        (torch.nn.Conv2d, r"'Conv2d', which matches no sub-module.* such as: .*Embedding"),
        ("layers", r"only containers that never run \('layers' is a ModuleList\).*'layers\.\*'"),
        ([], r"patterns=\[\] chooses nothing"),
        ([3], r"patterns contains 3, which is neither a name pattern nor a module type"),
        (b"layers.*", r"patterns contains b'layers\.\*', which is neither a name pattern"),
        (3, r"patterns contains 3, which is neither a name pattern nor a module type"),
        (["layers.*", "layers.*.mlp"], r"'layers\.\*\.mlp', which adds nothing .*leave one"),
        (["**.mlp", torch.nn.GELU], r"'GELU', which adds nothing"),
        (Decoder, r"'Decoder', which matches no sub-module"),
    ],
    ids=str,
)
def test_a_pattern_that_chooses_nothing_is_an_error(
    model: Decoder, patterns: Any, error: str
) -> None:
    with pytest.raises(ValueError, match=error):
        attach(model, patterns)
    assert not any(module._forward_hooks for module in model.modules())


def test_an_argument_of_another_type_is_an_error_that_names_it(model: Decoder) -> None:
    for arguments, error in (
        (("layers", "layers.*"), r"model='layers' is no module"),
        (([model], "layers.*"), r"^model=a list is no module; give the torch.nn.Module"),
        (
            (model, "layers.*", {"offload_verify": 1}),
            r"config=\{'offload_verify': 1\} is no OffloadConfig",
        ),
        ((model, model.layers[1]), r"a Layer itself, .* give its name, 'layers\.1', or"),
        ((model, [model.layers[1]]), r"a Layer itself, .* give its name, 'layers\.1', or"),
        ((model, Layer()), r"a Layer itself, .* give text such as"),
    ):
        with pytest.raises(ValueError, match=error):
            attach(*arguments)  # type: ignore[arg-type]
    assert not any(module._forward_hooks for module in model.modules())


def test_a_detached_handle_is_no_context(model: Decoder) -> None:
    attached = attach_to(Decoder(1), "layers.*")
    attached.detach()
    with (
        pytest.raises(RuntimeError, match="is detached, .*; call attach"),
        attached,
    ):
        pass


def test_of_matches_inside_each_other_the_outer_counts() -> None:
    nested = torch.nn.Sequential(torch.nn.Sequential(torch.nn.Sequential(torch.nn.Linear(2, 2))))
    assert [match.name for match in find_modules(nested, [torch.nn.Sequential])] == ["0"]


def test_names_are_those_without_wrappers() -> None:
    model = Decoder(2)
    model.layers[0] = checkpoint_wrapper(model.layers[0])
    model.layers[1] = torch.compile(model.layers[1])
    whole = torch.compile(model)
    assert isinstance(whole, torch.nn.Module)
    for patterns in (["layers.*"], [Layer]):
        matches = find_modules(whole, patterns)
        assert [match.name for match in matches] == ["layers.0", "layers.1"]
        # The wrapper: its operations belong to the group.
        assert [match.module for match in matches] == list(model.layers)


def test_a_shared_module_is_found_once() -> None:
    model = Decoder(2)
    model.tied = model.layers[0]
    names = [match.name for match in find_modules(model, ["layers.*", "tied"])]
    assert names == ["layers.0", "layers.1"]


def test_a_module_is_attached_once_only() -> None:
    model, attached = make_attached(Decoder, "layers.*.mlp")
    with pytest.raises(ValueError, match=r"the model \(Decoder\) because it is attached already"):
        attach_to(model, "layers.*.attn")
    with pytest.raises(ValueError, match=r"for mlp because it is attached already"):
        attach_to(model.layers[0], "mlp")
    attached.detach()
    attach_to(model, "layers.*.attn").detach()


@pytest.mark.parametrize(
    "name, value",
    [
        ("offload_engine", "megatron"),
        ("offload_report_path", "report.json"),
        ("offload_trace_path", "trace.json"),
        *((SMALL, value) for value in (-1, "1", 1e6, True, None)),
        *(
            ("activation_offload_fraction", value)
            for value in (1.5, "0.5", None, True, float("nan"))
        ),
    ],
)
def test_a_value_that_cannot_be_followed_is_refused(name: str, value: Any) -> None:
    if name.startswith("offload_"):
        assert name in {rule.name for rule in ATTACH_RULES}
        with pytest.raises(ValueError, match=f"{name}=.* is not supported with attach.*because.*;"):
            attach(Decoder(1), "layers.*", OffloadConfig(**{name: value}))
    else:
        with pytest.raises(ValueError, match=f"{name}="):
            attach(Decoder(1), "layers.*", **{name: value})


def _on_gpus(model: Decoder, *indices: int) -> Decoder:
    """Makes the model's parameters appear to be on these GPUs."""
    tensors = [SimpleNamespace(is_cuda=True, device=torch.device("cuda", i)) for i in indices]
    model.parameters = lambda recurse=True: iter(tensors)
    return model


def test_a_model_on_several_gpus_is_refused() -> None:
    with pytest.raises(ValueError, match=r"several GPUs \(\[0, 2\]\) of one process.*; use one"):
        attach(_on_gpus(Decoder(1), 0, 2, 0), "layers.*")


def test_a_model_on_another_gpu_than_the_current_one_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Its operations run on another stream than the one that copies would wait for."""
    model = Decoder(1)
    attach_to(model, "layers.*")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    _on_gpus(model, 0)
    model(micro_batch(0))
    _on_gpus(model, 1)
    with pytest.raises(RuntimeError, match=r"call torch\.cuda\.set_device\(1\)"):
        model(micro_batch(0))


# --- why nothing moves ----------------------------------------------------------------------------


Block = Callable[[torch.Tensor], torch.Tensor]


class Blocks(torch.nn.Module):
    """Layers of which each call is wrapped."""

    def __init__(
        self, wrap: Callable[[Block, torch.Tensor], torch.Tensor], is_inside: bool
    ) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(Wrapped(wrap) if is_inside else Layer() for _ in range(4))
        self.wrap = wrap
        self.is_inside = is_inside

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x) if self.is_inside else self.wrap(layer, x)
        return x


class Wrapped(Layer):
    def __init__(self, wrap: Callable[[Block, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.wrap = wrap

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.wrap(super().forward, x)


class Half(Wrapped):
    """Only a part of what it saves is taken."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x + self.attn(self.attn_norm(x))
        return x + self.wrap(self.mlp, x)


class Jagged(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = torch.nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        rows = torch.nested.as_nested_tensor(list(x.unbind()), layout=torch.jagged)
        return self.linear(rows).sin().to_padded_tensor(0.0)


def on_cpu(block: Block, x: torch.Tensor) -> torch.Tensor:
    with save_on_cpu():
        return block(x)


def by_hand(block: Block, x: torch.Tensor) -> torch.Tensor:
    with saved_tensors_hooks(lambda tensor: (tensor,), lambda saved: saved[0]):
        return block(x)


def checkpointed(block: Block, x: torch.Tensor, use_reentrant: bool) -> torch.Tensor:
    with save_on_cpu():
        return checkpoint(block, x, use_reentrant=use_reentrant)


TAKEN = "it saves only tensors that other saved-tensor hooks take"
AROUND = "modules of '{}' run under other saved-tensor hooks ({}), which take what they save"
INSIDE = "modules of '{}' set other saved-tensor hooks ({}), which take what they save"

REASONS: dict[str, tuple[Callable[[], torch.nn.Module], str, list[str]]] = {
    "around": (
        partial(Blocks, on_cpu, False), "layers.*", [AROUND.format("layers.*", "save_on_cpu")]
    ),
    "around checkpoints": (
        partial(Blocks, partial(checkpointed, use_reentrant=False), False),
        "layers.*",
        [AROUND.format("layers.*", "save_on_cpu")],
    ),
    "around reentrant checkpoints": (
        partial(Blocks, partial(checkpointed, use_reentrant=True), False),
        "layers.*",
        [AROUND.format("layers.*", "save_on_cpu")],
    ),
    "inside": (
        partial(Blocks, on_cpu, True),
        "layers.*",
        [INSIDE.format("layers.*", "save_on_cpu"), f"Of 4 groups 4 stay: {TAKEN}"],
    ),
    "inside by other functions": (
        partial(Blocks, by_hand, True),
        "layers.*",
        [INSIDE.format("layers.*", "by_hand"), f"Of 4 groups 4 stay: {TAKEN}"],
    ),
    "jagged": (
        partial(Chain, Jagged),
        "parts.*",
        ["Of 3 groups 3 stay: it saves only parameters and buffers, nested tensors"],
    ),
}  # fmt: skip


def train_on(build: Callable[[], torch.nn.Module], patterns: str | None, path: str) -> Any:
    model, attached = make(build), None
    if patterns is not None:
        config = OffloadConfig(offload_backend="cpu", offload_native=path)
        attached = attach(model, patterns, config, min_offloaded_tensor_size=1)
    for index in range(3):
        torch.manual_seed(index)
        x = numbers(index, 2, 8, WIDTH).requires_grad_()
        model(x).square().sum().backward()
    return [x.grad, *gradients(model)], attached


@pytest.mark.parametrize("path", ["auto", "off"])
@pytest.mark.parametrize("name", REASONS)
def test_where_nothing_moves_the_real_reason_is_told(
    name: str, path: str, caplog: pytest.LogCaptureFixture
) -> None:
    build, patterns, words = REASONS[name]
    expected, _ = train_on(build, None, path)
    results, attached = train_on(build, patterns, path)
    assert equal(results, expected)
    assert attached.report().ranks[0].d2h_bytes == 0
    told = warnings_of(caplog)
    assert len(told) == len(words), told
    places = {"handle": repr(attached), "report": attached.report().render()}
    for word, text in zip(words, told, strict=True):
        assert word in text
        reason = word.removeprefix("Of 4 groups 4 stay: ").removeprefix("Of 3 groups 3 stay: ")
        for place, content in places.items():
            assert reason in content, place
    for text in (*told, *places.values()):
        assert SMALL not in text
        assert "the modules that are checkpointed" not in text
        assert "set the option" not in text


@pytest.mark.parametrize("path", ["auto", "off"])
def test_a_group_of_which_a_part_is_taken_says_so(
    path: str, caplog: pytest.LogCaptureFixture
) -> None:
    build = partial(Chain, partial(Half, on_cpu), 4)
    expected, _ = train_on(build, None, path)
    results, attached = train_on(build, "parts.*", path)
    assert equal(results, expected)
    assert attached.report().ranks[0].modules["parts.*"].num_groups_moved == 3
    (told,) = warnings_of(caplog)
    assert INSIDE.format("parts.*", "save_on_cpu") in told
    for content in (repr(attached), attached.report().render()):
        assert told.removeprefix("attach(): ") in content
        assert "3 groups that move also save tensors that other saved-tensor hooks take" in content


class Keeps(torch.nn.Module):
    """Its result is saved by an operation outside of it, too."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), torch.nn.Sigmoid())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.inner(x).sin()


@pytest.mark.parametrize("path", ["auto", "off"])
def test_memory_that_something_else_holds_is_said_with_its_bytes(path: str) -> None:
    _, attached = train_on(partial(Chain, Keeps, 4), "parts.*.inner", path)
    # In two layers the sigmoid's result, which the sine saves; of the first, its input is held too.
    nbytes = 2 * 2 * 8 * WIDTH * 4
    text = f"of groups that move, {nbytes / 1024:.1f} KiB stay: an operation outside the chosen"
    for content in (repr(attached), attached.report().render()):
        assert text in content


def train(model: torch.nn.Module) -> None:
    for index in range(3):
        loss_of(model, index).backward()


def without_gradients() -> Decoder:
    model = Decoder()
    model.requires_grad_(False)
    model.head.requires_grad_(True)
    return model


def with_identities() -> Decoder:
    model = Decoder()
    for layer in model.layers:
        layer.mlp_norm = torch.nn.Identity()
    return model


def never_backward(model: torch.nn.Module) -> None:
    for index in range(2 * MAX_LOST_PASSES):
        loss_of(model, index)


def train_in_a_checkpoint(model: torch.nn.Module) -> None:
    for index in range(3):
        checkpoint(model, micro_batch(index), use_reentrant=False).sum().backward()


def train_a_part_in_a_checkpoint(model: torch.nn.Module) -> None:
    x = numbers(0, 2, 8, 32).requires_grad_()
    for _ in range(3):
        checkpoint(model.layers[0], x, use_reentrant=False).sum().backward()


def train_compiled(model: torch.nn.Module) -> None:
    train(torch.compile(model, fullgraph=True, backend="eager"))


class Spare(Decoder):
    def __init__(self) -> None:
        super().__init__()
        self.spare = Layer()


class Case:
    def __init__(
        self,
        words: list[str],
        build: Callable[[], torch.nn.Module] = Decoder,
        patterns: Any = "layers.*",
        run: Callable[[torch.nn.Module], None] = train,
        config: dict[str, Any] | None = None,
        **options: Any,
    ) -> None:
        self.words, self.build, self.patterns, self.run = words, build, patterns, run
        self.config = OffloadConfig(offload_backend="cpu", **(config or {}))
        self.options = {"min_offloaded_tensor_size": 1, **options}


CASES = {
    "too small": Case(
        [
            "nothing moves. Of 4 groups 4 stay: it saves only tensors smaller than "
            "min_offloaded_tensor_size, parameters and buffers",
            "or set the option named",
        ],
        min_offloaded_tensor_size=1 << 20,
    ),
    "a fraction of none": Case(
        ["nothing moves. Of 4 groups 3 stay: activation_offload_fraction keeps it; 1 stays"],
        activation_offload_fraction=0.0,
    ),
    "host memory for none": Case(
        ["nothing moves. Of 4 groups 3 stay: offload_host_memory_limit_bytes keeps it; 1 stays"],
        config={"offload_host_memory_limit_bytes": 100},
    ),
    "before backward only": Case(
        ["nothing moves. Of 1 groups 1 stays: its backward follows before another layer"],
        patterns="layers.3",
    ),
    "no gradients": Case(
        ["backward does not reach modules of 'layers.*.mlp'", "name modules that are trained"],
        without_gradients, "layers.*.mlp",
    ),
    "nothing computed": Case(
        ["backward does not reach modules of 'layers.*.mlp_norm'"],
        with_identities, "layers.*.mlp_norm",
    ),
    "never a backward": Case(
        [f"{MAX_LOST_PASSES + 1} times in a row with gradients and no backward", "torch.no_grad()"],
        run=never_backward,
    ),
    "a model in a checkpoint": Case(["under other saved-tensor hooks"], run=train_in_a_checkpoint),
    "a part in a checkpoint": Case(
        ["a module of 'layers.*' runs outside of the model's forward and under other saved-tensor"],
        run=train_a_part_in_a_checkpoint,
    ),
    "recomputed": Case(
        ["'layers.*.mlp' ran only where nothing is kept of them"],
        partial(Decoder, checkpointing=False), ["layers.*.mlp", "head"],
    ),
    "never runs": Case(["no module of 'spare' ran"], Spare, ["layers.*", "spare"]),
    "one graph": Case(["compiled with fullgraph=True", "leave fullgraph out"], run=train_compiled),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_where_nothing_moves_one_warning_says_why(
    name: str, caplog: pytest.LogCaptureFixture
) -> None:
    case = CASES[name]
    model = make(case.build)
    attached = attach(model, case.patterns, case.config, **case.options)
    case.run(model)
    assert attached.report().ranks[0].d2h_bytes == 0 or name in ("a fraction of none", "never runs")
    warnings = warnings_of(caplog)
    told = [text for text in warnings if case.words[0] in text]
    assert len(told) == 1, warnings
    for word in case.words[1:]:
        assert word in told[0]
    assert attached.report().ranks[0].warnings
    assert SMALL in attached.report().render() or name != "too small"
    assert "'head'" not in caplog.text


def test_where_something_moves_nothing_is_said(caplog: pytest.LogCaptureFixture) -> None:
    model, attached = make_attached(Decoder, "layers.*")
    train(model)
    for index in range(MAX_LOST_PASSES):  # forwards for a metric
        loss_of(model, index)
    train(model)
    assert attached.report().ranks[0].d2h_bytes > 0
    assert warnings_of(caplog) == []


# --- print(attached) ------------------------------------------------------------------------------


def test_a_handle_prints_modules_bytes_and_plan() -> None:
    model = make(Decoder)
    attached = attach_to(model, ["layers.*.mlp", "head"])
    assert str(attached).splitlines() == [
        "Attached to Decoder, backend cpu",
        "  layers.*.mlp: 4 modules",
        "  head: 1 module",
        "  no plan yet: it is made after the first forward and backward",
    ]
    train(model)
    lines = str(attached).splitlines()
    moved = attached.report().ranks[0].modules["layers.*.mlp"]
    assert lines[1].startswith("  layers.*.mlp: 4 modules, 3 of 4 groups and ")
    assert f"{moved.d2h_bytes / 1024:.1f} KiB moved in the last iteration" in lines[1]
    assert lines[2].startswith("  head: 1 module, 0 of 1 groups and 0 B moved")
    assert lines[3].startswith("  3 iterations, plan: 3 of 5 groups move, ")
    attached.detach()
    assert str(attached).startswith("Attached to Decoder, backend cpu, detached\n")


def test_printing_a_handle_changes_no_figure() -> None:
    results = []
    for prints in (False, True):
        model, attached = make_attached(partial(Chain, Layer), "parts.*")
        for _ in range(3):
            loss = model(numbers(1, 2, 8, 32)).sum()
            if prints:
                str(attached)
            loss.backward()
            if prints:
                repr(attached)
        rank = attached.report().ranks[0]
        results.append((rank.modules, rank.num_plans, rank.num_iterations))
    assert results[0] == results[1]


# --- ranks ----------------------------------------------------------------------------------------


def test_a_process_group_made_after_attach_gives_the_rank(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    model = make(Decoder)
    attached = attach_to(model, "layers.3")
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_rank", lambda: 1)
    loss_of(model, 0).backward()
    (told,) = warnings_of(caplog)
    assert told.startswith("rank 1: nothing moves. Of 1 groups 1 stays")
    assert attached.report().ranks[0].rank == 1


# --- the page -------------------------------------------------------------------------------------


class _Model(Decoder):
    """Returns a loss, as the page's model does."""

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        return super().forward(ids).square().mean()


def test_the_lines_of_the_page_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    model = _Model()
    scope: dict[str, Any] = {
        "model": model,
        "batches": [micro_batch(index) for index in range(3)],
        "optimizer": torch.optim.SGD(model.parameters(), 0.1),
    }
    blocks = [block for block in BLOCKS if "transformers" not in block]
    assert len(blocks) == len(BLOCKS) - 1 == 3
    for block in blocks:
        exec(compile(block, str(PAGE), "exec"), scope)
    assert "layers.*" in capsys.readouterr().out
    assert {path.name for path in tmp_path.iterdir()} == {"report.json", "trace.json"}
    assert not any(module._forward_hooks for module in model.modules())


@pytest.mark.skipif(
    not all(map(importlib.util.find_spec, ("transformers", "accelerate"))),
    reason="transformers or accelerate is not installed",
)
def test_the_lines_for_hugging_face_run(tmp_path: Path) -> None:
    import transformers

    (block,) = (block for block in BLOCKS if "transformers" in block)
    ids = torch.zeros(8, dtype=torch.long)
    scope: dict[str, Any] = {
        "llama_config": transformers.LlamaConfig(
            vocab_size=64,
            hidden_size=32,
            intermediate_size=64,
            num_hidden_layers=2,
            num_attention_heads=4,
        ),
        "arguments": transformers.TrainingArguments(
            output_dir=str(tmp_path), use_cpu=True, max_steps=1, report_to=[], disable_tqdm=True
        ),
        "dataset": [{"input_ids": ids, "labels": ids}] * 2,
    }
    exec("from megatron.slipstream import attach", scope)
    exec(compile(block, str(PAGE), "exec"), scope)
    assert scope["trainer"].state.global_step == 1
