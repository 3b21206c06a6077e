# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Divides megatron-core's MLPs, experts and loss into tiles of the sequence.

The classes of a built model's modules are derived from their own, so its spec, parameters,
checkpoints and copies stay as they are. What runs in a tile is the module's own method, so every
cross-entropy function, tensor parallelism, sequence parallelism and tied embeddings keep their
meaning.

[Note: Losses in place of logits]
Every model of megatron-core calls its output layer, then its loss with the logits. With labels, the
output layer here gives the losses at once, in an object that only the loss method knows; whatever
else reads logits in between fails. Without labels it gives logits as before.
"""

from __future__ import annotations

import inspect
import logging
import re
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple, Optional

import torch
from megatron.core.models.common.language_module.language_module import LanguageModule
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe.moe_layer import MoELayer

from megatron.slipstream.fine_grained_activation_offload.report import RankReport
from megatron.slipstream.integration.experts.sync_free_experts import SyncFreeGroupedMLP
from megatron.slipstream.integration.seam.layer_classes import convert
from megatron.slipstream.launcher import rank
from megatron.slipstream.options.facts import Facts
from megatron.slipstream.options.fields import TileOptions
from megatron.slipstream.options.rules import check_rules, require
from megatron.slipstream.options.tiles import TILE_RULES
from megatron.slipstream.patches.marks import run_in_a_group
from megatron.slipstream.plan import tiles
from megatron.slipstream.plan.tiles import Tiling
from megatron.slipstream.tiles.by_tiles import Bounds, Needs, run_by_tiles

logger = logging.getLogger(__name__)


def with_tiles(
    chunks: Sequence[torch.nn.Module], options: Optional[TileOptions] = None
) -> list[torch.nn.Module]:
    """Compute the MLPs, experts and loss of a model in tiles from now on.

    Call it between building the model and its first iteration, such as in megatron-core's
    ``ModelConfig.pre_wrap_hooks`` or Megatron-Bridge's ``register_pre_wrap_hook``, with or without
    offloading. Tiles stay the same as long as the model lives, since they change how sums round.

    Args:
        chunks: All chunks of the model on this rank, wrapped or not.
        options: What is divided; None: both, by ``'auto'``.

    Returns:
        The same chunks.

    Raises:
        ValueError: The model has options, or dropout inside an MLP, that tiles do not support, or
            it is divided already.
    """
    options = options or TileOptions(loss_sequence_tiles="auto", mlp_sequence_tiles="auto")
    lines: list[str] = []
    for model in _models_in(chunks):
        require(check_rules(TILE_RULES, Facts(model.config, options)))
        if hasattr(model, "tile_options"):
            raise ValueError(
                "with_tiles() is not supported with a model that it has divided because its tiles "
                "would be divided again; call it once for each model"
            )
        lines += _divide_mlps(model, options)
        lines += _divide_loss(model, options)
        model.tile_options = options
    if rank() == 0:
        for line in dict.fromkeys(lines):
            logger.info("%s", line)
    return list(chunks)


def tiles_of(chunk: torch.nn.Module) -> TileOptions:
    """Return how a model chunk is divided, wrapped or not; the defaults if it is not."""
    options = (getattr(model, "tile_options", None) for model in _models_in([chunk]))
    return next((found for found in options if found is not None), TileOptions())


def fill_tiles(report: RankReport, chunks: Sequence[torch.nn.Module]) -> None:
    """Set the report's number of tiles of the last micro-batch in training, by part of the model.

    Experts that were given different numbers of tokens can have had different numbers of tiles;
    the largest one counts.
    """
    counts: dict[str, int] = {}
    for module in (module for chunk in chunks for module in chunk.modules()):
        if isinstance(module, _Tiled) and module.num_tiles:
            counts[module.part] = max(counts.get(module.part, 0), module.num_tiles)
    report.tiles = counts


def has_tiles(mlp: torch.nn.Module) -> bool:
    """Return whether an MLP, or the experts of an expert layer, are computed tile by tile."""
    return isinstance(getattr(mlp, "experts", mlp), _Tiled)


def _models_in(chunks: Sequence[torch.nn.Module]) -> Iterator[Any]:
    for chunk in chunks:
        yield from (module for module in chunk.modules() if isinstance(module, LanguageModule))


def _said(what: str, tiling: Tiling, bytes_per_token: int) -> str:
    if tiling.max_tokens is None:
        return f"{what}: {tiling.num_tiles} tiles of each micro-batch"
    mib = tiling.max_tokens * bytes_per_token / 2**20
    return f"{what}: tiles of at most {tiling.max_tokens} tokens, which take {mib:.0f} MiB"


# MLPs and experts


def _divide_mlps(model: torch.nn.Module, options: TileOptions) -> Iterator[str]:
    asked = options.mlp_sequence_tiles
    for layer in list(model.modules()):
        mlp: Any = getattr(layer, "mlp", None)
        mixin: type = _TiledMlpMixin
        if isinstance(mlp, MoELayer):
            mlp, mixin = mlp.experts, _TiledExpertsMixin
        elif not isinstance(mlp, MLP):
            continue
        bytes_per_token = _bytes_inside(mlp)
        tiling = Tiling.of(asked, bytes_per_token)
        if tiling is None:
            return
        for name, module in mlp.named_modules():
            if isinstance(module, torch.nn.modules.dropout._DropoutNd) and module.p > 0:
                raise ValueError(
                    f"dropout inside an MLP ({name}, {module.p}) is not supported with "
                    "mlp_sequence_tiles because it would draw other numbers when backward computes "
                    "a tile again; set its probability to 0, or mlp_sequence_tiles=1"
                )
        convert(mlp, mixin)
        mlp.tiling = tiling
        yield _said(f"mlp_sequence_tiles={asked}, {type(mlp).__name__}", tiling, bytes_per_token)


def _bytes_inside(mlp: Any) -> int:
    config = mlp.config
    # The second linear layer's weights are the same with and without a gate.
    widths = [p.shape for name, p in mlp.named_parameters() if "linear_fc2" in name and p.dim() > 1]
    is_fused = bool(config.bias_activation_fusion or config.use_te_activation_func)
    return tiles.mlp_bytes_per_token(
        config.hidden_size,
        min(shape[-1] for shape in widths),
        config.params_dtype.itemsize,
        bool(config.gated_linear_unit),
        is_fused,
    )


class _Tiled:
    part: str
    tiling: Tiling
    num_tiles = 0
    """Number of tiles of the last micro-batch in training; 0 before the first."""

    def _divide(self, num_rows: int, tokens_per_row: int = 1) -> Bounds:
        bounds = self.tiling.bounds(num_rows, tokens_per_row)
        if torch.is_grad_enabled():  # A recomputed layer runs once more with gradients.
            self.num_tiles = len(bounds)
        return bounds


class _TiledMlpMixin(_Tiled):
    """An :class:`MLP` that is computed tile by tile; only its input is saved for backward."""

    part = "mlp"

    def forward(
        self: Any, hidden_states: torch.Tensor, **options: Any
    ) -> tuple[torch.Tensor, Optional[torch.Tensor]]:
        """Return the output, ``[s, b, h]`` as the input, and the bias for the caller to add."""
        whole = super().forward  # type: ignore[misc]
        biases: list[Optional[torch.Tensor]] = []

        def run(_: slice, tile: torch.Tensor) -> torch.Tensor:
            output, bias = whole(tile, **options)
            biases[:] = [bias]
            return output

        config = self.config
        num_gathered = config.tensor_model_parallel_size if config.sequence_parallel else 1
        num_tokens = hidden_states[0].numel() // hidden_states.shape[-1]
        bounds = self._divide(hidden_states.shape[0], num_tokens * num_gathered)
        parameters = list(self.parameters())
        output = run_by_tiles(run, bounds, [hidden_states], parameters, run_in_a_group)
        (bias,) = biases
        # The caller adds it, so its gradient does not pass through the tiles.
        if bias is not None and not any(bias is parameter for parameter in parameters):
            raise ValueError(
                "add_bias_linear=True is not supported with mlp_sequence_tiles and "
                f"params_dtype={config.params_dtype} because the layer gives a copy of its bias, "
                "which gets no gradient; set add_bias_linear=False"
            )
        return output, bias


class _TiledExpertsMixin(_Tiled):
    """The experts of a rank, computed tile by tile; only their input is saved for backward.

    A tile is a range of the tokens that the dispatcher gives to them, sorted by expert, so each
    expert's weights are used in few tiles.
    """

    part = "experts"

    def forward(
        self: Any,
        rows: torch.Tensor,
        tokens_per_expert: torch.Tensor,
        probs: torch.Tensor,
        **buffers: Any,
    ) -> tuple[torch.Tensor, None]:
        """Return the output of each row, ``[num_rows, h]``, and no bias."""
        whole = super().forward  # type: ignore[misc]
        if buffers:
            raise ValueError(
                f"{', '.join(buffers)} of the token dispatcher is not supported with "
                "mlp_sequence_tiles because experts then write their whole output into it; set "
                "moe_token_dispatcher_type=alltoall"
            )
        is_known = not isinstance(self, SyncFreeGroupedMLP)
        if is_known:
            tokens_per_expert = tokens_per_expert.cpu()  # once, as the experts do for all rows

        def run(tile: slice, hidden: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
            output, bias = whole(hidden, _tokens_within(tokens_per_expert, tile), weights)
            assert bias is None, "experts add their bias themselves"
            return output

        bounds = self._divide(rows.shape[0]) if rows.shape[0] else ((0, 0),)
        needs = _needs_of(self, tokens_per_expert) if is_known else None
        parameters = list(self.parameters())
        inputs = [rows, probs]
        return run_by_tiles(run, bounds, inputs, parameters, run_in_a_group, needs), None


_EXPERT = re.compile(r"local_experts\.(\d+)\.|linear_fc[12]\.(?:weight|bias)(\d+)$")
"""The number of an expert in the name of its parameter."""


def _needs_of(experts: torch.nn.Module, tokens_per_expert: torch.Tensor) -> Needs:
    """Return which experts' parameters some rows depend on."""
    found = [_EXPERT.search(name) for name, _ in experts.named_parameters()]
    numbers = [int(match[1] or match[2]) if match else None for match in found]

    def needs(rows: slice) -> list[bool]:
        counts = _tokens_within(tokens_per_expert, rows).tolist()
        return [number is None or counts[number] > 0 for number in numbers]

    return needs


