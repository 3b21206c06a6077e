# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""The parts of a layer, one by one: what each computes, saves for backward, takes and gives.

A part is a sequence of operations; parts that megatron-core marks are named after its
``offload_modules``. Two kinds of layers are modelled: those built from Transformer Engine's modules
and those built from megatron-core's plain PyTorch modules (``attention_backend='local'``). Sizes
were checked against recorded traces of both (listed in docs/user-guide/planning.md).

[Note: Compute times]
Matrix products take their FLOPs divided by the GPU's average achieved rate; memory-bound operations
take their bytes divided by the memory bandwidth. In fp8, products of linear layers are faster, and
their inputs are read once more and written by rows and by columns. Backward costs twice the
forward, 2.5 times for attention, three times for scans and delta rules. Communication between GPUs,
kernels too small to fill a GPU and launch-bound parts are not counted; each makes a real step
longer.

[Note: Transformer Engine's fused norms]
Its linear layers fuse the preceding norm, so that norm is not marked: the query/key/value
projection does so except in multi-latent attention, the first projection of a dense MLP always.
A fused linear layer saves the norm's input and output. Transformer Engine's core attention copies
values that are strided views of the projection's output, so that output is not kept.

[Note: Inputs of linear layers in fp8]
A linear layer in fp8 keeps a quantized copy of its input, which it makes itself: two layers with
the same input have two, and the 16-bit input is saved only if something else needs it. What a norm
or an activation function frees and recomputes is kept by no copy.

[Note: Deterministic attention]
On Hopper, cuDNN before 9.25 writes the gradients of all scores to memory in the backward of a
deterministic fused attention. On an H200, 16,384 tokens of 16 heads took 8.06 GiB. Transformer
Engine uses it with ``NVTE_ALLOW_NONDETERMINISTIC_ALGO=0``, which ``--deterministic-mode`` asks for.
Other GPUs are planned alike.

[Note: Saved tensors under recomputation]
To recompute a norm or an activation function, megatron-core frees its output after use and reruns
the operation in backward. The output then takes no memory; the module's own group saves the input
for the rerun, and the input is offloaded with the group. Core attention is recomputed outside of
its group, so the tensors that its checkpoint keeps are not offloaded. A checkpoint of whole layers
saves only the input of the first, in a group of its own.

[Note: What kernels of state-space layers save]
Mamba's kernels are those of mamba-ssm (its memory-efficient path), a gated delta net's those of
flash-linear-attention; what they save is derived from their code, not measured. Mamba's
convolution, scan and gate are one operation. It saves its input, which is the input projection's
output, and the scan's output before the gate; backward computes the rest again. The norm after it
saves its input.

A gated delta net's convolution saves its input, a view of the input projection's output, so that
all of this is kept. Queries and keys are normalized together, then copied apart, and repeated for
each value head. The rule saves these, values, decays, gates, and for each chunk of tokens a
triangular matrix. The output's norm saves the rule's output, the product with the output's gate
both factors. The functions around the kernels are compiled: then they save no float32 copies. For
layers of plain PyTorch they are taken as they are if they are not.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Literal, NamedTuple, Optional

from megatron.slipstream.estimate.gpus import Products, Speed
from megatron.slipstream.estimate.model_shapes import (
    LatentAttention,
    LayerKind,
    ModelShape,
    has_feed_forward,
)
from megatron.slipstream.options.model import CHECKPOINTED_MODULES
from megatron.slipstream.plan.settings import NOTHING, WHOLE, LayerSetting
from megatron.slipstream.plan.trace import OUTPUT_LAYER

MODULES = (
    *("attn_norm", "qkv_linear", "core_attn", "attn_proj"),
    *("gdn_in_proj", "gdn_rule", "gdn_out_proj", "mamba_in_proj", "mamba_scan", "mamba_out_proj"),
    *("mlp_norm", "mlp_fc1", "mlp_act", "mlp_fc2", "shared_experts"),
    *("expert_fc1", "moe_act", "expert_fc2"),
)
"""The ``offload_modules`` that are modelled, in layer order."""

MEGATRON_MODULES = tuple(
    name
    for name in MODULES
    if name not in ("mlp_fc1", "mlp_act", "mlp_fc2", "shared_experts", "expert_fc2")
)
"""Those of them that megatron-core marks, and those of state-space layers."""

CHECKPOINT_INPUTS = "checkpoint_inputs"
"""The part, and the group, of a checkpoint of whole layers (``offload_checkpoint_inputs``)."""

TILED_PARTS = frozenset({"mlp_fc1", "mlp_act", "mlp_fc2", "expert_fc1", "moe_act", "expert_fc2"})
"""The parts of a layer that ``mlp_sequence_tiles`` computes tile by tile."""

MAMBA_CHUNK = 128
"""Tokens of a chunk of Mamba's scan (``MambaMixer``'s default)."""
_MAMBA_CONV_WIDTH = 4
RULE_CHUNK = 64
"""Tokens of a chunk of the gated delta rule."""
_LOSS_PASSES = 4
_MASKED_SOFTMAX_MAX_SEQUENCE = 16384
"""The longest sequence for which Transformer Engine's unfused attention has a softmax kernel."""

BACKWARD_PER_FORWARD = 2.0
ATTENTION_BACKWARD_PER_FORWARD = 2.5
"""Fused attention computes two products in forward and five in backward, scores included."""
SCAN_BACKWARD_PER_FORWARD = 3.0
"""Scans and delta rules save no states of chunks: backward computes them again."""

Phase = Literal["forward", "rerun", "backward"]


class Cost(NamedTuple):
    """Cost of one part of a layer for one micro-batch on one rank."""

    flops: float = 0.0
    """Operations of matrix products in forward."""
    traffic_bytes: float = 0.0
    """Bytes that memory-bound operations read and write in forward."""
    backward_factor: float = BACKWARD_PER_FORWARD
    kind: Products = "16 bits"
    """What the products are, since kinds reach other rates."""
    weights: int = 0
    rerun_share: float = 0.0
    """The share of the forward that backward runs again, before its own operations."""

    def ms(self, speed: Speed, phase: Phase) -> float:
        """Return the compute time of forward, of what runs again, or of backward without that."""
        factor = {"forward": 1.0, "rerun": self.rerun_share, "backward": self.backward_factor}
        return factor[phase] * speed.compute_ms(self.flops, self.traffic_bytes, self.kind)

    def backward_ms(self, speed: Speed) -> float:
        return self.ms(speed, "rerun") + self.ms(speed, "backward")


class SavedTensor(NamedTuple):
    """A storage that a layer saves for backward. Parts that save the same one use the same name."""

    name: str
    numel: int
    nbytes: int
    is_kept: bool = False
    """Whether a checkpoint keeps it: [Note: Saved tensors under recomputation]."""


Tensors = tuple[SavedTensor, ...]
Saved = dict[str, Tensors]


class Part(NamedTuple):
    """A sequence of operations of a layer, for one micro-batch on one rank."""

    name: str
    cost: Cost
    saved: Tensors
    stream: str
    """The tensor to which its half of the layer is added."""
    taken: Tensors
    given: Tensors
    """What comes out; empty if it is added to the residual stream."""
    inside: int
    """Bytes of the largest gradients between its operations."""
    rerun_by: frozenset[str]
    """The ``recompute_modules`` by which backward runs it again."""
    is_marked: bool


def layer_parts(shape: ModelShape, layer: int) -> tuple[Part, ...]:
    """Return the parts of a layer, in forward order."""
    return parts_of_kind(shape.plain, *shape.kind_and_setting(layer))


@lru_cache(maxsize=512)
def parts_of_kind(shape: ModelShape, kind: LayerKind, setting: LayerSetting) -> tuple[Part, ...]:
    """Return the parts of such a layer; the shape is one that recomputes nothing."""
    return tuple(_Layer(shape, kind, setting).parts())


def saved_tensors(shape: ModelShape, layer: int) -> Saved:
    """Return the tensors of each part that saves any, in forward order.

    A layer that is recomputed as a whole saves its input, if a checkpoint starts there.
    """
    found = {part.name: part.saved for part in layer_parts(shape, layer) if part.saved}
    kind, setting = shape.kind_and_setting(layer)
    if setting == WHOLE and layer in shape.checkpoint_starts:
        tensor = SavedTensor(input_name(kind), shape.hidden_numel, shape.hidden_bytes)
        found[CHECKPOINT_INPUTS] = (tensor,)
    return found


def savers_of(saved: Saved) -> dict[str, tuple[SavedTensor, list[str]]]:
    """Return each storage once, by name, with the parts that save it."""
    found: dict[str, tuple[SavedTensor, list[str]]] = {}
    for part, tensors in saved.items():
        for tensor in tensors:
            found.setdefault(tensor.name, (tensor, []))[1].append(part)
    return found


def marked_modules(shape: ModelShape, layer: int) -> tuple[str, ...]:
    """Return the parts of a layer that can be marked as groups, in layer order."""
    if shape.setting_of(layer) == WHOLE:
        return tuple(saved_tensors(shape, layer))
    return tuple(part.name for part in layer_parts(shape, layer) if part.is_marked)


def recomputable_parts(shape: ModelShape, kind: LayerKind) -> LayerSetting:
    """Return the parts, and the whole, whose recomputation makes a difference to such a layer."""
    found = NOTHING.union(*(part.rerun_by for part in parts_of_kind(shape.plain, kind, NOTHING)))
    found -= {"mlp", "moe_act"} if shape.mlp_sequence_tiles else NOTHING
    return found if kind == "/" else found | WHOLE


def setting_with_tiles(shape: ModelShape, kind: LayerKind, setting: LayerSetting) -> LayerSetting:
    """Return such a layer's setting with what tiles of its MLP or experts recompute."""
    if setting == WHOLE or not has_feed_forward(kind) or not shape.mlp_sequence_tiles:
        return setting
    return setting | {"moe_act" if "E" in kind else "mlp"}


def input_name(kind: LayerKind) -> str:
    """Return the name of a layer's input among its tensors."""
    return "attended" if kind in ("-", "E") else "layer_input"


def head_costs(shape: ModelShape) -> dict[str, Cost]:
    """Return the costs of the final norm, output layer and loss, in forward order."""
    logits = shape.tokens * shape.vocab_size / shape.parallelism.tp
    # Tiles run again in backward.
    factor = BACKWARD_PER_FORWARD + shape.loss_sequence_tiles
    return {
        "final_norm": Cost(0.0, 2.0 * shape.hidden_bytes, factor),
        OUTPUT_LAYER: Cost(2 * logits * shape.hidden_size, logits * shape.element_bytes, factor),
        # Float32 logits are read and written a few times.
        "loss": Cost(0.0, logits * 4 * _LOSS_PASSES, factor),
    }


def attended_pairs(shape: ModelShape) -> float:
    """Return the query-key pairs that causal attention computes for a sequence on a rank."""
    length = shape.seq_length
    window = min(shape.window_size or length, length)
    return (length * window - window * window / 2) / shape.parallelism.cp


class _Layer:
    """Lists the parts of one layer."""

    def __init__(self, shape: ModelShape, kind: LayerKind, setting: LayerSetting) -> None:
        self._shape, self._kind = shape, kind
        self._is_whole = setting == WHOLE
        self._setting = setting_with_tiles(shape, kind, setting - WHOLE)
        """What is recomputed beside the whole layer."""
        self._parts: list[Part] = []
        self._stream = input_name(kind)

    def parts(self) -> list[Part]:
        add_parts = {
            **{"*": self._attention, "M": self._mamba, "G": self._gated_delta_net},
            **{"/": self._further_tokens, "-": self._mlp, "E": self._experts},
        }
        for letter in self._kind:
            add_parts[letter]()
        return self._parts

    def _add(
        self,
        name: str,
        cost: Cost,
        saved: Tensors = (),
        given: Tensors = (),
        *,
        taken: Optional[Tensors] = None,
        inside: int = 0,
        rerun_by: str = "",
        rerun_share: float = 1.0,
        of_checkpoint: Tensors = (),
        is_marked: bool = True,
    ) -> None:
        """Add a part, which by default takes what the part before it gives.

        ``rerun_by`` has names with spaces between them. If one of them is a checkpoint, the part
        saves only ``of_checkpoint`` for it.
        """
        modules = frozenset(rerun_by.split())
        if self._is_whole:
            saved = ()
        elif modules & self._setting & CHECKPOINTED_MODULES.keys():
            saved, is_marked = of_checkpoint, False  # Nothing is marked in its rerun.
        if taken is None:
            taken = self._parts[-1].given if self._parts else (self._hidden_state(self._stream),)
        if self._shape.mlp_sequence_tiles and name in TILED_PARTS:
            is_marked = False
            rerun_share = 2.0 if self._is_whole else 1.0  # Again after its whole layer did.
        elif self._is_whole:
            rerun_share = 1.0
        elif not modules & self._setting:
            rerun_share = 0.0
        self._parts.append(
            Part(name, cost._replace(rerun_share=rerun_share), saved, self._stream, taken, given,
                 inside, modules, is_marked and name in MODULES)
        )  # fmt: skip

    def _add_norm(
        self, name: str, normed: SavedTensor, is_fused: bool, module: str = ""
    ) -> Tensors:
        """Add a norm; return what the linear layer after it saves for both, or with the norm.

        A fused norm runs again with its linear layer, for ``module``.
        """
        shape, given = self._shape, (self._hidden_state(normed.name),)
        norm = self._norm(self._stream, shape.region_tokens, shape.hidden_size)
        if is_fused:
            self._add(name, self._moved(2), (), given, rerun_by=module, is_marked=False)
            return (*norm, normed)
        again = self._recomputes("layernorm")
        saved = (self._hidden_state(self._stream),) if again else norm
        self._add(name, self._moved(2), saved, given, rerun_by="layernorm")
        return () if again else (normed,)

    def _add_residual(self, half: str, given: str) -> None:
        has_dropout = self._shape.hidden_dropout > 0
        mask = self._dropout_mask(f"{half}_dropout_mask", self._shape.hidden_numel)
        saved = (mask,) if has_dropout else ()
        self._add(f"{half}_residual", self._moved(3), saved, (self._hidden_state(given),))
        self._stream = given

    def _add_output(self, half: str, name: str, read: SavedTensor, width: int) -> None:
        """Add the projection that ends a half of a layer, from ``width`` per token, and the sum."""
        self._add(name, self._linear(self._shape.hidden_size * width, read.numel), (read,))
        self._add_residual(half, "attended")

    def _attention(self) -> None:
        shape, latent, size = self._shape, self._shape.latent_attention, self._shape.element_bytes
        tokens, heads, hidden = shape.tokens, shape.heads, shape.hidden_size
        groups, key_width, value_width = shape.attention_sizes
        # The down-projections of queries and of keys and values are two layers.
        copies = 2 if latent and shape.fp8_recipe else 1
        normed = self._input("normed_input", copies * shape.hidden_numel)
        is_fused = shape.uses_transformer_engine and not latent
        read = self._add_norm("attn_norm", normed, is_fused)
        query, key, value = heads_read = self._query_key_value()
        share, by, projections = 1.0, "", self._qk_norms()
        if latent:
            by = "mla_up_proj"
            up, down, projections = self._latent_projections(latent)
            # Ranks of a tensor-parallel group have all down-projections, each for its own tokens.
            up_flops, down_flops = 2.0 * tokens * up, 2.0 * shape.region_tokens * down
            share = up_flops / (up_flops + down_flops)
            project = self._linear(up + down, shape.hidden_numel, up_flops + down_flops)
        else:
            weights = hidden * (heads + 2 * groups) * shape.head_dim
            project = self._linear(weights, shape.hidden_numel)
        saved = (*read, *projections)
        self._add("qkv_linear", project, saved, heads_read, rerun_by=by, rerun_share=share)
        moved = heads * key_width + groups * (key_width + value_width)
        has_tables = not (shape.apply_rope_fusion or latent)
        tables = self._rotary_tables(shape.head_dim) if has_tables else ()
        rotary = Cost(0.0, 2.0 * tokens * moved * size)
        self._add("rotary", rotary, tables, heads_read, rerun_by=by)
        output = self._tensor("attention_output", tokens * heads * value_width)
        of_proj = output
        if shape.fp8_recipe:
            of_proj = self._input("attention_output_quantized", output.numel)
        # With all-to-all, a rank has the whole sequence of some heads.
        is_whole = shape.parallelism.cp > 1 and "a2a" in shape.parallelism.cp_comm_type
        if is_whole:  # Saved before heads and tokens are transposed back.
            output = output._replace(name="attention_output_by_heads")
        inner: Tensors = (output, self._float32("log_sum_exp", tokens * heads))
        pairs, scores, inside = shape.micro_batch_size * heads * attended_pairs(shape), 0.0, 0
        if self._has_scores:  # The softmax and the two products write and read all scores.
            pairs *= 2
            scores = 4.0 * pairs * size
            inner, output = self._scores(), of_proj
            inside = sum(tensor.nbytes for tensor in (*heads_read, *inner))
        cost = Cost(2.0 * pairs * (key_width + value_width), scores,
                    ATTENTION_BACKWARD_PER_FORWARD, "attention")  # fmt: skip
        if shape.deterministic_mode and shape.attention_backend == "fused":
            inside = tokens * heads * (shape.seq_length if is_whole else shape.sequence) * size
        saved = inner if self._recomputes("mla_up_proj") else (*heads_read, *inner)
        kept = tuple(each._replace(is_kept=True) for each in heads_read)
        self._add("core_attn", cost, saved, (output,), inside=inside, rerun_by="core_attn",
                  of_checkpoint=kept)  # fmt: skip
        self._add_output("attn", "attn_proj", of_proj, heads * value_width)

    def _mamba(self) -> None:
        shape, mamba, tp = self._shape, self._shape.mamba, self._shape.parallelism.tp
        assert mamba is not None
        tokens, hidden, size = shape.tokens, shape.hidden_size, shape.element_bytes
        heads, groups, state = mamba.num_heads // tp, mamba.num_groups // tp, mamba.state_dim
        inner = heads * mamba.head_dim
        # Channels of the convolution: the heads' inputs, and what a group shares.
        convolved = inner + 2 * groups * state
        # The input projection's output: also a gate, and a step size per head.
        projected = inner + convolved + heads
        # Context-parallel ranks divide heads, but each of them has one group at least.
        most_groups = max(groups, shape.parallelism.cp)
        scanned = projected + 2 * (most_groups - groups) * state
        # Within chunks, of each group and each head; into and out of the states of chunks.
        products = MAMBA_CHUNK * (most_groups * state + inner) + 2 * inner * state
        states = 4 * 2 * tokens * inner * state / MAMBA_CHUNK
        # The convolution writes what the scan reads; the scan's output is written with its gate
        # too, and read and written by a norm.
        moved = scanned + 2 * convolved + 2 * inner + 2 * inner
        normed = self._input("normed_input", shape.hidden_numel)
        saved = self._add_norm("mamba_norm", normed, is_fused=True)
        into = self._tensor("mamba_projected", tokens * scanned)
        project = self._linear(hidden * projected, shape.hidden_numel)
        self._add("mamba_in_proj", project, saved, (into,))
        out = self._input("mamba_normed", tokens * inner)
        self._add(
            "mamba_scan",
            Cost(2.0 * tokens * products, tokens * moved * size + states,
                 SCAN_BACKWARD_PER_FORWARD, "attention", convolved * _MAMBA_CONV_WIDTH),
            (
                into,
                self._tensor("mamba_scanned", tokens * inner),
                self._tensor("mamba_output", tokens * inner),
                self._float32("mamba_output_deviation", tokens * groups),
            ),
            (out,),
            # What backward computes again, and its gradient.
            inside=2 * (tokens * convolved * size + 4 * tokens * inner * state // MAMBA_CHUNK),
        )  # fmt: skip
        self._add_output("mamba", "mamba_out_proj", out, inner)

    def _gated_delta_net(self) -> None:
        shape, net, tp = self._shape, self._shape.gated_delta_net, self._shape.parallelism.tp
        assert net is not None
        tokens, hidden, size = shape.tokens, shape.hidden_size, shape.element_bytes
        key_heads, value_heads = net.num_key_heads // tp, net.num_value_heads // tp
        keys, values = key_heads * net.key_head_dim, value_heads * net.value_head_dim
        repeated, gates = value_heads * net.key_head_dim, tokens * value_heads
        # The input projection's output: also a gate, and two numbers per value head.
        projected = 2 * (keys + values + value_heads)
        # Of each chunk: keys with keys, the triangle's inverse, keys and values by it, queries with
        # keys, and these with values; into and out of the states of chunks.
        in_chunk = RULE_CHUNK * (3 * repeated + 2 * values + value_heads * RULE_CHUNK)
        products = in_chunk + 3 * repeated * net.value_head_dim
        # The convolution reads and writes queries, keys and values; these are normalized, repeated,
        # and read by the rule.
        moved = 4 * (2 * keys + values) + 2 * (2 * repeated + values) + values
        normed = self._input("normed_input", shape.hidden_numel)
        saved = self._add_norm("attn_norm", normed, shape.uses_transformer_engine)
        into = self._tensor("gdn_projected", tokens * projected)
        project = self._linear(hidden * projected, shape.hidden_numel)
        self._add("gdn_in_proj", project, saved, (into,))
        numel = tokens * values
        inner = (
            self._tensor("gdn_query_key", tokens * 2 * keys),
            self._tensor("gdn_query", tokens * repeated),
            self._tensor("gdn_key", tokens * repeated),
            self._tensor("gdn_value", numel),
        )
        self._add(
            "gdn_rule",
            Cost(2.0 * tokens * products, 1.0 * tokens * moved * size, SCAN_BACKWARD_PER_FORWARD,
                 "attention", (2 * keys + values) * net.conv_kernel_dim),
            (
                into,
                inner[0],
                self._float32("gdn_query_key_deviation", tokens * 2 * key_heads),
                *inner[1:],
                *self._compiled("gdn_decay_input", "gdn_decay_rate", gates),
                self._float32("gdn_decay", gates),
                self._tensor("gdn_beta", gates),
                self._tensor("gdn_triangles", gates * RULE_CHUNK),
                *self._norm("gdn_output", gates, net.value_head_dim),
                self._tensor("gdn_output_normed", numel),
                *self._compiled("gdn_gate", "gdn_gate_activated", numel),
            ),
            (self._tensor("gdn_output", numel),),
            inside=sum(tensor.nbytes for tensor in inner),
        )  # fmt: skip
        norm = Cost(0.0, 5.0 * tokens * values * size)
        self._add("gdn_norm", norm, (), (self._tensor("gdn_normed", numel),))
        self._add_output("attn", "gdn_out_proj", self._input("gdn_normed", numel), values)

    def _further_tokens(self) -> None:
        """Add a norm, and the norms and projection that join its output with the next embedding."""
        shape = self._shape
        names = ("layer_input", "further_state", "further_embedding")
        norms = [self._norm(name, shape.region_tokens, shape.hidden_size) for name in names]
        joined = self._input("further_joined", 2 * shape.hidden_numel)
        moved = 3 * self._moved(2).traffic_bytes + 2.0 * joined.numel * shape.element_bytes
        self._add("further_norms", Cost(0.0, moved), sum(norms, ()), (joined,))
        self._stream = "further_state"
        project = self._linear(2 * shape.hidden_size**2 // shape.parallelism.tp, joined.numel)
        self._add("further_proj", project, (joined,), (self._hidden_state("attended"),))

    def _mlp(self) -> None:
        normed = self._input("normed_attended", self._shape.hidden_numel)
        saved = self._add_norm("mlp_norm", normed, self._shape.uses_transformer_engine, "mlp")
        rows, width = self._shape.feed_forward_sizes(self._kind)
        costs, activated, given, product = self._two_layers("mlp", rows, width)
        first, activation, second = costs
        self._add("mlp_fc1", first, saved, activated[:1], rerun_by="mlp", of_checkpoint=saved[:1])
        self._add("mlp_act", activation, activated, (given,), rerun_by="mlp")
        self._add("mlp_fc2", second, (product,), rerun_by="mlp")
        self._add_residual("mlp", "layer_output")

    def _experts(self) -> None:
        shape, experts = self._shape, self._shape.experts
        assert experts is not None
        normed = self._hidden_state("normed_attended")  # The router is in 16 bits.
        saved = self._add_norm("mlp_norm", normed, is_fused=False)
        hidden, one_copy = shape.hidden_size, normed.nbytes
        rows, width = shape.feed_forward_sizes(self._kind)
        routed = one_copy * experts.topk
        weights = hidden * experts.num_experts
        scores = self._float32("router_scores", shape.region_tokens * experts.num_experts)
        sent = self._tensor("expert_input", rows * hidden)
        received = self._tensor("expert_output", rows * hidden)
        router = Cost(2.0 * shape.region_tokens * weights, one_copy + 2.0 * routed, weights=weights)
        self._add("router", router, (*saved, scores), (sent,), rerun_by="moe", of_checkpoint=saved)
        if experts.shared_ffn_hidden_size:
            self._shared_experts(saved, experts.shared_ffn_hidden_size // shape.parallelism.tp)
        costs, activated, given, product = self._two_layers("expert", rows, width)
        num_local = experts.num_experts // shape.parallelism.ep
        first, activation, second = (
            cost._replace(weights=cost.weights * num_local) for cost in costs
        )
        into, is_again = activated[:1], self._recomputes("moe_act")
        if shape.mlp_sequence_tiles:  # What goes in is 'expert_input'.
            activated = ()
        elif is_again:
            activated = into
        elif not shape.bias_activation_fusion:
            activated += (self._tensor("expert_unweighted", rows * width),)
        activated += (self._tensor("routing_probabilities", rows),)
        entering = self._input("expert_input", rows * hidden)
        self._add("expert_fc1", first, (entering,), into, taken=(sent,), rerun_by="moe")
        self._add("moe_act", activation, activated, (given,), rerun_by="moe moe_act")
        self._add("expert_fc2", second, () if is_again else (product,), (received,),
                  rerun_by="moe", is_marked=not is_again)  # fmt: skip
        self._add("combine", Cost(0.0, routed + one_copy), rerun_by="moe")
        self._add_residual("mlp", "layer_output")

    def _shared_experts(self, normed: Tensors, width: int) -> None:
        shape = self._shape
        costs, activated, given, product = self._two_layers("shared", shape.tokens, width)
        cost = costs[0]._replace(
            flops=sum(each.flops for each in costs),
            traffic_bytes=sum(each.traffic_bytes for each in costs),
            weights=sum(each.weights for each in costs),
        )
        read = normed
        if shape.fp8_recipe and normed:
            read = (self._input("normed_attended_quantized", shape.hidden_numel),)
        self._add(
            "shared_experts",
            cost,
            (*read, *activated, product),
            taken=(self._hidden_state("normed_attended"),),
            inside=activated[0].nbytes + given.nbytes,
            rerun_by="moe shared_experts",
            of_checkpoint=() if self._recomputes("moe") else normed,
        )

    # Costs

    def _two_layers(
        self, prefix: str, rows: int, width: int
    ) -> tuple[list[Cost], Tensors, SavedTensor, SavedTensor]:
        """Return the costs of two linear layers and of the activation function between them.

        Also what that saves, its input first; what it gives; and what the second layer saves.
        """
        shape, numel = self._shape, rows * width
        factor = 2 if shape.gated_linear_unit else 1
        weights = shape.hidden_size * width
        flops = 2.0 * rows * weights
        costs = [
            self._linear(factor * weights, rows * shape.hidden_size, factor * flops),
            Cost(0.0, 1.0 * numel * (factor + 1) * shape.element_bytes),
            self._linear(weights, numel, flops),
        ]
        saved: Tensors = (self._tensor(f"{prefix}_projected", numel * factor),)
        if shape.gated_linear_unit and not shape.bias_activation_fusion:
            saved += tuple(self._tensor(f"{prefix}_{half}", numel) for half in ("gate", "linear"))
        name = f"{prefix}_activated"
        return costs, saved, self._tensor(name, numel), self._input(name, numel)

    def _linear(self, weights: int, input_numel: int, flops: Optional[float] = None) -> Cost:
        shape = self._shape
        each = shape.element_bytes + 2 * shape.linear_input_bytes if shape.fp8_recipe else 0.0
        flops = 2.0 * shape.tokens * weights if flops is None else flops
        kind: Products = "fp8" if shape.fp8_recipe else "16 bits"
        return Cost(flops, input_numel * each, kind=kind, weights=weights)

    def _moved(self, times: int) -> Cost:
        return Cost(0.0, float(times) * self._shape.hidden_bytes)

    # Saved tensors

    def _recomputes(self, module: str) -> bool:
        return module in self._setting

    def _norm(self, name: str, rows: int, width: int) -> Tensors:
        """Return the tensors that a norm of ``[rows, width]`` saves, its input first."""
        shape = self._shape
        taken = self._tensor(name, rows * width)
        if shape.uses_transformer_engine:
            names = ("deviation", "mean") if shape.normalization == "LayerNorm" else ("deviation",)
            return (taken, *(self._float32(f"{name}_{each}", rows) for each in names))
        if shape.normalization == "LayerNorm":
            names = ("mean", "deviation")
            return (taken, *(self._tensor(f"{name}_{each}", rows) for each in names))
        # Plain PyTorch computes an RMS norm step by step, in float32.
        return (
            self._float32(name if shape.precision == "fp32" else f"{name}_fp32", rows * width),
            self._float32(f"{name}_deviation", rows),
            self._float32(f"{name}_scaled", rows * width),
        )

    def _qk_norms(self) -> Tensors:
        shape = self._shape
        if not shape.qk_layernorm:
            return ()
        return (
            *self._norm("query_before_norm", shape.tokens * shape.heads, shape.head_dim),
            *self._norm("key_before_norm", shape.tokens * shape.groups, shape.head_dim),
        )

    def _latent_projections(self, latent: LatentAttention) -> tuple[int, int, Tensors]:
        """Return the weights of up- and of down-projections, and what the norms between save."""
        shape, tokens, hidden = self._shape, self._shape.region_tokens, self._shape.hidden_size
        position, is_again = latent.qk_pos_emb_head_dim, self._recomputes("mla_up_proj")
        key_width, up, down = latent.qk_head_dim + position, 0, 0
        # Each latent vector, with the rest of the tensor that it is a view of, and the width of a
        # head: the tensor of keys and values also holds the keys' positional part.
        rows = [("key_value_latent", latent.kv_lora_rank, position,
                 latent.qk_head_dim + latent.v_head_dim)]  # fmt: skip
        if latent.q_lora_rank is None:
            up = hidden * shape.heads * key_width
        else:
            rows.insert(0, ("query_latent", latent.q_lora_rank, 0, key_width))
        tensors: Tensors = ()
        for name, rank, rest, width in rows:
            up += rank * shape.heads * width
            down += hidden * (rank + rest)
            saved: Tensors = ()
            if shape.qk_layernorm and not is_again:  # The recomputed part contains the norm.
                normed = self._input(f"normed_{name}", tokens * rank)
                saved = (*self._norm(name, tokens, rank), normed)
            if shape.uses_transformer_engine or not saved:
                saved = (self._tensor(name, tokens * (rank + rest)), *saved[1:])
            tensors += saved
        if not (shape.apply_rope_fusion or is_again):
            tensors += self._rotary_tables(position)
        return up, down, tensors

    @property
    def _has_scores(self) -> bool:
        return self._shape.attention_backend in ("unfused", "local")

    def _query_key_value(self) -> tuple[SavedTensor, SavedTensor, SavedTensor]:
        shape, latent = self._shape, self._shape.latent_attention
        groups, key_width, value_width = shape.attention_sizes
        stored = groups * value_width
        if self._has_scores:
            if groups == shape.heads and not latent and not shape.uses_transformer_engine:
                # Values are a view of the projection's output, all of which is kept.
                stored = (shape.heads + 2 * groups) * shape.head_dim
            groups = shape.heads  # Keys and values are repeated for each query head.
            stored = max(stored, groups * value_width)
        return (
            self._tensor("query", shape.tokens * shape.heads * key_width),
            self._tensor("key", shape.tokens * groups * key_width),
            self._tensor("value", shape.tokens * stored),
        )

    def _scores(self) -> Tensors:
        """Return the ``[b, heads, s, s]`` tensors of softmax and the product with the values."""
        shape = self._shape
        numel = shape.micro_batch_size * shape.heads * shape.sequence**2
        tensors = [self._tensor("probabilities", numel)]
        is_16_bit, has_softmax = shape.precision != "fp32", False
        if shape.attention_backend == "local":
            has_softmax = is_16_bit and shape.attention_softmax_in_fp32
        elif not is_16_bit or shape.sequence > _MASKED_SOFTMAX_MAX_SEQUENCE:  # There is no kernel.
            tensors.append(SavedTensor("mask", shape.sequence**2, shape.sequence**2))
            has_softmax = is_16_bit
        if has_softmax:
            tensors.append(self._float32("softmax", numel))
        if shape.attention_dropout > 0:
            tensors.append(self._dropout_mask("attention_dropout_mask", numel))
            if not has_softmax:
                # Saved in addition to the softmax output, unless "softmax" is that output and
                # "probabilities" already holds these.
                tensors.append(self._tensor("dropped_probabilities", numel))
        return tuple(tensors)

    def _rotary_tables(self, width: int) -> Tensors:
        names = ("query_cosines", "query_sines", "key_cosines", "key_sines")
        return tuple(self._tensor(name, self._shape.sequence * width) for name in names)

    def _hidden_state(self, name: str) -> SavedTensor:
        return self._tensor(name, self._shape.hidden_numel)

    def _compiled(self, name: str, more: str, numel: int) -> Tensors:
        """Return what a gated delta net's function saves: less if it is compiled."""
        if self._shape.uses_transformer_engine:
            return (self._tensor(name, numel),)
        return self._float32(name, numel), self._float32(more, numel)

    def _dropout_mask(self, name: str, numel: int) -> SavedTensor:
        # Masks are boolean on a GPU; without one, they have the dtype of activations.
        if self._shape.uses_transformer_engine:
            return SavedTensor(name, numel, numel)
        return self._tensor(name, numel)

    def _tensor(self, name: str, numel: int) -> SavedTensor:
        return SavedTensor(name, numel, numel * self._shape.element_bytes)

    def _input(self, name: str, numel: int) -> SavedTensor:
        """Return a linear layer's input, see [Note: Inputs of linear layers in fp8]."""
        return SavedTensor(name, numel, int(numel * self._shape.linear_input_bytes))

    def _float32(self, name: str, numel: int) -> SavedTensor:
        return SavedTensor(name, numel, 4 * numel)
