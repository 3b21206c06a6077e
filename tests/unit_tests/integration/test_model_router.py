# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Several models in one process: each has its own engine, in any order of runs."""

from __future__ import annotations

import copy
import gc
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

import pytest
import torch
from ranks import run_ranks
from tiny_gpt import ModelCase, build_chunks, initialize, make_config

from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.integration import install
from megatron.slipstream.integration.seam import model_router
from megatron.slipstream.options.fields import OffloadConfig
from megatron.slipstream.patches import releases
from megatron.slipstream.plan.trace import StepKind

MODULES = ("core_attn", "attn_proj", "mlp_norm")
POLICY = ModelCase("dense")
CRITIC = ModelCase("dense", hidden_size=48, num_layers=3, seq_length=24)
STEPS = 3

Micro = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def micro_batches(case: ModelCase, seed: int, count: int) -> list[Micro]:
    """Tokens and positions ``[b, s]``, and an attention mask."""
    generator = torch.Generator().manual_seed(seed)
    shape = (case.micro_batch_size, case.seq_length)
    mask = torch.ones(1, 1, case.seq_length, case.seq_length, dtype=torch.bool).triu(1)
    positions = torch.arange(case.seq_length).expand(shape)
    return [
        (torch.randint(case.vocab_size, shape, generator=generator), positions, mask)
        for _ in range(count)
    ]


def loss_of(model: Any, micro: Micro) -> torch.Tensor:
    tokens, positions, mask = micro
    return model(tokens, positions, mask, labels=tokens.roll(-1, 1))


class Model:
    """A model under megatron's schedule."""

    def __init__(self, case: ModelCase, modules: Sequence[str] = (), seed: int = 0) -> None:
        self.case = case
        self.config = make_config(case, modules)
        self.chunks = build_chunks(case, self.config)
        with torch.no_grad():
            for chunk in self.chunks:
                for index, parameter in enumerate(chunk.parameters()):
                    parameter.add_(0.01 * torch.sin(torch.tensor(float(index + 31 * seed))))

    def run(
        self,
        seed: int,
        count: int = 2,
        forward_only: bool = False,
        inside_loss: Callable[[], Any] = lambda: 0.0,
        before_forward: Callable[[], Any] = lambda: None,
    ) -> list[torch.Tensor]:
        """Call the schedule once. Returns its losses and the gradients afterwards."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        def forward_step(data: Iterator[Micro], model: Any) -> Any:
            before_forward()
            output = loss_of(model, next(data))

            def loss(losses: torch.Tensor) -> Any:
                total = losses.float().mean() + inside_loss()
                return total, {"loss": total.detach().clone()}

            return output, loss

        batches = micro_batches(self.case, seed, count)
        is_staged = len(self.chunks) > 1
        if not forward_only:
            for chunk in self.chunks:
                chunk.zero_grad(set_to_none=True)
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=[iter(batches) for _ in self.chunks] if is_staged else iter(batches),
            model=self.chunks if is_staged else self.chunks[0],
            num_microbatches=count,
            seq_length=self.case.seq_length,
            micro_batch_size=self.case.micro_batch_size,
            forward_only=forward_only,
        )
        return [result["loss"] for result in results] + self.gradients()

    def gradients(self) -> list[torch.Tensor]:
        parameters = [p for chunk in self.chunks for p in chunk.parameters()]
        return [p.grad.clone() for p in parameters if p.grad is not None]

    def log_probabilities(self, seed: int) -> torch.Tensor:
        """Run like a reference model: through the schedule, without gradients."""
        with torch.no_grad():
            return self.run(seed, count=1, forward_only=True)[0]

    def value(self, seed: int) -> torch.Tensor:
        """A call without a schedule and without gradients."""
        with torch.no_grad():
            return loss_of(self.chunks[0], micro_batches(self.case, seed, 1)[0]).mean()


def alternate(policy: Model, critic: Model, reference: Model, step: int) -> list[torch.Tensor]:
    before = reference.log_probabilities(step)
    first = policy.run(step)
    second = critic.run(step, count=3)
    return [before, *first, reference.log_probabilities(step), *second, policy.value(step)]


def reference_inside_the_loss(
    policy: Model, critic: Model, reference: Model, step: int
) -> list[torch.Tensor]:
    """With its own schedule, which ends in the middle of the policy's iteration."""
    first = policy.run(step, inside_loss=lambda: reference.log_probabilities(step))
    return [*first, *critic.run(step, inside_loss=lambda: policy.log_probabilities(step))]


