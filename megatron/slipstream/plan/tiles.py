# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""Tiles of a sequence: where they begin and end, and how much memory one needs.

Pure arithmetic, for the training and for estimates of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, Optional, Union

TILE_BYTES = 512 * 2**20
"""What the temporary tensors of a tile take at most with 'auto', in bytes."""
MIN_TILE_TOKENS = 1024
"""The fewest tokens of a tile with 'auto', even above :data:`TILE_BYTES`: each tile reads the
weights and adds to their gradients, which takes longer than its matrix products below that."""

NumTiles = Union[int, Literal["auto"]]
"""A number of tiles, or 'auto': tiles of a length that follows from the shapes of the model."""


@dataclass(frozen=True)
class Tiling:
    """How rows are divided into tiles: into a number of them, or by their length."""

    num_tiles: Optional[int] = None
    """Number of tiles of every micro-batch; None: as :attr:`max_tokens` says."""
    max_tokens: Optional[int] = None
    """The most tokens of a tile, whatever the number of tiles; None: as :attr:`num_tiles` says."""

    @classmethod
    def of(cls, asked: NumTiles, bytes_per_token: float) -> Optional[Tiling]:
        """Return the division that an option asks for; None for one tile, which is no division.

        Args:
            asked: The value of the option.
            bytes_per_token: Bytes of a tile's temporary tensors per token.
        """
        if asked == "auto":
            return cls(max_tokens=max(MIN_TILE_TOKENS, int(TILE_BYTES / bytes_per_token)))
        return cls(num_tiles=asked) if asked > 1 else None

    def bounds(self, num_rows: int, tokens_per_row: int = 1) -> tuple[tuple[int, int], ...]:
        """Return the first and the end row of each tile; lengths differ by one row at most.

        The same numbers always give the same tiles, since tiles change how sums round.

        Args:
            num_rows: Rows of this rank, 1 or more.
            tokens_per_row: Tokens of a tile for each of its rows: the micro-batch size, times the
                ranks whose rows a layer gathers.
        """
        if self.num_tiles is not None:
            num_tiles = self.num_tiles
        else:
            assert self.max_tokens is not None
            num_tiles = -(-num_rows // max(1, self.max_tokens // tokens_per_row))
        num_tiles = max(1, min(num_tiles, num_rows))
        ends = [num_rows * (tile + 1) // num_tiles for tile in range(num_tiles)]
        return tuple(zip([0, *ends], ends, strict=False))


CrossEntropy = Literal["unfused", "native", "te"]
"""Cross-entropy functions of megatron-core: without ``cross_entropy_loss_fusion``, or with it by
``cross_entropy_fusion_impl``."""


def logits_bytes_per_token(vocab_size: int, element_bytes: int, function: CrossEntropy) -> int:
    """Return the bytes that the logits of a token need at once, forward or backward.

    Transformer Engine's function copies the logits, and its backward turns the copy into the
    gradient. megatron-core's own turns logits into float32, and the gradient back; its fused one
    (``native``) computes with a second copy in float32.

    Args:
        vocab_size: Size of the vocabulary, padded, on one tensor-parallel rank.
        element_bytes: Bytes of an element of the logits.
        function: The cross-entropy function.
    """
    if function == "te":
        return vocab_size * 2 * element_bytes
    num_copies = (element_bytes < 4) + (function == "native")
    return vocab_size * (element_bytes + 4 * num_copies)


def mlp_bytes_per_token(
    hidden_size: int, ffn_size: int, element_bytes: int, is_gated: bool, is_fused: bool = True
) -> int:
    """Return the bytes that a token needs at once inside an MLP or its experts.

    The most is needed in the backward of the activation function: its input, and the gradients of
    its output and input. Beside them there are the input, normalized, and the gradient of the
    output.

    Args:
        hidden_size: Width of the model.
        ffn_size: Width inside the MLP, or an expert, on one tensor-parallel rank.
        element_bytes: Bytes of an element.
        is_gated: Whether the activation function has two inputs of this width.
        is_fused: Whether the activation function is one operation (``bias_activation_fusion``).
            Else a gated one also keeps its activated half, and the gradients of both halves.
    """
    inputs = 2 if is_gated else 1
    widths = 2 * inputs + 1
    if is_gated and not is_fused:
        widths += 2
    return element_bytes * (widths * ffn_size + 3 * hidden_size)


def gradient_bytes(num_parameters: int, element_bytes: int, has_main_grad: bool) -> int:
    """Return the bytes of weight gradients beside a tile, during its backward.

    Zero if layers add to ``main_grad`` themselves (``gradient_accumulation_fusion``).

    Args:
        num_parameters: Parameters of the output layer, or of the MLP.
        element_bytes: Bytes of a parameter.
        has_main_grad: Whether each tile's gradient is added to ``main_grad``. Else the sum of the
            tiles is one more tensor, which then becomes the gradient.
    """
    return num_parameters * element_bytes * (1 if has_main_grad else 2)