def _tokens_within(tokens_per_expert: torch.Tensor, rows: slice) -> torch.Tensor:
    ends = tokens_per_expert.cumsum(0)
    starts = ends - tokens_per_expert
    return ends.clamp(rows.start, rows.stop) - starts.clamp(rows.start, rows.stop)


# Output layer and loss


class _Losses(NamedTuple):
    """What the output layer gives in place of logits: [Note: Losses in place of logits]."""

    of_tokens: torch.Tensor
    """``[b, s]``."""
    labels: torch.Tensor


def _divide_loss(model: Any, options: TileOptions) -> Iterator[str]:
    asked = options.loss_sequence_tiles
    output_layer = getattr(model, "output_layer", None)
    if not getattr(model, "post_process", False) or output_layer is None:
        return
    config = model.config
    weight = output_layer.weight
    if weight is None:
        weight = model.shared_embedding_or_output_weight()
    fused: Any = config.cross_entropy_fusion_impl if config.cross_entropy_loss_fusion else "unfused"
    bytes_per_token = tiles.logits_bytes_per_token(weight.shape[0], weight.itemsize, fused)
    tiling = Tiling.of(asked, bytes_per_token)
    if tiling is None:
        return
    convert(model, _TiledLossMixin)
    convert(output_layer, _TiledOutputLayerMixin)
    output_layer.tiling = tiling
    yield _said(f"loss_sequence_tiles={asked}", tiling, bytes_per_token)