def reference_called_inside_the_loss(
    policy: Model, critic: Model, reference: Model, step: int
) -> list[torch.Tensor]:
    """The last call before the policy's schedule ends is one of another model."""
    first = policy.run(step, inside_loss=lambda: reference.value(step))
    return [*first, *critic.run(step, inside_loss=lambda: policy.value(step))]


def critic_trained_inside_the_loss(
    policy: Model, critic: Model, reference: Model, step: int
) -> list[torch.Tensor]:
    """Unusual, but it must not break anything."""
    inner: list[list[torch.Tensor]] = []

    def train_critic() -> torch.Tensor:
        with torch.enable_grad():
            inner.append(critic.run(step))
        return inner[-1][0].detach()

    first = policy.run(step, count=1, inside_loss=train_critic)
    return [*first, *(tensor for result in inner for tensor in result)]


def others_between_micro_batches(
    policy: Model, critic: Model, reference: Model, step: int
) -> list[torch.Tensor]:
    """Schedules of others end where no pass of the policy waits for backward."""
    inner: list[list[torch.Tensor]] = []

    def run_others() -> None:
        inner.append([reference.log_probabilities(step)])
        if len(inner) == 2:
            inner.append(critic.run(step))
            inner.append([reference.log_probabilities(step)])

    first = policy.run(step, count=3, before_forward=run_others)
    return [*first, *(tensor for result in inner for tensor in result)]


def critic_called_inside_a_forward(
    policy: Model, critic: Model, reference: Model, step: int
) -> list[torch.Tensor]:
    """A model that appears to contain the other one."""
    micro = micro_batches(critic.case, step, 1)[0]
    inner: list[torch.Tensor] = []

    def call_critic(*_: object) -> None:
        inner.append(loss_of(critic.chunks[0], micro).mean())

    critic.chunks[0].zero_grad(set_to_none=True)
    layer: Any = policy.chunks[0].decoder.layers[1]
    hook = layer.register_forward_pre_hook(call_critic)
    first = policy.run(step, inside_loss=lambda: inner[-1])
    hook.remove()
    return [*first, *critic.gradients()]


def passes_of_both_before_backward_of_either(
    policy: Model, critic: Model, reference: Model, step: int
) -> list[torch.Tensor]:
    """A custom loop that tells the engine when an iteration has ended."""
    from megatron.core.pipeline_parallel.fine_grained_activation_offload import (
        FineGrainedActivationOffloadingInterface as Facade,
    )

    for model in (policy, critic):
        model.chunks[0].zero_grad(set_to_none=True)
    losses = []
    for seed in (step, step + 10):
        for model in (policy, critic):
            micro = micro_batches(model.case, seed, 1)[0]
            losses.append(loss_of(model.chunks[0], micro).float().mean())
            reference.value(seed)
    for loss in losses:
        loss.backward()
    Facade.reset()
    Facade.reset()
    return [*(x.detach() for x in losses), *policy.gradients(), *critic.gradients()]


ORDERS = (
    alternate,
    pytest.param(reference_inside_the_loss, marks=pytest.mark.releases),
    reference_called_inside_the_loss,
    critic_trained_inside_the_loss,
    others_between_micro_batches,
    critic_called_inside_a_forward,
    passes_of_both_before_backward_of_either,
)
Order = Callable[[Model, Model, Model, int], list[torch.Tensor]]


def _run_order(rank: int, world_size: int, port: int, order: Order) -> list[dict[str, Any]]:
    """Figures of policy and critic; fails if a bit differs from the engine switched off."""
    initialize(POLICY)
    plain = [Model(POLICY), Model(CRITIC), Model(POLICY, seed=1)]
    expected = [order(*plain, step) for step in range(STEPS)]
    install.install(OffloadConfig(offload_backend="cpu-lazy"))
    moved = [Model(POLICY, MODULES), Model(CRITIC, MODULES), Model(POLICY, MODULES, seed=1)]
    plans_before: list[int] = []
    for step in range(STEPS):
        if step == STEPS - 2:
            plans_before = [_report_of(model).num_plans for model in moved[:2]]
        actual = order(*moved, step)
        assert len(actual) == len(expected[step]) > 10
        for index, (a, b) in enumerate(zip(expected[step], actual, strict=True)):
            assert torch.equal(a, b), f"step {step}, tensor {index}"
    engine = install.installed()
    assert engine is not None
    with pytest.raises(ValueError, match="has no engine because it has not been tra"):
        install.report(moved[2].chunks[0])
    assert len(engine.router.managers) == 2
    return [
        {
            "iterations": report.num_iterations,
            "plans made late": report.num_plans - before,
            "late": report.total.num_late,
            "moves": report.d2h_bytes > 0,
            "marks that went astray": report.total.num_groups % (len(MODULES) * num_layers),
        }
        for report, before, num_layers in zip(
            map(_report_of, moved[:2]),
            plans_before,
            (POLICY.num_layers, CRITIC.num_layers),
            strict=True,
        )
    ]


