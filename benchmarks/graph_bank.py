# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Compares steps on documents of very different lengths, divided among context-parallel ranks.

Lengths vary a thousandfold. All ways have the same documents and initial weights. A step is the
forward and backward of the documents of one global batch.

- ``eager``: each micro-batch with the context-parallel size that its documents need, kernels
  launched one by one; ``bank``: by CUDA graphs of each size (Slipstream's graph bank).
- ``fixed``: all micro-batches with one size, that of the longest document; ``fixed+graph``: the
  same by CUDA graphs.
"""

from __future__ import annotations

import dataclasses
import gc
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from megatron_models import make_config, shared_inputs, use_gpu, wrap

from benchmarks.case import Case, Variant
from benchmarks.engines import NUM_DATA
from benchmarks.measure import HeldMemory
from benchmarks.ways import Way
from megatron.slipstream.context_parallel.limits import CostModel, RankLimits
from megatron.slipstream.context_parallel.scheduler import MicroBatch, batches, schedule, share_of
from megatron.slipstream.packed_sequences.packing import Piece

NUM_EAGER_ITERATIONS = 2
MAX_SEQUENCES = 64
MEAN_LOG_LENGTH, SIGMA_LOG_LENGTH = 6.0, 1.5
"""Log-normal document lengths if a rank has 4096 tokens: half of them are shorter than 404 tokens,
one in a hundred is longer than 13,000."""


class Documents:
    """The documents of every step, and the micro-batches that they form with given sizes.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        self._case = case
        model, num_ranks = case.model, case.num_ranks
        sizes = (num_ranks, model.seq_length, MAX_SEQUENCES)
        self.limits = {False: RankLimits(*sizes), True: RankLimits(*sizes, min_size=num_ranks)}
        """Limits by whether there is only one size."""
        width = model.hidden_size
        self._cost = CostModel.of_layer(3 * width**2 + 9 * width**2, width)

    def micro_batches(self, step: int, is_fixed: bool) -> list[MicroBatch]:
        """Return a step's micro-batches; the documents do not depend on ``is_fixed``."""
        limits = self.limits[False]
        draw = np.random.default_rng(step)
        longest = limits.largest * limits.tokens_per_rank
        scale = self._case.model.seq_length / 4096

        def stream() -> Iterator[Piece]:
            number = 0
            while True:
                length = draw.lognormal(MEAN_LOG_LENGTH, SIGMA_LOG_LENGTH) * scale
                yield Piece(number, 0, min(longest, int(length) + 1))
                number += 1

        count = self._case.num_micro_batches
        dynamic = next(batches(stream(), limits, self._cost, count, look_ahead=64))
        if not is_fixed:
            return dynamic
        pieces = [piece for groups in dynamic for group in groups for piece in group.pack]
        return schedule(pieces, self.limits[True], self._cost)

    def text(self, piece: Piece, step: int) -> Any:
        """Return the tokens of a document, and one more."""
        draw = np.random.default_rng((step, piece.document))
        return draw.integers(self._case.model.vocab_size, size=piece.length + 1)


class BankWay(Way):
    """A model that is trained in one of the ways. Each has its own weights and gradients.

    Args:
        label: See above.
        case: The model.
        documents: Its training data.
    """

    num_eager_iterations = NUM_EAGER_ITERATIONS
    ends_process = True

    def __init__(self, label: str, case: Case, documents: Documents) -> None:
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        from megatron.slipstream.integration.packed.context_parallel_groups import (
            context_parallel_groups,
        )
        from megatron.slipstream.integration.packed.dynamic_context_parallel import (
            with_dynamic_context_parallelism,
        )

        torch.manual_seed(1)
        model_parallel_cuda_manual_seed(1, te_rng_tracker=use_gpu(), force_reset_rng=True)
        self.label = label
        self._before = HeldMemory.now()
        self._held: dict[str, int] = {}
        self._case, self._documents = case, documents
        self._is_fixed = label.startswith("fixed")
        limits = documents.limits[self._is_fixed]
        self._groups = context_parallel_groups(documents.limits[False])
        config = make_config(case.model)
        spec = get_gpt_decoder_block_spec(config, use_transformer_engine=use_gpu())
        model = GPTModel(
            config=config,
            transformer_layer_spec=with_dynamic_context_parallelism(spec),
            vocab_size=case.model.vocab_size,
            max_sequence_length=limits.largest * limits.tokens_per_rank,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        self._chunks: list[Any] = wrap(config, [model if not use_gpu() else model.cuda()])
        self._bank: Any = None
        if label in ("bank", "fixed+graph"):
            from megatron.slipstream.integration.graphs.chunk_graphs import replay_chunks

            (self._bank,) = replay_chunks(self._chunks, NUM_EAGER_ITERATIONS, limits=limits)
        self._data = [
            [self._inputs(batch, step) for batch in documents.micro_batches(step, self._is_fixed)]
            for step in range(NUM_DATA)
        ]

    def on_ready(self) -> None:
        """See :meth:`Way.on_ready`."""
        self._held = HeldMemory.now().fields_since(self._before)

    def fields(self) -> dict[str, Any]:
        """Return memory, and what the graphs of each size added to those of larger ones."""
        of_size = self._bank.of_size.items() if self._bank is not None else ()
        sizes = {
            size: {"num_replays": graphs.num_replays, **dataclasses.asdict(graphs.figures)}
            for size, graphs in of_size
        }
        notes = [
            f"size {size}: {graphs.figures.render()}, {graphs.num_replays} replays"
            for size, graphs in of_size
        ]
        return {**self._held, "sizes": sizes, "notes": notes}

    def close(self) -> None:
        """Delete the graphs."""
        if self._bank is not None:
            self._bank.delete()
        self._chunks.clear()
        gc.collect()

    def _inputs(self, micro_batch: MicroBatch, step: int) -> tuple[dict[str, Any], torch.Tensor]:
        """Return the arguments of the model, and which labels count."""
        share = share_of(micro_batch, self._groups.everyone.rank())
        texts = [self._documents.text(piece, step) for piece in share.pack]
        limits = self._documents.limits[self._is_fixed]
        return shared_inputs(texts, share, limits, self._groups.of_size[share.size])

    def run(self, iteration: int) -> list[torch.Tensor]:
        """See :meth:`Way.run`; the loss is the sum over all ranks."""
        from megatron.core.pipeline_parallel import get_forward_backward_func

        for chunk in self._chunks:
            chunk.zero_grad_buffer()

        def forward_step(data: Iterator[Any], model: Any) -> Any:
            inputs, counts = next(data)
            output = model(**inputs)

            def loss(per_token: torch.Tensor) -> Any:
                total = (per_token.float() * counts).sum()
                return total, counts.sum().int(), {"loss": total.detach()}

            return output, loss

        data = self._data[iteration % NUM_DATA]
        results = get_forward_backward_func()(
            forward_step_func=forward_step,
            data_iterator=iter(data),
            model=self._chunks[0],
            num_microbatches=len(data),
            seq_length=self._case.model.seq_length,
            micro_batch_size=1,
            forward_only=False,
        )
        total = torch.stack([result["loss"].double() for result in results]).sum()
        torch.distributed.all_reduce(total)
        return [total]


class Comparison:
    """The ways above, on the same documents.

    Args:
        case: The case.
    """

    def __init__(self, case: Case) -> None:
        if not use_gpu():
            torch.compiler.set_stance("force_eager")  # compiling megatron-core takes long
        self._case, self._documents = case, Documents(case)

    def build(self, variant: Variant, label: str, options: Mapping[str, Any]) -> BankWay:
        """See :class:`benchmarks.ways.Comparison`."""
        return BankWay(label, self._case, self._documents)