class _TiledLossMixin:
    """A model whose output layer computes the losses."""

    def forward(self: Any, *arguments: Any, **options: Any) -> Any:
        whole = super().forward  # type: ignore[misc]
        given = inspect.signature(whole).bind_partial(*arguments, **options).arguments
        layer = self.output_layer
        layer.labels = given.get("labels", given.get("kwargs", {}).get("labels"))
        layer.loss_of = super().compute_language_model_loss  # type: ignore[misc]
        try:
            return whole(*arguments, **options)
        finally:
            layer.labels = layer.loss_of = None

    def compute_language_model_loss(self: Any, labels: torch.Tensor, logits: Any) -> torch.Tensor:
        """Return the losses of tokens, ``[b, s]``, that the output layer has computed."""
        if not isinstance(logits, _Losses):
            return super().compute_language_model_loss(labels, logits)  # type: ignore[misc]
        if labels is not logits.labels:
            raise ValueError(
                "labels that change between the model's arguments and its loss are not supported "
                "with loss_sequence_tiles because the losses are computed by then; set "
                "loss_sequence_tiles=1"
            )
        return logits.of_tokens


class _TiledOutputLayerMixin(_Tiled):
    """An output layer that computes losses tile by tile where its model has labels.

    Saved for backward: the hidden states and the labels.
    """

    part = "output_layer"
    labels: Optional[torch.Tensor] = None
    """The labels of the running call of the model, int64 ``[b, s]``."""
    loss_of: Optional[Callable[[torch.Tensor, torch.Tensor], torch.Tensor]] = None
    """The model's loss: labels ``[b, s]`` and logits ``[s, b, v]`` to losses ``[b, s]``."""

    def forward(
        self: Any,
        hidden_states: torch.Tensor,
        weight: Optional[torch.Tensor] = None,
        **options: Any,
    ) -> Any:
        """Return losses in place of logits; without labels, logits."""
        whole = super().forward  # type: ignore[misc]
        labels, loss_of = self.labels, self.loss_of
        if labels is None:
            return whole(hidden_states, weight=weight, **options)
        num_rows, num_sequences = hidden_states.shape[:2]
        num_gathered = labels.shape[1] // num_rows
        # With sequence parallelism a rank's rows are a part of the sequence, and the layer gathers
        # those of all ranks: the first rank's rows of the tile, then the second's.
        labels_of_ranks = labels.reshape(num_sequences, num_gathered, num_rows)
        used = self.weight if weight is None else weight

        def run(rows: slice, tile: torch.Tensor) -> torch.Tensor:
            logits, _ = whole(tile, weight=used, **options)
            of_tile = labels_of_ranks[:, :, rows]
            losses = loss_of(of_tile.flatten(1), logits)
            return losses.view(of_tile.shape).permute(2, 0, 1)

        bounds = self._divide(num_rows, num_sequences * num_gathered)
        if len(bounds) == 1:
            losses = run(slice(0, num_rows), hidden_states)
        else:
            losses = run_by_tiles(run, bounds, [hidden_states], [used])
        return _Losses(losses.permute(1, 2, 0).reshape(labels.shape), labels), None
