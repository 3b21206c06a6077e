# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Replays a whole model chunk as one CUDA graph forward and one backward.

A chunk has as many slots as its schedule has micro-batches in flight. A slot is a forward and a
backward graph with the memory in which they were captured. A micro-batch takes a free slot in its
forward and frees it once the replay of its backward is launched: the slot's next replay is launched
later on the same stream.

[Note: Slots in any order]
Every slot has its own memory pool, so graphs of different slots never share memory, and slots can
be taken and freed in any order.
"""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.step_clock import NUM_TIMED, Times
from megatron.slipstream.graphs.capture import GraphBackend
from megatron.slipstream.graphs.chunk import CaptureParameters, Chunk, Constants
from megatron.slipstream.graphs.offload import PlannedPass
from megatron.slipstream.graphs.slots import Replay, Slot, SlotMemories, SlotMemory
from megatron.slipstream.graphs.static_arguments import StaticArguments, TensorFacts
from megatron.slipstream.plan.render import format_bytes

logger = logging.getLogger(__name__)

NUM_TIMED_CAPTURES = 2
"""Timed captures before the final one. Each updates the plan, since the first plan is made from
eager passes, which may be several times slower."""

Together = Callable[[Callable[[], None]], None]
"""Runs a step that may fail, and raises on every rank if it fails on one."""


@dataclasses.dataclass(frozen=True)
class CaptureFigures:
    """Memory and time of a capture."""

    num_slots: int
    predicted_slot_bytes: int
    """Peak device memory of one forward and backward pass, run before the capture."""
    slot_bytes: int
    """Device memory that the graphs hold, divided by the number of slots; excludes graphs captured
    earlier in the same memory."""
    seconds: float

    def render(self) -> str:
        return (
            f"{self.num_slots} slots of {format_bytes(self.slot_bytes)} "
            f"(predicted {format_bytes(self.predicted_slot_bytes)}) in {self.seconds:.1f} s"
        )


class _Prepared(NamedTuple):
    slots: list[Slot]
    parameters: CaptureParameters
    sample: torch.Tensor
    predicted_bytes: int
    seconds: float


class SizeGraphs:
    """The graphs of one model chunk for micro-batches of one context-parallel size."""

    def __init__(self, chunk: Chunk, num_slots: int, backend: GraphBackend) -> None:
        self.chunk = chunk
        self.num_slots = num_slots
        self.figures: Optional[CaptureFigures] = None
        """Figures of the last capture; None before the first."""
        self.num_replays = 0
        """Number of forward passes that were replayed."""
        self.slots: list[Slot] = []
        """The slots, one in each of :attr:`memories`; none before the capture."""
        self.memories = SlotMemories()
        self._backend = backend
        self._arguments: Optional[StaticArguments] = None
        """The captured arguments, other than hidden states."""
        self._addresses: tuple[int, ...] = ()
        self._constants: Optional[Constants] = None
        """Constants that the graphs read."""
        self._prepared: Optional[_Prepared] = None
        self._anchor = torch.zeros((), requires_grad=True)
        """Input of a replay whose hidden states need no gradient, so that backward runs."""

    def close(self) -> None:
        """Release the graphs, even with micro-batches in flight."""
        for slot in self.slots:
            slot.hooks.close()
        if self.slots and self.chunk.offloading is not None:
            self.chunk.offloading.note_deleted()
        self.slots, self.memories = [], SlotMemories()
        self._arguments = self._constants = self._prepared = None

    def __call__(self, hidden: torch.Tensor, arguments: Mapping[str, Any]) -> torch.Tensor:
        """Run one micro-batch by a replay; see :meth:`ChunkGraphs.__call__`."""
        tensors = self._match_call(hidden, arguments)
        taken = self.memories.take(self.chunk.name)
        if taken is None:
            return self.chunk.run(hidden, **arguments)
        number, allocation = taken
        self.chunk.before_replay()
        self.num_replays += 1
        if self.chunk.offloading is not None:
            self.chunk.offloading.note_replay()
        output: torch.Tensor = Replay.apply(
            hidden,
            None if hidden.requires_grad else self._anchor,  # Autograd visits each input.
            self.slots[number],
            allocation,
            tensors,
            self.chunk.after_replay,
        )
        return output

    # Capture.

    def prepare(
        self,
        sample: torch.Tensor,
        arguments: StaticArguments,
        memories: SlotMemories,
        together: Together = lambda step: step(),
    ) -> None:
        """Run the passes to capture, and check that they fit; call in a session of the backend.

        There is one memory for each slot, which may contain other graphs. ``together`` runs each
        timed capture, in whose replays other ranks would wait if it failed. Raises ``ValueError``
        as :meth:`ChunkGraphs.begin_iteration`.
        """
        started = time.perf_counter()
        self._constants = self.chunk.hold_constants()
        parameters = CaptureParameters(self.chunk.name, self.chunk.module)
        self._arguments, self.memories = arguments, memories
        put_back = self.chunk.save_state()
        try:
            slots = [self._slot(sample, memory) for memory in memories]
            peak_bytes = self._plan(slots[0], parameters, sample, together)
        finally:
            put_back()
        seconds = time.perf_counter() - started
        self._prepared = _Prepared(slots, parameters, sample, peak_bytes, seconds)

    def _slot(self, sample: torch.Tensor, memory: SlotMemory) -> Slot:
        assert self._arguments is not None
        return Slot(sample, self._arguments, memory, self.chunk.constant_arguments)

    def record(self) -> None:
        """Capture all slots as prepared, in the same session."""
        assert self._prepared is not None
        assert self._arguments is not None
        slots, parameters, sample, predicted_bytes, seconds = self._prepared
        self._prepared = None
        started = time.perf_counter()
        held_bytes = self._backend.held_bytes()
        put_back = self.chunk.save_state()
        try:
            for slot in slots:
                with torch.no_grad():  # Other graphs may share the inputs.
                    slot.feed(sample, self._arguments.tensors)
                if self.chunk.offloading is not None:
                    slot.hooks = self.chunk.offloading.make_slot(
                        slot.memory, self._backend.is_eager
                    )
                self._record(slot, parameters)
        except BaseException:
            for slot in slots:
                slot.hooks.close()
            slots.clear()  # The traceback keeps the list.
            raise
        finally:
            put_back()
        held_bytes = self._backend.held_bytes() - held_bytes
        self.slots = slots
        self._addresses = self._current_addresses()
        self.figures = CaptureFigures(
            num_slots=self.num_slots,
            predicted_slot_bytes=predicted_bytes,
            slot_bytes=held_bytes // self.num_slots,
            seconds=seconds + time.perf_counter() - started,
        )
        if self._backend.is_eager:
            logger.info("eager graphs of %s: %d slots", self.chunk.name, self.num_slots)
        else:
            logger.info("CUDA graphs of %s: %s", self.chunk.name, self.figures.render())
        offloading = self.chunk.offloading
        if offloading is not None:
            offloading.note_captured()
            logger.info(
                "CUDA graphs of %s move %s in each replay (host memory: %s)",
                self.chunk.name,
                format_bytes(offloading.moved_bytes),
                format_bytes(offloading.host_bytes),
            )

    def _run(self, slot: Slot) -> torch.Tensor:
        assert self._arguments is not None
        with torch.enable_grad():
            output = self.chunk.run(slot.hidden, **self._arguments.unflatten(slot.tensors))
        if not torch.is_tensor(output):
            raise ValueError(
                f"{self.chunk.name} returns {type(output).__name__}, but CUDA graphs of chunks "
                "return hidden states only; train without them"
            )
        return output

    @contextlib.contextmanager
    def _replaced(self, parameters: CaptureParameters) -> Iterator[None]:
        """Make the chunk use the capture's parameters and the held constants."""
        assert self._constants is not None
        with parameters.in_place(), self._constants():
            yield

    def _run_once(self, slot: Slot, parameters: CaptureParameters) -> None:
        with self._replaced(parameters):
            output = self._run(slot)
            output.backward(torch.ones_like(output))
        slot.hidden.grad = None

    def _plan(
        self, slot: Slot, parameters: CaptureParameters, sample: torch.Tensor, together: Together
    ) -> int:
        """Run a slot's work for first-use effects, plan what moves, and measure its memory."""
        run = partial(self._run_once, slot, parameters)
        if self.chunk.offloading is None:
            run()
            return self._measure(run)
        with self.chunk.offloading.planning(run) as planned:
            peak_bytes = self._measure(planned.run)
            if planned.times_replays:
                for _ in range(NUM_TIMED_CAPTURES):
                    self._time_replays(planned, parameters, sample, together)
                peak_bytes = self._measure(planned.run)
        return peak_bytes

    def _measure(self, run: Callable[[], None]) -> int:
        peak_bytes = self._backend.measure(run)
        self._check_room(peak_bytes)
        return peak_bytes

    def _time_replays(
        self,
        planned: PlannedPass,
        parameters: CaptureParameters,
        sample: torch.Tensor,
        together: Together,
    ) -> None:
        """Capture the pass and replan it from its replays: [Note: Times of replays]."""
        (memory,) = SlotMemories.of(self._backend, 1)
        slot = self._slot(sample, memory)
        slot.hooks = hooks = planned.timed_slot(memory)
        times: list[Optional[Times]] = []
        try:
            together(partial(self._record, slot, parameters))
            for _ in range(1 + NUM_TIMED):  # The first one uploads the graphs.
                slot.replay_forward()
                slot.replay_backward()
                self._backend.finish()
                times.append(hooks.read_times())
        finally:
            hooks.close()
        planned.plan_again([each for each in times[1:] if each is not None])

    def _record(self, slot: Slot, parameters: CaptureParameters) -> None:
        """Capture a slot's graphs; the backward graph frees activations into the same pool."""
        live: list[torch.Tensor] = []

        def forward() -> Sequence[torch.Tensor]:
            with self._replaced(parameters), slot.hooks.forward():
                live[:] = [self._run(slot)]
            return [live[0].detach()]

        def backward() -> Sequence[torch.Tensor]:
            # Recomputation runs layers again.
            with self._replaced(parameters), slot.hooks.backward():
                live.pop().backward(slot.grad_output)
            grad, slot.hidden.grad = slot.hidden.grad, None
            assert grad is not None
            return [grad]

        slot.forward, (slot.output,) = self._backend.record(forward, slot.memory.pool)
        slot.grad_output = slot.memory.static("gradient of the output", slot.output).tensor
        slot.backward, (slot.grad_hidden,) = self._backend.record(backward, slot.memory.pool)

    def _check_room(self, slot_bytes: int) -> None:
        free = self._backend.free_bytes()
        needed = slot_bytes * self.num_slots
        if free is not None and needed > free:
            raise ValueError(
                f"CUDA graphs of {self.chunk.name} do not fit in device memory: {self.num_slots} "
                f"slots of {format_bytes(slot_bytes)} are {format_bytes(needed)}, and "
                f"{format_bytes(free)} are free; train with smaller micro-batches, with "
                "recomputation, or without cuda_graph_granularity=chunk"
            )

    # Replay.

    def _match_call(
        self, hidden: torch.Tensor, arguments: Mapping[str, Any]
    ) -> Sequence[torch.Tensor]:
        """Return a call's tensors except hidden states; raise if it differs from the capture."""
        assert self._arguments is not None
        static = self.slots[0].hidden
        is_same = static.shape == hidden.shape and static.dtype == hidden.dtype
        tensors = self._arguments.tensors_of(arguments)
        if is_same and tensors is not None:
            return tensors
        differences = self._arguments.differences(arguments)
        if not is_same:
            was, now = TensorFacts.of(static), TensorFacts.of(hidden)
            differences.insert(0, f"hidden_states was {was} and is {now}")
        raise ValueError(
            f"{self.chunk.name} is called with other arguments than its CUDA graphs were captured "
            f"with: {'; '.join(differences)}. Give every micro-batch the same shapes, or delete "
            "the graphs when the shapes change, so that they are captured again"
        )

    def _current_addresses(self) -> tuple[int, ...]:
        parameters: list[Any] = [p for p in self.chunk.module.parameters() if p.requires_grad]
        gradients = [parameter.main_grad for parameter in parameters]
        return tuple(tensor.data_ptr() for tensor in (*parameters, *gradients))

    def check_addresses(self) -> None:
        """Raise ``RuntimeError`` if memory that is baked into the graphs has been replaced."""
        if self._current_addresses() != self._addresses:
            raise RuntimeError(
                f"parameters or main gradients of {self.chunk.name} have moved since its CUDA "
                "graphs were captured, so replays would read and write freed memory; delete the "
                "graphs first (ChunkGraphs.delete), so that they are captured again"
            )
