# Copyright (c) 2026 The Slipstream authors. Licensed under the Apache License, Version 2.0.

"""docs/user-guide/compatibility.md: what goes together, as the rule tables and the tests say.

A setting is tried on the rules of each feature: what they refuse is a "no" with their message. What
they let pass is called tested only where a test is named here, and that it is there is checked.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any, NamedTuple, Optional

from docs_parts import ROOT, as_text, generated_from, table

from megatron.slipstream import config
from megatron.slipstream.chunk_graphs.options import check_chunk_graphs
from megatron.slipstream.context_parallel.options import check_dynamic_context_parallel
from megatron.slipstream.packed_sequences.options import check_packing

TESTS = {
    "equality": "tests/functional_tests/test_equality.py",
    "training": "tests/functional_tests/test_pretrain.py",
    "gpu": "tests/functional_tests/test_gpu.py",
    "graph layers": "tests/unit_tests/integration/test_graph_layers.py",
    "graph capture": "tests/unit_tests/fine_grained_activation_offload/test_graph_capture.py",
    "graphs, gpu": "tests/functional_tests/test_graphs.py",
    "chunks": "tests/functional_tests/test_chunk_graphs.py",
    "chunks, gpu": "tests/functional_tests/test_chunk_graphs.py",
    "packed": "tests/unit_tests/packed_sequences/test_gpt.py",
    "packed batches": "tests/unit_tests/packed_sequences/test_training_path.py",
    "packed training": "tests/functional_tests/test_packed_training.py",
    "packed case, gpu": (
        "tests/functional_tests/test_cases/gpt/gpt3_thd_offload/model_config.yaml"
    ),
    "sizes": "tests/unit_tests/integration/test_dynamic_context_parallel.py",
    "sizes, graphs": "tests/unit_tests/integration/test_graph_bank.py",
    "sizes, graphs, gpu": "tests/functional_tests/test_dynamic_context_parallel.py",
}
"""Files by a name of ours; those that end in 'gpu' need one."""

Evidence = tuple[tuple[str, str], ...]
"""Tests by their file in :data:`TESTS` and a text in it that names the test or its case."""


class Feature(NamedTuple):
    """A column: what a setting is tried with."""

    title: str
    check: Callable[[Any], None]
    """Raises ``ValueError`` for what does not go together."""
    ways: tuple[Mapping[str, Any], ...]
    """Settings that have the feature. What only some of them refuse is a limit, not a no."""


class Setting(NamedTuple):
    """A row: what a user has, in the terms of the rule tables, and the tests that have it too."""

    name: str
    facts: Mapping[str, Any] = {}
    tests: Mapping[str, Evidence] = {}
    """By the name of the feature that they show."""
    says_nothing_of: tuple[str, ...] = ()
    """Features whose cells stay empty."""


_MODEL = {
    "fine_grained_activation_offloading": True,
    "offload_modules": ["core_attn", "attn_proj"],
    "num_moe_experts": None,
    **{"activation_offload_fraction": 1.0, "min_offloaded_tensor_size": 1024 * 1024},
    **{"delta_offload_bytes_across_pp_ranks": 0, "cpu_offloading": False},
}
_LAYER_GRAPHS = {
    "cuda_graph_impl": "transformer_engine",
    "cuda_graph_modules": ["attn"],
    "cuda_graph_warmup_steps": 3,
}
_CHUNK_GRAPHS = {"cuda_graph_granularity": "chunk", "cuda_graph_impl": "local"}
_PACKING = {"seq_length": 4096, "attention_backend": "fused"}


def _check_dynamic(facts: Any) -> None:
    check_packing(facts)
    check_dynamic_context_parallel(facts)


FEATURES: Mapping[str, Feature] = {
    "offloading": Feature("offloading", config.check_model_options, (_MODEL,)),
    "layer graphs": Feature(
        "offloading in [graphs of layers](cuda-graphs.md)",
        config.check_model_options,
        ({**_MODEL, **_LAYER_GRAPHS},),
    ),
    "chunk graphs": Feature(
        "[graphs of chunks](chunk-cuda-graphs.md)",
        lambda facts: check_chunk_graphs(facts, has_gpu=True),
        (_CHUNK_GRAPHS,),
    ),
    "packing": Feature(
        "[packed sequences](packed-sequences.md)",
        check_packing,
        tuple({**_PACKING, "sequence_packing": how} for how in ("greedy", "balanced")),
    ),
    "dynamic": Feature(
        "[dynamic context parallelism](dynamic-context-parallel.md)",
        _check_dynamic,
        (
            {
                **_PACKING,
                "dynamic_context_parallel": True,
                "sequence_packing": "balanced",
                "calculate_per_token_loss": True,
            },
        ),
    ),
}

_EXPERTS = {"num_moe_experts": 8, "num_experts": 8}
_EXPERTS_OF_A_CAPACITY = {
    **_EXPERTS,
    "moe_token_dispatcher_type": "alltoall",
    "moe_expert_capacity_factor": 1.0,
    "moe_pad_expert_input_to_capacity": True,
}
_ALL_GRAPHS = ("layer graphs", "chunk graphs")

SETTINGS: Mapping[str, tuple[Setting, ...]] = {
    "Model": (
        Setting(
            "dense",
            {},
            {
                "offloading": (("equality", '"dense"'), ("gpu", "def test_dense")),
                "layer graphs": (
                    ("graph layers", "def test_captured_layers"),
                    ("graphs, gpu", "def test_graphs_and_offloading"),
                ),
                "chunk graphs": (
                    ("chunks", '"dense": ModelCase('),
                    ("chunks, gpu", '"dense": on_gpu('),
                ),
                "packing": (("packed", "def test_packed_documents_train_like_documents"),),
                "dynamic": (("sizes", '"dense"'), ("sizes, graphs, gpu", '"dense"')),
            },
        ),
        Setting(
            "with experts (MoE)",
            _EXPERTS,
            {
                "offloading": (("equality", '"moe"'), ("gpu", "def test_moe(")),
                "layer graphs": (("graphs, gpu", '"moe"'),),
                "packing": (("packed", "def test_packed_documents_route"),),
            },
        ),
        Setting(
            "with experts of a fixed capacity (drop and pad)",
            _EXPERTS_OF_A_CAPACITY,
            {
                "chunk graphs": (
                    ("chunks", '"experts, drop and pad": ModelCase('),
                    ("chunks, gpu", '"experts, drop and pad": on_gpu('),
                ),
                "packing": (("packed", "MOE_STATIC"),),
                "dynamic": (("sizes, graphs, gpu", '"experts"'),),
            },
        ),
        Setting(
            "multi-latent attention (MLA)",
            {},
            {
                "offloading": (("equality", '"mla"'), ("gpu", "def test_mla")),
                "layer graphs": (("graphs, gpu", '"MLA"'),),
                "chunk graphs": (
                    ("chunks", '"MLA": ModelCase('),
                    ("chunks, gpu", '"MLA": on_gpu('),
                ),
                "packing": (("packed", "one_by_one_with_latent_attention"),),
                "dynamic": (("sizes", '"MLA"'), ("sizes, graphs, gpu", '"MLA"')),
            },
        ),
        Setting(
            "`HybridModel` of attention, MLP and MoE layers",
            {"hybrid_layer_pattern": "*-*E"},
            {
                "offloading": (
                    ("equality", '"hybrid"'),
                    ("gpu", "def test_hybrid"),
                    ("training", '"hybrid"'),
                )
            },
        ),
        Setting("`HybridModel` with Mamba layers", {"hybrid_layer_pattern": "M*-"}),
        Setting(
            "multi-token prediction",
            {"mtp_num_layers": 1},
            {
                "offloading": (
                    ("equality", '"multi-token prediction"'),
                    ("gpu", "def test_layers_that_predict_further_tokens"),
                ),
            },
        ),
        Setting(
            "dropout",
            {},
            {
                "offloading": (("equality", '"dropout"'), ("gpu", '"dropout"')),
                "layer graphs": (("graphs, gpu", '"dropout"'),),
                "chunk graphs": (
                    ("chunks", 'ModelCase("dense", overrides=DROPOUT)'),
                    ("chunks, gpu", "on_gpu(ModelCase(), **DROPOUT)"),
                ),
            },
        ),
    ),
    "Parallelism and schedule": (
        Setting(
            "data parallel",
            {},
            {
                "offloading": (("equality", '"data parallel"'),),
                "chunk graphs": (("chunks", "def test_two_data_parallel_ranks"),),
                "packing": (("packed batches", "def test_data_parallel_ranks"),),
                "dynamic": (("sizes", "def test_documents_train_alike_in_groups_of_any_size"),),
            },
        ),
        Setting(
            "data parallel, overlapped reduction",
            {},
            {
                "offloading": (("training", '"DP2, distributed optimizer, overlapped"'),),
                "chunk graphs": (
                    ("chunks", "def test_two_data_parallel_ranks"),
                    ("chunks, gpu", "def test_overlapped_reduction_on_two_gpus"),
                ),
                "dynamic": (("sizes, graphs, gpu", '{"overlap_grad_reduce": True}'),),
            },
        ),
        Setting(
            "tensor parallel",
            {},
            {
                "offloading": (
                    ("equality", '"tensor parallel"'),
                    ("training", '"TP2"'),
                    ("gpu", '"TP2, sequence parallel"'),
                ),
                "layer graphs": (("graphs, gpu", "def test_tensor_parallel_ranks"),),
                "chunk graphs": (("chunks", "def test_tensor_parallel_ranks"),),
                "packing": (("packed batches", "def test_tensor_parallel_ranks"),),
                "dynamic": (("sizes, graphs, gpu", '{"tp": 2}'),),
            },
        ),
        Setting(
            "sequence parallel",
            {"sequence_parallel": True},
            {
                "offloading": (("gpu", '"TP2, sequence parallel, MoE"'),),
                "layer graphs": (("graphs, gpu", "def test_tensor_parallel_ranks"),),
                "chunk graphs": (("chunks, gpu", '"TP2, sequence parallel, experts"'),),
            },
        ),
        Setting(
            "expert parallel",
            _EXPERTS,
            {"offloading": (("equality", '"expert parallel"'), ("gpu", '"EP2"'))},
            ("chunk graphs",),
        ),
        Setting(
            "expert parallel, experts of a fixed capacity",
            _EXPERTS_OF_A_CAPACITY,
            {
                "chunk graphs": (
                    ("chunks", "def test_expert_parallel_ranks"),
                    ("chunks, gpu", '"EP2": dataclasses.replace('),
                ),
            },
        ),
        Setting(
            "pipeline, 1F1B",
            {},
            {
                "offloading": (("equality", '"PP2"'), ("gpu", '"PP2"')),
                "layer graphs": (
                    ("graph capture", '"1F1B first of two"'),
                    ("graphs, gpu", '"PP2"'),
                ),
                "chunk graphs": (
                    ("chunks", '"PP2"'),
                    ("chunks, gpu", "def test_pipelines_of_two_gpus"),
                ),
                "packing": (("packed batches", '"PP2"'),),
                "dynamic": (
                    ("sizes", "def test_stages_have_the_losses_of_one_stage"),
                    ("sizes, graphs, gpu", '{"pp": 2}'),
                ),
            },
        ),
        Setting(
            "pipeline, interleaved",
            {},
            {
                "offloading": (
                    ("equality", '"PP2 VPP2"'),
                    ("gpu", '"PP2 VPP2, one layer per chunk"'),
                ),
                "layer graphs": (
                    ("graph capture", '"interleaved first of two"'),
                    ("graphs, gpu", '"PP2 VPP2"'),
                ),
                "chunk graphs": (
                    ("chunks", '"PP2 VPP2"'),
                    ("chunks, gpu", "def test_pipelines_of_two_gpus"),
                ),
                "packing": (("packed batches", '"PP2 VPP2"'),),
            },
        ),
        Setting(
            "context parallel",
            {"context_parallel_size": 2},
            {
                "offloading": (("gpu", '"CP2"'),),
                "chunk graphs": (("chunks, gpu", '"CP2": on_gpu('),),
            },
        ),
        Setting(
            "context parallel, loss per token",
            {"context_parallel_size": 2, "calculate_per_token_loss": True},
        ),
        Setting(
            "another number of micro-batches from step to step",
            {"rampup_batch_size": [8, 8, 100]},
            {
                "offloading": (("equality", "(1, 3, 3, 2, 3)"), ("gpu", "(4, 4, 2, 6)")),
                "chunk graphs": (("chunks", "(4, 3, 1, 6, 2)"),),
            },
        ),
    ),
    "Precision": (
        Setting("float32", {}, {"offloading": (("equality", '"dense"'), ("gpu", "def test_fp32"))}),
        Setting(
            "bfloat16",
            {},
            {
                "offloading": (("equality", '"dense bf16"'), ("gpu", "def test_dense")),
                "layer graphs": (("graphs, gpu", "bf16=True"),),
                "chunk graphs": (("chunks", '"dense, bf16"'), ("chunks, gpu", '"bf16": True')),
            },
        ),
        Setting("float16"),
        *(
            Setting(
                f"FP8, {recipe}",
                {"fp8": "hybrid", "fp8_recipe": recipe},
                {
                    "offloading": (("gpu", "def test_fp8(recipe"),),
                    "layer graphs": (("graphs, gpu", 'f"FP8, {name}"'),),
                    **({"chunk graphs": chunk_tests} if chunk_tests else {}),
                },
            )
            for recipe, chunk_tests in {
                "tensorwise": (
                    ("chunks", '"FP8": ModelCase('),
                    ("chunks, gpu", '"FP8": on_gpu('),
                ),
                "blockwise": (("chunks, gpu", '"FP8, blocks": on_gpu('),),
                "delayed": (),
            }.items()
        ),
    ),
    "Recomputation": (
        Setting(
            "full",
            {},
            {
                "offloading": (("equality", '"full recompute"'),),
                "dynamic": (("sizes", '"dense, layers recomputed"'),),
            },
        ),
        Setting(
            "core attention",
            {},
            {
                "offloading": (("equality", '"core attention recomputed"'),),
                "dynamic": (
                    ("sizes", '"dense, core attention recomputed"'),
                    ("sizes, graphs, gpu", '"dense, core attention recomputed"'),
                ),
                "chunk graphs": (
                    ("chunks", '"attention recomputed": ModelCase('),
                    ("chunks, gpu", '"attention recomputed": on_gpu('),
                ),
            },
        ),
        Setting(
            "norms",
            {},
            {
                "offloading": (("equality", '"norms recomputed"'), ("gpu", '"recompute"')),
                "layer graphs": (("graphs, gpu", '"norms recomputed"'),),
                "chunk graphs": (
                    ("chunks", '"norms recomputed": ModelCase('),
                    ("chunks, gpu", '"norms recomputed": on_gpu('),
                ),
            },
        ),
        Setting(
            "activation function of experts",
            _EXPERTS,
            {
                "offloading": (
                    ("equality", '"activation function of experts recomputed"'),
                    ("gpu", '"recompute"'),
                ),
                "layer graphs": (("graphs, gpu", '"experts recomputed"'),),
            },
            ("chunk graphs",),
        ),
    ),
    "CUDA graphs of megatron-core": (
        Setting("`local`", {"cuda_graph_impl": "local"}, {}, _ALL_GRAPHS),
        Setting(
            "`local` for parts of layers, only expert modules in `offload_modules`",
            {
                "cuda_graph_impl": "local",
                "cuda_graph_modules": ["attn"],
                "num_moe_experts": 8,
                "offload_modules": ["expert_fc1", "moe_act"],
            },
            {},
            _ALL_GRAPHS,
        ),
        Setting(
            "`transformer_engine`",
            {"cuda_graph_impl": "transformer_engine"},
            {"offloading": (("graphs, gpu", "def test_graphs_and_offloading"),)},
            _ALL_GRAPHS,
        ),
        Setting("`full_iteration`", {"cuda_graph_impl": "full_iteration"}, {}, _ALL_GRAPHS),
        Setting(
            "`--cuda-graph-modules moe`",
            {"cuda_graph_modules": ["moe"]},
            {},
            ("offloading", "packing", "dynamic"),
        ),
        Setting(
            "`--cuda-graph-warmup-steps 0`",
            {"cuda_graph_warmup_steps": 0},
            {},
            ("offloading", "packing", "dynamic"),
        ),
    ),
    "Other": (
        Setting(
            "offloading, with these",
            {"fine_grained_activation_offloading": True},
            {
                "chunk graphs": (
                    ("chunks", "def test_offloading_inside_the_graphs"),
                    ("chunks, gpu", "def test_offloading_inside_the_graphs_on_one_gpu"),
                ),
                "packing": (
                    ("packed training", "def test_packed_training_learns_the_same"),
                    ("packed case, gpu", "--sequence-packing"),
                ),
                "dynamic": (
                    ("packed training", "pytest.param(2, DYNAMIC"),
                    ("sizes, graphs, gpu", "def test_activations_move_inside_the_graphs"),
                ),
            },
            ("offloading", "layer graphs"),
        ),
        Setting(
            "[graphs of chunks](chunk-cuda-graphs.md), with these",
            _CHUNK_GRAPHS,
            {
                "packing": (
                    ("packed training", "def test_packed_training_learns_the_same_with_c"),
                    ("chunks, gpu", "def test_pipelines_of_two_gpus"),
                ),
                "dynamic": (
                    ("sizes, graphs", "def test_sizes_in_every_order_train_as_without_graphs"),
                    ("sizes, graphs, gpu", "def test_graphs_of_two_sizes_train_as_without"),
                ),
            },
            ("offloading", *_ALL_GRAPHS),
        ),
        Setting(
            "Megatron's `--cpu-offloading-num-layers`",
            {"cpu_offloading": True, "cpu_offloading_num_layers": 1},
        ),
        Setting("`--sft`", {"sft": True}, {}, _ALL_GRAPHS),
        Setting("`--reset-position-ids`", {"reset_position_ids": True}, {}, _ALL_GRAPHS),
        Setting("`--reset-attention-mask`", {"reset_attention_mask": True}, {}, _ALL_GRAPHS),
        Setting("`--dataloader-type external`", {"dataloader_type": "external"}, {}, _ALL_GRAPHS),
        Setting("`--position-embedding-type mrope`", {"position_embedding_type": "mrope"}),
    ),
}

RELEASES = (
    ("GPT models (dense, MoE, MLA), pipeline and interleaved schedules", "yes", "yes", "yes"),
    ("hybrid models (`HybridModel`)", "no", "yes", "yes"),
    (
        "`--activation-offload-fraction`, `--delta-offload-bytes-across-pp-ranks`, "
        "`--delay-offload-until-cuda-graph`",
        *("no", "no", "yes"),
    ),
    ("offloading inside Transformer Engine's CUDA graphs of layers", "yes", "yes", "yes"),
    ("offloading beside megatron-core's own (`local`) CUDA graphs", "no", "no", "yes"),
    ("`fused_group_mlp` in `--offload-modules`", "no", "no", "yes"),
    ("packed sequences (`--sequence-packing`)", "yes", "yes", "yes"),
    ("CUDA graphs of model chunks (`--cuda-graph-granularity chunk`)", "no", "no", "yes"),
    (
        "`./run train` with `--mtp-num-layers`, `--spec`, heterogeneous layers or experimental "
        "attention",
        *("no", "no", "yes"),
    ),
    (
        "`./run train` with `--tokenizer-json` and `--eod-mask-loss` or `--reset-...`",
        *("no", "yes", "yes"),
    ),
)

TESTED = ("0.17.1", "0.18.2", "0.19.2")
"""The releases of :data:`RELEASES`."""


class Page:
    """Collects reasons while cells are made."""

    def __init__(self) -> None:
        self.reasons: list[str] = []

    def row(self, setting: Setting) -> tuple[str, ...]:
        cells = (
            "" if name in setting.says_nothing_of else self._cell(name, feature, setting)
            for name, feature in FEATURES.items()
        )
        return (setting.name, *cells)

    def _cell(self, name: str, feature: Feature, setting: Setting) -> str:
        refusals = [_why_not(feature.check, {**way, **setting.facts}) for way in feature.ways]
        number = next((self._number(refusal) for refusal in refusals if refusal), 0)
        if all(refusals):
            return f"**no** ({number})"
        evidence = setting.tests.get(name, ())
        limit = f", but see {number}" if number else ""
        return (f"yes: {_links(evidence)}" if evidence else "not tested") + limit

    def _number(self, reason: str) -> int:
        if reason not in self.reasons:
            self.reasons.append(reason)
        return self.reasons.index(reason) + 1


def _why_not(check: Callable[[Any], None], facts: Mapping[str, Any]) -> Optional[str]:
    try:
        check(SimpleNamespace(**facts))
    except ValueError as error:
        return str(error)
    return None


def _links(evidence: Evidence) -> str:
    links = {}
    for name, text in evidence:
        file = TESTS[name]
        if text not in (ROOT / file).read_text(encoding="utf-8"):
            raise ValueError(f"{file} has no {text!r}, which tools/compatibility_page.py names")
        links.setdefault("GPU" if name.endswith("gpu") else "CPU", file)
    return ", ".join(f"[{where}](../../{path})" for where, path in links.items())


def compatibility_page() -> str:
    """Give the whole text of docs/user-guide/compatibility.md."""
    page = Page()
    head = ("", *(feature.title for feature in FEATURES.values()))
    lines = [
        "# Compatibility",
        "",
        generated_from("the rule tables and tools/compatibility_page.py"),
        "",
        "What goes together. **yes** means that a test shows it: losses and gradients are bitwise "
        "those without, or those of the documents one by one. *CPU* is a test that every change "
        "has to pass, *GPU* one that needs a GPU, or several; "
        "[what was measured on one](../../benchmarks/README.md#results) says where and when it "
        "last ran. **no** means refused at start, with the message of that number "
        "[below](#why-not). *not tested* means just that: nothing refuses it, and nothing shows "
        "it.",
        "",
        "Of any PyTorch model without Megatron: [What goes together](any-pytorch-model.md"
        "#what-goes-together) with `attach()`.",
    ]
    for title, settings in SETTINGS.items():
        lines += ["", f"## {title}", "", *table(head, map(page.row, settings))]
    lines += [
        "",
        "## Releases of megatron-core",
        "",
        "The tests that touch megatron-core run with each of these. What a release does not have "
        "is refused with what to use instead.",
        "",
        *table(("", *TESTED), RELEASES),
        "",
        "The interleaved schedule of 0.17 may free a stage's output while it is still being sent, "
        "with or without offloading (0.18 waits); there, set `--no-overlap-p2p-communication`. "
        "Without a GPU, Slipstream keeps that memory itself.",
        "",
        "## Faults of megatron-core that are worked around",
        "",
        "The fused rotation of multi-latent attention (`--rope-type yarn` without "
        "`--no-rope-fusion`) works in place, and with some of the block sizes that Triton's tuner "
        "chooses from, two warps of a block read and write the same values in no order. The "
        "gradients of some tokens' queries are wrong then, and other ones each time "
        "([#4640](https://github.com/NVIDIA/Megatron-LM/issues/4640)): on an H200 in "
        "257 of 300 launches with 32 rotated dimensions and 4 heads a block, in 300 of 300 with 64 "
        "and 2. And a block that is not full, as with 12 heads on a rank, goes on into the next "
        "token's ([#7103](https://github.com/NVIDIA/Megatron-LM/issues/7103)). Which size a "
        "process gets depends on the tuner's timing. All three releases have both faults. With "
        "Slipstream the tuner chooses among full blocks only, and those in place have one warp, "
        "which reads everything before it writes (`patches/rotary_kernels.py`): from "
        "`install()`, `./run train`, `replay_chunks()` or `with_dynamic_context_parallelism()` on, "
        "offloading or not. Where algorithms are to be deterministic "
        "(`NVTE_ALLOW_NONDETERMINISTIC_ALGO=0` or torch's own switch), the kernel that sums over "
        "heads has one size only, since it rounds otherwise in every other.",
        "",
        "## Why not",
        "",
        *(f"{number}. {as_text(text)}" for number, text in enumerate(page.reasons, 1)),
        "",
        "All that is refused, single values included: [Options](options.md#what-is-refused).",
    ]
    return "\n".join(lines) + "\n"
