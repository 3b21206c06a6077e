# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The guard sees every failed ordering that damages what comes back, and names it."""

from __future__ import annotations

import pytest
import torch
from hand_driven import LAZY_NATIVE, HandDriven
from race_scenarios import without_edge
from toy_model import SCHEDULES, all_equal, make_chunks, make_manager, run_schedule

from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.fine_grained_activation_offload.storage import Residence
from megatron.slipstream.fine_grained_activation_offload.verify import Verifier, checksum
from megatron.slipstream.integration.seam.manager import PipelineOffloadManager
from megatron.slipstream.plan.edges import Edge

BACKENDS = ["cpu-lazy", LAZY_NATIVE]


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("schedule", SCHEDULES.values(), ids=SCHEDULES)
def test_a_correct_engine_passes_and_the_guard_ends(backend: str, schedule: str) -> None:
    chunks = make_chunks(2)
    expected = run_schedule(chunks, schedule, None)
    manager = make_manager(backend, num_verified_iterations=2)
    verifier = manager.store.verifier
    assert verifier is not None
    for _ in range(3):
        assert all_equal(expected, run_schedule(chunks, schedule, manager))
    assert verifier.num_verified > 0
    assert manager.store.verifier is None
    assert not manager.store.backend.poisons_dropped


def test_cpp_moves_nothing_past_the_guard() -> None:
    """What a plan moves is verified as often as where Python follows it."""
    num_verified = []
    for backend in ("cpu-lazy", LAZY_NATIVE):
        chunks, manager = make_chunks(1), make_manager(backend, num_verified_iterations=6)
        verifier = manager.store.verifier
        assert verifier is not None
        for _ in range(6):
            run_schedule(chunks, SCHEDULES["accumulation"], manager)
        num_verified.append(verifier.num_verified)
    assert num_verified[0] == num_verified[1] > 0


def test_a_guard_that_ends_leaves_those_of_other_engines_on() -> None:
    backend = make_manager("cpu").store.backend
    first, second = Verifier(backend), Verifier(backend)
    first.stop()
    assert backend.poisons_dropped
    second.stop()
    assert not backend.poisons_dropped
    engine = PipelineOffloadManager(OffloadEngine(backend, num_verified_iterations=1))
    assert backend.poisons_dropped
    engine.close()
    assert not backend.poisons_dropped


@pytest.mark.parametrize(
    "edge, named",
    # On this backend an unordered copy out spoils what it writes, not what it reads, so the blame
    # falls one step later than on a GPU; E3 needs one.
    [(Edge.E1, "E2 or E3"), (Edge.E5, "E5 or E4")],
    ids=lambda value: getattr(value, "name", ""),
)
def test_a_missing_ordering_ends_the_run_and_is_named(edge: Edge, named: str) -> None:
    chunks = make_chunks(1)
    manager = make_manager("cpu-lazy", num_verified_iterations=2)
    with without_edge(edge), pytest.raises(RuntimeError, match=named):
        run_schedule(chunks, SCHEDULES["accumulation"], manager)


def test_the_message_names_module_layer_micro_batch_and_cure() -> None:
    chunks = make_chunks(1)
    manager = make_manager("cpu", num_verified_iterations=2)
    buffers = []
    allocate = manager.store.host_pool.allocate

    def remembering(nbytes: int) -> object:
        allocation = allocate(nbytes)
        buffers.append(allocation.buffer.view())
        return allocation

    manager.store.host_pool.allocate = remembering  # type: ignore[method-assign,assignment]
    actions = SCHEDULES["one micro-batch"].split()
    assert actions == ["F0.0", "B0.0"]
    x = torch.randn(7, 48, requires_grad=True)
    y = chunks[0](x, manager)
    buffers[0].zero_()  # as another owner of the buffer would
    with pytest.raises(RuntimeError) as error:
        y.sum().backward()
    message = str(error.value)
    assert "first of layer 0 (of this model chunk, 0) in micro-batch 0" in message
    assert "edge E2 or E3" in message
    assert "set fine_grained_activation_offloading=False" in message


@pytest.mark.parametrize("backend", BACKENDS)
def test_dropped_device_memory_is_poisoned_while_the_guard_is_on(backend: str) -> None:
    hand = HandDriven(backend)
    hand.store.verifier = Verifier(hand.backend)
    seen = []
    drop = hand.backend.drop_device

    def observing(storage: torch.UntypedStorage) -> None:
        drop(storage)
        seen.append(bytes(storage[:4]))  # type: ignore[arg-type]

    hand.backend.drop_device = observing  # type: ignore[method-assign]
    group = hand.group()
    tensor = torch.ones(256)
    expected = tensor.clone()
    saved = hand.save(group, tensor)
    del tensor
    hand.send(group)
    assert seen == [b"\xff\xff\xff\xff"]
    assert torch.equal(hand.store.read(saved), expected)


@pytest.mark.parametrize("tells", [False, True], ids=["", "announced"])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_is_discarded_during_its_copy_out_is_not_summed(backend: str, tells: bool) -> None:
    hand = HandDriven(backend)
    hand.store.verifier = Verifier(hand.backend)
    groups = [hand.group() for _ in range(2)]
    discarded, kept = torch.ones(256), torch.ones(256)
    saved = [hand.save(group, t) for group, t in zip(groups, (discarded, kept), strict=True)]
    hand.copy_out(groups[0])
    if tells:
        hand.store.before_discard(discarded)
    discarded.untyped_storage().resize_(0)
    hand.store.release(groups[0])
    assert saved[0].storage.residence is Residence.STAYS
    del kept
    hand.send(groups[1])
    assert torch.equal(hand.store.read(saved[1]), torch.ones(256))
    assert hand.store.verifier.num_verified == 1
    recomputed = torch.full((256,), 2.0)
    discarded.untyped_storage().resize_(1024).copy_(recomputed.untyped_storage())
    assert torch.equal(hand.store.read(saved[0]), recomputed)


@pytest.mark.parametrize("nbytes", [1, 7, 8, 63, 511, 512, 513, 4096, 5001])
def test_any_changed_byte_changes_the_sums(nbytes: int) -> None:
    data = torch.randint(0, 255, (nbytes,), dtype=torch.uint8)
    before = checksum(data)
    for position in {0, nbytes // 2, nbytes - 1}:
        changed = data.clone()
        changed[position] += 1
        assert not torch.equal(checksum(changed), before)


def test_bytes_that_change_places_change_the_sums() -> None:
    data = torch.arange(4096, dtype=torch.int64).view(torch.uint8)
    assert not torch.equal(checksum(data.view(2, -1).flip(0).reshape(-1)), checksum(data))


@pytest.mark.gpu
@pytest.mark.exclusive
@pytest.mark.parametrize("kind", ["cuda", "cuda, native"])
@pytest.mark.parametrize("edge", [Edge.E1, Edge.E3, Edge.E5], ids=lambda edge: edge.name)
def test_a_missing_ordering_is_seen_on_a_gpu(edge: Edge, kind: str) -> None:
    from race_scenarios import SCENARIOS

    original = HandDriven.__init__

    def watched(self: HandDriven, backend: str = "cuda") -> None:
        original(self, backend)
        self.store.verifier = Verifier(self.backend)

    HandDriven.__init__ = watched  # type: ignore[method-assign]
    try:
        assert SCENARIOS[edge](kind)
        with without_edge(edge), pytest.raises(RuntimeError, match="offload_verify: .* edge E"):
            SCENARIOS[edge](kind)
    finally:
        HandDriven.__init__ = original  # type: ignore[method-assign]
