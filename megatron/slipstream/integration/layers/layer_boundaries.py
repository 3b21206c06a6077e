# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Reads time and device memory where forward and backward pass the layers of a model.

Hooks on the layers, and on the tensors between them, tell where an iteration is. They add no
operation: [Note: One mark per group].
"""

from __future__ import annotations

import itertools
import weakref
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple, Optional

import torch

from megatron.slipstream.fine_grained_activation_offload.copy_streams import Timings
from megatron.slipstream.fine_grained_activation_offload.engine import OffloadEngine
from megatron.slipstream.integration.layers import layer_settings
from megatron.slipstream.patches.model_calls import tensors_in
from megatron.slipstream.plan.actions import Plan
from megatron.slipstream.plan.layer_visits import Boundary, Place, RankLayer, Rerun
from megatron.slipstream.plan.trace import GroupKey, Trace

PEAK = "layers"
"""Name of the peak since the last boundary or mark."""


class _Cut(NamedTuple):
    """A boundary, and what its time is read from."""

    boundary: Boundary
    event: Any
    """A timed event of the device; None if the backend takes no times."""
    num_stalls: int
    """The number of waits for copies before it."""


class LayerBoundaries:
    """Records the boundaries of one iteration after the other."""

    def __init__(self, engine: OffloadEngine) -> None:
        self._engine = engine
        self._layers: list[RankLayer] = []
        self._undo: list[Callable[[], None]] = []
        self.is_on = False
        """Whether the running iteration is measured."""
        self.hidden_bytes = 0
        """Bytes of the last output of a chunk's layers; 0 before the first."""
        self._clear()

    def _clear(self) -> None:
        self._cuts: list[_Cut] = []
        self._timings: Optional[Timings] = None
        """Times of the iteration's copies; None if they are not timed."""
        self._groups: dict[tuple[int, int], int] = {}
        """For each pass and layer, the number of groups that began before it."""
        self._peak = self._absent = 0
        self._before_mlp_bytes: Optional[int] = None
        self._mlp_bytes = self._mlp_output_bytes = 0
        """What an MLP that has run again since the last boundary has left, and its output."""
        self.has_memory = False
        """Whether memory is read in that iteration."""
        self._gradient_bytes = 0
        """Bytes of gradients that parameters had at the last boundary."""
        self._keeps_gradients = False
        """Whether parameters keep the gradients that backward makes, as far as is known. Data
        parallelism adds them to buffers at once."""

    def watch(self, modules: Sequence[torch.nn.Module], layers: Sequence[RankLayer]) -> None:
        """Set hooks on the layers of the rank; undo those that were set before."""
        self.stop()
        self._layers = list(layers)
        enter, leave = weakly(self._enter), weakly(self._leave)
        before_mlp, after_mlp = weakly(self._before_mlp), weakly(self._after_mlp)
        for index, module in enumerate(modules):
            self._undo += [
                module.register_forward_pre_hook(partial(enter, index), with_kwargs=True).remove,
                module.register_forward_hook(partial(leave, index)).remove,
                layer_settings.watch_reruns(module, partial(weakly(self._after_rerun), index)),
            ]
            mlp = getattr(module, "mlp", None)
            if isinstance(mlp, torch.nn.Module):
                self._undo += [
                    mlp.register_forward_pre_hook(partial(before_mlp, index)).remove,
                    mlp.register_forward_hook(partial(after_mlp, index)).remove,
                ]

    def stop(self) -> None:
        while self._undo:
            self._undo.pop()()

    # An iteration.

    def begin(self, has_memory: bool) -> None:
        """Begin to measure an iteration, before its first forward, and memory if asked."""
        self._clear()
        self.is_on, self.has_memory = True, has_memory
        if has_memory:
            self._engine.recorder.observer = self
            self._count_gradients()
            self._engine.store.backend.begin_peak(PEAK)

    def end(self) -> Optional[int]:
        """End the iteration.

        Returns:
            The bytes by which it has increased what is allocated beside gradients; None if it was
            not recorded.
        """
        if self.is_on:
            self.come_to(Place.END)
        was_recorded = self.is_on and self.has_memory and bool(self._cuts)
        self.is_on = False
        self._engine.recorder.observer = None
        if not was_recorded:
            return None
        return self._cuts[-1].boundary.nbytes - self._cuts[0].boundary.nbytes

    def come_to(self, place: Place, chunk: int = -1, layer: int = -1) -> None:
        if not self.is_on:
            return
        engine, backend = self._engine, self._engine.store.backend
        nbytes = 0
        reading = backend.memory() if self.has_memory else None
        if reading is not None:
            self.before_mark()
            self._count_gradients()
            self._absent = engine.recorder.absent_bytes_now()
            nbytes = reading[0] + self._absent - self._gradient_bytes
        if place is Place.LAYER:
            now = engine.now
            num_groups = 0 if now.chunk is None else len(now.chunk.groups)
            self._groups[len(now.passes) - 1, layer] = num_groups
        boundary = Boundary(place, chunk, layer, nbytes, max(self._peak, nbytes))
        event = backend.timed_event(backend.current_stream())
        self._timings = engine.store.copy_streams.timings
        num_stalls = 0 if self._timings is None else len(self._timings.stalls)
        self._cuts.append(_Cut(boundary, event, num_stalls))
        self._peak = self._mlp_bytes = self._mlp_output_bytes = 0

    def _rerun_bytes(self, layer: int) -> Optional[int]:
        """Return what a layer's rerun has left so far; None if none is measured."""
        if not (self.is_on and self.has_memory and self._cuts):
            return None
        last, reading = self._cuts[-1].boundary, self._engine.store.backend.memory()
        if reading is None or (last.place, last.layer) != (Place.GRADIENT, layer):
            return None
        absent = self._engine.recorder.absent_bytes_now()
        return reading[0] + absent - self._gradient_bytes - last.nbytes

    def _before_mlp(self, layer: int, *_: Any) -> None:
        self._before_mlp_bytes = self._rerun_bytes(layer)

    def _after_mlp(self, layer: int, _: Any, __: Any, outputs: Any) -> None:
        nbytes, before = self._rerun_bytes(layer), self._before_mlp_bytes
        if nbytes is None or before is None:
            return
        made = sum(tensor.untyped_storage().nbytes() for tensor in tensors_in(outputs))
        self._mlp_bytes, self._mlp_output_bytes = max(0, nbytes - before - made), made

    def _after_rerun(self, layer: int) -> None:
        """Note what a layer's forward has left that ran again as a whole."""
        nbytes = self._rerun_bytes(layer)
        if nbytes is not None and nbytes > 0:
            rerun = Rerun(nbytes, self._mlp_bytes, self._mlp_output_bytes)
            last = self._cuts[-1]
            self._cuts[-1] = last._replace(boundary=last.boundary._replace(rerun=rerun))

    def before_mark(self) -> None:
        """Note the peak so far: a mark's actions are about to change what is on the device."""
        recorder, backend = self._engine.recorder, self._engine.store.backend
        recorder.keep_peak()
        made = recorder.gradient_bytes if self._keeps_gradients else None
        gradient_bytes = self._gradient_bytes if made is None else made
        peak = backend.peak_bytes(PEAK) + self._absent - gradient_bytes
        self._peak = max(self._peak, peak)
        backend.begin_peak(PEAK)

    def _count_gradients(self) -> None:
        gradients = self._engine.store.backend.gradients
        before = self._gradient_bytes
        self._gradient_bytes = 0 if gradients is None else gradients.count()
        if self._gradient_bytes > before and self._cuts:
            self._keeps_gradients = self._gradient_bytes == self._engine.recorder.gradient_bytes

    def after_mark(self) -> None:
        """Begin to measure after a mark's actions."""
        self._absent = self._engine.recorder.absent_bytes
        self._engine.store.backend.begin_peak(PEAK)

    # Results.

    def boundaries(self) -> Optional[list[Boundary]]:
        """Return the boundaries of the last iteration; None until the device has passed them."""
        backend = self._engine.store.backend
        found = self.without_times()
        stalls = [] if self._timings is None else self._timings.stalls
        for number, (start, stop) in enumerate(itertools.pairwise(self._cuts), start=1):
            if stop.event is None:
                continue
            ms = backend.elapsed_ms(start.event, stop.event)
            if ms is None:
                return None
            waits = stalls[start.num_stalls : stop.num_stalls]
            waited_ms = sum(backend.elapsed_ms(one.start, one.stop) or 0.0 for one in waits)
            found[number] = found[number]._replace(ms=max(0.0, ms - waited_ms), waited_ms=waited_ms)
        return found

    @property
    def has_backward(self) -> bool:
        """Whether the running iteration is measured, and has had a backward."""
        return self.is_on and any(cut.boundary.place is Place.GRADIENT for cut in self._cuts)

    def without_times(self) -> list[Boundary]:
        return [cut.boundary for cut in self._cuts]

    def movable_bytes(self, trace: Trace) -> list[int]:
        """Return, for each layer, the bytes of a micro-batch that can move, by the trace."""
        least: dict[int, int] = {}
        for layer, keys in self._groups_by_layer(trace):
            nbytes = sum(
                storage.nbytes
                for storage in trace.storages
                if storage.holders[0] in keys and not storage.held_outside
            )
            least[layer] = min(least.get(layer, nbytes), nbytes)
        return [least.get(index, 0) for index in range(len(self._layers))]

    def moved_bytes(self, plan: Plan) -> list[int]:
        """Return, for each layer, the bytes of a micro-batch that move by a plan, on average."""
        moved: list[list[int]] = [[] for _ in self._layers]
        nbytes_of = {group.key: group.moved_nbytes for group in plan.groups}
        for layer, keys in self._groups_by_layer(plan.trace):
            moved[layer].append(sum(nbytes_of[key] for key in keys if key in nbytes_of))
        return [sum(each) // max(1, len(each)) for each in moved]

    def _groups_by_layer(self, trace: Trace) -> Iterator[tuple[int, set[GroupKey]]]:
        """Yield each layer of each pass with its groups."""
        for chunk_pass in {key.chunk_pass for key in trace.group_by_key}:
            places = sorted((n, i) for (p, i), n in self._groups.items() if p == chunk_pass)
            stops = [*(number for number, _ in places[1:]), len(trace.groups)]
            for (first, layer), stop in zip(places, stops, strict=False):
                yield layer, {GroupKey(chunk_pass, number) for number in range(first, stop)}

    # Hooks. Autograd's graph and the layers own them, and must not own this object.

    def _is_measured(self) -> bool:
        # Inside a graph task it is a recomputation.
        is_forward = torch._C._current_graph_task_id() == -1
        return self.is_on and torch.is_grad_enabled() and is_forward

    def _enter(self, index: int, _: Any, inputs: Any, options: Any) -> None:
        if self._is_measured():
            hidden_states = options.get("hidden_states", inputs[0] if inputs else None)
            chunk = self._layers[index].chunk
            if index == 0 or self._layers[index - 1].chunk != chunk:
                self._at_gradient(hidden_states, Place.INPUT_GRADIENT, chunk, -1)
            self.come_to(Place.LAYER, chunk, index)

    def _leave(self, index: int, _: Any, __: Any, outputs: Any) -> None:
        if self._is_measured():
            chunk = self._layers[index].chunk
            self._at_gradient(outputs, Place.GRADIENT, chunk, index)
            if index + 1 == len(self._layers) or self._layers[index + 1].chunk != chunk:
                self.hidden_bytes = sum(
                    tensor.untyped_storage().nbytes() for tensor in tensors_in(outputs)
                )
                self.come_to(Place.LAYERS_END, chunk)

    def _at_gradient(self, values: Any, place: Place, chunk: int, layer: int) -> None:
        tensors = [tensor for tensor in tensors_in(values) if tensor.requires_grad]
        if tensors:
            come_to = weakly(self.come_to)
            tensors[0].register_hook(lambda _: come_to(place, chunk, layer))


def weakly(method: Callable[..., None]) -> Callable[..., None]:
    """Return a function that calls a method as long as its object is alive."""
    reference = weakref.WeakMethod(method)

    def call(*arguments: Any) -> None:
        alive = reference()
        if alive is not None:
            alive(*arguments)

    return call