def _report_of(model: Model) -> Any:
    (report,) = install.report(model.chunks[0]).ranks
    return report


@pytest.mark.parametrize("order", ORDERS, ids=lambda order: order.__name__)
def test_models_that_take_turns_keep_to_their_plans(order: Order) -> None:
    ((policy, critic),) = run_ranks(1, _run_order, order)
    as_if_alone = {
        "iterations": STEPS,
        "plans made late": 0,
        "late": 0,
        "moves": True,
        "marks that went astray": 0,
    }
    assert policy == as_if_alone
    assert critic == as_if_alone


def _stages(rank: int, world_size: int, port: int, own_configs: bool) -> list[int]:
    """The number of chunks of each engine, with two models of two virtual stages on each rank."""
    case = ModelCase("dense", pp=2, vpp=2)
    initialize(case, rank, world_size, port)
    plain = [Model(case), Model(case, seed=1)]
    expected = [model.run(step) for step in range(3) for model in plain]
    install.install(OffloadConfig(offload_backend="cpu-lazy"))
    moved = [Model(case, MODULES), Model(case, MODULES, seed=1)]
    for model in moved:
        if own_configs:  # slime makes one for each stage
            for chunk in model.chunks:
                chunk.config = copy.copy(chunk.config)
    actual = [model.run(step) for step in range(3) for model in moved]
    for left, right in zip(expected, actual, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(left, right, strict=True))
    engine = install.installed()
    served = [[engine.router.known_manager(c) for c in model.chunks] for model in moved]
    assert len({manager for managers in served for manager in managers}) == 2
    for managers in served:
        assert len(set(managers)) == 1
        assert managers[0].report.num_iterations == 3
        assert managers[0].report.d2h_bytes > 0
    return [len(managers) for managers in served]


@pytest.mark.parametrize(
    "own_configs",
    [
        pytest.param(False, id="one config"),
        pytest.param(True, id="one for each stage", marks=pytest.mark.releases),
    ],
)
def test_virtual_stages_of_a_model_share_its_engine(own_configs: bool) -> None:
    assert run_ranks(2, _stages, own_configs) == [[2, 2], [2, 2]]


# One of several, without running them.


class Chunk(torch.nn.Module):
    """The part of a model chunk that the router reads."""

    def __init__(self, stage: Optional[int] = None, num_stages: Optional[int] = None) -> None:
        super().__init__()
        self.vp_stage = stage
        options = {
            "virtual_pipeline_model_parallel_size": num_stages,
            "fine_grained_activation_offloading": True,
        }
        self.config = SimpleNamespace(**options)


LIMIT_BYTES = 3 << 20


@pytest.fixture
def router() -> Any:
    install.install(
        OffloadConfig(offload_backend="cpu", offload_host_memory_limit_bytes=LIMIT_BYTES)
    )
    return install.installed().router


def test_bound_chunks_are_one_model(router: Any) -> None:
    first, second = Chunk(0, 2), Chunk(1, 2)
    others = [Chunk(0, 2), Chunk(1, 2)]
    # Called in an order that does not show which chunks form a model.
    router.bind([first, second])
    router.bind(others)
    assert router.managers == [router.default], "what is not trained needs no engine"
    assert router.manager_of(first) is not router.manager_of(others[0])
    assert router.manager_of(first) is router.manager_of(second)
    assert router.manager_of(others[0]) is router.manager_of(others[1])
    router.bind([first])
    assert router.manager_of(first) is router.manager_of(second)


def test_stages_with_the_same_configuration_belong_together(router: Any) -> None:
    a0, a1, b0, b1 = Chunk(0, 2), Chunk(1, 2), Chunk(0, 2), Chunk(1, 2)
    a1.config, b1.config = a0.config, b0.config
    for chunk in (a0, b0, a1, b1):
        router.manager_of(chunk)
    assert router.manager_of(a0) is router.manager_of(a1)
    assert router.manager_of(b0) is router.manager_of(b1)
    assert router.manager_of(a0) is not router.manager_of(b0)


def test_engines_share_the_host_memory_of_the_process(router: Any) -> None:
    chunks = [Chunk() for _ in range(3)]
    pools = [router.manager_of(chunk).store.host_pool for chunk in chunks]
    assert [pool.limit_bytes for pool in pools] == [LIMIT_BYTES // 3] * 3


def test_an_engine_keeps_the_host_memory_that_it_has(router: Any) -> None:
    first = router.manager_of(keep := Chunk()).store.host_pool
    first.allocate(2 << 20)
    held_bytes = first.allocated_bytes
    assert held_bytes > LIMIT_BYTES // 2
    second = router.manager_of(other := Chunk()).store.host_pool
    assert (first.limit_bytes, second.limit_bytes) == (held_bytes, LIMIT_BYTES - held_bytes)
    del keep, other


def test_those_with_less_host_memory_share_what_the_others_leave(router: Any) -> None:
    chunks = [Chunk(), Chunk()]
    pools = [router.manager_of(chunk).store.host_pool for chunk in chunks]
    pools[1].allocate(1 << 20)
    held_bytes = pools[1].allocated_bytes
    assert held_bytes > LIMIT_BYTES // 3
    chunks.append(Chunk())
    pools.append(router.manager_of(chunks[2]).store.host_pool)
    left_bytes = LIMIT_BYTES - held_bytes
    assert [pool.limit_bytes for pool in pools] == [left_bytes // 2, held_bytes, left_bytes // 2]


def test_who_was_refused_host_memory_does_not_get_to_ask_again(router: Any) -> None:
    first = router.manager_of(keep := Chunk()).store.host_pool
    first.was_refused, first.limit_bytes = True, 0
    second = router.manager_of(other := Chunk()).store.host_pool
    assert (first.limit_bytes, second.limit_bytes) == (0, LIMIT_BYTES)
    del keep, other


def test_an_engine_stays_while_backward_can_still_read_what_it_moved(
    router: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = Chunk(), Chunk()
    router.manager_of(first)
    late = router.manager_of(second)
    late.store.host_pool.allocate(8192)
    monkeypatch.setattr(OffloadEngine, "is_needed", property(lambda self: self is late.engine))
    del second
    gc.collect()
    third = Chunk()
    assert router.manager_of(third) is not late
    assert late.store.host_pool.allocated_bytes > 0
    del first, third


def test_a_model_that_is_gone_gives_its_engine_back(router: Any) -> None:
    first, second = Chunk(), Chunk()
    router.manager_of(first)
    gone = router.manager_of(second).store
    gone.host_pool.allocate(8192)
    assert gone.host_pool.allocated_bytes > 0
    del second
    gc.collect()
    third = Chunk()
    router.manager_of(third)
    assert gone.host_pool.allocated_bytes == 0
    assert len(router.managers) == 2
    del first
    gc.collect()
    assert router.manager_of(Chunk()) is router.default


def test_an_iteration_of_passes_that_no_call_began_ends_with_its_schedule(router: Any) -> None:
    """Megatron's overlapped schedules run the layers of a chunk one by one."""
    from marked_group import offload_group

    manager = router.default

    def one_group() -> None:
        tensor = torch.ones(4, requires_grad=True)
        with offload_group(manager, "core_attn") as group:
            result = tensor.exp()
        group.commit(result).sum().backward()

    for num_groups in (2, 1):
        manager.init_model_chunk_offload_handler(
            **{name: 0 for name in ("pp_rank",) if releases.is_since("0.19")},
            vp_size=None,
            vp_stage=None,
        )
        one_group()
        if num_groups == 2:
            with torch.no_grad(), router.calling(Chunk()):
                pass
            one_group()
        manager.reset()
    assert manager.report.num_iterations == 2


def test_suspending_covers_every_model(router: Any) -> None:
    first, second = router.manager_of(keep := Chunk()), router.manager_of(other := Chunk())
    with install.suspended():
        assert not first.do_offload
        assert not second.do_offload
        # A model that starts to train in the meantime.
        assert not router.manager_of(late := Chunk()).do_offload
    assert first.do_offload
    assert second.do_offload
    # As NeMo-RL does: with the engine that is installed in megatron.
    second.disable_offload()
    assert not first.do_offload
    second.enable_offload()
    assert first.do_offload
    del keep, other, late


def test_suspending_leaves_no_model_to_cpp(router: Any) -> None:
    """C++ performs the steps of an iteration without asking whether offloading is suspended."""
    managers = router.manager_of(keep := Chunk()), router.manager_of(other := Chunk())
    for manager in managers:
        manager.engine.now.native = SimpleNamespace(
            leaves_out_marks=False, num_steps=0, end=lambda: None
        )
    managers[0].disable_offload()
    assert [manager.engine.now.native for manager in managers] == [None, None]
    del keep, other


def test_models_with_layers_in_graphs_have_engines_of_their_own(router: Any) -> None:
    chunks = Chunk(), Chunk()
    for chunk in chunks:
        chunk.config.cuda_graph_impl = "transformer_engine"
    first, second = map(router.manager_of, chunks)
    assert first.graphs is not second.graphs
    plain = router.manager_of(without := Chunk())
    tries = [manager.engine.lifecycle.tries_plans for manager in (first, second, plain)]
    assert tries == [False, False, True], "graphs cost the host nothing for each group"
    del without
    from megatron.core.pipeline_parallel import fine_grained_activation_offload

    seam = fine_grained_activation_offload.PipelineOffloadManager
    before = seam.OFFLOAD_MGR
    with model_router.marks_go_to(second):
        assert seam.OFFLOAD_MGR is second
    assert seam.OFFLOAD_MGR is before


# Callers of the engine.


def _calls(rank: int, world_size: int, port: int) -> None:
    from megatron.core.models.common.language_module.language_module import LanguageModule

    initialize(POLICY)
    plain, moved = Model(POLICY), Model(POLICY, MODULES)
    seen = []
    install.install_at_first_call(
        OffloadConfig(offload_backend="cpu"), lambda: seen.append("checked")
    )
    assert install.installed() is None
    plain.run(0)
    assert install.installed() is None, "a model without offloading needs no engine"
    moved.log_probabilities(0)
    engine = install.installed()
    assert len(engine.router._model_of) == 0, "a model without gradients needs no plan"
    num_passes: list[int] = []
    moved.run(0, inside_loss=lambda: num_passes.append(len(engine.engine.now.passes)) or 0.0)
    assert num_passes == [1, 2], "one pass for each micro-batch"
    moved.run(1)
    assert seen == ["checked"]
    assert engine.report.num_iterations == 2
    with install.suspended():
        moved.run(2)
    assert engine.report.num_iterations == 2
    install.uninstall()
    assert "__call__" not in vars(LanguageModule)
    expected = plain.run(3)
    install.install(OffloadConfig(offload_backend="cpu-lazy"))
    # A forward that does not announce a pass to the engine, as in mcore-bridge's models.
    chunk: Any = moved.chunks[0]
    own_forward = type(chunk).forward

    def forward(*arguments: Any, **options: Any) -> Any:
        chunk.config.fine_grained_activation_offloading = False
        try:
            return own_forward(chunk, *arguments, **options)
        finally:
            chunk.config.fine_grained_activation_offloading = True

    chunk.forward = forward
    assert all(torch.equal(a, b) for a, b in zip(expected, moved.run(3), strict=True))
    (report,) = install.report(chunk).ranks
    assert report.d2h_bytes > 0


@pytest.mark.releases
def test_the_engine_comes_with_the_first_call_of_a_model_that_is_to_offload() -> None:
    run_ranks(1, _calls)


def _forward_only_with_gradients(rank: int, world_size: int, port: int) -> tuple[int, int]:
    initialize(POLICY)
    plain, moved = Model(POLICY), Model(POLICY, MODULES)
    expected = [plain.run(step) for step in range(STEPS)]
    manager = install.install(OffloadConfig(offload_backend="cpu-lazy"))
    for step in range(STEPS):
        moved.run(step, count=1, forward_only=True)  # gradients are on
        before = manager.report.num_plans
        actual = moved.run(step)
        assert all(torch.equal(a, b) for a, b in zip(expected[step], actual, strict=True))
    return manager.report.num_plans - before, manager.report.total.num_late


def test_a_schedule_without_backward_leaves_the_plan_alone() -> None:
    assert run_ranks(1, _forward_only_with_gradients) == [(0, 0)]


def _marks_of_output_layers(rank: int, world_size: int, port: int) -> None:
    initialize(POLICY)
    plain, moved = Model(POLICY), Model(POLICY, MODULES)
    expected = [plain.run(step) for step in range(STEPS)]
    manager = install.install(OffloadConfig(offload_backend="cpu-lazy"))
    for step in range(STEPS):
        moved.log_probabilities(step)
        with install.suspended():
            moved.run(step)
        actual = moved.run(step)
        assert all(torch.equal(a, b) for a, b in zip(expected[step], actual, strict=True))
    plan = manager.plan
    marks = [(i, step) for i, step in enumerate(plan.trace.steps) if not step.is_of_group]
    assert [str(step) for _, step in marks] == [
        *("0.output_layer:OS", "0.output_layer:OE"),
        *("0.backward:BS", "0.output_layer:OB", "0.output_layer:OD"),
        *("1.output_layer:OS", "1.output_layer:OE"),
        *("1.backward:BS", "1.output_layer:OB", "1.output_layer:OD"),
    ]
    kinds = [step.kind for step in plan.trace.steps]
    for start, _ in marks[::5]:
        assert kinds[start - 1] is StepKind.FORWARD_COMMIT
        assert kinds[start + 5] is StepKind.BACKWARD_USE
    assert not any(group.name == "output_layer" for group in plan.trace.groups)
    install.uninstall()
    layer = moved.chunks[0].output_layer
    assert not layer._forward_pre_hooks
    assert not layer._forward_hooks


@pytest.mark.releases
def test_the_output_layer_is_marked_between_forward_and_backward() -> None:
    run_ranks(1, _marks_of_output_layers)


def _marks_of_stages(rank: int, world_size: int, port: int) -> list[str]:
    case = ModelCase("dense", num_layers=4, pp=2)
    initialize(case, rank, world_size, port)
    manager = install.install(OffloadConfig(offload_backend="cpu-lazy"))
    model = Model(case, MODULES)
    for step in range(2):
        model.run(step)
    plan = manager.plan
    steps = plan.trace.steps
    uses = [i for i, step in enumerate(steps) if step.kind is StepKind.BACKWARD_USE]
    for i, step in enumerate(steps):
        if step.kind is StepKind.BACKWARD_START:
            first = next(use for use in uses if steps[use].key.chunk_pass == step.key.chunk_pass)
            assert all(steps[j].kind is not StepKind.BACKWARD_USE for j in range(i, first))
    return [step.kind.value for step in steps if not step.is_of_group]


def test_backward_begins_in_every_pipeline_stage() -> None:
    first, last = run_ranks(2, _marks_of_stages)
    assert first == ["BS"] * 2
    assert last == ["OS", "OE", "BS", "OB", "OD"] * 2


class _Output(NamedTuple):
    """Possible results of a model with a fused loss."""

    name: str
    log_probs: list[torch.Tensor]


def _packed(
    pack: Callable[[Any], Any], forward: Callable[..., Any], *arguments: Any, **options: Any
) -> Any:
    return pack(forward(*arguments, **options))


def _own_outputs(rank: int, world_size: int, port: int) -> list[list[str]]:
    initialize(POLICY)
    plain, moved = Model(POLICY), Model(POLICY, MODULES)
    manager = install.install(OffloadConfig(offload_backend="cpu-lazy"))
    chunk: Any = moved.chunks[0]
    own_forward = chunk.forward
    found = []
    ways: list[tuple[Callable[[Any], Any], Callable[[Any], Any]]] = [
        (lambda losses: {"entropy": None, "loss": losses}, lambda output: output["loss"]),
        (lambda losses: _Output("log_probs", [losses]), lambda output: output.log_probs[0]),
    ]
    for step, (pack, unpack) in enumerate(ways):
        chunk.forward = partial(_packed, pack, own_forward)
        micro = micro_batches(POLICY, step, 1)[0]
        for model in (plain, moved):
            model.chunks[0].zero_grad(set_to_none=True)
        loss_of(plain.chunks[0], micro).mean().backward()
        unpack(loss_of(chunk, micro)).mean().backward()
        both = zip(plain.gradients(), moved.gradients(), strict=True)
        assert all(torch.equal(a, b) for a, b in both)
        manager.reset()
        steps = manager.plan.trace.steps if manager.plan is not None else ()
        found.append([str(step) for step in steps if step.kind is StepKind.BACKWARD_START])
    return found


def test_backward_begins_whatever_a_model_returns_its_losses_in() -> None:
    assert run_ranks(1, _own_outputs) == [[["0.backward:BS"]] * 2]


@pytest.mark.parametrize("chunks", [None, "model", ["model"], torch.nn.Identity()], ids=str)
def test_what_is_no_list_of_modules_cannot_be_bound(chunks: Any) -> None:
    with pytest.raises(ValueError, match=r"^model_chunks is .*, not a list of modules; give"):
        install.bind(chunks)
